"""python -m scripts.figure_direction: ListOps by what a token sees, into results/figures: direction.{md,png,svg}.

From the records of results/runs and results/direction; configs/experiment/direction.yaml says how the latter are made.
"""

import sys
from typing import Any

from macformer.harness import files
from macformer.harness.record import Record
from macformer.paper import direction
from macformer.report.cells import ROOT

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from macformer.report.figures import DASHES, FLOOR_COLOUR, STYLE, Drawn, saved
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not there; pip install 'macformer[figures]' (make setup does)")

COLOURS = dict(zip(direction.DIRECTIONS, ("#000000", "#0072B2", "#D55E00"), strict=True))


@mpl.rc_context(STYLE)
def draw(whole: list[Record], short: list[Record]) -> Drawn:
    figure = Figure((11, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = "the paper's schedule, rate 1e-4", "200 + 2,000 steps, rate 1e-3: NOT the paper's protocol"
    for panel, title, runs in zip(panels, titles, (whole, short), strict=True):
        for run in runs:
            (which, clamp), steps = direction.settings(run), [point.step for point in run.history]
            released = run.model.endswith("_released")
            label = f"{which}{', as released' if released else ', clamped at 1' * clamp}"
            shown = {line.get_label() for line in panel.lines}
            look: dict[str, Any] = {"color": COLOURS[which], "ls": "--" if clamp else "-"}
            look |= {"lw": 2.4 if released else 1.3, "label": None if label in shown else label}
            panel.plot(steps, [100 * point.dev_accuracy for point in run.history], **look)
        for name, dash in zip(("majority", "root operator"), DASHES, strict=False):
            for run in runs[:1]:
                panel.axhline(100 * direction.baselines(run)[name], color=FLOOR_COLOUR, ls=dash, lw=1.2, label=name)
        panel.set(title=title, xlabel="step")
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.legend(loc="center right", bbox_to_anchor=(1, 0.45))
    panels[0].set_ylabel("dev accuracy, %")
    figure.suptitle("ListOps: macformer_exp by what a token sees")
    return saved("direction", figure, "ListOps by what a token sees", direction.CAPTION)


def main() -> None:
    results = ROOT / "results"
    whole, short = direction.load(results)
    text = direction.markdown(whole, short)
    files.write(results / "figures" / "direction.md", text)
    draw(whole, short).write(results / "figures")
    print(f"{text}\nwritten to results/figures: direction.{{md,png,svg}}")


if __name__ == "__main__":
    main()
