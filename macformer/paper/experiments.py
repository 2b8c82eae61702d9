"""The paper's experiments, judged from files that other commands write; nothing is measured here.

    figure 3   results/figures/rmfa.json, by `make figure-rmfa`
    figure 4   results/figures/ppsbn.json, by `make figure-ppsbn`
    table 2    results/runs, by train.py; results/bench/models.json, by `make bench`; the paper's own numbers

Where a file is not there the claim cannot be checked, and the row says so.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import NormalDist, median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from macformer.paper.finding import (
    CONFIDENCE,
    UNCHECKED,
    WORDS,
    Finding,
    Interval,
    Verdict,
    all_between,
    found,
    over_rounds,
    slopes,
    student,
    worst,
)
from macformer.report.cells import BASELINE, MODELS, PAPER, TASKS, Column, Table
from macformer.report.statistics import LEVEL, TWINS

Array = NDArray[np.float64]
Words = dict[str, Any]
ERRORS = ("nmse", "nmse_offset", "deviation")
SOFTMAX: tuple[Literal["explicit"], Literal["sdpa"]] = ("explicit", "sdpa")
FLAT = 0.05  # an exponent below this is none
PAPER_WIDTH = 128  # D on LRA
MACFORMERS = tuple(model for model in MODELS if model.startswith("macformer"))


def values(report: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, Array]:
    """Errors, and how many times as fast as softmax, of cells of results/figures/rmfa.json: (cells, repeats)."""
    softmax = {row["n"]: row for row in report["softmax"]}
    errors = {kind: np.array([cell[kind] for cell in cells]) for kind in ERRORS}
    gains = {to: np.array([np.divide(softmax[cell["n"]][to], cell["seconds"]) for cell in cells]) for to in SOFTMAX}
    return errors | gains


def figure3(report: dict[str, Any] | None) -> list[Finding]:
    """`report` as in results/figures/rmfa.json."""
    fixed: dict[str, Any] = {"flat": FLAT, "D": PAPER_WIDTH}
    if report is None or report["settings"]["repeats"] < 2 or not _enough(report["lengths"], report["features"]):
        return [found(claim, UNCHECKED, {}, fixed) for claim in WORDS if claim.startswith("F3 ")]
    lengths, features, repeats = report["lengths"], report["features"], report["settings"]["repeats"]
    grids = {
        kind: each.reshape(len(lengths), len(features), repeats).transpose(2, 0, 1)  # (repeats, lengths, features)
        for kind, each in values(report, report["cells"]).items()
    }

    def each(samples: Array | list[list[float]]) -> list[Interval]:
        """An interval for each column of (repeats, comparisons)."""
        columns = np.transpose(samples)
        return [student(column.tolist(), len(columns)) for column in columns]

    def in_features(values: Array) -> dict[int, Interval]:
        """The exponent in D, at each length."""
        return dict(zip(lengths, each([slopes(features, rows) for rows in values]), strict=True))

    def in_length(values: Array) -> dict[int, Interval]:
        """The exponent in the length, at each D."""
        return dict(zip(features, each([slopes(lengths, rows.T) for rows in values]), strict=True))

    falling = in_features(grids["nmse"])
    growing = {name: in_length(grids[name]) for name in ERRORS}
    drop, middle = grids["nmse"].mean(1), len(features) // 2  # the mean over the lengths
    share = student(((drop[:, 0] - drop[:, middle]) / (drop[:, 0] - drop[:, -1])).tolist())
    of_averaging = grids["deviation"][:, -1]  # at the longest
    useful = student(of_averaging[:, features.index(PAPER_WIDTH)].tolist())
    enough = [D for D, deviation in zip(features, of_averaging.mean(0), strict=True) if deviation < 1]
    logs = {to: each(np.log10(grids[to]).reshape(repeats, -1)) for to in SOFTMAX}
    places = [(cell["n"], cell["D"]) for cell in report["cells"]]
    batch = report["settings"]["batch"]
    setting = "as in the paper" if (batch, repeats) == (16, 100) else "quick setting; the paper: 16, 100"
    fixed["setting"] = f"batch {batch}, {repeats} repeats, {setting}; {_origin(report)}"
    fixed |= {"first": features[0], "middle": features[middle], "last": features[-1], "longest": lengths[-1]}

    def judged(claim: str, of: Iterable[Interval], bounds: dict[str, float], figures: Words, words: Words) -> Finding:
        return found(claim, all_between(of, **bounds), figures, fixed | words)

    def exponents(claim: str, of: dict[int, Interval], over: str, **bounds: float) -> Finding:
        return judged(claim, of.values(), bounds, {"exponents": of}, {"spread": _spread(of, over)})

    growth = {name: _spread(of, "D") for name, of in growing.items()} | {"at_last": growing["nmse"][features[-1]]}
    of_cells = {
        f"log10_acceleration_{to}": [[*at, *i] for at, i in zip(places, logs[to], strict=True)] for to in SOFTMAX
    }
    faster: Words = {to: _count_faster(places, logs[to]) for to in SOFTMAX}
    from_where = {"enough": f"from D = {enough[0]} on" if enough else "at no D"}
    return [
        exponents("F3 error falls with D", falling, "lengths", high=0),
        judged("F3 diminishing returns", [share], {"low": 0.5}, {"share_at_half": share}, {}),
        judged("F3 error grows with n", growing["nmse"].values(), {"low": FLAT}, {"exponents": growing}, growth),
        judged("F3 replaces attention", [useful], {"high": 1}, {"deviation": useful}, from_where),
        judged("F3 faster everywhere", logs["explicit"], {"low": 0}, of_cells, faster),
        exponents("F3 gain grows with n", in_length(grids["explicit"]), "D", low=0),
        exponents("F3 gain falls with D", in_features(grids["explicit"]), "lengths", high=0),
    ]


def _enough(lengths: Sequence[int], features: Sequence[int]) -> bool:
    return len(lengths) > 1 and len(features) > 2 and PAPER_WIDTH in features


def _origin(report: dict[str, Any]) -> str:
    """The machine and the code of a measurement."""
    environment, commit = report["environment"], report["code"]["commit"]
    return f"{environment['device_name']}, {environment['threads']} thread, commit {str(commit)[:7]}"


def _spread(intervals: dict[int, Interval], of: str) -> str:
    middle, lows, highs = zip(*intervals.values(), strict=True)
    return (
        f"median of {len(intervals)} {of} {median(middle):.2f} (all intervals in {min(lows):.2f} to {max(highs):.2f})"
    )


def _count_faster(places: Sequence[tuple[int, int]], logs: Sequence[Interval]) -> str:
    """`logs`: the logarithm of how many times as fast RMFA is, at each length and D."""
    slow = [place for place, i in zip(places, logs, strict=True) if i.high < 0]
    within = f" (all within n <= {max(n for n, _ in slow):,} and D >= {min(D for _, D in slow)})" if slow else ""
    low, high = (10 ** choose(i.value for i in logs) for choose in (min, max))
    return (
        f"faster in {sum(i.low > 0 for i in logs)} of {len(places)} cells, slower in {len(slow)}{within}, undecided "
        f"in the others; {low:.2g} to {high:.3g} times as fast"
    )


METRICS4 = {  # the name of a metric -> its key in results/figures/ppsbn.json, and 1 if more of it is better
    "loss": ("loss", -1),
    "training loss": ("train_loss", -1),
    "perplexity": ("perplexity", -1),
    "BLEU": ("bleu", 1),
}


def figure4(report: dict[str, Any] | None) -> list[Finding]:
    """`report` as in results/figures/ppsbn.json.

    The paper has a notable gain in loss and a slight one in perplexity. Of one split these are the same thing, so that
    its loss may be that of training: both are judged.
    """
    findings = []
    for name, (metric, sign) in METRICS4.items():
        pairs = _pairs4(report, metric)
        if report is None or len(pairs) < 2:
            findings.append(found(f"F4 {name}", UNCHECKED, {}))
            continue
        gain = student([sign * (having - without) for having, without in pairs], len(METRICS4))
        having, without = np.mean(pairs, 0)
        loss = Interval(-gain.value, -gain.high, -gain.low)
        change = f"better by {gain:.3g}" if gain.value > 0 else f"worse by {loss:.3g}"
        words = {"having": having, "without": without, "change": change, "setting": _setting4(report)}
        findings.append(found(f"F4 {name}", all_between([gain], low=0), {"gain": gain, "pairs": pairs}, words))
    return findings


def _pairs4(report: dict[str, Any] | None, metric: str) -> list[tuple[float, float]]:
    """The metric with and without ppSBN, for each seed that has both."""
    runs = report["runs"] if report else []
    having, without = ({run["seed"]: run[metric] for run in runs if run["ppsbn"] is arm} for arm in (True, False))
    return [(having[seed], without[seed]) for seed in sorted(having.keys() & without.keys())]


def _setting4(report: dict[str, Any]) -> str:
    own, seeds = report["settings"], f"{len(_pairs4(report, 'bleu'))} seeds, paired"
    return f"{seeds}; preset {own['preset']}: width {own['width']}, {own['epochs']} epochs; {_origin(report)}"


def sentence4(report: dict[str, Any]) -> str:
    """Say whether the paper's claim holds, with its statistics."""
    findings = {finding.id.removeprefix("F4 "): finding for finding in figure4(report)}
    claim = "The paper's claim, that ppSBN gives a better loss and BLEU and a slightly better perplexity,"
    if not findings["loss"].figures:
        return f"{claim} cannot be judged: it takes two seeds or more of both arms."
    verdicts = {name: finding.verdict for name, finding in findings.items()}
    holds = "cannot be decided here: the intervals allow both"
    if set(verdicts.values()) == {"reproduced"}:
        holds = "holds here"
    elif against := [name for name, verdict in verdicts.items() if verdict == "not reproduced"]:
        holds = f"does not hold here, not in {', '.join(against)}"
    measured = "; ".join(f"{name} {finding.measured.partition(';')[0]}" for name, finding in findings.items())
    sure = f"intervals that hold together with {CONFIDENCE}, by Student's t"
    return f"{claim} {holds} ({_setting4(report)}; {sure}): {measured}."


