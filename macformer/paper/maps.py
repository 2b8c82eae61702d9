"""The paper's Figure 3 from results/figures/rmfa.json: heat maps, the samplings beside each other, CSV and Markdown.

Unlike the paper's, the maps are not smoothed: a field is a cell. Needs matplotlib (the extra `figures`).
Letters: n length, D features, d head width.
"""

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from macformer.paper.experiments import ERRORS, SOFTMAX, values
from macformer.paper.finding import WORDS
from macformer.report.figures import FLOOR_COLOUR, STYLE, THIN, Drawn, saved

COLOURS = "cividis"  # even steps to the eye, also to a colour-blind one; dark is small, as in the paper
LOOKS = {  # Okabe and Ito's, as in figures.py
    "paper": ("#0072B2", "^"),
    "release": ("#E69F00", "s"),
    "exact01": ("#009E73", "o"),
    "order1": ("#D55E00", "*"),
}
PANELS = {  # kind: title, colour bar, label of the contour at 0
    "nmse": ("(a) Error", "log10 NMSE", ""),
    "explicit": ("(b) Acceleration", "log10 (explicit / RMFA time)", "equally fast"),
    "deviation": ("(c) Error vs averaging V", "log10 (error / averaging V's)", "as averaging V"),
    "sdpa": ("(d) Acceleration vs SDPA", "log10 (SDPA / RMFA time)", "equally fast"),
}
LARGE = {"font.size": 13, "axes.titlesize": 13, "legend.fontsize": 12}  # to be read at half a page's width
WRAP = 125  # letters of the caption in a line
SMALL: dict[str, Any] = {"fontsize": 9, "x": 0.01, "ha": "left"}  # the caption
Report = dict[str, Any]


def frame(report: Report, part: str) -> pd.DataFrame:
    """A row for each of report[part], by the names of the CSV: logarithms to the base 10, median milliseconds.

    `cells`: of the paper's map, at every length. `samplings`: of every map, at the longest length. Means and standard
    deviations (none of one repeat) are those of the logarithms, over the repeats.
    """
    cells = report[part]
    columns: dict[str, Any] = {name: [cell[name] for cell in cells] for name in ("n", "D")}
    columns["repeats"] = repeats = len(cells[0]["seconds"])
    for kind, each in values(report, cells).items():
        logs, name = np.log10(each), _column(kind)
        columns[f"{name}_mean"] = logs.mean(1)
        columns[f"{name}_sd"] = logs.std(1, ddof=1) if repeats > 1 else math.nan
    return pd.DataFrame(columns | {"median_ms": [1e3 * median(cell["seconds"]) for cell in cells]})


def _column(kind: str) -> str:
    return f"log10_{'acceleration_' * (kind in SOFTMAX)}{kind}"


def csv(report: Report) -> str:
    """One row a cell; no standard deviation of one repeat."""
    cells = frame(report, "cells")
    return cells.assign(median_ms=cells.median_ms.map("{:.4g}".format)).to_csv(index=False, float_format="%.4f")


def caption(report: Report) -> str:
    values = report["environment"] | report["settings"]
    unit, setting = "thread" + "s" * (values["threads"] > 1), "quick" if values["quick"] else "full"
    return WORDS["pages"]["caption"].format_map(values | {"unit": unit, "setting": setting})


def findings(report: Report) -> list[str]:
    """What the cells say of the paper's claims: error falls with D and grows with n, RMFA is faster everywhere."""
    cells, lengths, features = frame(report, "cells"), report["lengths"], report["features"]
    explicit, sdpa, worse = ((cells[f"{_column(kind)}_mean"] > 0).sum() for kind in (*SOFTMAX, "deviation"))
    found = [
        f"by the mean, faster than explicit softmax in {explicit} of {len(cells)} cells, than SDPA in {sdpa}",
        f"error above that of averaging V in {worse} of {len(cells)} cells",
    ]
    for D in sorted({features[0], features[-1]}):
        ends = cells[(cells.D == D) & cells.n.isin([lengths[0], lengths[-1]])]
        logs = [" to ".join(f"{x:.2f}" for x in ends[f"{_column(kind)}_mean"]) for kind in ("nmse", "nmse_offset")]
        times = [" to ".join(f"{10**x:.3g}" for x in ends[f"{_column(kind)}_mean"]) for kind in SOFTMAX]
        found.append(
            f"D = {D:,}, n = {' to '.join(f'{n:,}' for n in ends.n)}: log10 NMSE {logs[0]} (V ~ N(1, 1): {logs[1]}), "
            f"times faster than explicit {times[0]}, than SDPA {times[1]}"
        )
    return found


