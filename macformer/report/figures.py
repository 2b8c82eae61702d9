"""Table 2 as figures: learning curves, bars of time and memory, accuracy versus time, time over the length.

Needs matplotlib (the extra `figures`). The same records give the same bytes, on one machine and installation.
"""

import io
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from macformer.report.cells import Cell, Column, Measure, Table

# Okabe and Ito's colours, which colour-blind readers can tell apart, and a marker besides: the same on every figure.
MARKS = {
    "transformer": ("#000000", "o"),
    "transformer_checkpointed": ("#555555", "p"),
    "transformer_sdpa": ("#999999", "h"),
    "rfa": ("#E69F00", "s"),
    "macformer_exp": ("#0072B2", "^"),
    "macformer_inv": ("#D55E00", "v"),
    "macformer_trigh": ("#56B4E9", "D"),
    "macformer_log": ("#009E73", "<"),
    "macformer_sqrt": ("#CC79A7", ">"),
}
OTHER = ("#8C6D31", "X")  # models of one's own
FLOOR_COLOUR, DASHES = "#666666", [(0, (1, 1.5)), (0, (2, 2)), (0, (5, 2)), (0, (7, 2, 1, 2))]
VARIANTS = ["-", "--", ":", "-."]  # a model's rows: as it stands, then with changed keys
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.markersize": 7,
    "svg.fonttype": "path",  # glyphs are in the file
}
THIN: dict[str, Any] = {"elinewidth": 1.1, "capsize": 2.5}


@dataclass(frozen=True)
class Drawn:
    name: str  # of the files, without ending
    title: str
    caption: str
    png: bytes
    svg: bytes


@mpl.rc_context(STYLE)
def draw(number: int, table: Table) -> list[Drawn]:
    """All figures of one table; curves only where there are runs."""

    def warning(columns: list[Column]) -> str:
        if not table.conditions:
            return "" if table.machine else " (no runs yet)"
        stand_in = [column.task for column in columns if any(run.data.source == "stand-in" for run in column.runs)]
        which = f" for {', '.join(stand_in)}" if len(columns) > 1 else ""
        return f" ({f'STAND-IN data{which}, ' if stand_in else ''}NOT the paper's protocol)"

    made = []
    for column in table.columns:
        if column.runs:
            made.append(_curves(f"table2-{number}-curves-{column.task}", column, warning([column])))
        if any(cell.paper or cell.time or cell.race for cell in column.cells.values()):
            made.append(_bars(f"table2-{number}-bars-{column.task}", column, warning([column])))
    return [*made, _accuracy_over_time(f"table2-{number}-accuracy-time", table, warning(table.columns))]


@mpl.rc_context(STYLE)
def over_length(bench: dict[str, Any]) -> Drawn:
    """Of results/bench/models.json: steps of equal numbers of tokens, in ever longer texts."""
    title, results = "Time of a training step over the length", bench["lengths"]["results"]
    figure = Figure((10, 4.8), layout="constrained")
    panel = figure.subplots()
    handles: list[Any] = []
    for model in dict.fromkeys(model for result in results for model in result["arms"]):
        points = [(result["n"], result["arms"][model]["seconds"]) for result in results if model in result["arms"]]
        colour, marker = MARKS.get(model, OTHER)
        middle = [median(seconds) for _, seconds in points]
        low = [median(seconds) - min(seconds) for _, seconds in points]
        high = [max(seconds) - median(seconds) for _, seconds in points]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "label": model}
        handles.append(panel.errorbar([n for n, _ in points], middle, [low, high], **look, **THIN))
    lengths = [result["n"] for result in results]
    for crossing, dash in zip(bench["lengths"]["break_even"], DASHES * 9, strict=False):
        if crossing["n"] is not None:
            colour, _ = MARKS.get(crossing["model"], OTHER)
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
    says = " ".join(crossing["says"] for crossing in bench["lengths"]["break_even"])
    caption = f"Whole models in turn on the same batches; median and range of the rounds. {says}"
    return saved("table2-lengths", figure, title, caption.strip())


