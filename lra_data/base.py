"""What every task shares: its spec, packed splits, the cache on disk, the order of the batches.

An example is one text, or two (`paired`). Texts are stored end to end as bytes; on reading, the id of a token is
the stored byte + 1 (which would not fit a byte), and 0 is padding.
"""

import hashlib
import io
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock, Timeout
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import BaseModel, PositiveInt, ValidationError, field_validator
from tqdm import tqdm
from typing_extensions import TypedDict

DATA_VERSION = 2  # raise it when the packed bytes of any task change: caches are then made anew
SPLITS = ("train", "dev", "test")
ROUND = 64  # trimmed batches have few different lengths
SLACK = 2**16  # zeros behind the last token, so that a row can be read from any text on; no task may be longer
WINDOW = 32  # batches that are sorted by length together when bucketing
BYTES = 512  # the base code's embedding table for bytes; 257 ids are real
Source = Literal["lra", "multi30k", "stand-in", "generated"]


class Sizes(TypedDict):
    """Examples of each split."""

    train: PositiveInt
    dev: PositiveInt
    test: PositiveInt


class Caps(TypedDict):
    """At most so many examples of each split; null = all."""

    train: PositiveInt | None
    dev: PositiveInt | None
    test: PositiveInt | None


class Lengths(BaseModel):
    """Tokens of a text."""

    mean: float
    min: int
    p10: int
    median: int
    p90: int
    max: int


class Packed(BaseModel):
    """What a split holds."""

    examples: int
    labels: list[int]  # examples of each
    lengths: Lengths
    sha256: str  # of its files


class Manifest(BaseModel):
    """What stands beside the packed data."""

    data_version: int
    source: Source
    origin: str | None  # what it was read from
    files: dict[str, list[int]]  # size and time of change of each of them
    settings: dict[str, Any]  # all else that decides the packed bytes
    splits: dict[str, Packed]

    @field_validator("splits")
    @classmethod
    def all_three(cls, splits: dict[str, Packed]) -> dict[str, Packed]:
        if splits.keys() != set(SPLITS):
            raise ValueError(f"not {', '.join(SPLITS)}")
        return splits


class DataError(Exception):
    """Data that is missing or wrong: one sentence that names the file and the way out."""


@dataclass(frozen=True)
class TaskSpec:
    """All that a model needs to know of a task."""

    vocabulary: int  # size of the embedding table, padding included
    length: int  # padded length
    classes: int
    paired: bool


