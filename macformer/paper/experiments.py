"""The paper's experiments, judged from files that other commands write; nothing is measured here.

    figure 3   results/figures/rmfa.json, by `make figure-rmfa`
    figure 4   results/figures/ppsbn.json, by `make figure-ppsbn`
    table 2    results/runs, by train.py; results/bench/models.json, by `make bench`; the paper's own numbers

Where a file is not there the claim cannot be checked, and the row says so.
"""

import math
from collections.abc import Collection, Sequence
from itertools import combinations
from statistics import NormalDist, median
from typing import Any, Literal

import numpy as np

from macformer.paper import finding
from macformer.paper.finding import UNCHECKED, Finding, Interval, all_between, found, slopes, student, students, worst
from macformer.report.cells import BASELINE, MODELS, PAPER, TASKS, Column, Table
from macformer.report.statistics import LEVEL, TWINS

Report = dict[str, Any]
ERRORS = ("nmse", "nmse_offset", "deviation")
SOFTMAX: tuple[Literal["explicit"], Literal["sdpa"]] = ("explicit", "sdpa")
FLAT = 0.05  # an exponent below this is none
PAPER_WIDTH = 128  # D on LRA
METRICS4 = {"loss": "loss", "training loss": "train_loss", "perplexity": "perplexity", "BLEU": "bleu"}
MACFORMERS = tuple(model for model in MODELS if model.startswith("macformer"))


def values(report: Report, cells: list[Report]) -> dict[str, finding.Array]:
    """Errors, and how many times as fast as softmax, of cells of results/figures/rmfa.json: (cells, repeats)."""
    softmax = {row["n"]: row for row in report["softmax"]}
    errors = {kind: np.array([cell[kind] for cell in cells]) for kind in ERRORS}
    gains = {to: np.array([np.divide(softmax[cell["n"]][to], cell["seconds"]) for cell in cells]) for to in SOFTMAX}
    return errors | gains


def figure3(report: Report | None) -> list[Finding]:
    """`report` as in results/figures/rmfa.json."""
    fixed: Report = {"flat": FLAT, "D": PAPER_WIDTH}
    lengths, features = (report["lengths"], report["features"]) if report else ([], [])
    enough = len(lengths) > 1 and len(features) > 2 and PAPER_WIDTH in features
    if not (report and enough and report["settings"]["repeats"] > 1):
        return [found(claim, UNCHECKED, {}, **fixed) for claim in finding.WORDS if claim.startswith("F3 ")]
    batch, repeats = (report["settings"][key] for key in ("batch", "repeats"))
    setting = "as in the paper" if (batch, repeats) == (16, 100) else "quick setting; the paper: 16, 100"
    fixed["setting"] = f"batch {batch}, {repeats} repeats, {setting}; {_origin(report)}"
    middle = len(features) // 2
    fixed |= {"first": features[0], "middle": features[middle], "last": features[-1], "longest": lengths[-1]}

    shape = len(lengths), len(features), repeats
    grids = {  # kind -> (repeats, lengths, features)
        kind: each.reshape(shape).transpose(2, 0, 1) for kind, each in values(report, report["cells"]).items()
    }
    in_features = {kind: _intervals(lengths, slopes(features, grid)) for kind, grid in grids.items()}
    in_length = {kind: _intervals(features, slopes(lengths, grid.swapaxes(1, 2))) for kind, grid in grids.items()}
    drop = grids["nmse"].mean(1)  # over the lengths
    share = student((drop[:, 0] - drop[:, middle]) / (drop[:, 0] - drop[:, -1]))
    deviations = grids["deviation"][:, -1]  # at the longest
    deviation = student(deviations[:, features.index(PAPER_WIDTH)])
    below = [D for D, mean in zip(features, deviations.mean(0), strict=True) if mean < 1]
    cells = [(n, D) for n in lengths for D in features]
    gains = {to: _intervals(cells, np.log10(grids[to]).reshape(repeats, -1)) for to in SOFTMAX}

    def judged(claim: str, of: Collection[Interval], figures: Report, words: Report, **bounds: float) -> Finding:
        return found(f"F3 {claim}", all_between(of, **bounds), figures, **fixed, **words)

    def exponents(claim: str, of: dict[Any, Interval], over: str, **bounds: float) -> Finding:
        return judged(claim, of.values(), {"exponents": of}, {"spread": _spread(of, over)}, **bounds)

    growing = {kind: in_length[kind] for kind in ERRORS}
    growth = {kind: _spread(of, "D") for kind, of in growing.items()} | {"at_last": growing["nmse"][features[-1]]}
    of_cells = {f"log10_acceleration_{to}": [[*at, *i] for at, i in of.items()] for to, of in gains.items()}
    faster: Report = {to: _count_faster(of) for to, of in gains.items()}
    where = {"enough": f"from D = {below[0]} on" if below else "at no D"}
    return [
        exponents("error falls with D", in_features["nmse"], "lengths", high=0),
        judged("diminishing returns", [share], {"share_at_half": share}, {}, low=0.5),
        judged("error grows with n", growing["nmse"].values(), {"exponents": growing}, growth, low=FLAT),
        judged("replaces attention", [deviation], {"deviation": deviation}, where, high=1),
        judged("faster everywhere", gains["explicit"].values(), of_cells, faster, low=0),
        exponents("gain grows with n", in_length["explicit"], "D", low=0),
        exponents("gain falls with D", in_features["explicit"], "lengths", high=0),
    ]


