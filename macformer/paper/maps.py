"""The paper's Figure 3 from results/figures/rmfa.json: heat maps, the samplings beside each other, CSV and Markdown.

Unlike the paper's, the maps are not smoothed: a field is a cell. Needs matplotlib (the extra `figures`), no torch.
Letters: n length, D features, d head width.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, stdev
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from macformer.report.figures import FLOOR_COLOUR, STYLE, THIN, Drawn, saved

COLOURS = "cividis"  # even steps to the eye, also to a colour-blind one; dark is small, as in the paper
LOOKS = {  # Okabe and Ito's, as in figures.py
    "paper": ("#0072B2", "^"),
    "release": ("#E69F00", "s"),
    "exact01": ("#009E73", "o"),
    "order1": ("#D55E00", "*"),
}
LOGS = {  # of a cell -> column of the CSV
    "nmse": "log10_nmse",
    "nmse_offset": "log10_nmse_offset",
    "deviation": "log10_deviation",
    "explicit": "log10_acceleration_explicit",
    "sdpa": "log10_acceleration_sdpa",
}
LARGE = {"font.size": 13, "axes.titlesize": 13, "legend.fontsize": 12}  # to be read at half a page's width
WRAP = 125  # letters of the caption in a line
SMALL: dict[str, Any] = {"fontsize": 9, "x": 0.01, "ha": "left"}  # the caption
Report = dict[str, Any]


@dataclass(frozen=True)
class GridCell:
    """Mean and standard deviation (NaN of one repeat) over the repeats of each logarithm of LOGS, to the base 10."""

    sampling: str
    n: int
    D: int
    repeats: int
    mean: dict[str, float]
    spread: dict[str, float]
    ms: float  # the median


def cells(report: Report) -> list[GridCell]:
    """Of the paper's map, at every length."""
    return [_cell(report, cell, "paper") for cell in report["cells"]]


def samplings(report: Report) -> list[GridCell]:
    """Of every sampling, at the longest length."""
    return [_cell(report, cell, cell["sampling"]) for cell in report["samplings"]]


def _cell(report: Report, cell: dict[str, Any], sampling: str) -> GridCell:
    """A ratio of times is taken within a repeat."""
    (softmax,) = (times for times in report["softmax"] if times["n"] == cell["n"])
    values = {kind: cell[kind] for kind in LOGS if kind in cell}
    for kind in ("explicit", "sdpa"):
        values[kind] = [theirs / ours for theirs, ours in zip(softmax[kind], cell["seconds"], strict=True)]
    logs = {kind: [math.log10(x) for x in each] for kind, each in values.items()}
    return GridCell(
        sampling,
        cell["n"],
        cell["D"],
        len(cell["seconds"]),
        {kind: mean(each) for kind, each in logs.items()},
        {kind: stdev(each) if len(each) > 1 else math.nan for kind, each in logs.items()},
        1e3 * median(cell["seconds"]),
    )


def csv(report: Report) -> str:
    """One row a cell; no standard deviation of one repeat."""
    lines = [
        ",".join(
            ["n", "D", "repeats", *(f"{name}_{what}" for name in LOGS.values() for what in ("mean", "sd")), "median_ms"]
        )
    ]
    for cell in cells(report):
        logs = [f"{x:.4f}" if x == x else "" for kind in LOGS for x in (cell.mean[kind], cell.spread[kind])]
        lines.append(",".join([str(cell.n), str(cell.D), str(cell.repeats), *logs, f"{cell.ms:.4g}"]))
    return "\n".join(lines) + "\n"


def caption(report: Report) -> str:
    settings, environment = report["settings"], report["environment"]
    threads = f"{settings['threads']} thread{'s' * (settings['threads'] > 1)}"
    return (
        f"q, k, V ~ N(0, 1), {settings['batch']} x {settings['heads']} heads of width d = {settings['head_dim']}; "
        "reference: exact softmax attention on the same q and k after pre-SBN "
        f"(eps {settings['eps']:g}). Mean of the logarithm over {settings['repeats']} repeats, "
        f"new data and features in each; {'quick' if settings['quick'] else 'full'} setting "
        f"(the paper: 16 x 8 heads, 100 repeats). Forward pass on {environment['device_name']}, {threads}, "
        f"{environment['precision']}, torch {environment['torch']}. Nothing is smoothed."
    )


