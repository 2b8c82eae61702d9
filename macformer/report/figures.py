"""Table 2 as figures: learning curves, bars of time and memory, accuracy versus time, time over the length.

Needs matplotlib (the extra `figures`). The same records give the same bytes, on one machine and installation.
"""

import io
from collections import defaultdict
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from macformer.harness import files
from macformer.report.cells import COSTS, MODELS, WORDS, Column, Measure, Table

# Okabe and Ito's colours, which colour-blind readers can tell apart, and a marker besides: the same on every figure.
COLOURS = ["#000000", "#E69F00", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#555555", "#999999"]
SOFTMAX = ("transformer_checkpointed", "transformer_sdpa")  # the Transformer's other implementations
MARKS = dict(zip((*MODELS, *SOFTMAX), zip(COLOURS, "os^vD<>ph", strict=True), strict=True))
OTHERS = [("#8C6D31", "X"), ("#7B4173", "P"), ("#637939", "*"), ("#843C39", "d")]  # models of one's own, by name
FLOOR_COLOUR, DASHES = "#666666", [(0, (1, 1.5)), (0, (2, 2)), (0, (5, 2)), (0, (7, 2, 1, 2))]
VARIANTS = ["-", "--", ":", "-."]  # a model's rows: as it stands, then with changed keys
STYLE: dict[Any, Any] = {"font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9, "lines.markersize": 7}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"grid.color": "#dddddd", "grid.linewidth": 0.6, "legend.frameon": False}
STYLE |= {"svg.fonttype": "path"}  # glyphs are in the file
THIN: dict[str, Any] = {"elinewidth": 1.1, "capsize": 2.5}
GREY, CAPTIONS = "#555555", WORDS["captions"]
BARS = {  # kind of bar -> how the legend shows it
    "ours": Patch(fc=GREY, label="ours (± standard deviation over the seeds)"),
    "raced": Patch(fc=f"{GREY}55", ec=GREY, label="raced (median and range of the rounds)"),
    "paper": Patch(fc="white", ec=GREY, hatch="////", label="the paper's"),
}
Look = dict[str, Any]  # colour, marker and kind of line


@dataclass(frozen=True)
class Drawn:
    name: str  # of the files, without ending
    title: str
    caption: str
    png: bytes
    svg: bytes

    def write(self, folder: Path) -> None:
        files.write(folder / f"{self.name}.png", self.png)
        files.write(folder / f"{self.name}.svg", self.svg)


@mpl.rc_context(STYLE)
def draw(number: int, table: Table) -> list[Drawn]:
    """All figures of one table; curves only where there are runs."""
    looks, name, made = _looks({cell.row: cell.model for _, cell in table.cells}), f"table2-{number}", []
    for column in table.columns:
        if column.runs:
            made.append(_curves(f"{name}-curves-{column.task}", column, looks, _warning(table, [column])))
        if kinds := [kind for kind in BARS if any("time" in getattr(cell, kind) for cell in column.cells.values())]:
            made.append(_bars(f"{name}-bars-{column.task}", column, kinds, looks, _warning(table, [column])))
    return [*made, _accuracy_over_time(f"{name}-accuracy-time", table, looks)]


@mpl.rc_context(STYLE)
def over_length(bench: dict[str, Any]) -> Drawn:
    """Of results/bench/models.json: steps of equal numbers of tokens, in ever longer texts."""
    title, results = "Time of a training step over the length", bench["lengths"]["results"]
    lengths, crossings = [result["n"] for result in results], bench["lengths"]["break_even"]
    figure = Figure((10, 4.8), layout="constrained")
    panel = figure.subplots()
    handles: list[Any] = []
    looks = _looks({model: model for result in results for model in result["arms"]})
    for model, look in looks.items():
        steps = {each["n"]: Measure.over(each["arms"][model]["seconds"]) for each in results if model in each["arms"]}
        middle, error = [step.value for step in steps.values()], np.hstack([*map(_error, steps.values())])
        handles.append(panel.errorbar(list(steps), middle, error, **THIN | look, markersize=5, label=model))
    for crossing, dash in zip(crossings, cycle(DASHES), strict=False):
        if crossing["n"] is not None:
            colour = looks[crossing["model"]]["color"]
            ends = crossing["low"] or lengths[0], crossing["high"] or lengths[-1]  # none: no crossing in some round
            panel.axvspan(*ends, color=colour, alpha=0.12, lw=0)
            label = f"break-even: {crossing['model']} and {crossing['baseline']}, n = {crossing['n']:,.0f}"
            handles.append(panel.axvline(crossing["n"], color=colour, ls=dash, lw=1.2, label=label))
    panel.set(xscale="log", yscale="log", xlabel="length n of a text", ylabel="seconds a step")
    panel.minorticks_off()
    panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_title(f"{title}, {bench['lengths']['tokens']:,} tokens a batch")
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    caption = " ".join([CAPTIONS["lengths"], *(crossing["says"] for crossing in crossings)])
    return saved("table2-lengths", figure, title, caption)


def saved(name: str, figure: Figure, title: str, caption: str) -> Drawn:
    """Without dates and names of programs; the salt makes the ids in the SVG the same every time."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata={"Software": None})
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Drawn(name, title, caption, png.getvalue(), svg.getvalue())


def _titled(name: str, figure: Figure, title: str, caption: str, ncols: int = 4, handles: Any = None) -> Drawn:
    """With the title above all panels and one legend below them."""
    figure.suptitle(title)
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols)
    return saved(name, figure, title, caption)


def _warning(table: Table, columns: list[Column]) -> str:
    """What the title of a figure of these tasks must say."""
    if not table.conditions:
        return "" if table.machine else " (no runs yet)"
    stand_in = [column.task for column in columns if any(run.data.source == "stand-in" for run in column.runs)]
    which = f" for {', '.join(stand_in)}" if len(columns) > 1 else ""
    return f" ({f'STAND-IN data{which}, ' if stand_in else ''}NOT the paper's protocol)"


def _looks(models: dict[str, str]) -> dict[str, Look]:
    """By row, from the model of each row: rows of one model have its colour, but differ in marker and kind of line."""
    others, looks = cycle(OTHERS), {}
    for model in sorted(set(models.values())):
        colour, marker = MARKS.get(model) or next(others)
        variants = zip([marker, *(other for other in "X*dP" if other != marker)], VARIANTS, strict=False)
        looks[model] = cycle([{"color": colour, "marker": mark, "ls": line} for mark, line in variants])
    return {row: next(looks[model]) for row, model in models.items()}


def _curves(name: str, column: Column, looks: dict[str, Look], warning: str) -> Drawn:
    """Means over the seeds, in a band from the lowest to the highest."""
    figure = Figure((10, 4.8), layout="constrained")
    accuracies, losses = figure.subplots(1, 2)
    for cell in column.ran:
        for panel, label in (accuracies, f"{cell.row} (n={len(cell.runs)})"), (losses, None):
            at = defaultdict(list)
            for point in (point for run in cell.runs for point in run.history):
                at[point.step].append(100 * point.dev_accuracy if panel is accuracies else point.train_loss)
            low, middle, high = ([summary(values) for values in at.values()] for summary in (min, mean, max))
            panel.plot(list(at), middle, **looks[cell.row] | {"marker": None, "lw": 1.6, "label": label})
            panel.fill_between(list(at), low, high, color=looks[cell.row]["color"], alpha=0.15, lw=0)
    for (floor, accuracy), dash in zip(column.floors["dev_accuracy"].items(), cycle(DASHES), strict=False):
        accuracies.axhline(100 * accuracy, color=FLOOR_COLOUR, ls=dash, lw=1.2, label=f"floor: {floor}")
    for panel, title in (accuracies, "dev accuracy, %"), (losses, "training loss"):
        panel.set(title=title, xlabel="step")
        panel.xaxis.set_major_formatter("{x:,.0f}")
    caption = CAPTIONS["curves"] + CAPTIONS["floors"] * bool(column.floors["dev_accuracy"])
    return _titled(name, figure, f"Learning curves on {column.task}{warning}", caption)


def _bars(name: str, column: Column, kinds: list[str], looks: dict[str, Look], warning: str) -> Drawn:
    """Ours, raced and the paper's, each only if any row has it."""
    cells, height = column.cells.values(), 0.8 / len(kinds)
    figure = Figure((10, 1.6 + (0.14 + 0.2 * len(kinds)) * len(cells)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, cost in zip(panels, COSTS, strict=True):
        for (line, cell), (place, kind) in product(enumerate(cells), enumerate(kinds)):
            if not (measure := getattr(cell, kind).get(cost)):
                continue
            y, colour = line + (place + 0.5) * height - 0.4, looks[cell.row]["color"]
            face = {"ours": colour, "raced": f"{colour}55", "paper": "white"}[kind]
            panel.barh(y, measure.value, 0.9 * height, lw=0.8, fc=face, ec=colour, hatch=BARS[kind].get_hatch())
            if measure.high > measure.low:
                panel.errorbar(measure.value, y, xerr=_error(measure), color="#333333", fmt="none", **THIN)
            number = f"{measure.value:.2f}"
            panel.annotate(number, (measure.high, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
        panel.axvline(1, color="black", lw=0.8, ls=":")
        panel.set(title=f"{cost}, the Transformer's = 1", xmargin=0.12)
        panel.grid(visible=False, axis="y")
    panels[0].set_yticks(range(len(cells)), list(column.cells))
    panels[0].invert_yaxis()
    caption, handles = " ".join(CAPTIONS[part] for part in ("bars", *kinds)), [BARS[kind] for kind in kinds]
    return _titled(name, figure, f"Time and memory on {column.task}{warning}", caption, ncols=3, handles=handles)


def _accuracy_over_time(name: str, table: Table, looks: dict[str, Look]) -> Drawn:
    """A panel a task: ours filled, the paper's hollow."""
    figure = Figure((max(10, 1 + 3.4 * len(table.columns)), 5), layout="constrained")
    panels = figure.subplots(1, len(table.columns), squeeze=False)[0]
    handles = {}
    for panel, column in zip(panels, table.columns, strict=True):
        for row, cell in column.cells.items():
            look = looks[row] | {"ls": ""}
            ours = {**cell.raced, **cell.ours}  # without the Transformer there is no time of ours
            for measures, hollow in ((cell.papers_own, {"mfc": "white", "elinewidth": 0.6}), (ours, {})):
                if measures.keys() >= {"time", "accuracy"}:
                    time, accuracy = measures["time"], measures["accuracy"]
                    at = time.value, 100 * accuracy.value, _error(accuracy, 100), time.spread
                    panel.errorbar(*at, **THIN | look | hollow)
                    handles[row] = Line2D([], [], label=row, **look)
        if best := column.best_floor:
            panel.axhline(100 * column.floors["test_accuracy"][best], color=FLOOR_COLOUR, ls="--", lw=1.2)
        heading = f"{column.task}\n{f'best floor: {best}' if best else 'no floor'}"
        panel.set(title=heading, xlabel="time, the Transformer's = 1", xmargin=0.1, ymargin=0.1)
    panels[0].set_ylabel("test accuracy, %")
    handles["paper"] = Line2D([], [], color=GREY, marker="o", mfc="white", ls="", label="hollow: the paper's")
    handles["floor"] = Line2D([], [], color=FLOOR_COLOUR, ls="--", lw=1.2, label="the best floor")
    title = f"Accuracy versus time{_warning(table, table.columns)}"
    return _titled(name, figure, title, CAPTIONS["accuracy_over_time"], handles=list(handles.values()))


def _error(measure: Measure, scale: int = 1) -> list[list[float]]:
    """How far its error bar reaches to both sides."""
    value, low, high = (scale * number for number in (measure.value, measure.low, measure.high))
    return [[value - low], [high - value]]
