"""python scripts/table.py [FOLDER]: the records below FOLDER/runs as Table 2, on the screen and in FOLDER/tables.

With --settings as one table for each task, a row for each model and setting.
"""

import argparse
import sys
from pathlib import Path

from macformer.harness import files
from macformer.report import cells, table

README, RESULTS = cells.ROOT / "README.md", cells.ROOT / "results"
BLOCK = "<!-- written by `make table` -->", "<!-- until here -->"
SETTINGS = "<!-- written by `make table`: settings -->", "<!-- until here: settings -->"


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
    files.write(README, f"{before}{begin}\n\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("results"), help="default: results")
    parser.add_argument("--settings", action="store_true", help="for a sweep over settings: a row for each of them")
    arguments = parser.parse_args()
    folder, read = arguments.folder, cells.read(arguments.folder)
    texts, home, block = {"table2.md": table.markdown(*read), "table2.csv": table.to_csv(read[0])}, RESULTS, BLOCK
    if arguments.settings:
        texts, home, block = {"settings.md": table.settings(*read)}, RESULTS / "ablations", SETTINGS
    shown, *_ = texts.values()
    for name, text in texts.items():
        files.write(folder / "tables" / name, text)
    if folder.resolve() == home:
        write_block(*block, shown)
    again = f"python scripts/table.py {folder}{' --settings' * arguments.settings}"
    print(f"{shown}\nwritten to {folder}/tables: {', '.join(texts)}; after more runs: {again}")


if __name__ == "__main__":
    main()