@dataclass(frozen=True)
class Split:
    """Packed examples: text i is tokens[offsets[i]:offsets[i+1]]; a pair is two texts that follow each other."""

    tokens: NDArray[np.uint8]
    windows: NDArray[np.uint8]  # a view: row i is the padded length of tokens from token i on
    offsets: NDArray[np.int64]
    labels: NDArray[np.uint8]
    spec: TaskSpec

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example; of a pair, those of its longer text."""
        return self.text_lengths.max(1)

    @property
    def text_lengths(self) -> NDArray[np.int64]:
        """Tokens of each text (examples, 1), or (examples, 2) for pairs."""
        return np.diff(self.offsets).reshape(len(self), -1)

    def texts(self, index: int) -> list[NDArray[np.uint8]]:
        """The stored bytes of one example: one text or two."""
        sides = 2 if self.spec.paired else 1
        bounds = self.offsets[index * sides : (index + 1) * sides + 1].tolist()
        return [self.tokens[start:end] for start, end in itertools.pairwise(bounds)]

    def batch(self, indices: NDArray[np.int64], trim: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """ids (B, n), or (B, 2, n) for pairs, padded with 0; labels (B,).

        n is the task's length or, with `trim`, the longest of the batch rounded up to a multiple of 64.
        """
        length = self.spec.length
        if trim:
            length = min(length, -(-int(self.lengths[indices].max()) // ROUND) * ROUND)
        texts = np.stack([2 * indices, 2 * indices + 1], 1).ravel() if self.spec.paired else indices
        starts = self.offsets[texts]
        ids = self.windows[:, :length][starts].astype(np.int32)
        ids += 1
        for row, size in zip(ids, (self.offsets[texts + 1] - starts).tolist(), strict=True):
            row[size:] = 0  # what stands behind the text
        shape = (len(indices), 2, length) if self.spec.paired else ids.shape
        return ids.reshape(shape), self.labels[indices].astype(np.int64)


@dataclass(frozen=True)
class Task:
    """A task ready for use: what the model needs, the three splits, and the manifest that says where they came from."""

    spec: TaskSpec
    splits: dict[str, Split]
    manifest: Manifest
    home: Path  # the folder of the packed data
    decode: Callable[[NDArray[np.uint8]], str]  # stored bytes -> what a person reads

    @property
    def source(self) -> Source:
        return self.manifest.source

    @property
    def fingerprint(self) -> str:
        """sha256 of the packed bytes."""
        checksums = "".join(self.manifest.splits[split].sha256 for split in SPLITS)
        return hashlib.sha256(checksums.encode()).hexdigest()

    def order(self, batch_size: int, seed: int, bucket: bool) -> "Batches":
        """The order in which a run of that seed sees the training examples."""
        train = self.splits["train"]
        return Batches(len(train), batch_size, seed, train.lengths if bucket else None)

    @property
    def majority(self) -> float:
        """Share of the commonest test label: no constant answer does better."""
        labels = self.splits["test"].labels
        return float(np.bincount(labels).max() / len(labels))


class Batches:
    """The endless order of the training examples: every epoch is one seeded shuffle.

    With `lengths`, each run of WINDOW batches is sorted by length before it is cut into batches, so that texts of like
    length meet, and these batches are shuffled. The batch of a step follows from (seed, step) alone, so that a
    resumed run needs no state.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, lengths: NDArray[np.int64] | None = None):
        self.examples, self.batch_size, self.seed, self.lengths = examples, batch_size, seed, lengths
        self._shuffles: dict[int, NDArray[np.int64]] = {}
        self._window, self._sorted = -1, np.empty((0, 0), np.int64)

    def indices(self, step: int) -> NDArray[np.int64]:
        """Indices of the examples of step 0, 1, ..."""
        if self.lengths is None:
            return self._stream(step * self.batch_size, self.batch_size)
        window, place = divmod(step, WINDOW)
        if window != self._window:
            size = WINDOW * self.batch_size
            stream = self._stream(window * size, size)
            by_length = stream[np.argsort(self.lengths[stream], kind="stable")].reshape(WINDOW, -1)
            self._sorted = by_length[np.random.default_rng((self.seed, window, 1)).permutation(WINDOW)]
            self._window = window
        return self._sorted[place]

    def _stream(self, start: int, count: int) -> NDArray[np.int64]:
        """Places start .. start + count of all epochs, one behind the other."""
        places = np.arange(start, start + count)
        epochs = range(places[0] // self.examples, places[-1] // self.examples + 1)
        # Only the epochs in use are kept.
        self._shuffles = {e: self._shuffles[e] if e in self._shuffles else self._shuffle(e) for e in epochs}
        order = np.concatenate([self._shuffles[e] for e in epochs])
        return order[places - epochs[0] * self.examples]

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch)).permutation(self.examples)


Example = tuple[tuple[bytes, ...], int]  # (one text or two, label)
Stamps = dict[str, list[int]]  # name of a file: its size and when it was changed
NO_FILES: Mapping[str, Path] = {}
Build = Callable[[], tuple[Source, dict[str, Iterable[Example]]]]


