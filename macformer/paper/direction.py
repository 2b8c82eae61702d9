"""Does the direction of the sum explain Table 2's ListOps? Judged from records; nothing is trained here.

The runs: those of results/runs at the paper's schedule, trimmed and bucketed at most, and those of
configs/experiment/direction.yaml. docs/log.md has what was predicted before they ran.
"""

import math
from itertools import product
from pathlib import Path

from macformer.harness.record import Point, Record
from macformer.paper.finding import UNCHECKED, Finding, Verdict, found, judge
from macformer.report import cells
from macformer.report.cells import PAPER

TASK, MODEL = "listops", "macformer_exp"
DIRECTIONS = ("both", "causal", "backward")
ORDER_ALONE = ("bucket = ", "pad = ")  # what may differ from the paper: the order of the batches, and padding
SHORT = {"warmup_steps": 200, "steps": 2000, "learning_rate": 1e-3, "bucket": True, "cycle_momentum": True}
VARIED = ("direction=", "attention.clamp=")
CLOSE = 0.1  # relative, of memory
CAPTION = """Dev accuracy over the steps of ListOps, 500 < L < 2,000. Black: every token sees all, as the paper writes \
it; blue: itself and earlier ones, as the authors' release computes it; red: itself and later ones. Dashed: the \
denominator clamped at 1; thick: the release's map and post-SBN as well. Lines end where a run was stopped."""


def load(results: Path) -> tuple[list[Record], list[Record]]:
    """Runs at the paper's schedule; and those of the experiment, stopped ones too."""
    known = {each["fingerprint"] for each in cells.floors() if each["protocol"] == "paper"}

    def records(folder: Path) -> list[Record]:
        runs = [run for run in cells.load(folder)[0] if run.history and run.data.fingerprint in known]
        return [run for run in runs if run.task == TASK and run.model in (MODEL, f"{MODEL}_released")]

    whole = [
        run
        for run in records(results)
        if run.status == "ok" and not cells.own(run)
        if all(change.startswith(ORDER_ALONE) for change in run.differences.shared)
    ]
    tried = [*records(results / "ablations"), *records(results / "direction")]
    short = [run for run in tried if SHORT.items() <= run.config["trainer"].items()]
    return whole, [run for run in short if all(change.startswith(VARIED) for change in run.differences.model)]


def settings(run: Record) -> tuple[str, bool]:
    """Its direction, and whether its denominator is clamped."""
    model = run.config["model"]
    return model.get("direction", "both"), model["attention"].get("clamp") is not None


def baselines(run: Record) -> dict[str, float]:
    return next(each["dev_accuracy"] for each in cells.floors() if each["fingerprint"] == run.data.fingerprint)


def left_plateau(run: Record) -> Point | None:
    """The first evaluation above halfway between the majority class and the root operator, on the same dev split."""
    reached = baselines(run)
    halfway = (reached["majority"] + reached["root operator"]) / 2
    return next((point for point in run.history if point.dev_accuracy > halfway), None)


def first_key(run: Record, name: str = "first_key") -> list[float]:
    """Its weight as a multiple of plain averaging's: each layer, each evaluation. Empty without telemetry."""
    told = (point.telemetry.items() for point in run.history)
    return [value for values in told for key, value in values if key.endswith(f".{name}")]


def findings(whole: list[Record], short: list[Record], memory: dict[str, float]) -> list[Finding]:
    """`memory`, relative to softmax: both ways, and of the release's causal sums against the base code's softmax."""
    return [accuracy_and_memory(whole, memory), learns(short), near_uniform([*whole, *short])]


