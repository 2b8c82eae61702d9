"""The paper's Figure 4 from results/figures/ppsbn.json: loss, perplexity and BLEU over the epochs, CSV and Markdown.

Solid lines are with ppSBN, dashed ones without, as in the paper. Needs matplotlib (the extra `figures`), no torch.
"""

import textwrap
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from macformer.report.figures import STYLE, Drawn, saved

ARMS = {True: ("with ppSBN", "#0072B2", "-"), False: ("without", "#000000", "--")}  # Okabe and Ito's, as in figures.py
PANELS = {"dev_loss": "(a) loss", "dev_perplexity": "(b) perplexity", "dev_bleu": "(c) BLEU"}  # of an epoch -> title
COLUMNS = ("train_loss", *PANELS)
METRICS = {  # of a run -> what it is called, the digits that are shown
    "bleu": ("BLEU", 2),
    "loss": ("loss", 3),
    "perplexity": ("perplexity", 2),
    "train_loss": ("training loss of the last epoch", 3),
}
Report = dict[str, Any]


def csv(report: Report) -> str:
    """One row for each run and epoch."""
    lines = ["ppsbn,seed,epoch,step," + ",".join(COLUMNS)]
    for run in report["runs"]:
        arm = "with" if run["ppsbn"] else "without"
        for epoch, point in enumerate(run["history"], 1):
            values = ",".join(f"{point[column]:.5f}" for column in COLUMNS)
            lines.append(f"{arm},{run['seed']},{epoch},{point['step']},{values}")
    return "\n".join(lines) + "\n"


def caption(report: Report) -> str:
    own, environment = report["settings"], report["environment"]
    sizes = " / ".join(f"{count:,}" for count in own["examples"].values())
    return (
        f"Multi30K, German to English ({own['source']}: {sizes} pairs), preset {own['preset']}: {own['layers']} + "
        f"{own['layers']} layers of width {own['width']}, {own['heads']} heads, {own['vocabulary']:,} byte pairs, "
        f"{own['parameters']:,} parameters ({own['ppsbn_parameters']:+,} with ppSBN), {own['epochs']} epochs. "
        f"On the dev split (thin lines in (a): the training loss, with dropout); {own['search']}; BLEU: "
        f"{own['signature']}. Lines are means over {len(seeds(report))} seeds, bands from the lowest to the highest. "
        f"On {environment['device_name']}, {environment['threads']} thread, {environment['precision']}, torch "
        f"{environment['torch']}."
    )


def seeds(report: Report) -> list[int]:
    return sorted({run["seed"] for run in report["runs"]})


def of_arm(report: Report, ppsbn: bool) -> list[dict[str, Any]]:
    return sorted((run for run in report["runs"] if run["ppsbn"] == ppsbn), key=lambda run: run["seed"])


def spread(values: Sequence[float], digits: int) -> str:
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _minutes(report: Report, ppsbn: bool) -> str:
    """Of the shortest and the longest run: the machine's other work shows more than the seed."""
    minutes = [run["seconds"] / 60 for run in of_arm(report, ppsbn)]
    return f"{min(minutes):.1f} to {max(minutes):.1f}"


def reached(report: Report) -> str:
    """How far the arm without ppSBN came, and how long that took."""
    own, machine, runs = report["settings"], report["environment"], of_arm(report, ppsbn=False)
    return (
        f"Without ppSBN the preset `{own['preset']}` reaches a test BLEU of {spread([run['bleu'] for run in runs], 2)} "
        f"in {_minutes(report, False)} minutes a run, evaluation included ({len(runs)} seeds; {machine['threads']} "
        f"thread of {machine['device_name']})."
    )


def markdown(report: Report, verdict: str) -> str:
    """`verdict`: the sentence on whether the paper's claim holds."""
    own, numbers = report["settings"], ", ".join(map(str, seeds(report)))
    rows = [["", *(f"{name} (seeds {numbers})" for name, *_ in ARMS.values())], ["---"] * 3]
    for metric, (name, digits) in METRICS.items():
        arms = [[run[metric] for run in of_arm(report, ppsbn)] for ppsbn in ARMS]
        each = [", ".join(f"{value:.{digits}f}" for value in values) for values in arms]
        rows.append([name, *(f"{spread(v, digits)} ({e})" for v, e in zip(arms, each, strict=True))])
    rows.append(["minutes of the whole run", *(_minutes(report, ppsbn) for ppsbn in ARMS)])
    table = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
    records = ", ".join(f"`{run['run_id']}`" for run in report["runs"])
    return f"""# ppSBN in a Transformer that translates (the paper's Figure 4)

`{own["command"]}` at commit {str(report["code"]["commit"])[:12]}. {caption(report)}

{verdict} {reached(report)}

![curves](ppsbn.png)

On the {own["examples"]["test"]:,} test pairs, with the weights of the best dev BLEU (mean ± standard deviation over \
the seeds):

{table}

Every epoch is in [ppsbn.csv](ppsbn.csv); the runs' records: {records}.
"""


@mpl.rc_context(STYLE | {"font.size": 12, "axes.titlesize": 13, "legend.fontsize": 12})
def draw(report: Report) -> Drawn:
    title = "A Transformer that translates, with and without ppSBN"
    figure = Figure((11, 4.6), layout="constrained")
    for panel, (metric, name) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        for ppsbn, (label, colour, dash) in ARMS.items():
            shown = {metric: 2.0} | ({"train_loss": 0.9} if metric == "dev_loss" else {})
            for column, width in shown.items():
                runs = [[point[column] for point in run["history"]] for run in of_arm(report, ppsbn)]
                by_epoch = list(zip(*runs, strict=True))
                epochs = range(1, len(by_epoch) + 1)
                look: dict[str, Any] = {"color": colour, "ls": dash, "lw": width}
                look |= {"label": label} if column == "dev_loss" else {}
                panel.plot(epochs, list(map(mean, by_epoch)), **look)
                panel.fill_between(
                    epochs, list(map(min, by_epoch)), list(map(max, by_epoch)), color=colour, alpha=0.15, lw=0
                )
        panel.set(title=name, xlabel="epoch")
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    figure.legend(loc="outside upper center", ncols=2, title=title)
    figure.supxlabel(textwrap.fill(caption(report), 175), fontsize=8.5, x=0.01, ha="left")
    return saved("ppsbn", figure, title, caption(report))
