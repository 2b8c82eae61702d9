"""python scripts/table.py [FOLDER]: the records below FOLDER/runs as Table 2, on the screen and in FOLDER/tables."""

import argparse
import os
from pathlib import Path

from macformer.report import table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("results"), help="default: results")
    folder = parser.parse_args().folder
    text = table.render(*table.load(folder))
    file = folder / "tables" / "table2.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".tmp")
    fresh.write_text(text)
    os.replace(fresh, file)
    print(text)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