def findings(report: Report) -> list[str]:
    """What the cells say of the paper's claims: error falls with D and grows with n, RMFA is faster everywhere."""
    every, lengths, features = cells(report), report["lengths"], report["features"]
    faster, total = (_above(every, "explicit"), _above(every, "sdpa")), len(every)
    found = [
        f"by the mean, faster than explicit softmax in {faster[0]} of {total} cells, than SDPA in {faster[1]}",
        f"error above that of averaging V in {_above(every, 'deviation')} of {total} cells",
    ]
    for D in sorted({features[0], features[-1]}):
        ends = [cell for cell in every if cell.D == D and cell.n in (lengths[0], lengths[-1])]
        logs = {kind: " to ".join(f"{cell.mean[kind]:.2f}" for cell in ends) for kind in LOGS}
        times = {kind: " to ".join(f"{10 ** cell.mean[kind]:.3g}" for cell in ends) for kind in ("explicit", "sdpa")}
        found.append(
            f"D = {D:,}, n = {' to '.join(f'{cell.n:,}' for cell in ends)}: log10 NMSE {logs['nmse']} (V ~ N(1, 1): "
            f"{logs['nmse_offset']}), times faster than explicit {times['explicit']}, than SDPA {times['sdpa']}"
        )
    return found


def _above(every: Sequence[GridCell], kind: str) -> int:
    return sum(cell.mean[kind] > 0 for cell in every)


