"""Does the direction of the sum explain Table 2's ListOps? Judged and drawn from records; nothing is trained here.

The runs: those of results/runs at the paper's schedule, trimmed and bucketed at most, and those of results/direction
(configs/experiment/direction.yaml). docs/log.md has what was predicted before they ran.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from macformer.harness.record import Point, Record
from macformer.paper.finding import UNCHECKED, Finding, Verdict, found, judge
from macformer.report import cells

TASK, MODEL = "listops", "macformer_exp"
ORDER_ALONE = ("bucket = ", "pad = ")  # what may differ from the paper: the order of the batches, and padding
DIRECTIONS = ("both", "causal", "backward")
CAPTION = """Dev accuracy over the steps of ListOps, 500 < L < 2,000. Black: every token sees all, as the paper writes \
it; blue: those up to itself, as the authors' release computes it; red: those from itself on. Dashed: the denominator \
clamped at 1; thick: the release's map and post-SBN as well. Lines end where a run was stopped."""


def load(results: Path) -> tuple[list[Record], list[Record]]:
    """Runs at the paper's schedule, and those of the experiment, failed and stopped ones too."""
    whole = [
        run
        for run in cells.load(results)[0]
        if run.task == TASK and run.model.startswith(MODEL) and run.status == "ok" and not cells.own(run)
        if all(change.startswith(ORDER_ALONE) for change in run.differences.shared)
    ]
    return whole, [run for run in cells.load(results / "direction")[0] if run.history]


def settings(run: Record) -> tuple[str, bool]:
    """Its direction, and whether its denominator is clamped."""
    model = run.config["model"]
    return model.get("direction", "both"), model["attention"].get("clamp") is not None


def left_plateau(run: Record) -> Point | None:
    """The first evaluation above halfway between the majority class and the root operator, on the same dev split."""
    reached = baselines(run)
    halfway = (reached["majority"] + reached["root operator"]) / 2
    return next((point for point in run.history if point.dev_accuracy > halfway), None)


def baselines(run: Record) -> dict[str, float]:
    return next(each["dev_accuracy"] for each in cells.floors() if each["fingerprint"] == run.data.fingerprint)


def times_uniform(run: Record) -> Iterator[float]:
    """The weight of the first key as a multiple of what plain averaging gives it: each layer, each evaluation."""
    for point in run.history:
        for name, weight in point.telemetry.items():
            if name.endswith(".first"):
                yield weight / point.telemetry[f"{name}_if_uniform"]


def findings(whole: list[Record], short: list[Record], memory: dict[str, float]) -> list[Finding]:
    """`memory`, relative to softmax: both ways, and of the release's causal sums against the base code's softmax."""
    return [accuracy_and_memory(whole, memory), learns(short), near_uniform([*whole, *short])]


def accuracy_and_memory(whole: list[Record], memory: dict[str, float]) -> Finding:
    rows = next((c.cells for t in cells.tables(whole, cells.floors(), None) for c in t.columns if c.runs), {})
    gaps = {row: cell.gap["accuracy"] for row, cell in rows.items() if cell.gap}
    words: dict[str, Any] = {"task": TASK, "paper": cells.PAPER["accuracy"][TASK][MODEL], **memory}
    words["paper_memory"] = cells.PAPER["memory"][TASK][MODEL]
    if MODEL not in gaps or len(gaps) == 1:
        return found("D accuracy and memory", UNCHECKED, {}, **words)
    agree = {row: gap.low <= 0 <= gap.high for row, gap in gaps.items()}
    told = (
        f"{row} {100 * rows[row].ours['accuracy'].value:.2f}% ({100 * gap.value:+.2f}, {100 * gap.low:+.2f} to "
        f"{100 * gap.high:+.2f}; n={len(rows[row].runs)})"
        for row, gap in gaps.items()
    )
    verdict = judge(agree[MODEL], any(agree.values()))
    figures = {"minus_paper": {row: [gap.value, gap.low, gap.high] for row, gap in gaps.items()}}
    return found("D accuracy and memory", verdict, figures, rows="; ".join(told), **words)


def learns(short: list[Record]) -> Finding:
    """With the denominator as it is by default."""
    left = {direction: [left_plateau(run) for run in _of(short, direction)] for direction in DIRECTIONS}
    told = []
    for direction, points in left.items():
        steps = ", ".join(f"{point.step:,}" for point in points if point)
        total = f"{sum(map(bool, points))} of {len(points)} seeds" if points else "not run"
        told.append(f"{direction} {total}{f' (at steps {steps})' if steps else ''}")
    verdict: Verdict = UNCHECKED
    if left["both"] and left["causal"]:
        verdict = judge(all(left["both"]), all(left["causal"]) and not any(left["both"]))
    figures = {direction: [point.step if point else None for point in points] for direction, points in left.items()}
    return found("D learns", verdict, {"left_at": figures}, told="; ".join(told))


def near_uniform(runs: list[Record]) -> Finding:
    watched = [run for run in runs if any(times_uniform(run))]
    multiples = {d: [x for run in _of(watched, d, None) for x in times_uniform(run)] for d in DIRECTIONS}
    width = watched[0].config["model"]["head_dim"] if watched else 1
    bound = math.exp(2 / math.sqrt(width))
    shown = (f"{d} {min(each):.2f} to {max(each):.2f}" for d, each in multiples.items() if each)
    words = {"bound": bound, "d": width, "shown": "; ".join(shown), "runs": len(watched)}
    verdict = judge(any(x > bound for each in multiples.values() for x in each)) if watched else UNCHECKED
    figures = {d: [min(each), max(each)] for d, each in multiples.items() if each}
    return found("D attention", verdict, {"times_uniform": figures}, **words)


def _of(runs: list[Record], direction: str, clamp: bool | None = False) -> list[Record]:
    """Of this direction, by seed; clamp=None: either way."""
    chosen = [run for run in runs if settings(run)[0] == direction and clamp in (None, settings(run)[1])]
    return sorted(chosen, key=lambda run: run.seed)


def markdown(whole: list[Record], short: list[Record]) -> str:
    """A row for each run."""
    rows = []
    for schedule, runs in (("the paper's", whole), ("a fifth, rate 1e-3", short)):
        for run in sorted(
            runs, key=lambda run: (DIRECTIONS.index(settings(run)[0]), *map(str, settings(run)), run.seed)
        ):
            (direction, clamp), point = settings(run), left_plateau(run)
            best = max(run.history, key=lambda each: each.dev_accuracy)
            multiples = list(times_uniform(run))
            row = [schedule, run.model, direction, "clamped" if clamp else "floored", str(run.seed)]
            row += [f"{point.step:,}" if point else "-", f"{100 * best.dev_accuracy:.2f} ({best.step:,})"]
            row += [f"{100 * run.quality.test_accuracy:.2f}" if run.quality else "-", f"{run.steps_done:,}"]
            rows.append([*row, f"{min(multiples):.2f} to {max(multiples):.2f}" if multiples else "-"])
    head = ["schedule", "model", "direction", "denominator", "seed", "left the plateau at step"]
    head += ["best dev accuracy (step)", "test accuracy", "steps", "first key, times uniform"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{CAPTION}\n"