def _intervals(keys: Sequence[Any], samples: finding.Array) -> dict[Any, Interval]:
    """Of (repeats, comparisons): an interval for each comparison, which has a key."""
    return students(dict(zip(keys, samples.T, strict=True)))


def _origin(report: Report) -> str:
    """The machine and the code of a measurement."""
    environment, commit = report["environment"], report["code"]["commit"]
    return f"{environment['device_name']}, {environment['threads']} thread, commit {str(commit)[:7]}"


def _spread(intervals: dict[Any, Interval], of: str) -> str:
    middle, lows, highs = zip(*intervals.values(), strict=True)
    return f"median of {len(middle)} {of} {median(middle):.2f} (all intervals in {min(lows):.2f} to {max(highs):.2f})"


def _count_faster(gains: dict[tuple[int, int], Interval]) -> str:
    """`gains`: length and D -> the logarithm of how many times as fast RMFA is."""
    times, lows, _ = np.transpose(list(gains.values()))
    slow = [place for place, gain in gains.items() if gain.high < 0]
    within = f" (all within n <= {max(n for n, _ in slow):,} and D >= {min(D for _, D in slow)})" if slow else ""
    return (
        f"faster in {(lows > 0).sum()} of {len(gains)} cells, slower in {len(slow)}{within}, undecided in the others; "
        f"{10 ** times.min():.2g} to {10 ** times.max():.3g} times as fast"
    )


def figure4(report: Report | None) -> list[Finding]:
    """`report` as in results/figures/ppsbn.json.

    The paper has a notable gain in loss and a slight one in perplexity. Of one split these are the same thing, so that
    its loss may be that of training: both are judged.
    """
    runs = report["runs"] if report else []
    having, without = ({run["seed"]: run for run in runs if run["ppsbn"] is arm} for arm in (True, False))
    seeds = sorted(having.keys() & without.keys())
    if not report or len(seeds) < 2:
        return [found(f"F4 {name}", UNCHECKED, {}) for name in METRICS4]
    preset = "preset {preset}: width {width}, {epochs} epochs".format_map(report["settings"])
    words = {"setting": f"{len(seeds)} seeds, paired; {preset}; {_origin(report)}"}
    findings = []
    for name, metric in METRICS4.items():
        pairs = [(having[seed][metric], without[seed][metric]) for seed in seeds]
        ours, theirs = np.transpose(pairs)
        higher, lower = (student(sign * (ours - theirs), len(METRICS4)) for sign in (1, -1))
        gain, loss = (higher, lower) if metric == "bleu" else (lower, higher)
        words["change"] = f"better by {gain:.3g}" if gain.value > 0 else f"worse by {loss:.3g}"
        words |= {"having": ours.mean(), "without": theirs.mean()}
        findings.append(found(f"F4 {name}", all_between([gain], low=0), {"gain": gain, "pairs": pairs}, **words))
    return findings