def saved(name: str, figure: Figure, title: str, caption: str) -> Drawn:
    """Without dates and names of programs; the salt makes the ids in the SVG the same every time."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata={"Software": None})
    with mpl.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(svg, format="svg", metadata=nothing)
    return Drawn(name, title, caption, png.getvalue(), svg.getvalue())


def _looks(column: Column) -> dict[str, dict[str, Any]]:
    """Row -> colour, marker and kind of line."""
    looks, rows = {}, dict[str, int]()
    for row, cell in column.cells.items():
        colour, marker = MARKS.get(cell.model, OTHER)
        variant = rows[cell.model] = rows.get(cell.model, -1) + 1
        looks[row] = {
            "color": colour,
            "marker": marker if not variant else "PX*d"[variant % 4],
            "ls": VARIANTS[variant % 4],
        }
    return looks


def _curves(name: str, column: Column, warning: str) -> Drawn:
    """Means over the seeds, in a band from the lowest to the highest."""
    title = f"Learning curves on {column.task}{warning}"
    looks = _looks(column)
    figure = Figure((10, 4.8), layout="constrained")
    accuracies, losses = figure.subplots(1, 2)
    for row, cell in column.cells.items():
        by_step: dict[int, list[tuple[float, float]]] = {}
        for run in cell.runs:
            for point in run.history:
                by_step.setdefault(point.step, []).append((100 * point.dev_accuracy, point.train_loss))
        for panel, part in ((accuracies, 0), (losses, 1)):
            values = [[point[part] for point in points] for points in by_step.values()]
            if values:
                label = f"{row} (n={len(cell.runs)})" if panel is accuracies else None
                style = looks[row] | {"marker": None, "lw": 1.6, "label": label}
                panel.plot(list(by_step), [mean(v) for v in values], **style)
                low, high = [min(v) for v in values], [max(v) for v in values]
                panel.fill_between(list(by_step), low, high, color=looks[row]["color"], alpha=0.15, lw=0)
    for (floor, accuracy), dash in zip(column.dev_floors.items(), DASHES * 9, strict=False):
        accuracies.axhline(100 * accuracy, color=FLOOR_COLOUR, ls=dash, lw=1.2, label=f"floor: {floor}")
    accuracies.set(title="dev accuracy, %", xlabel="step")
    losses.set(title="training loss", xlabel="step")
    for panel in (accuracies, losses):
        panel.xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=4)
    caption = (
        "Lines are means over the seeds (n of them), bands go from the lowest to the highest seed. The training "
        "loss is the mean since the evaluation before."
    )
    if column.dev_floors:
        caption += " Floors: what cheap predictors reach on the whole dev split, of which the curves may take a part."
    return saved(name, figure, title, caption)


def _bars(name: str, column: Column, warning: str) -> Drawn:
    """Ours, raced and the paper's, each only if any row has it."""
    title = f"Time and memory on {column.task}{warning}"
    kinds = [kind for kind in ("ours", "raced", "paper") if any(_cost(c, "time", kind) for c in column.cells.values())]
    figure = Figure((10, 1.6 + (0.14 + 0.2 * len(kinds)) * len(column.cells)), layout="constrained")
    times, memories = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(kinds)
    for panel, measure in ((times, "time"), (memories, "memory")):
        for line, cell in enumerate(column.cells.values()):
            for place, kind in enumerate(kinds):
                _bar(panel, line + (place + 0.5) * height - 0.4, height, cell, measure, kind)
        panel.axvline(1, color="black", lw=0.8, ls=":")
        panel.set(title=f"{measure}, the Transformer's = 1")
        panel.margins(x=0.12)
        panel.grid(visible=False, axis="y")
    times.set_yticks(range(len(column.cells)), list(column.cells))
    times.invert_yaxis()
    figure.suptitle(title)
    patches = {
        "ours": Patch(fc="#555555", label="ours (± standard deviation over the seeds)"),
        "raced": Patch(fc="#55555555", ec="#555555", label="raced (median and range of the rounds)"),
        "paper": Patch(fc="white", ec="#555555", hatch="////", label="the paper's"),
    }
    figure.legend(handles=[patches[kind] for kind in kinds], loc="outside lower center", ncols=3)
    explained = {
        "ours": "Ours: ratio of the means over the seeds.",
        "raced": "Raced: training steps in turn on the same batches, in one process; peak memory has no range.",
        "paper": "The paper gives no spread.",
    }
    caption = " ".join(
        ["Training time and peak memory as multiples of the Transformer's; less is better."]
        + [explained[kind] for kind in kinds]
    )
    return saved(name, figure, title, caption)


