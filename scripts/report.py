"""python scripts/report.py [FOLDER]: the records below FOLDER/runs as FOLDER/report.html and FOLDER/figures."""

import argparse
import sys
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
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not there: give the folder that has runs/ in it")
    found, problems = cells.load(folder)
    bench = cells.bench()
    tables = cells.tables(found, cells.floors(), bench, papers=folder.resolve() == cells.ROOT / "results")
    drawn = [figures.draw(number, table) for number, table in enumerate(tables, 1)]
    lengths = figures.over_length(bench) if bench else None
    every = [figure for each in drawn for figure in each] + ([lengths] if lengths else [])
    for figure in every:
        files.write(folder / "figures" / f"{figure.name}.png", figure.png)
        files.write(folder / "figures" / f"{figure.name}.svg", figure.svg)
    for file in (folder / "figures").glob("table2-*.*"):  # of tables that are no longer there
        if file.suffix in (".png", ".svg") and file.stem not in {figure.name for figure in every}:
            file.unlink()
    files.write(folder / "report.html", page.render(tables, drawn, lengths, found, problems))
    print(f"written: {folder}/report.html, and {len(every)} figures as PNG and SVG in {folder}/figures")


if __name__ == "__main__":
    main()