def sentence4(report: Report) -> str:
    """Say whether the paper's claim holds, with its statistics."""
    findings = dict(zip(METRICS4, figure4(report), strict=True))
    claim = "The paper's claim, that ppSBN gives a better loss and BLEU and a slightly better perplexity,"
    verdict = worst(each["verdict"] for each in findings.values())
    if verdict == UNCHECKED:
        return f"{claim} cannot be judged: it takes two seeds or more of both arms."
    against = ", ".join(name for name, each in findings.items() if each["verdict"] == "not reproduced")
    holds = {"reproduced": "holds here", "not reproduced": f"does not hold here, not in {against}"}
    says = holds.get(verdict, "cannot be decided here: the intervals allow both")
    measured, _, setting = zip(*(each["measured"].partition("; ") for each in findings.values()), strict=True)
    changes = "; ".join(f"{name} {change}" for name, change in zip(findings, measured, strict=True))
    sure = f"intervals that hold together with {finding.CONFIDENCE}, by Student's t"
    return f"{claim} {says} ({setting[0]}; {sure}): {changes}."


def table2(table: Table, bench: Report | None) -> list[Finding]:
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
    pairs = [pair for pair in combinations(MACFORMERS, 2) if set(pair) != set(TWINS)]
    z = NormalDist().inv_cdf(1 - LEVEL / 2 / (len(pairs) * len(accuracy)))
    for task, of in accuracy.items():
        twins = abs(of[TWINS[0]] - of[TWINS[1]])  # one model twice: what chance alone does
        share = np.mean([of[model] for model in MACFORMERS]) / 100
        error = 100 * z * math.sqrt(2 * share * (1 - share) / examples[task])
        largest = max(abs(of[a] - of[b]) for a, b in pairs)
        carried.append(largest > max(error, twins))
        figures[task] = {"largest_difference": largest, "error_of_the_test_set": error, "exp_minus_trigh": twins}
        words.append(f"{task} {largest:.2f} (test set {error:.2f}, exp against trigh {twins:.2f})")
    verdict: finding.Verdict = "reproduced" if all(carried) else "inconclusive"
    return found("TAB kernels suit tasks", verdict, figures, differences="; ".join(words))


def _race(task: str, bench: Report | None) -> Report:
    """Of the models at the task's full length, which took turns: a race of runs one after the other is not fair."""
    races = bench["results"] if bench else []
    return next((race for race in races if race["setting"] == f"{task}-full"), {"arms": {}})


def _times(race: Report, model: str, other: str) -> Interval:
    """The median, lowest and highest of the ratios within each round."""
    ratios = np.divide(race["arms"][model]["seconds"], race["arms"][other]["seconds"])
    return Interval(float(np.median(ratios)), float(ratios.min()), float(ratios.max()))


def _above(interval: Interval, above: bool, than: float = 0) -> finding.Verdict:
    return all_between([interval], low=than) if above else all_between([interval], high=than)


def _models_above(task: str, measure: str) -> list[str]:
    """The models that the paper has above the Transformer."""
    paper = PAPER[measure][task]
    return [model for model in MODELS[1:] if paper[model] > paper[BASELINE]]


