"""python scripts/table.py [FOLDER]: the records below FOLDER/runs as Table 2, on the screen and in FOLDER/tables."""

import argparse
import sys
from pathlib import Path

from macformer import record as records
from macformer.report import cells, table

README = cells.ROOT / "README.md"
BEGIN, END = "<!-- written by `make table` -->", "<!-- until here -->"


def find_block(begin: str, end: str) -> tuple[str, str]:
    """What stands in the README before and after these two lines."""
    before, found, rest = README.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        sys.exit(f"error: README.md lacks the lines {begin} and {end}, between which this goes")
    return before, after


def write_block(begin: str, end: str, text: str) -> None:
    """Put it into the README, between these two lines."""
    before, after = find_block(begin, end)
    records.write_text(README, f"{before}{begin}\n\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("results"), help="default: results")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not there: give the folder that has runs/ in it")
    found, problems = cells.load(folder)
    ours = folder.resolve() == cells.ROOT / "results"
    tables = cells.tables(found, cells.floors(), cells.bench(), papers=ours)
    texts = table.formats(tables, found, problems)
    for ending, text in texts.items():
        records.write_text(folder / "tables" / f"table2.{ending}", text)
    if ours:  # the README shows this very table
        write_block(BEGIN, END, texts["md"])
    print(texts["md"])
    print(
        f"written to {folder}/tables: table2.{{{','.join(texts)}}}; after more runs: python scripts/table.py {folder}"
    )


if __name__ == "__main__":
    main()