def markdown(report: Report) -> str:
    longest = report["lengths"][-1]
    explicit, sdpa = (f"{1e3 * median(report['softmax'][-1][arm]):.3g} ms" for arm in ("explicit", "sdpa"))
    lines = [
        "# RMFA against softmax attention on random data (the paper's Figure 3)",
        "",
        f"`{report['settings']['command']}` at commit {str(report['code']['commit'])[:12]}. {caption(report)}",
        "",
        *(f"- {finding}" for finding in findings(report)),
        "",
        "![maps](rmfa-maps.png)",
        "",
        "![samplings](rmfa-samplings.png)",
        "",
        f"At n = {longest:,} (mean ± standard deviation over the repeats; a call of explicit softmax takes {explicit}, "
        f"of SDPA {sdpa}, the medians):",
        "",
        "| sampling | D | log10 NMSE | the same for V ~ N(1, 1) | log10 error, averaging V = 0 "
        "| times faster than explicit | than SDPA | ms |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for cell in samplings(report):
        logs = (
            f"{cell.mean[kind]:.2f}" + (f" ± {cell.spread[kind]:.2f}" if cell.repeats > 1 else "")
            for kind in ("nmse", "nmse_offset", "deviation")
        )
        faster = (f"{10 ** cell.mean[kind]:.3g}" for kind in ("explicit", "sdpa"))
        lines.append(f"| {cell.sampling} | {cell.D:,} | {' | '.join([*logs, *faster])} | {cell.ms:.3g} |")
    lines += ["", "Every cell is in [rmfa.csv](rmfa.csv), every sample in [rmfa.json](rmfa.json).", ""]
    return "\n".join(lines)


@mpl.rc_context(STYLE | LARGE)
def draw(report: Report) -> list[Drawn]:
    return [_maps(report), _samplings(report)]


def _maps(report: Report) -> Drawn:
    title = "RMFA against softmax attention on random data"
    panels_of = {  # kind: title, colour bar, label of the contour at 0
        "nmse": ("(a) Error", "log10 NMSE", ""),
        "explicit": ("(b) Acceleration", "log10 (explicit / RMFA time)", "equally fast"),
        "deviation": ("(c) Error vs averaging V", "log10 (error / averaging V's)", "as averaging V"),
        "sdpa": ("(d) Acceleration vs SDPA", "log10 (SDPA / RMFA time)", "equally fast"),
    }
    figure = Figure((8.4, 8), layout=ConstrainedLayoutEngine(wspace=0.06))
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    every = {(cell.n, cell.D): cell.mean for cell in cells(report)}
    for panel, (kind, (name, unit, at_zero)) in zip(panels.flat, panels_of.items(), strict=True):
        values = np.array([[every[n, D][kind] for n in report["lengths"]] for D in report["features"]])
        _heat(panel, report, values, unit, at_zero)
        panel.set_title(name)
    for panel in panels[1]:
        panel.set_xlabel("length n (tokens)")
    for panel in panels[:, 0]:
        panel.set_ylabel("features D")
    figure.supxlabel(textwrap.fill(caption(report), WRAP), **SMALL)
    return saved("rmfa-maps", figure, title, caption(report))


def _heat(panel: Axes, report: Report, values: NDArray[Any], unit: str, at_zero: str) -> None:
    lengths, logs = report["lengths"], [math.log2(D) for D in report["features"]]
    image = panel.pcolormesh(_edges(lengths), _edges(logs), values, cmap=COLOURS)
    assert panel.figure
    bar = panel.figure.colorbar(image, ax=panel)
    bar.set_label(unit)
    bar.outline.set_visible(False)
    panel.grid(visible=False)
    panel.set_yticks(logs, [str(D) for D in report["features"]])
    panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    panel.xaxis.set_major_formatter("{x:.0f}")
    if min(values.shape) < 2:
        return  # no contours in one row or column
    ticks = {round(x, 9) for x in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(values.min(), values.max())}
    for level in sorted(ticks | {0.0} if at_zero else ticks):
        if not values.min() < level < values.max():
            continue
        label, width = (at_zero, 2.0) if at_zero and level == 0 else (f"{level:g}".replace("-", "\N{MINUS SIGN}"), 0.9)
        lines = panel.contour(lengths, logs, values, [level], colors="white", linewidths=width, linestyles="-")
        pieces: list[Any] = lines.get_paths()[0].to_polygons(closed_only=False)
        longest = max(pieces, key=len)  # the others go without a label
        if len(longest) < 4 and label != at_zero:
            lines.remove()  # cuts off a corner, and there is no room for its label
            continue
        lines.set_path_effects([withStroke(linewidth=width + 1.2, foreground="black")])
        for text in panel.clabel(lines, fontsize=11, fmt=label, manual=[longest[len(longest) // 2]]):
            text.set_path_effects([withStroke(linewidth=2, foreground="black")])


def _edges(centres: Sequence[float]) -> list[float]:
    """Of the fields around them: half-way between two."""
    inner = [(a + b) / 2 for a, b in pairwise(centres)]
    first, last = (inner[0], inner[-1]) if inner else (centres[0] - 0.5, centres[0] + 0.5)
    return [2 * centres[0] - first, *inner, 2 * centres[-1] - last]


def _samplings(report: Report) -> Drawn:
    longest, settings = report["lengths"][-1], report["settings"]
    title = f"Which features: error and time at n = {longest:,}"
    softmax = report["softmax"][-1]
    figure = Figure((8.4, 5.6), layout="constrained")
    by_width, by_time = figure.subplots(1, 2, sharey=True)
    for sampling, (colour, marker) in LOOKS.items():
        chosen = [cell for cell in samplings(report) if cell.sampling == sampling]
        if not chosen:
            continue  # exact01 needs more features than there are
        ends = list(_ends(chosen))
        bars = [[middle - low for low, middle, _ in ends], [high - middle for _, middle, high in ends]]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 9 if marker == "*" else 5, "lw": 1.3}
        for panel, x in ((by_width, [float(cell.D) for cell in chosen]), (by_time, [cell.ms for cell in chosen])):
            panel.errorbar(
                x,
                [middle for _, middle, _ in ends],
                bars,
                label=sampling if panel is by_width else None,
                **look,
                **THIN,
            )
    features = report["features"]
    theory = [4 * settings["head_dim"] / D for D in features]
    by_width.plot(features, theory, color="black", ls="--", lw=0.8, label="paper, theory of the mean: 4d/D")
    by_width.set(xlabel="features D", ylabel="error / error of averaging V")
    by_width.set_xscale("log", base=2)
    by_width.set_xticks(features, [str(D) for D in features], rotation=45)
    by_time.set(xscale="log", xlabel="time of one call, ms")
    by_time.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_time.xaxis.set_major_formatter("{x:g}")
    for panel in (by_width, by_time):
        panel.set_yscale("log")
        panel.axhline(1, color=FLOOR_COLOUR, lw=1.2, label="averaging V" if panel is by_width else None)
        panel.minorticks_off()
    for arm, dash in (("explicit", "-."), ("sdpa", ":")):
        name = "explicit softmax" if arm == "explicit" else "SDPA"
        by_time.axvline(1e3 * median(softmax[arm]), color="black", ls=dash, lw=1.2, label=name)
    figure.legend(loc="outside upper center", ncols=4, title=title)
    text = f"{caption(report)} Bars: standard deviation over the repeats."
    figure.supxlabel(textwrap.fill(text, WRAP), **SMALL)
    return saved("rmfa-samplings", figure, title, text)


def _ends(chosen: Sequence[GridCell]) -> Iterator[tuple[float, float, float]]:
    """Of the error relative to averaging V: a standard deviation below, mean, one above."""
    for cell in chosen:
        middle, spread = cell.mean["deviation"], cell.spread["deviation"] if cell.repeats > 1 else 0.0
        yield 10 ** (middle - spread), 10**middle, 10 ** (middle + spread)