def table2(table: Table, bench: dict[str, Any] | None) -> list[Finding]:
    """`table` is the one of the paper's protocol; `bench` as in results/bench/models.json."""
    columns = {column.task: column for column in table.columns} if not table.conditions else {}
    return [
        kernels_differ(PAPER["accuracy"], PAPER["test_examples"]),
        *(time_order(task, bench) for task in TASKS),
        *(time_of_kernels(task, bench) for task in TASKS),
        *(accuracy_order(task, columns.get(task)) for task in TASKS),
    ]


def kernels_differ(accuracy: dict[str, dict[str, float]], examples: dict[str, int]) -> Finding:
    """Do the paper's own numbers carry it? A difference counts beyond its test set's error and beyond exp - trigh.

    How many seeds the paper has, and their spread, it does not say: that it is not carried does not make it false.
    """
    words, figures, carried = [], {}, []
    for task, values in accuracy.items():
        kernels = {model: values[model] for model in MACFORMERS}
        twins = abs(kernels[TWINS[0]] - kernels[TWINS[1]])  # one model twice: what chance alone does
        different = [pair for pair in combinations(MACFORMERS, 2) if set(pair) != set(TWINS)]
        share = np.mean(list(kernels.values())) / 100
        z = NormalDist().inv_cdf(1 - LEVEL / 2 / (len(different) * len(accuracy)))
        error = 100 * z * math.sqrt(2 * share * (1 - share) / examples[task])
        largest = max(abs(kernels[a] - kernels[b]) for a, b in different)
        carried.append(largest > max(error, twins))
        figures[task] = {"largest_difference": largest, "error_of_the_test_set": error, "exp_minus_trigh": twins}
        words.append(f"{task} {largest:.2f} (test set {error:.2f}, exp against trigh {twins:.2f})")
    verdict: Verdict = "reproduced" if all(carried) else "inconclusive"
    return found("TAB kernels suit tasks", verdict, figures, {"differences": "; ".join(words)})


