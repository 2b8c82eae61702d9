"""What every task shares: its spec, packed splits, the order of the batches, and the cache on disk.

An example is one text, or two (`paired`). Texts are stored end to end as bytes; on reading, the id of a token is
the stored byte + 1 (which would not fit a byte), and 0 is padding.

`cached` packs the examples of a task once and opens them as memory-mapped arrays ever after. Of several runs that want
the same data, one packs and the others wait. Data are written under a temporary name and renamed: a killed run leaves
nothing half-made behind. What is opened is checked against its sha256 first.
"""

import hashlib
import io
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import BaseModel, PositiveInt
from tqdm import tqdm
from typing_extensions import TypedDict

DATA_VERSION = 2  # raise it when the packed bytes of any task change: caches are then made anew
SLACK = 2**16  # zeros behind the last token, so that a row can be read from any text on; no task may be longer
SplitName = Literal["train", "dev", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "dev", "test")
ROUND = 64  # trimmed batches have few different lengths
WINDOW = 32  # batches that are sorted by length together when bucketing
BYTES = 512  # the base code's embedding table for bytes; 257 ids are real
LENGTHS = ("mean", "min", "p10", "median", "p90", "max")  # what the manifest tells of the texts of a split
Source = Literal["lra", "stand-in", "generated"]
Example = tuple[tuple[bytes, ...], int]  # (one text or two, label)
Build = Callable[[], tuple[Source, Mapping[str, Iterable[Example]]]]  # -> where from, and the examples of each split
Decode = Callable[[NDArray[np.uint8]], str]  # stored bytes -> what a person reads
T = TypeVar("T")


class PerSplit(TypedDict, Generic[T]):
    train: T
    dev: T
    test: T


Sizes = PerSplit[PositiveInt]  # so many examples of each split
Caps = PerSplit[PositiveInt | None]  # at most so many; null = all


class Packed(BaseModel):
    """What a split holds."""

    examples: int
    labels: list[int]  # examples of each
    lengths: dict[str, int | float]  # LENGTHS of its texts, in tokens
    sha256: str  # of its files


class Manifest(BaseModel):
    """What stands beside the packed data, as manifest.json."""

    data_version: int
    source: Source
    origin: str | None  # what it was read from
    files: dict[str, list[int]]  # size and time of change of each of them
    settings: dict[str, Any]  # all else that decides the packed bytes
    splits: PerSplit[Packed]


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
    """Packed examples of one text each, or of two (`sides`)."""

    windows: NDArray[np.uint8]  # a view of all texts, end to end: row i is the padded length of tokens from token i on
    starts: NDArray[np.int64]  # (examples, sides): where each text begins
    sizes: NDArray[np.int64]  # (examples, sides): its tokens
    labels: NDArray[np.uint8]
    spec: TaskSpec

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example; of a pair, those of its longer text."""
        return self.sizes.max(1)

    def texts(self, index: int) -> list[NDArray[np.uint8]]:
        """The stored bytes of one example: one text or two."""
        return [self.windows[start, :size] for start, size in zip(self.starts[index], self.sizes[index], strict=True)]

    def batch(self, indices: NDArray[np.int64], trim: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """ids (B, n), or (B, 2, n) for pairs, padded with 0; labels (B,).

        n is the task's length or, with `trim`, the longest of the batch rounded up to a multiple of 64.
        """
        length = self.spec.length
        if trim:
            length = min(length, -(-int(self.lengths[indices].max()) // ROUND) * ROUND)
        ids = self.windows[:, :length][self.starts.take(indices, 0).ravel()].astype(np.int32)
        ids += 1
        for row, size in zip(ids, self.sizes.take(indices, 0).ravel().tolist(), strict=True):
            row[size:] = 0  # what stands behind the text
        return ids.reshape(-1, 2, length) if self.spec.paired else ids, self.labels[indices].astype(np.int64)


@dataclass(frozen=True)
class Task:
    """A task ready for use: what the model needs, the three splits, and the manifest that says where they came from."""

    spec: TaskSpec
    splits: dict[str, Split]
    manifest: Manifest
    home: Path  # the folder of the packed data
    decode: Decode

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
        test = self.manifest.splits["test"]
        return max(test.labels) / test.examples


class Batches:
    """The endless order of the training examples: every epoch is one seeded shuffle.

    With `lengths`, each run of WINDOW batches is sorted by length before it is cut into batches, so that texts of like
    length meet, and these batches are shuffled. The batch of a step follows from (seed, step) alone, so that a
    resumed run needs no state.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, lengths: NDArray[np.int64] | None = None):
        self.examples, self.batch_size, self.seed, self.lengths = examples, batch_size, seed, lengths
        self._sorted: dict[int, NDArray[np.int64]] = {}  # the window in use

    def indices(self, step: int) -> NDArray[np.int64]:
        """Indices of the examples of step 0, 1, ..."""
        if self.lengths is None:
            return self._stream(step * self.batch_size, self.batch_size)
        window, place = divmod(step, WINDOW)
        if window not in self._sorted:
            size = WINDOW * self.batch_size
            stream = self._stream(window * size, size)
            by_length = stream[np.argsort(self.lengths[stream], kind="stable")].reshape(WINDOW, -1)
            self._sorted = {window: by_length[np.random.default_rng((self.seed, window, 1)).permutation(WINDOW)]}
        return self._sorted[window][place]

    def _stream(self, start: int, count: int) -> NDArray[np.int64]:
        """Places start .. start + count of all epochs, one behind the other."""
        first, last = start // self.examples, (start + count - 1) // self.examples
        order = np.concatenate([_shuffled(self.examples, self.seed, epoch) for epoch in range(first, last + 1)])
        return order[start - first * self.examples :][:count]