def cached(
    folder: str | Path,
    name: str,
    spec: TaskSpec,
    settings: dict[str, Any],
    build: Build,
    decode: Callable[[NDArray[np.uint8]], str],
    origin: str | None,
    files: Mapping[str, Path] = NO_FILES,
) -> Task:
    """The task packed under folder/name/<hash of settings>, built there first if need be.

    `settings` is all that decides the packed bytes, but for where they come from: `origin`, and the `files` or folders
    that are read, by name. If these are not those that the cache was made from, or another version of this program
    made it, it is made anew. None and no files: whatever it was made from is welcome. `build` gives the source and the
    examples of each split.
    Of several runs that want the same data, one builds and the others wait. The result is written under a temporary
    name and renamed: a killed run leaves no half-made cache behind. What is there is checked against its sha256.
    """
    if spec.length > SLACK:
        raise DataError(f"task.data.length={spec.length} is too long: at most {SLACK}")
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    home = Path(folder) / name / key
    found = {title: file.stat() for title, file in files.items() if file.exists()}
    stamps: Stamps = {title: [stat.st_size, stat.st_mtime_ns] for title, stat in found.items()}

    def opened(manifest: Manifest) -> Task:
        splits = {split: _open(home, split, spec, manifest.splits[split].sha256) for split in SPLITS}
        return Task(spec, splits, manifest, home, decode)

    with suppress(DataError):  # another run may be replacing it just now: look again when that is over
        manifest = _manifest(home, origin, stamps)
        if isinstance(manifest, Manifest):
            return opened(manifest)  # without a lock: the folder may be read-only
    with alone(home):
        manifest = _manifest(home, origin, stamps)
        if isinstance(manifest, str):
            if manifest:
                print(f"{home} {manifest}: it is made anew")
            manifest = _build(home, settings, origin, stamps, build, spec.classes)
        return opened(manifest)


def _manifest(home: Path, origin: str | None, stamps: Stamps) -> Manifest | str:
    """The manifest of data that fit, or why they must be made: no word is needed where there are none."""
    try:
        told = json.loads((home / "manifest.json").read_text())
        if told["data_version"] != DATA_VERSION:
            return f"is of data version {told['data_version']}, this is {DATA_VERSION}"
        manifest = Manifest.model_validate(told)
    except FileNotFoundError:
        return ""
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(home, f"manifest.json, {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError):
        raise _damaged(home, "manifest.json is no manifest") from None
    if origin and manifest.origin != origin:
        return f"was made from {manifest.origin}, not from {origin}"
    changed = [title for title, stamp in stamps.items() if manifest.files.get(title) != stamp]
    return f"was made from another {', '.join(changed)}" if changed else manifest


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """No other process makes `home` meanwhile. The empty lock file stays: removed, it could be locked twice."""
    home.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home.parent / f".{home.name}.lock")
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        print(f"another run is making {home}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(
    home: Path, settings: dict[str, Any], origin: str | None, stamps: Stamps, build: Build, classes: int
) -> Manifest:
    try:
        with replacing(home) as temporary:
            temporary.mkdir()
            source, splits = build()
            manifest = Manifest(
                data_version=DATA_VERSION,
                source=source,
                origin=origin,
                files=stamps,
                settings=settings,
                splits={split: _pack(temporary / split, examples, classes) for split, examples in splits.items()},
            )
            (temporary / "manifest.json").write_text(manifest.model_dump_json(indent=2) + "\n")
    except OSError as error:
        if error.filename:
            raise
        raise DataError(f"{home} cannot be written ({error}): make room, or choose another paths.data") from None
    return manifest


