"""LRA Retrieval: pairs of papers as bytes; label 1 = one cites the other.

Read from LRA's files, which quote nothing. The train file has more than 1 GB: it is packed line by line.
"""

from functools import partial

from pydantic import PositiveInt, validate_call

from lra_data.base import BYTES, Caps, Example, Task, TaskSpec, cached, check_length, line_files

FILES, COLUMNS = "new_aan_pairs.{train,eval,test}.tsv", ["label", "id1", "id2", "text1", "text2"]
PAIRS = {"train": 147_086, "dev": 18_090, "test": 17_437}  # in LRA's files
READ = 10_000  # bytes of a text that LRA's pipeline reads, before it cuts to max_length
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}

spec = partial(TaskSpec, BYTES, classes=2, paired=True)


@validate_call(config={"strict": True})
def load(folder: str, length: PositiveInt, max_length: PositiveInt, examples: Caps, origin: str | None = None) -> Task:
    """Pairs packed on first use from the three files in `origin` (default: `folder`); `examples` caps the splits."""
    check_length(length, max_length)
    settings, hint = {"max_length": max_length}, f"put LRA's {FILES} there"
    source = line_files(origin or folder, FILES, COLUMNS, PAIRS, partial(_pair, min(READ, max_length)))
    return cached(folder, "retrieval", spec(length), settings, examples, *source, place=origin, hint=hint)


def _pair(max_length: int, label: bytes, _id1: bytes, _id2: bytes, first: bytes, second: bytes) -> Example:
    if label not in LABELS:
        raise ValueError(f"the label {label.decode(errors='replace')!r} is not 0 or 1")
    if not first or not second:
        raise ValueError("an empty text")
    return (first[:max_length], second[:max_length]), LABELS[label]
