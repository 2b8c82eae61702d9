"""python scripts/table.py [FOLDER]: the records below FOLDER/runs as Table 2, on the screen and in FOLDER/tables."""

import argparse
import sys
from pathlib import Path

from macformer import record as records
from macformer.report import table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("results"), help="default: results")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not there: give the folder that has runs/ in it")
    text = table.render(*table.load(folder))
    file = folder / "tables" / "table2.md"
    records.write_text(file, text)
    print(text)
    print(f"written to {file}; after more runs: python scripts/table.py {folder}")


if __name__ == "__main__":
    main()
