"""LRA Retrieval: pairs of papers as bytes; label 1 = one cites the other.

Read from LRA's new_aan_pairs.{train,eval,test}.tsv: label, id1, id2, text1, text2, tabs between, no quoting. The train
file has more than 1 GB: it is packed line by line.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import PositiveInt, validate_call

from lra_data import base
from lra_data.base import Caps, DataError, Example, Source, Task, TaskSpec

PARTS = ("train", "eval", "test")
FILES = {split: f"new_aan_pairs.{part}.tsv" for split, part in zip(base.SPLITS, PARTS, strict=True)}
PAIRS = {"train": 147_086, "dev": 18_090, "test": 17_437}  # of LRA's files; any others are a stand-in
READ = 10_000  # bytes of a text that LRA's pipeline reads, before it cuts to max_length
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


def spec(length: int) -> TaskSpec:
    return TaskSpec(base.BYTES, length, classes=2, paired=True)


@validate_call(config={"strict": True})
def load(folder: str, length: PositiveInt, max_length: PositiveInt, examples: Caps, origin: str | None = None) -> Task:
    """Pairs packed from the three files in `origin` (default: `folder`) on first use.

    `examples` caps the splits; null = all.
    """
    paths = {split: Path(origin or folder) / FILES[split] for split in base.SPLITS}
    limits: dict[str, Any] = {**examples}
    base.check_length(length, max_length)

    def require() -> None:
        base.require("retrieval", folder, origin, paths.values(), f"put LRA's {', '.join(FILES.values())} there")

    if origin:  # a place that was named must be there, packed data or not
        require()

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        require()
        real = all(_lines(paths[split]) == PAIRS[split] for split in base.SPLITS)
        return "lra" if real else "stand-in", {
            split: itertools.islice(_read(path, min(READ, max_length)), limits[split]) for split, path in paths.items()
        }

    settings = {"max_length": max_length, "examples": limits}
    files = {path.name: path for path in paths.values()}
    return base.cached(
        folder, "retrieval", spec(length), settings, build, base.as_text, "new_aan_pairs.{train,eval,test}.tsv", files
    )


def _lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def _read(path: Path, max_length: int) -> Iterator[Example]:
    for number, line in base.lines(path):
        fields = line.split(b"\t")
        if len(fields) != 5:
            raise DataError(f"{path}, line {number}: {len(fields)} fields, not 5 (label, id1, id2, text1, text2)")
        label, _, _, first, second = fields
        if label not in LABELS:
            raise DataError(f"{path}, line {number}: the label {label.decode(errors='replace')!r} is not 0 or 1")
        if not first or not second:
            raise DataError(f"{path}, line {number}: an empty text")
        yield (first[:max_length], second[:max_length]), LABELS[label]