def markdown(report: Report) -> str:
    names, several, rows = [_column(kind) for kind in ERRORS], report["settings"]["repeats"] > 1, []
    for cell, (_, row) in zip(report["samplings"], frame(report, "samplings").iterrows(), strict=True):
        logs = [f"{row[f'{name}_mean']:.2f}" + f" ± {row[f'{name}_sd']:.2f}" * several for name in names]
        faster = [f"{10 ** row[f'{_column(kind)}_mean']:.3g}" for kind in SOFTMAX]
        rows.append(f"| {cell['sampling']} | {cell['D']:,} | {' | '.join([*logs, *faster])} | {row.median_ms:.3g} |")
    softmax = {arm: f"{1e3 * median(report['softmax'][-1][arm]):.3g} ms" for arm in SOFTMAX}
    return WORDS["pages"]["rmfa"].format(
        command=report["settings"]["command"],
        commit=str(report["code"]["commit"])[:12],
        caption=caption(report),
        findings="\n".join(f"- {finding}" for finding in findings(report)),
        longest=report["lengths"][-1],
        rows="\n".join(rows),
        **softmax,
    )


@mpl.rc_context(STYLE | LARGE)
def draw(report: Report) -> list[Drawn]:
    return [_maps(report), _samplings(report)]


def _maps(report: Report) -> Drawn:
    figure = Figure((8.4, 8), layout=ConstrainedLayoutEngine(wspace=0.06))
    panels, cells = figure.subplots(2, 2, sharex=True, sharey=True), frame(report, "cells")
    for panel, (kind, (name, unit, at_zero)) in zip(panels.flat, PANELS.items(), strict=True):
        means = cells.pivot(index="D", columns="n", values=f"{_column(kind)}_mean").to_numpy()
        _heat(panel, report, means, unit, at_zero)
        panel.set_title(name)
    for panel in panels[1]:
        panel.set_xlabel("length n (tokens)")
    for panel in panels[:, 0]:
        panel.set_ylabel("features D")
    figure.supxlabel(textwrap.fill(caption(report), WRAP), **SMALL)
    return saved("rmfa-maps", figure, "RMFA against softmax attention on random data", caption(report))


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
    """The edges of the fields around these centres, half-way between two."""
    inner = [(a + b) / 2 for a, b in pairwise(centres)]
    first, last = (inner[0], inner[-1]) if inner else (centres[0] - 0.5, centres[0] + 0.5)
    return [2 * centres[0] - first, *inner, 2 * centres[-1] - last]


def _samplings(report: Report) -> Drawn:
    features, figure = report["features"], Figure((8.4, 5.6), layout="constrained")
    by_width, by_time = figure.subplots(1, 2, sharey=True)
    every = frame(report, "samplings")
    every["sampling"] = [cell["sampling"] for cell in report["samplings"]]
    for sampling, cells in every.groupby("sampling", sort=False):  # the error relative to averaging V
        mean, spread = cells.log10_deviation_mean, cells.log10_deviation_sd.fillna(0)
        bars = [10**mean - 10 ** (mean - spread), 10 ** (mean + spread) - 10**mean]
        colour, marker = LOOKS[str(sampling)]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 9 if marker == "*" else 5, "lw": 1.3}
        by_width.errorbar(cells.D, 10**mean, bars, label=sampling, **look, **THIN)
        by_time.errorbar(cells.median_ms, 10**mean, bars, **look, **THIN)
    theory = [4 * report["settings"]["head_dim"] / D for D in features]
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
    for arm, name, dash in (("explicit", "explicit softmax", "-."), ("sdpa", "SDPA", ":")):
        by_time.axvline(1e3 * median(report["softmax"][-1][arm]), color="black", ls=dash, lw=1.2, label=name)
    title = f"Which features: error and time at n = {report['lengths'][-1]:,}"
    figure.legend(loc="outside upper center", ncols=4, title=title)
    text = f"{caption(report)} Bars: standard deviation over the repeats."
    figure.supxlabel(textwrap.fill(text, WRAP), **SMALL)
    return saved("rmfa-samplings", figure, title, text)