@lru_cache(2)
def _shuffled(examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(examples)


def as_text(stored: NDArray[np.uint8]) -> str:
    """Bytes as UTF-8; what is none is shown as a replacement character."""
    return stored.tobytes().decode("utf-8", "replace")


def cached(
    folder: str | Path,
    name: str,
    spec: TaskSpec,
    settings: dict[str, Any],
    examples: Sizes | Caps,
    build: Build,
    origin: str | None = None,
    files: Mapping[str, Path] = {},
    decode: Decode = as_text,
    place: str | None = None,
    hint: str = "",
) -> Task:
    """The task packed under folder/name/<hash of settings>: what `build` gives, at most `examples` of each split.

    `settings` is all else that decides the packed bytes, but for where they come from: `origin`, and the `files` or
    folders that are read, by name. If these are not those that the cache was made from, or another version of this
    program made it, it is made anew. Without origin and files, whatever it was made from is welcome.

    What is packed needs its files no more, unless `place` names where they are (paths.NAME). `hint`: how to get them.
    """
    if spec.length > SLACK:
        raise DataError(f"task.data.length={spec.length} is too long: at most {SLACK}")
    settings = settings | {"examples": {**examples}}
    home = Path(folder) / name / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    found = {title: file.stat() for title, file in files.items() if file.exists()}
    stamps = {title: [stat.st_size, stat.st_mtime_ns] for title, stat in found.items()}
    keys = ("" if folder == "data" else f" paths.data={folder}") + (f" paths.{name}={place}" if place else "")
    way_out = f"{hint}, then run `python -m lra_data prepare {name}{keys}`"
    absent = next((file for title, file in files.items() if title not in found), None)
    missing = DataError(f"task={name} needs {absent}, which is not there: {way_out}")
    if absent and place:
        raise missing

    def opened() -> Task:
        if not (file := home / "manifest.json").exists():
            raise _Outdated
        try:
            manifest = Manifest.model_validate_json(file.read_bytes())
            if manifest.data_version != DATA_VERSION:
                raise _Outdated(f"is of data version {manifest.data_version}, this is {DATA_VERSION}")
            if origin and manifest.origin != origin:
                raise _Outdated(f"was made from {manifest.origin}, not from {origin}")
            if changed := [title for title, stamp in stamps.items() if manifest.files.get(title) != stamp]:
                raise _Outdated(f"was made from another {', '.join(changed)}")
            splits: Any = {split: _open(home / split, spec, manifest.splits[split].sha256) for split in SPLITS}
        except (OSError, ValueError) as error:
            what = f"the packed data in {home} are damaged ({' '.join(str(error).split())})"
            raise DataError(f"{what}: delete that folder, and they will be made anew") from None
        return Task(spec, splits, manifest, home, decode)

    with suppress(_Outdated, DataError):  # another run may be replacing it just now: look again when that is over
        return opened()  # without a lock: the folder may be read-only
    with lock(home):
        try:
            return opened()
        except _Outdated as reason:
            if str(reason):
                print(f"{home} {reason}: it is made anew")
        if absent:
            raise missing
        _build(home, build, spec.classes, origin=origin, files=stamps, settings=settings)
        return opened()


def lock(path: Path) -> AbstractContextManager[FileLock]:
    """No other process makes `path` meanwhile. The empty lock file stays: removed, it could be locked twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        return file.acquire(timeout=0.5)
    except Timeout:
        print(f"another run is making {path}: waiting for it")
        return file.acquire()


class _Outdated(Exception):
    """Why packed data must be made anew; empty if there are none."""


def _open(stem: Path, spec: TaskSpec, expected: str) -> Split:
    tokens, arrays, sha256 = _read(stem)
    if sha256 != expected:
        raise ValueError(f"the sha256 of {stem.name} is {sha256[:8]}..., not {expected[:8]}...")
    offsets, labels = (np.load(io.BytesIO(array)) for array in arrays)
    starts, sizes = (array.reshape(len(labels), -1) for array in (offsets[:-1], np.diff(offsets)))
    check_length(spec.length, int(sizes.max()))
    return Split(sliding_window_view(tokens, spec.length), starts, sizes, labels, spec)


def line_files(
    folder: str, title: str, columns: list[str], released: dict[str, int], parse: Callable[..., Example]
) -> tuple[Build, str, dict[str, Path]]:
    """What `cached` wants to know of three text files in `folder`, an example a line; `title` has their names.

    Tabs stand between the columns; a first line may name them. Lines end with LF or CRLF. Files with as many examples
    as LRA `released` count as LRA's, any others as a stand-in. `parse` raises ValueError for fields that are wrong.
    """
    before, parts, after = re.split("[{}]", title)
    files = {name: Path(folder) / name for name in (f"{before}{part}{after}" for part in parts.split(","))}
    header = "\t".join(columns).encode()

    def examples(file: Path, count: int) -> Iterator[Example]:
        with open(file, "rb") as lines:
            for number, line in enumerate(tqdm(lines, f"reading {file.name}", count, unit=" lines", mininterval=1), 1):
                row = line.rstrip(b"\r\n")
                fields = row.split(b"\t")
                try:
                    if len(fields) != len(columns):
                        raise ValueError(f"{len(fields)} fields, not {len(columns)} ({', '.join(columns)})")
                    if number > 1 or row != header:
                        yield parse(*fields)
                except ValueError as error:
                    raise DataError(f"{file}, line {number}: {error}") from None

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        counts: dict[str, int] = {}
        for split, file in zip(SPLITS, files.values(), strict=True):
            with open(file, "rb") as lines:
                counts[split] = sum(line.rstrip(b"\r\n") != header for line in lines)
        read = map(examples, files.values(), counts.values())
        return "lra" if counts == released else "stand-in", dict(zip(SPLITS, read, strict=True))

    return build, title, files


def check_length(length: int, longest: int) -> None:
    """The longest text must fit."""
    if longest > length:
        what = f"task.data.length={length} is too short for the longest text, {longest} tokens"
        raise DataError(f"{what}: raise it, or lower task.data.max_length")


def _read(stem: Path) -> tuple[NDArray[np.uint8], list[bytes], str]:
    """Tokens; offsets and labels as they are stored; the sha256 of all three, even if a run replaces the files."""
    with open(f"{stem}.tokens.bin", "rb") as file:
        digest = hashlib.file_digest(file, "sha256")  # not of the map: its pages would count as this process's memory
        tokens = np.asarray(np.memmap(file, np.uint8, mode="r"))  # slices of np.memmap itself take twice as long
    arrays = [Path(f"{stem}.{part}.npy").read_bytes() for part in ("offsets", "labels")]
    for array in arrays:
        digest.update(array)
    return tokens, arrays, digest.hexdigest()


def _build(home: Path, build: Build, classes: int, **known: Any) -> None:
    temporary = home.with_name(f".{home.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed: the lock is ours
    try:
        temporary.mkdir()
        source, splits = build()
        limits = known["settings"]["examples"]
        packed: Any = {s: _pack(temporary / s, itertools.islice(splits[s], limits[s]), classes) for s in SPLITS}
        manifest = Manifest(data_version=DATA_VERSION, source=source, splits=packed, **known)
        (temporary / "manifest.json").write_text(manifest.model_dump_json(indent=2) + "\n")
        shutil.rmtree(home, ignore_errors=True)
        temporary.rename(home)
    except OSError as error:
        if error.filename:
            raise
        raise DataError(f"{home} cannot be written ({error}): make room, or choose another paths.data") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _pack(stem: Path, examples: Iterable[Example], classes: int) -> Packed:
    """Write one split as its examples come, so that a large source is never held whole. Returns what it holds."""
    sizes: list[int] = []
    labels: list[int] = []
    with open(f"{stem}.tokens.bin", "wb", buffering=2**20) as file:
        for texts, label in examples:
            labels.append(label)
            sizes.extend(map(len, texts))
            file.writelines(texts)
        file.write(bytes(SLACK))
    if not labels:
        raise DataError(f"the {stem.name} split has no examples: its source is empty")
    np.save(f"{stem}.offsets.npy", np.cumsum([0, *sizes], dtype=np.int64))
    np.save(f"{stem}.labels.npy", np.array(labels, np.uint8))
    quantiles = np.quantile(sizes, [0, 0.1, 0.5, 0.9, 1], method="lower").tolist()
    return Packed(
        examples=len(labels),
        labels=np.bincount(labels, minlength=classes).tolist(),
        lengths=dict(zip(LENGTHS, [float(np.mean(sizes)), *quantiles], strict=True)),
        sha256=_read(stem)[-1],
    )
