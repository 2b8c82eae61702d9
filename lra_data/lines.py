"""Sources that are three text files, an example a line."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from lra_data.base import SPLITS, Build, DataError, Example, Source


def line_files(
    folder: str, title: str, columns: list[str], released: dict[str, int], parse: Callable[..., Example]
) -> tuple[Build, str, dict[str, Path]]:
    """What `cached` wants to know of the files in `folder`; `title` has their names, with braces.

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