def _models_above(task: str, measure: str) -> list[str]:
    """The models that the paper has above the Transformer."""
    values = PAPER[measure][task]
    return [model for model in MODELS[1:] if values[model] > values[BASELINE]]


def _race(task: str, bench: dict[str, Any] | None) -> tuple[dict[str, Any], int]:
    """At the task's full length: model -> seconds of each round and peak bytes; examples of a batch."""
    races = [(r["arms"], r["batch_size"]) for r in bench["results"] if r["setting"] == f"{task}-full"] if bench else []
    return races[0] if races else ({}, 0)


def time_order(task: str, bench: dict[str, Any] | None) -> Finding:
    """From the race, where all models took turns: runs one after the other are no fair comparison."""
    slower = _models_above(task, "time")
    words: dict[str, Any] = {"task": task, "but": f", but {', '.join(slower)}" if slower else ""}
    claim = "TAB time, {task}"
    arms, batch = _race(task, bench)
    against = next((name for name in (BASELINE, f"{BASELINE}_checkpointed") if name in arms), None)
    if bench is None or against is None or not set(MODELS[1:]) <= arms.keys():
        return found(claim, UNCHECKED, {}, words)

    def times(model: str, other: str) -> Interval:
        return over_rounds(arms[model]["seconds"], arms[other]["seconds"])

    shares = {model: times(model, against) for model in MODELS[1:]}
    verdicts = {model: _above(share, model in slower, than=1) for model, share in shares.items()}
    figures: dict[str, Any] = {model: {"median": i.value, "low": i.low, "high": i.high} for model, i in shares.items()}
    notes, fused = "", f"{BASELINE}_sdpa"
    fewest = min(arms[against].get("examples", [batch]))  # races of older versions took whole batches alone
    if fewest < batch:
        notes = f" (which took {fewest} of {batch} examples, its time scaled)"
    if fused in arms:
        of_fused = {model: times(model, fused).value for model in MODELS[1:]}
        figures = {model: of | {"of_sdpa": of_fused[model]} for model, of in figures.items()}
        notes += f", in the median {min(of_fused.values()):.2f} to {max(of_fused.values()):.2f} of {fused}'s"
    if wrong := [model for model, verdict in verdicts.items() if verdict == "not reproduced"]:
        notes += f"; otherwise than in the paper: {', '.join(wrong)}"
    _, lows, highs = zip(*shares.values(), strict=True)
    words |= {"against": against, "low": min(lows), "high": max(highs), "notes": notes, "origin": _origin(bench)}
    words["rounds"] = len(arms[against]["seconds"])
    return found(claim, worst(verdicts.values()), figures | {"against": against}, words)


