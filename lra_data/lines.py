"""Sources that are three text files, an example a line."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from lra_data.base import SPLITS, Build, DataError, Example, Source

HEADER = b"Source\tTarget"  # of LRA's ListOps; the files of Retrieval have none
Parse = Callable[[bytes], Example]  # raises ValueError for a line that is wrong


def line_files(folder: str, title: str, released: dict[str, int], parse: Parse) -> tuple[Build, str, dict[str, Path]]:
    """What `cached` wants to know of the files in `folder`; `title` has their names, with braces.

    Files with as many lines as LRA `released` count as LRA's, any others as a stand-in.
    """
    before, parts, after = re.split("[{}]", title)
    files = {name: Path(folder) / name for name in (f"{before}{part}{after}" for part in parts.split(","))}

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        counts: dict[str, int] = {}
        examples: dict[str, Iterable[Example]] = {}
        for split, file in zip(SPLITS, files.values(), strict=True):
            with open(file, "rb") as lines:
                counts[split] = sum(line.rstrip(b"\r\n") != HEADER for line in lines)
            examples[split] = _examples(file, counts[split], parse)
        return "lra" if counts == released else "stand-in", examples

    return build, title, files


def _examples(file: Path, count: int, parse: Parse) -> Iterator[Example]:
    """Of lines that end with LF or CRLF."""
    with open(file, "rb") as lines:
        for number, line in enumerate(tqdm(lines, f"reading {file.name}", count, unit=" lines", mininterval=1), 1):
            row = line.rstrip(b"\r\n")
            try:
                if number > 1 or row != HEADER:
                    yield parse(row)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: {error}") from None