def time_order(task: str, bench: Report | None) -> Finding:
    slower, race, fused = _models_above(task, "time"), _race(task, bench), f"{BASELINE}_sdpa"
    words: Report = {"task": task, "but": f", but {', '.join(slower)}" if slower else ""}
    against = BASELINE if BASELINE in race["arms"] else f"{BASELINE}_checkpointed"
    if not bench or not {against, *MODELS[1:]} <= race["arms"].keys():
        return found("TAB time, {task}", UNCHECKED, {}, **words)
    shares = {model: _times(race, model, against) for model in MODELS[1:]}
    verdicts = {model: _above(share, model in slower, than=1) for model, share in shares.items()}
    figures: Report = {model: {"median": i.value, "low": i.low, "high": i.high} for model, i in shares.items()}
    notes, arm = "", race["arms"][against]
    fewest = min(arm.get("examples", [race["batch_size"]]))  # races of older versions took whole batches alone
    if fewest < race["batch_size"]:
        notes = f" (which took {fewest} of {race['batch_size']} examples, its time scaled)"
    if fused in race["arms"]:
        of_fused = {model: _times(race, model, fused).value for model in MODELS[1:]}
        figures = {model: of | {"of_sdpa": of_fused[model]} for model, of in figures.items()}
        notes += f", in the median {min(of_fused.values()):.2f} to {max(of_fused.values()):.2f} of {fused}'s"
    if wrong := [model for model, verdict in verdicts.items() if verdict == "not reproduced"]:
        notes += f"; otherwise than in the paper: {', '.join(wrong)}"
    words |= {"against": against, "notes": notes, "origin": _origin(bench), "rounds": len(arm["seconds"])}
    words |= {"low": min(i.low for i in shares.values()), "high": max(i.high for i in shares.values())}
    return found("TAB time, {task}", worst(verdicts.values()), figures | {"against": against}, **words)


def time_of_kernels(task: str, bench: Report | None) -> Finding:
    """The paper's slowest kernel against its fastest one: is our ratio of the two nearer to the paper's, or to 1?"""
    times, race = PAPER["time"][task], _race(task, bench)
    fast, slow = (choose(MACFORMERS, key=lambda model: times[model]) for choose in (min, max))
    paper, same = times[slow] / times[fast], " (one kernel under two names)" if {fast, slow} == set(TWINS) else ""
    words = {"task": task, "fast": fast, "slow": slow, "paper": paper, "same": same}
    if not bench or not {fast, slow} <= race["arms"].keys():
        return found("TAB time of kernels, {task}", UNCHECKED, {}, **words)
    ratio, rounds = _times(race, slow, fast), len(race["arms"][slow]["seconds"])
    figures = {"median": ratio.value, "low": ratio.low, "high": ratio.high}
    words |= {"ratio": ratio, "rounds": rounds, "halfway": paper**0.5, "origin": _origin(bench)}
    return found("TAB time of kernels, {task}", all_between([ratio], low=paper**0.5), figures, **words)


def accuracy_order(task: str, column: Column | None) -> Finding:
    above, paper = _models_above(task, "accuracy"), PAPER["accuracy"][task]
    below = [model for model in MODELS[1:] if model not in above]
    cells = {model: column.cells[model] for model in MODELS[1:]} if column else {}
    versus = {model: cell.versus for model, cell in cells.items() if cell.versus}
    figures = {model: Interval(each.difference, each.low, each.high) for model, each in versus.items()}
    verdicts = [
        _above(figures[model], model in above) if cell.supported else "inconclusive" for model, cell in cells.items()
    ]
    differences = []
    for model, (ours, low, high) in figures.items():
        published = paper[model] - paper[BASELINE]
        differences.append(f"{model} {100 * ours:+.2f} ({100 * low:+.2f} to {100 * high:+.2f}; paper {published:+.2f})")
    words = {"task": task, "above": ", ".join(above) or "none", "below": ", ".join(below) or "none"}
    verdict = worst(verdicts) if figures else UNCHECKED
    return found("TAB accuracy, {task}", verdict, figures, **words, differences="; ".join(differences))