def time_of_kernels(task: str, bench: dict[str, Any] | None) -> Finding:
    """The paper's slowest kernel against its fastest one: is our ratio of the two nearer to the paper's, or to 1?"""
    times = {model: PAPER["time"][task][model] for model in MACFORMERS}
    fast, slow = (choose(times, key=lambda model: times[model]) for choose in (min, max))
    paper, same = times[slow] / times[fast], " (one kernel under two names)" if {fast, slow} == set(TWINS) else ""
    words = {"task": task, "fast": fast, "slow": slow, "paper": paper, "same": same}
    claim = "TAB time of kernels, {task}"
    arms, _ = _race(task, bench)
    if bench is None or not {fast, slow} <= arms.keys():
        return found(claim, UNCHECKED, {}, words)
    ratio, halfway = over_rounds(arms[slow]["seconds"], arms[fast]["seconds"]), paper**0.5
    figures = {"median": ratio.value, "low": ratio.low, "high": ratio.high}
    measured = {"ratio": ratio, "rounds": len(arms[slow]["seconds"]), "halfway": halfway, "origin": _origin(bench)}
    return found(claim, all_between([ratio], low=halfway), figures, words | measured)


def accuracy_order(task: str, column: Column | None) -> Finding:
    above = _models_above(task, "accuracy")
    below = [model for model in MODELS[1:] if model not in above]
    claim = "TAB accuracy, {task}"
    words = {"task": task, "above": ", ".join(above) or "none", "below": ", ".join(below) or "none"}
    cells = {model: column.cells[model] for model in MODELS[1:] if model in column.cells} if column else {}
    compared = {model: (cell.versus, cell.supported) for model, cell in cells.items() if cell.versus}
    if not compared:
        return found(claim, UNCHECKED, {}, words)
    figures: dict[str, Any] = {}
    verdicts: list[Verdict] = ["inconclusive" for model in MODELS[1:] if model not in compared]
    differences, paper = [], PAPER["accuracy"][task]
    for model, (versus, supported) in compared.items():
        figures[model] = Interval(versus.difference, versus.low, versus.high)
        verdicts.append(_above(figures[model], model in above) if supported else "inconclusive")
        ours, low, high = (100 * x for x in figures[model])
        published = paper[model] - paper[BASELINE]
        differences.append(f"{model} {ours:+.2f} ({low:+.2f} to {high:+.2f}; paper {published:+.2f})")
    return found(claim, worst(verdicts), figures, words | {"differences": "; ".join(differences)})


def _above(difference: Interval, above: bool, than: float = 0) -> Verdict:
    return all_between([difference], low=than) if above else all_between([difference], high=than)
