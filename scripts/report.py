"""python scripts/report.py [FOLDER]: the records below FOLDER/runs as FOLDER/report.html and FOLDER/figures."""

import argparse
import sys
from itertools import chain
from pathlib import Path

from macformer.harness import files
from macformer.report import cells

try:
    from macformer.report import figures, page
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not there; pip install 'macformer[figures]' (make setup does)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("results"), help="default: results")
    folder = parser.parse_args().folder
    tables, found, problems = cells.read(folder)
    drawn = [figures.draw(number, table) for number, table in enumerate(tables, 1)]
    lengths = figures.over_length(cells.bench())
    made = {figure.name: figure for figure in (*chain(*drawn), lengths)}
    for file in (folder / "figures").glob("table2-*.*"):
        if file.suffix in (".png", ".svg") and file.stem not in made:  # of a table that is no longer there
            file.unlink()
    for figure in made.values():
        figure.write(folder / "figures")
    files.write(folder / "report.html", page.render(tables, drawn, lengths, found, problems))
    print(f"written: {folder}/report.html, and {len(made)} figures as PNG and SVG in {folder}/figures")


if __name__ == "__main__":
    main()
