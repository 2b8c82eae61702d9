"""The paper's Figure 3 from results/figures/rmfa.json: heat maps, the samplings beside each other, CSV and Markdown.

Unlike the paper's, the maps are not smoothed: a field is a cell. Needs matplotlib (the extra `figures`).
Letters: n length, D features, d head width.
"""

import textwrap
from collections.abc import Iterable
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator

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
    """A row for each of report[part]: a column for each error and gain, the mean of log10 over the repeats.

    `cells`: of the paper's map, at every length. `samplings`: of every map, at the longest length. `nmse_sd` and so on
    are standard deviations of the logarithms, 0 for one repeat; `ms` is the median of the milliseconds.
    """
    rows = pd.DataFrame(report[part])
    for kind, each in values(report, report[part]).items():
        logs = np.log10(each)
        rows[kind], rows[f"{kind}_sd"] = logs.mean(1), logs.std(1, ddof=min(1, logs.shape[1] - 1))
    rows["ms"] = 1e3 * rows["seconds"].map(median)
    return rows


def caption(report: Report) -> str:
    values = report["environment"] | report["settings"]
    unit, setting = "thread" + "s" * (values["threads"] > 1), "quick" if values["quick"] else "full"
    return WORDS["pages"]["caption"].format_map(values | {"unit": unit, "setting": setting})


def findings(report: Report) -> list[str]:
    """What the cells say of the paper's claims: error falls with D and grows with n, RMFA is faster everywhere."""
    cells, lengths, features = frame(report, "cells"), report["lengths"], report["features"]
    above = {kind: (cells[kind] > 0).sum() for kind in (*SOFTMAX, "deviation")}
    found = [
        "by the mean, faster than explicit softmax in {explicit} of {0} cells, than SDPA in {sdpa}",
        "error above that of averaging V in {deviation} of {0} cells",
    ]
    found = [sentence.format(len(cells), **above) for sentence in found]
    for D in sorted({features[0], features[-1]}):
        ends = cells[(cells.D == D) & cells.n.isin([lengths[0], lengths[-1]])]
        found.append(
            f"D = {D:,}, n = {_to(ends.n, ',')}: log10 NMSE {_to(ends.nmse, '.2f')} (V ~ N(1, 1): "
            f"{_to(ends.nmse_offset, '.2f')}), times faster than explicit {_to(10**ends.explicit, '.3g')}, "
            f"than SDPA {_to(10**ends.sdpa, '.3g')}"
        )
    return found


def _to(numbers: Iterable[float], form: str) -> str:
    return " to ".join(f"{number:{form}}" for number in numbers)


def markdown(report: Report) -> str:
    rows, deviation = [], " ± {:.2f}" if report["settings"]["repeats"] > 1 else ""
    for row in frame(report, "samplings").to_dict("records"):
        errors = [f"{row[kind]:.2f}" + deviation.format(row[f"{kind}_sd"]) for kind in ERRORS]
        times = [f"{time:.3g}" for time in (*(10 ** row[kind] for kind in SOFTMAX), row["ms"])]
        rows.append(f"| {row['sampling']} | {row['D']:,} | {' | '.join([*errors, *times])} |")
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
    for panel, (kind, (title, unit, at_zero)) in zip(panels.flat, PANELS.items(), strict=True):
        _heat(panel, cells.pivot(index="D", columns="n", values=kind), unit, at_zero)
        panel.set(title=title, xlabel="length n (tokens)", ylabel="features D")
        panel.label_outer()
    figure.supxlabel(textwrap.fill(caption(report), WRAP), **SMALL)
    return saved("rmfa-maps", figure, "RMFA against softmax attention on random data", caption(report))


def _heat(panel: Axes, means: pd.DataFrame, unit: str, at_zero: str) -> None:
    """A row of the map for each D, a column for each length. `at_zero`: the label of the contour at 0, if any."""
    values, where = means.to_numpy(), (means.columns, np.log2(means.index))
    assert panel.figure
    bar = panel.figure.colorbar(panel.pcolormesh(*where, values, cmap=COLOURS), ax=panel, label=unit)
    bar.outline.set_visible(False)
    panel.grid(visible=False)
    panel.set_yticks(where[1], means.index.astype(str))
    panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    panel.xaxis.set_major_formatter("{x:.0f}")
    if min(values.shape) < 2:
        return  # no contours in one row or column
    low, high = values.min(), values.max()
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
    labels = {round(x, 9): Formatter.fix_minus(f"{x:g}") for x in ticks}
    labels |= {0.0: at_zero} if at_zero else {}
    for level, label in labels.items():
        if not low < level < high:
            continue
        width = 2.0 if label == at_zero else 0.9
        lines = panel.contour(*where, values, [level], colors="white", linewidths=width, linestyles="-")
        pieces: list[Any] = lines.get_paths()[0].to_polygons(closed_only=False)
        longest = max(pieces, key=len)  # the others go without a label
        if len(longest) < 4 and label != at_zero:
            lines.remove()  # cuts off a corner, and there is no room for its label
            continue
        lines.set_path_effects([withStroke(linewidth=width + 1.2, foreground="black")])
        for text in panel.clabel(lines, fontsize=11, fmt=label, manual=[longest[len(longest) // 2]]):
            text.set_path_effects([withStroke(linewidth=2, foreground="black")])


def _samplings(report: Report) -> Drawn:
    features, figure = report["features"], Figure((8.4, 5.6), layout="constrained")
    by_width, by_time = figure.subplots(1, 2, sharey=True)
    for sampling, cells in frame(report, "samplings").groupby("sampling", sort=False):  # relative to averaging V
        mean, spread = cells.deviation, cells.deviation_sd
        bars = [10**mean - 10 ** (mean - spread), 10 ** (mean + spread) - 10**mean]
        colour, marker = LOOKS[str(sampling)]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 9 if marker == "*" else 5, "lw": 1.3}
        by_width.errorbar(cells.D, 10**mean, bars, label=sampling, **look, **THIN)
        by_time.errorbar(cells.ms, 10**mean, bars, **look, **THIN)
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