@contextmanager
def replacing(home: Path) -> Iterator[Path]:
    """A temporary path beside `home`, for a file or a folder: `home` itself when the block ends, removed if it fails.

    The caller has the lock: what is there under the temporary name was left by a run that was killed. (macformer has
    its own for files, of which nothing is known here.)
    """

    def remove(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    temporary = home.parent / f".{home.name}.tmp"
    remove(temporary)
    try:
        yield temporary
        if home.is_dir():
            remove(home)
        os.replace(temporary, home)
    finally:
        remove(temporary)


def _damaged(home: Path, what: str) -> DataError:
    return DataError(f"the packed data in {home} are damaged ({what}): delete that folder, and they will be made anew")


def _pack(stem: Path, examples: Iterable[Example], classes: int) -> Packed:
    """Write one split as its examples come, so that a large source is never held whole. Returns what it holds."""
    sizes: list[int] = []
    labels: list[int] = []
    digest = hashlib.sha256()
    with open(f"{stem}.tokens.bin", "wb", buffering=2**20) as file:
        for texts, label in examples:
            labels.append(label)
            for text in texts:
                sizes.append(len(text))
                file.write(text)
                digest.update(text)
        file.write(bytes(SLACK))
        digest.update(bytes(SLACK))
    if not labels:
        raise DataError(f"the {stem.name} split has no examples: its source is empty")
    arrays: dict[str, NDArray[Any]] = {
        "offsets": np.cumsum([0, *sizes], dtype=np.int64),
        "labels": np.array(labels, np.uint8),
    }
    for part, array in arrays.items():
        content = io.BytesIO()
        np.save(content, array)
        Path(f"{stem}.{part}.npy").write_bytes(content.getbuffer())
        digest.update(content.getbuffer())
    least, p10, median, p90, most = np.quantile(sizes, [0, 0.1, 0.5, 0.9, 1], method="lower").tolist()
    return Packed(
        examples=len(labels),
        labels=np.bincount(labels, minlength=classes).tolist(),
        lengths=Lengths(mean=float(np.mean(sizes)), min=least, p10=p10, median=median, p90=p90, max=most),
        sha256=digest.hexdigest(),
    )


def _open(home: Path, name: str, spec: TaskSpec, expected: str) -> Split:
    """The split, if it is what its manifest says. What is checked is what is used, even if a run replaces the files."""
    try:
        with open(home / f"{name}.tokens.bin", "rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(2**20):  # not through the map: its pages would count as this process's memory
                digest.update(piece)
            mapped = np.memmap(file, np.uint8, mode="r")
        contents = [(home / f"{name}.{part}.npy").read_bytes() for part in ("offsets", "labels")]
    except (OSError, ValueError) as error:
        raise _damaged(home, str(error)) from None
    for content in contents:
        digest.update(content)
    if digest.hexdigest() != expected:
        raise _damaged(home, f"the sha256 of {name} is {digest.hexdigest()[:8]}..., not {expected[:8]}...")
    offsets, labels = (np.load(io.BytesIO(content)) for content in contents)
    tokens = np.asarray(mapped)  # slices of np.memmap itself take twice as long
    split = Split(tokens[: offsets[-1]], sliding_window_view(tokens, spec.length), offsets, labels, spec)
    longest = int(split.lengths.max())
    if longest > spec.length:
        raise DataError(
            f"task.data.length={spec.length} is too short for the longest text, {longest} tokens: "
            "raise it, or lower task.data.max_length"
        )
    return split


def as_text(stored: NDArray[np.uint8]) -> str:
    """Bytes as UTF-8; what is none is shown as a replacement character."""
    return stored.tobytes().decode("utf-8", "replace")


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a text file, numbered from 1, without their ends (LF or CRLF); with a progress bar in bytes."""
    with (
        open(file, "rb") as stream,
        tqdm(total=file.stat().st_size, desc=f"reading {file.name}", unit="B", unit_scale=True, mininterval=1) as bar,
    ):
        for number, line in enumerate(stream, 1):
            yield number, line.rstrip(b"\r\n")
            bar.update(len(line))


def check_length(length: int, max_length: int) -> None:
    """The longest text must fit."""
    if max_length > length:
        raise DataError(f"task.data.length={length} is too short for task.data.max_length={max_length}: raise it")


def require(task: str, folder: str, origin: str | None, files: Iterable[Path], what: str) -> None:
    """All the files, or one sentence on how to get there."""
    for file in files:
        if not file.is_file():
            raise DataError(
                f"task={task} needs the file {file}, which is not there: {what}, "
                f"then run `{command(task, folder, origin)}`"
            )


def command(task: str, folder: str, origin: str | None) -> str:
    """What prepares a task's data, with the keys that it was asked for with."""
    keys = ("" if folder == "data" else f" paths.data={folder}") + (f" paths.{task}={origin}" if origin else "")
    return f"python -m lra_data prepare {task}{keys}"
