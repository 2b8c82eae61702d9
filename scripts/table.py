"""python scripts/table.py [FOLDER]: the records below FOLDER/runs as Table 2, on the screen and in FOLDER/tables."""

import argparse
import sys
from pathlib import Path

from macformer import record as records
from macformer.report import cells, table

README = cells.ROOT / "README.md"
BEGIN, END = "<!-- written by `make table` -->", "<!-- until here -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("results"), help="default: results")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not there: give the folder that has runs/ in it")
    found, problems = cells.load(folder)
    texts = table.formats(found, problems, cells.floors(), cells.bench())
    for ending, text in texts.items():
        records.write_text(folder / "tables" / f"table2.{ending}", text)
    if folder.resolve() == cells.ROOT / "results":  # the README shows this very table
        before, begin, rest = README.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            sys.exit(f"error: README.md lacks the lines {BEGIN} and {END}, between which the table goes")
        records.write_text(README, f"{before}{begin}\n\n{texts['md']}\n{end}{after}")
    print(texts["md"])
    print(
        f"written to {folder}/tables: table2.{{{','.join(texts)}}}; after more runs: python scripts/table.py {folder}"
    )


if __name__ == "__main__":
    main()
