"""The paper's first toy experiment (Figure 3): error and time of RMFA_exp against softmax attention on random data.

q, k and v are normal random numbers, q and k go through pre-SBN, and both attentions see the same rows. The paper
leaves open over what the error is summed and what V is: see `scales`. Needs matplotlib.

Shapes: B batch, H heads, n length, d head width, D features.
"""

import json
import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator
from torch import Generator, Tensor, nn
from tqdm import trange

from macformer.attention import RMFAttention, SoftmaxAttention
from macformer.bench.race import race
from macformer.check import require_int
from macformer.features import Sampling
from macformer.folded import plain_attention
from macformer.harness import files
from macformer.harness.device import is_cuda
from macformer.paper.experiments import ERRORS, SOFTMAX, values
from macformer.paper.finding import WORDS, rounded
from macformer.ppsbn import PreSBN
from macformer.report.figures import FLOOR_COLOUR, STYLE, THIN, Drawn, saved

HEADS, HEAD_DIM, EPS, KERNEL = 8, 64, 1e-12, "exp"
FIXED = {"heads": HEADS, "head_dim": HEAD_DIM, "eps": EPS, "kernel": KERNEL}  # as the report names them
TURN = 0.02  # seconds that an arm is called for when it is its turn, if one call does not take longer
CHECKED = 500  # tokens on which a map is compared with its definition; the larger maps take them in several pieces
COLOURS = "cividis"  # even steps to the eye, also to a colour-blind one; dark is small, as in the paper
LOOKS: dict[Any, dict[str, Any]] = {  # Okabe and Ito's colours, as in figures.py, and markers
    "paper": {"color": "#0072B2", "marker": "^"},
    "release": {"color": "#E69F00", "marker": "s"},
    "exact01": {"color": "#009E73", "marker": "o"},
    "order1": {"color": "#D55E00", "marker": "*", "markersize": 9},
}
PANELS = {  # kind: title, colour bar, label of the contour at 0
    "nmse": ("(a) Error", "log10 NMSE", ""),
    "explicit": ("(b) Acceleration", "log10 (explicit / RMFA time)", "equally fast"),
    "deviation": ("(c) Error vs averaging V", "log10 (error / averaging V's)", "as averaging V"),
    "sdpa": ("(d) Acceleration vs SDPA", "log10 (SDPA / RMFA time)", "equally fast"),
}
Sample = dict[str, dict[str, float]]  # arm -> seconds and errors, of one repeat at one length
Report = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    batch: int
    repeats: int
    lengths: Sequence[int] = tuple(range(200, 4001, 200))
    features: Sequence[int] = tuple(2**k for k in range(3, 12))

    def __post_init__(self) -> None:
        require_int(batch=self.batch, repeats=self.repeats, features=min(self.features))
        require_int(2, lengths=min(self.lengths))  # averaging V is exact for one token
        for name, numbers in (("lengths", self.lengths), ("features", self.features)):
            if list(numbers) != sorted(set(numbers)):
                raise ValueError(f"{name}={' '.join(map(str, numbers))} must be rising, each number once")

    def maps(self, n: int) -> list[tuple[Sampling, int]]:
        """Sampling and D of each RMFA at that length: at the longest, all samplings with each D that they allow."""
        longest = n == self.lengths[-1]
        fewest: dict[Sampling, int] = {"paper": 1, "release": 1, "exact01": HEAD_DIM + 2} if longest else {"paper": 1}
        found = [(sampling, D) for sampling, least in fewest.items() for D in self.features if least <= D]
        return [*found, ("order1", HEAD_DIM + 1)] if longest else found


