"""The paper's Figure 4 from the records of translations: loss, perplexity and BLEU over the epochs, and Markdown.

Solid lines are with ppSBN, dashed ones without, as in the paper. Needs matplotlib (the extra `figures`).
"""

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from macformer.paper.finding import WORDS
from macformer.paper.translation import Record
from macformer.report.figures import STYLE, Drawn, saved

ARMS = {True: ("with ppSBN", "#0072B2", "-"), False: ("without", "#000000", "--")}  # Okabe and Ito's, as in figures.py
# What each shows of an epoch: as thick lines, and as thin ones
PANELS = {"(a) loss": ["dev_loss", "train_loss"], "(b) perplexity": ["dev_perplexity"], "(c) BLEU": ["dev_bleu"]}
METRICS = {  # of a run -> what it is called, the digits that are shown
    "bleu": ("BLEU", 2),
    "loss": ("loss", 3),
    "perplexity": ("perplexity", 2),
    "train_loss": ("training loss of the last epoch", 3),
}
Report = dict[str, Any]


def report(found: Sequence[Record], command: str) -> Report:
    """What the figure and the claims are made of. Code, machine and settings are the first run's, without ppSBN."""
    first, second, *_ = found
    own = first.settings
    preset = "changed" if own.model_dump(exclude_defaults=True, exclude={"seed"}) else "small"
    settings = own.model_dump(include={"width", "heads", "layers"})
    settings |= {"command": command, "preset": preset, "epochs": own.epochs, "vocabulary": own.vocabulary}
    settings |= {"parameters": first.parameters, "ppsbn_parameters": second.parameters - first.parameters}
    settings |= first.model_dump(include={"source", "examples", "signature"}) | {"search": "greedy"}
    runs = [
        {"ppsbn": run.settings.post_sbn, "seed": run.settings.seed, "run_id": run.run_id}
        | run.test.model_dump()
        | {"train_loss": run.history[-1].train_loss, "seconds": sum(run.seconds.values())}
        | {"history": [epoch.model_dump(exclude={"train_seconds"}) for epoch in run.history]}
        for run in found
    ]
    return first.model_dump(include={"code", "environment"}) | {"settings": settings, "runs": runs}


def caption(report: Report) -> str:
    return WORDS["pages"]["caption_ppsbn"].format(**report, seeds=len(report["runs"]) // 2)


def of_arm(report: Report, ppsbn: bool) -> pd.DataFrame:
    """The runs of one arm, by their seeds."""
    runs = pd.DataFrame(report["runs"])
    return runs[runs.ppsbn == ppsbn].sort_values("seed")


def _mean(values: "pd.Series[float]", digits: int) -> str:
    return f"{values.mean():.{digits}f}" + (f" ± {values.std():.{digits}f}" if len(values) > 1 else "")


def _minutes(runs: pd.DataFrame) -> str:
    """Of the shortest and the longest run: the machine's other work shows more than the seed."""
    return f"{runs.seconds.min() / 60:.1f} to {runs.seconds.max() / 60:.1f}"


def reached(report: Report) -> str:
    """How far the arm without ppSBN came, and how long that took."""
    runs = of_arm(report, ppsbn=False)
    words = {"bleu": _mean(runs.bleu, 2), "minutes": _minutes(runs), "seeds": len(runs)}
    return WORDS["pages"]["reached"].format(**report, **words)


def markdown(report: Report, verdict: str) -> str:
    """`verdict`: the sentence on whether the paper's claim holds."""
    arms, rows = [of_arm(report, ppsbn) for ppsbn in ARMS], []
    for metric, (name, digits) in METRICS.items():
        each = [", ".join(f"{value:.{digits}f}" for value in runs[metric]) for runs in arms]
        rows.append([name, *(f"{_mean(runs[metric], digits)} ({e})" for runs, e in zip(arms, each, strict=True))])
    rows.append(["minutes of the whole run", *map(_minutes, arms)])
    return WORDS["pages"]["ppsbn"].format(
        **report,
        caption=caption(report),
        verdict=verdict,
        reached=reached(report),
        seeds=", ".join(map(str, arms[0].seed)),
        rows="\n".join(f"| {' | '.join(row)} |" for row in rows),
        records=", ".join(f"`{run['run_id']}`" for run in report["runs"]),
    )


@mpl.rc_context(STYLE | {"font.size": 12, "axes.titlesize": 13, "legend.fontsize": 12})
def draw(report: Report) -> Drawn:
    title = "A Transformer that translates, with and without ppSBN"
    figure = Figure((11, 4.6), layout="constrained")
    for panel, (name, columns) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        for ppsbn, (label, colour, dash) in ARMS.items():
            for column, width in zip(columns, (2.0, 0.9), strict=False):
                runs = np.array([[point[column] for point in run] for run in of_arm(report, ppsbn).history])
                epochs, named = range(1, runs.shape[1] + 1), label if column == "dev_loss" else None
                panel.plot(epochs, runs.mean(0), color=colour, ls=dash, lw=width, label=named)
                panel.fill_between(epochs, runs.min(0), runs.max(0), color=colour, alpha=0.15, lw=0)
        panel.set(title=name, xlabel="epoch")
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    figure.legend(loc="outside upper center", ncols=2, title=title)
    figure.supxlabel(textwrap.fill(caption(report), 175), fontsize=8.5, x=0.01, ha="left")
    return saved("ppsbn", figure, title, caption(report))