def accuracy_and_memory(whole: list[Record], memory: dict[str, float]) -> Finding:
    """The paper's numbers by its formula, or else as its authors released it: accuracy and memory together."""
    paper = {"accuracy": PAPER["accuracy"][TASK][MODEL], "memory": PAPER["memory"][TASK][MODEL]}
    columns = [column.cells for table in cells.tables(whole, cells.floors(), None) for column in table.columns]
    by_table = ({row: cell for row, cell in rows.items() if cell.gap} for rows in columns)
    rows = next((rows for rows in by_table if MODEL in rows and len(rows) > 1), {})
    words = {"task": TASK, "paper": paper["accuracy"], "paper_memory": paper["memory"], **memory}
    if not rows:
        return found("D accuracy and memory", UNCHECKED, {}, **words)
    gaps = {row: cell.gap["accuracy"] for row, cell in rows.items()}
    told = (
        f"{row} {100 * rows[row].ours['accuracy'].value:.2f}% ({100 * gap.value:+.2f}, {100 * gap.low:+.2f} to "
        f"{100 * gap.high:+.2f}; n={len(rows[row].runs)})"
        for row, gap in gaps.items()
    )
    agrees = {row: gap.low <= 0 <= gap.high for row, gap in gaps.items()}
    close = {kind: abs(share / paper["memory"] - 1) < CLOSE for kind, share in memory.items()}
    causal = [agrees[row] for row in rows if row != MODEL]
    verdict = judge(agrees[MODEL] and close["both"], any(causal) and close["released"])
    figures = {"minus_paper": {row: [gap.value, gap.low, gap.high] for row, gap in gaps.items()}, "memory": memory}
    return found("D accuracy and memory", verdict, figures, rows="; ".join(told), **words)


def learns(short: list[Record]) -> Finding:
    """With the denominator as it is by default. A run that was stopped on the plateau says nothing."""
    left: dict[str, list[Point | None]] = {}
    told = []
    for direction in DIRECTIONS:
        runs = [run for run in short if settings(run) == (direction, False)]
        left[direction] = [left_plateau(run) for run in runs if run.status == "ok" or left_plateau(run)]
        steps = ", ".join(f"{point.step:,}" for point in left[direction] if point)
        count = f"{sum(map(bool, left[direction]))} of {len(left[direction])}"
        told.append(f"{direction} {count}{f' (first evaluated so after {steps} steps)' if steps else ''}")
    verdict: Verdict = UNCHECKED
    if all(left.values()):
        causes = all(left["causal"]) and not any(left["backward"])
        verdict = judge(all(left["both"]), causes) if all(left["both"]) or not any(left["both"]) else "inconclusive"
    steps_of = {direction: [point.step if point else None for point in points] for direction, points in left.items()}
    return found("D learns", verdict, {"left_after": steps_of}, told="; ".join(told))


def near_uniform(runs: list[Record]) -> Finding:
    watched = [run for run in runs if first_key(run)]
    if not watched:
        return found("D attention", UNCHECKED, {})
    width = watched[0].config["model"]["head_dim"]
    bound = math.exp(2 / math.sqrt(width))
    multiples: dict[str, dict[str, tuple[float, float]]] = {"first_key": {}, "first_key_exact": {}}
    for run, (name, ranges) in product(watched, multiples.items()):
        direction, told = settings(run)[0], first_key(run, name)
        low, high = ranges.get(direction, (math.inf, -math.inf))
        ranges[direction] = min(low, *told), max(high, *told)
    shown = {
        name: ", ".join(f"{d} {low:.2f} to {high:.2f}" for d, (low, high) in each.items())
        for name, each in multiples.items()
    }
    verdict = judge(any(high > bound for _, high in multiples["first_key"].values()))
    return found("D attention", verdict, multiples, **shown, bound=bound, d=width, runs=len(watched))


def markdown(whole: list[Record], short: list[Record]) -> str:
    """A row for each run."""
    head = ["schedule", "model", "direction", "denominator", "seed", "left the plateau after"]
    head += ["best dev accuracy (step)", "test accuracy", "steps", "first key, times averaging"]
    rows = [head, ["---"] * len(head)]

    def order(run: Record) -> tuple[int, bool, str, int]:
        direction, clamp = settings(run)
        return DIRECTIONS.index(direction), clamp, run.model, run.seed

    for schedule, runs in (("the paper's", whole), ("a fifth, rate 1e-3", short)):
        for run in sorted(runs, key=order):
            (direction, clamp), point, multiples = settings(run), left_plateau(run), first_key(run)
            best = max(run.history, key=lambda each: each.dev_accuracy)
            row = [schedule, run.model, direction, "clamped" if clamp else "floored", str(run.seed)]
            row += [f"{point.step:,}" if point else "-", f"{100 * best.dev_accuracy:.2f} ({best.step:,})"]
            row += [f"{100 * run.quality.test_accuracy:.2f}" if run.quality else "stopped", f"{run.steps_done:,}"]
            rows.append([*row, f"{min(multiples):.2f} to {max(multiples):.2f}" if multiples else "-"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{CAPTION}\n"