def _cost(cell: Cell, measure: str, kind: str) -> tuple[float, float, float] | None:
    """A bar's value, and the ends of its error bar."""
    if kind == "paper":
        value = cell.paper.get(measure)
        return (value, value, value) if value is not None else None
    if kind == "raced":
        if not cell.race:
            return None
        race = cell.race
        return (race.time, race.low, race.high) if measure == "time" else (race.memory, race.memory, race.memory)
    ours = getattr(cell, measure)
    return (ours.value, ours.value - (ours.spread or 0), ours.value + (ours.spread or 0)) if ours else None


def _bar(panel: Axes, y: float, height: float, cell: Cell, measure: str, kind: str) -> None:
    cost = _cost(cell, measure, kind)
    if not cost:
        return
    value, low, high = cost
    colour, _ = MARKS.get(cell.model, OTHER)
    look: dict[str, Any] = {
        "ours": {"fc": colour, "ec": colour},
        "raced": {"fc": f"{colour}55", "ec": colour},
        "paper": {"fc": "white", "ec": colour, "hatch": "////"},
    }[kind]
    panel.barh(y, value, 0.9 * height, lw=0.8, **look)
    if high > low:
        panel.errorbar(value, y, xerr=[[value - low], [high - value]], color="#333333", fmt="none", **THIN)
    panel.annotate(f"{value:.2f}", (high, y), (4, 0), textcoords="offset points", va="center", fontsize=8)


def _accuracy_over_time(name: str, table: Table, warning: str) -> Drawn:
    """A panel a task: ours filled, the paper's hollow."""
    title = f"Accuracy versus time{warning}"
    figure = Figure((max(10, 1 + 3.4 * len(table.columns)), 5), layout="constrained")
    panels = figure.subplots(1, len(table.columns), squeeze=False)[0]
    handles = {}
    for panel, column in zip(panels, table.columns, strict=True):
        for row, look in _looks(column).items():
            cell, plain = column.cells[row], look | {"ls": ""}
            if cell.paper:
                ends = cell.paper["accuracy"], cell.paper_low, cell.paper_high
                _point(panel, cell.paper["time"], None, ends, plain | {"mfc": "white", "elinewidth": 0.6})
            time = cell.time or (cell.race and Measure(cell.race.time, None, cell.race.rounds))
            if cell.accuracy and time:
                ends = cell.accuracy.value, cell.low, cell.high
                _point(panel, time.value, time.spread, ends, plain)
            if cell.paper or (cell.accuracy and time):
                handles[row] = Line2D([], [], label=row, **plain)
        best = max(column.floors, key=lambda floor: column.floors[floor], default=None)
        if best:
            panel.axhline(100 * column.floors[best], color=FLOOR_COLOUR, ls="--", lw=1.2)
        panel.set(
            title=f"{column.task}\n{f'best floor: {best}' if best else 'no floor'}",
            xlabel="time, the Transformer's = 1",
        )
        panel.margins(0.1)
    panels[0].set_ylabel("test accuracy, %")
    hollow = Line2D([], [], color="#555555", marker="o", mfc="white", ls="", label="hollow: the paper's")
    dashed = Line2D([], [], color=FLOOR_COLOUR, ls="--", lw=1.2, label="the best floor")
    figure.suptitle(title)
    figure.legend(handles=[*handles.values(), hollow, dashed], loc="outside lower center", ncols=4)
    caption = (
        "Left and up is better. Ours are filled, with the 95% interval of the accuracy over seeds and test examples "
        "and the standard deviation of the time over seeds; where the Transformer did not run, their time is the raced "
        "one. The paper's are hollow, with the 95% interval that the size of its test set gives. The dashed line is "
        "what the best cheap predictor reaches on test."
    )
    return saved(name, figure, title, caption)


def _point(panel: Axes, time: float, spread: float | None, ends: tuple[Any, Any, Any], look: dict[str, Any]) -> None:
    value, low, high = (100 * share for share in ends)
    panel.errorbar(time, value, [[value - low], [high - value]], spread, **THIN | look)
