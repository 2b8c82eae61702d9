"""What every task shares: its spec, packed splits, the cache on disk, the order of the batches.

An example is one text, or two (`paired`). Texts are stored end to end as small whole numbers; on reading,
the id of a token is the stored number + 1, and 0 is padding.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt
from typing_extensions import TypedDict

DATA_VERSION = 1  # raise it when the packed bytes of any task change: caches are then made anew
SPLITS = ("train", "dev", "test")
ROUND = 64  # trimmed batches have few different lengths
WINDOW = 32  # batches that are sorted by length together when bucketing
Source = Literal["lra", "stand-in", "generated"]


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
    offsets: NDArray[np.int64]
    labels: NDArray[np.uint8]
    spec: TaskSpec

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each example; of a pair, those of its longer text."""
        return np.diff(self.offsets).reshape(len(self), -1).max(1)

    def batch(self, indices: NDArray[np.int64], trim: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """ids (B, n), or (B, 2, n) for pairs, padded with 0; labels (B,).

        n is the task's length or, with `trim`, the longest of the batch rounded up to a multiple of 64.
        """
        length = self.spec.length
        if trim:
            length = min(length, -(-int(self.lengths[indices].max()) // ROUND) * ROUND)
        sides = 2 if self.spec.paired else 1
        ids = np.zeros((len(indices) * sides, length), np.int64)
        texts = (np.asarray(indices)[:, None] * sides + np.arange(sides)).ravel()
        for row, start, end in zip(ids, self.offsets[texts], self.offsets[texts + 1], strict=True):
            np.add(self.tokens[start:end], 1, out=row[: end - start], dtype=np.int64)
        shape = (len(indices), 2, length) if self.spec.paired else ids.shape
        return ids.reshape(shape), self.labels[indices].astype(np.int64)


@dataclass(frozen=True)
class Task:
    """A task ready for use: what the model needs, the three splits, and where they came from."""

    spec: TaskSpec
    splits: dict[str, Split]
    source: Source
    fingerprint: str  # sha256 of the packed bytes

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


def cached(
    folder: str | Path,
    name: str,
    spec: TaskSpec,
    settings: dict[str, Any],
    build: Callable[[], tuple[Source, dict[str, Iterable[Example]]]],
    files: Iterable[Path] = (),
) -> Task:
    """The task packed under folder/name/<hash of settings>, built there first if need be.

    `settings` is all that decides the packed bytes, but for the source `files`: where these are there and not those
    that the cache was made from, it is made anew. `build` gives the source and the examples of each split.
    The result is written under a temporary name and renamed: a killed run leaves no half-made cache, and of two runs
    that build the same data at once the first to finish wins.
    """
    settings = {"data_version": DATA_VERSION, **settings}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    home = Path(folder) / name / key
    stamps = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.exists()}
    if (home / "manifest.json").exists() and stamps and _manifest(home)["files"] != stamps:
        print(f"{', '.join(stamps)} changed since {home} was made: it is made anew")
        shutil.rmtree(home)
    if not (home / "manifest.json").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=home.parent))
        try:
            source, splits = build()
            packed = {split: _pack(fresh / split, examples) for split, examples in splits.items()}
            made = {"settings": settings, "source": source, "files": stamps, "splits": packed}
            (fresh / "manifest.json").write_text(json.dumps(made, indent=2))
            _rename(fresh, home)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    manifest = _manifest(home)
    checksums = "".join(manifest["splits"][split]["sha256"] for split in SPLITS)
    return Task(
        spec=spec,
        splits={split: _open(home, split, spec) for split in SPLITS},
        source=manifest["source"],
        fingerprint=hashlib.sha256(checksums.encode()).hexdigest(),
    )


def _damaged(home: Path) -> DataError:
    return DataError(f"the packed data in {home} are damaged: delete that folder, and they will be made anew")


def _manifest(home: Path) -> dict[str, Any]:
    try:
        return json.loads((home / "manifest.json").read_text())
    except ValueError:
        raise _damaged(home) from None


def _rename(fresh: Path, home: Path) -> None:
    try:
        os.rename(fresh, home)
    except OSError:
        if not (home / "manifest.json").exists():  # not because another run was first
            raise


def _pack(stem: Path, examples: Iterable[Example]) -> dict[str, Any]:
    """Write one split as its examples come, so that a large source is never held whole."""
    sizes: list[int] = []
    labels: list[int] = []
    digest = hashlib.sha256()
    with open(f"{stem}.tokens.bin", "wb") as file:
        for texts, label in examples:
            labels.append(label)
            for text in texts:
                sizes.append(len(text))
                file.write(text)
                digest.update(text)
    if not labels:
        raise DataError(f"the {stem.name} split has no examples: ask for at least one")
    arrays: dict[str, NDArray[Any]] = {
        "offsets": np.cumsum([0, *sizes], dtype=np.int64),
        "labels": np.array(labels, np.uint8),
    }
    for part, array in arrays.items():
        np.save(f"{stem}.{part}.npy", array)
        digest.update(array.tobytes())
    return {
        "examples": len(labels),
        "labels": np.bincount(arrays["labels"]).tolist(),
        "mean_length": float(np.mean(sizes)),
        "sha256": digest.hexdigest(),
    }


def _open(home: Path, name: str, spec: TaskSpec) -> Split:
    try:
        split = Split(
            np.memmap(home / f"{name}.tokens.bin", np.uint8, mode="r"),
            np.load(home / f"{name}.offsets.npy"),
            np.load(home / f"{name}.labels.npy"),
            spec,
        )
    except (OSError, ValueError):
        raise _damaged(home) from None
    if len(split.tokens) != split.offsets[-1]:
        raise _damaged(home)
    longest = int(split.lengths.max())
    if longest > spec.length:
        raise DataError(
            f"task.data.length={spec.length} is too short for the longest text, {longest} tokens: "
            "raise it, or lower task.data.max_length"
        )
    return split