def inputs(batch: int, n: int, r: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after pre-SBN, and v, of repeat r: the same on every device."""
    rng = _generator("inputs", r, n)
    q, k, v = (torch.randn(batch, HEADS, n, HEAD_DIM, generator=rng).to(device) for _ in range(3))
    pre = PreSBN(eps=EPS)
    return pre(q), pre(k), v


def rmfa(sampling: Sampling, D: int, n: int, r: int) -> RMFAttention:
    """RMFA with the draw of repeat r at length n: no two cells share one."""
    return RMFAttention(HEAD_DIM, D, kernel=KERNEL, sampling=sampling, generator=_generator(sampling, D, r, n))


def scales(exact: Tensor, v: Tensor) -> dict[str, float]:
    """What a squared error |out - exact|^2, summed over everything, is relative to.

    nmse is the paper's: with V ~ N(0, 1) averaging leaves little of it. nmse_offset is what nmse is for V ~ N(1, 1), as
    a constant added to V goes through both attentions (through RMFA while no denominator is floored: in one draw of 256
    for D = 8 some are). A deviation of 1 is that of plain averaging of V.
    """
    relative_to = {"nmse": exact, "nmse_offset": exact + 1, "deviation": exact - v.mean(2, keepdim=True)}
    return {name: _squares(x) for name, x in relative_to.items()}


@torch.no_grad()
def measure(settings: Settings, r: int, n: int, device: torch.device, warm_up: bool) -> Sample:
    """Measure repeat r at length n. Explicit softmax gives the reference, before the clock starts."""
    data, sample = inputs(settings.batch, n, r, device), Sample()

    def call(attention: nn.Module) -> list[Tensor]:
        """On the CPU softmax takes the examples one by one: the weights of 16 of 8 heads and 4,000 tokens are 8 GB."""
        parts = 1 if isinstance(attention, RMFAttention) or is_cuda(device) else settings.batch
        return [attention(*part) for part in zip(*(x.chunk(parts) for x in data), strict=True)]

    calls: dict[str, Any] = {name: partial(call, SoftmaxAttention(implementation=name)) for name in SOFTMAX}
    calls |= {f"{name} {D}": partial(call, rmfa(name, D, n, r).to(device)) for name, D in settings.maps(n)}
    exact = torch.cat(calls["explicit"]())
    relative_to = scales(exact, data[-1])

    def look(name: str, out: list[Tensor]) -> None:
        error = _squares(torch.cat(out) - exact)
        sample[name] = {kind: error / scale for kind, scale in relative_to.items()}

    order = _generator("order", r, n).initial_seed()
    (taken,) = race(lambda number: calls, 1, device, TURN, order, warm_up, look)
    return rounded({name: errors | {"seconds": taken[name]} for name, errors in sample.items()})


@torch.no_grad()
def check(settings: Settings, device: torch.device) -> None:
    """Compare one draw of each map with its definition; raise ValueError if they differ."""
    q, k, v = inputs(1, CHECKED, 0, device)
    for sampling, D in settings.maps(settings.lengths[-1]):
        attention = rmfa(sampling, D, CHECKED, 0).to(device)
        phi_q, phi_k = (attention.feature_map(x.double() * HEAD_DIM**-0.25) for x in (q, k))
        truth = plain_attention(phi_q, phi_k, v.double(), None, attention.floor)
        off = float((attention(q, k, v) - truth).abs().max() / truth.abs().max())
        if not off < 1e-5:
            raise ValueError(f"RMFA with {sampling} features, D = {D}, is off its plain definition by {off:.1e}")


def measure_all(settings: Settings, device: torch.device, state: Path) -> list[list[Sample]]:
    """Measure repeat by repeat. `state` keeps every repeat that is done, and those in it are not measured again."""
    samples: list[list[Sample]] = json.loads(state.read_text()) if state.exists() else []
    if first := len(samples):
        print(f"going on after repeat {first} of {settings.repeats} ({state.name})", flush=True)
    for r in trange(first, settings.repeats, initial=first, total=settings.repeats, desc="repeats"):
        samples.append([measure(settings, r, n, device, warm_up=r == first) for n in settings.lengths])
        files.write(state, json.dumps(samples))
    return samples


def report(settings: Settings, samples: list[list[Sample]]) -> Report:
    """The samples of each repeat and length, by cell."""
    lengths, features, longest = settings.lengths, settings.features, settings.lengths[-1]
    maps = settings.maps(longest)
    at = dict(zip(lengths, zip(*samples, strict=True), strict=True))  # length -> the sample of each repeat

    def each(n: int, arm: str) -> Report:
        return {key: [sample[arm][key] for sample in at[n]] for key in (*ERRORS, "seconds")}

    return {
        "lengths": list(lengths),
        "features": list(features),
        "cells": [{"n": n, "D": D} | each(n, f"paper {D}") for n in lengths for D in features],
        "softmax": [{"n": n} | {arm: each(n, arm)["seconds"] for arm in SOFTMAX} for n in lengths],
        "samplings": [{"sampling": name, "D": D, "n": longest} | each(longest, f"{name} {D}") for name, D in maps],
    }


def _squares(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _generator(*words: object) -> Generator:
    """Its seed depends on the words alone, and is the same in every process."""
    return Generator().manual_seed(random.Random(repr(words)).getrandbits(62))


def frame(report: Report, part: str) -> pd.DataFrame:
    """A row for each of report[part]: of each error and gain the mean of log10 over the repeats and (`nmse_sd`, ...)
    its standard deviation, 0 for one repeat; the median of the milliseconds.
    """
    rows = pd.DataFrame(report[part])
    for kind, each in values(report, report[part]).items():
        logs = np.log10(each)
        rows[kind], rows[f"{kind}_sd"] = logs.mean(1), logs.std(1, ddof=min(1, logs.shape[1] - 1))
    rows["ms"] = 1e3 * rows["seconds"].map(median)
    return rows


def caption(report: Report) -> str:
    return WORDS["pages"]["caption_rmfa"].format(**report, setting="quick" if report["settings"]["quick"] else "full")


def findings(report: Report) -> list[str]:
    """What the cells say of the paper's claims: error falls with D and grows with n, RMFA is faster everywhere."""
    cells, ends, sentences = frame(report, "cells"), [report["lengths"][0], report["lengths"][-1]], WORDS["pages"]
    above = (cells[["explicit", "sdpa", "deviation"]] > 0).sum()
    found = sentences["findings"].format(cells=len(cells), **above).splitlines()
    for D in sorted({report["features"][0], report["features"][-1]}):
        at = cells[(cells.D == D) & cells.n.isin(ends)]
        words = {kind: " to ".join(f"{x:.2f}" for x in at[kind]) for kind in ERRORS}
        words |= {to: " to ".join(f"{10**x:.3g}" for x in at[to]) for to in SOFTMAX}
        found.append(sentences["finding_of_width"].format(D=D, n=" to ".join(f"{n:,}" for n in at.n), **words))
    return found


def markdown(report: Report) -> str:
    rows, deviation = [], " ± {:.2f}" if report["settings"]["repeats"] > 1 else ""
    for row in frame(report, "samplings").to_dict("records"):
        errors = [f"{row[kind]:.2f}" + deviation.format(row[f"{kind}_sd"]) for kind in ERRORS]
        times = [f"{time:.3g}" for time in (*(10 ** row[kind] for kind in SOFTMAX), row["ms"])]
        rows.append(f"| {row['sampling']} | {row['D']:,} | {' | '.join([*errors, *times])} |")
    return WORDS["pages"]["rmfa"].format(
        **report,
        caption=caption(report),
        findings="\n".join(f"- {finding}" for finding in findings(report)),
        longest=report["lengths"][-1],
        rows="\n".join(rows),
        **{arm: 1e3 * median(report["softmax"][-1][arm]) for arm in SOFTMAX},
    )


@mpl.rc_context(STYLE | {"font.size": 13, "axes.titlesize": 13, "legend.fontsize": 12})
def draw(report: Report) -> list[Drawn]:
    return [_maps(report), _samplings(report)]


def _maps(report: Report) -> Drawn:
    figure = Figure((8.4, 8), layout=ConstrainedLayoutEngine(wspace=0.06))
    panels, cells = figure.subplots(2, 2, sharex=True, sharey=True), frame(report, "cells")
    for panel, (kind, (title, unit, at_zero)) in zip(panels.flat, PANELS.items(), strict=True):
        _heat(panel, cells.pivot(index="D", columns="n", values=kind), unit, at_zero)
        panel.set(title=title, xlabel="length n (tokens)", ylabel="features D")
        panel.label_outer()
    return _saved("rmfa-maps", figure, "RMFA against softmax attention on random data", caption(report))


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
    for level in np.round(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high), 9):
        if not low < level < high:
            continue
        label = at_zero if at_zero and level == 0 else Formatter.fix_minus(f"{level:g}")
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
    for sampling, cells in frame(report, "samplings").groupby("sampling", sort=False):
        error, low, high = (10 ** (cells.deviation + sign * cells.deviation_sd) for sign in (0, -1, 1))
        look = {"markersize": 5, "lw": 1.3} | LOOKS[sampling] | THIN
        for panel, x, label in ((by_width, cells.D, sampling), (by_time, cells.ms, None)):
            panel.errorbar(x, error, [error - low, high - error], label=label, **look)
    theory = [4 * report["settings"]["head_dim"] / D for D in features]
    by_width.plot(features, theory, color="black", ls="--", lw=0.8, label="paper, theory of the mean: 4d/D")
    by_width.set(yscale="log", xlabel="features D", ylabel="error / error of averaging V")
    by_width.set_xscale("log", base=2)
    by_width.set_xticks(features, [str(D) for D in features], rotation=45)
    by_time.set(xscale="log", xlabel="time of one call, ms")
    by_time.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_time.xaxis.set_major_formatter("{x:g}")
    for panel in (by_width, by_time):
        panel.axhline(1, color=FLOOR_COLOUR, lw=1.2, label="averaging V" if panel is by_width else None)
        panel.minorticks_off()
    for arm, name, dash in (("explicit", "explicit softmax", "-."), ("sdpa", "SDPA", ":")):
        by_time.axvline(1e3 * median(report["softmax"][-1][arm]), color="black", ls=dash, lw=1.2, label=name)
    title = f"Which features: error and time at n = {report['lengths'][-1]:,}"
    figure.legend(loc="outside upper center", ncols=4, title=title)
    return _saved("rmfa-samplings", figure, title, f"{caption(report)} Bars: standard deviation over the repeats.")


def _saved(name: str, figure: Figure, title: str, text: str) -> Drawn:
    figure.supxlabel(textwrap.fill(text, 125), fontsize=9, x=0.01, ha="left")
    return saved(name, figure, title, text)
