"""The paper's experiments, judged from files that other commands write; nothing is measured here.

Figure 3 is that of results/figures/rmfa.json, Figure 4 that of results/figures/ppsbn.json, and Table 2 that of
results/runs, results/bench/models.json and the paper's own numbers. Without the file a claim cannot be checked.
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
FUSED = f"{BASELINE}_sdpa"
MACFORMERS = tuple(model for model in MODELS if model.startswith("macformer"))


def values(report: Report, cells: list[Report]) -> dict[str, finding.Array]:
    """Errors, and how many times as fast as softmax, of cells of results/figures/rmfa.json: (cells, repeats)."""
    softmax = {row["n"]: row for row in report["softmax"]}
    errors = {kind: np.array([cell[kind] for cell in cells]) for kind in ERRORS}
    gains = {to: np.array([np.divide(softmax[cell["n"]][to], cell["seconds"]) for cell in cells]) for to in SOFTMAX}
    return errors | gains


def figure3(report: Report | None) -> list[Finding]:
    """`report` as in results/figures/rmfa.json."""
    words: Report = {"flat": FLAT, "D": PAPER_WIDTH}
    lengths, features = (report["lengths"], report["features"]) if report else ([], [])
    enough = len(lengths) > 1 and len(features) > 2 and PAPER_WIDTH in features
    if not (report and enough and report["settings"]["repeats"] > 1):
        return [found(claim, UNCHECKED, {}, **words) for claim in finding.WORDS if claim.startswith("F3 ")]
    batch, repeats = (report["settings"][key] for key in ("batch", "repeats"))
    setting = "as in the paper" if (batch, repeats) == (16, 100) else "quick setting; the paper: 16, 100"
    words["setting"] = f"batch {batch}, {repeats} repeats, {setting}; {_origin(report)}"
    middle = len(features) // 2
    words |= {"first": features[0], "middle": features[middle], "last": features[-1], "longest": lengths[-1]}

    measured, cells = values(report, report["cells"]), [(n, D) for n in lengths for D in features]
    # kind -> (lengths, features, repeats)
    grids = {kind: each.reshape(len(lengths), len(features), repeats) for kind, each in measured.items()}
    in_D = {kind: _intervals(lengths, slopes(features, grid.swapaxes(1, 2))) for kind, grid in grids.items()}
    in_n = {kind: _intervals(features, slopes(lengths, grid.transpose(1, 2, 0))) for kind, grid in grids.items()}
    gains = {to: _intervals(cells, np.log10(measured[to])) for to in SOFTMAX}
    drop = grids["nmse"].mean(0)  # over the lengths
    share = student((drop[0] - drop[middle]) / (drop[0] - drop[-1]))
    deviations = dict(zip(features, grids["deviation"][-1], strict=True))  # at the longest
    deviation = student(deviations[PAPER_WIDTH])
    below = [D for D, each in deviations.items() if each.mean() < 1]

    words |= {f"{kind}_in_D": _spread(of, "lengths") for kind, of in in_D.items()}
    words |= {f"{kind}_in_n": _spread(of, "D") for kind, of in in_n.items()} | {"at_last": in_n["nmse"][features[-1]]}
    words |= {f"{to}_faster": _count_faster(of) for to, of in gains.items()}
    words["enough"] = f"from D = {below[0]} on" if below else "at no D"
    growth = {kind: in_n[kind] for kind in ERRORS}
    of_cells = {f"log10_acceleration_{to}": [[*at, *i] for at, i in of.items()] for to, of in gains.items()}
    claims: dict[str, tuple[Report, Collection[Interval], dict[str, float]]] = {  # figures, and what is to be between
        "error falls with D": ({"exponents": in_D["nmse"]}, in_D["nmse"].values(), {"high": 0}),
        "diminishing returns": ({"share_at_half": share}, [share], {"low": 0.5}),
        "error grows with n": ({"exponents": growth}, growth["nmse"].values(), {"low": FLAT}),
        "replaces attention": ({"deviation": deviation}, [deviation], {"high": 1}),
        "faster everywhere": (of_cells, gains["explicit"].values(), {"low": 0}),
        "gain grows with n": ({"exponents": in_n["explicit"]}, in_n["explicit"].values(), {"low": 0}),
        "gain falls with D": ({"exponents": in_D["explicit"]}, in_D["explicit"].values(), {"high": 0}),
    }
    return [
        found(f"F3 {claim}", all_between(of, **bounds), figures, **words)
        for claim, (figures, of, bounds) in claims.items()
    ]


def _intervals(keys: Sequence[Any], samples: finding.Array) -> dict[Any, Interval]:
    """`samples`: (keys, repeats)."""
    return students(dict(zip(keys, samples, strict=True)))


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
        better = ours - theirs if metric == "bleu" else theirs - ours
        gain, loss = (student(each, len(METRICS4)) for each in (better, -better))
        words["change"] = f"better by {gain:.3g}" if gain.value > 0 else f"worse by {loss:.3g}"
        words |= {"having": ours.mean(), "without": theirs.mean()}
        findings.append(found(f"F4 {name}", all_between([gain], low=0), {"gain": gain, "pairs": pairs}, **words))
    return findings


def sentence4(report: Report) -> str:
    """Say whether the paper's claim holds, with its statistics."""
    findings = dict(zip(METRICS4, figure4(report), strict=True))
    against = ", ".join(name for name, each in findings.items() if each["verdict"] == "not reproduced")
    measured, _, (setting, *_) = zip(*(each["measured"].partition("; ") for each in findings.values()), strict=True)
    changes = "; ".join(f"{name} {change}" for name, change in zip(findings, measured, strict=True))
    words = {"against": against, "setting": setting, "confidence": finding.CONFIDENCE, "changes": changes}
    return finding.WORDS["figure4"][worst(each["verdict"] for each in findings.values())].format_map(words)


def table2(table: Table, bench: Report) -> list[Finding]:
    """`table` is the one of the paper's protocol; `bench` as in results/bench/models.json."""
    columns = {column.task: column for column in table.columns} if not table.conditions else {}
    return [
        kernels_differ(PAPER["test_examples"]),
        *(time_order(task, bench) for task in TASKS),
        *(time_of_kernels(task, bench) for task in TASKS),
        *(accuracy_order(task, columns.get(task)) for task in TASKS),
    ]


def kernels_differ(examples: dict[str, int]) -> Finding:
    """Do the paper's own numbers carry it? A difference counts beyond its test set's error and beyond exp - trigh.

    How many seeds the paper has, and their spread, it does not say: that it is not carried does not make it false.
    """
    words, figures, carried = [], {}, []
    pairs = [pair for pair in combinations(MACFORMERS, 2) if set(pair) != set(TWINS)]
    z = NormalDist().inv_cdf(1 - LEVEL / 2 / (len(pairs) * len(TASKS)))
    for task, of in PAPER["accuracy"].items():
        twins = abs(of[TWINS[0]] - of[TWINS[1]])  # one model twice: what chance alone does
        share = np.mean([of[model] for model in MACFORMERS]) / 100
        error = 100 * z * math.sqrt(2 * share * (1 - share) / examples[task])
        largest = max(abs(of[a] - of[b]) for a, b in pairs)
        carried.append(largest > max(error, twins))
        figures[task] = {"largest_difference": largest, "error_of_the_test_set": error, "exp_minus_trigh": twins}
        words.append(f"{task} {largest:.2f} (test set {error:.2f}, exp against trigh {twins:.2f})")
    verdict: finding.Verdict = "reproduced" if all(carried) else "inconclusive"
    return found("TAB kernels suit tasks", verdict, figures, differences="; ".join(words))


def _race(task: str, bench: Report) -> tuple[Report, Report]:
    """The arms of all models, which took turns at the task's full length, if there are any; and words on the race."""
    for race in bench["results"]:
        if race["setting"] == f"{task}-full" and {*MODELS, FUSED} <= race["arms"].keys():
            softmax, whole = race["arms"][BASELINE], race["batch_size"]
            words = {"origin": _origin(bench), "rounds": len(softmax["seconds"]), "notes": ""}
            if (part := min(softmax["examples"])) < whole:
                words["notes"] = f" (which took {part} of {whole} examples, its time scaled)"
            return race["arms"], words
    return {}, {}


def _times(arms: Report, model: str, other: str) -> Interval:
    """The median, lowest and highest of the ratios within each round."""
    ratios = np.divide(arms[model]["seconds"], arms[other]["seconds"])
    return Interval(float(np.median(ratios)), float(ratios.min()), float(ratios.max()))


def _above(interval: Interval, above: bool, than: float = 0) -> finding.Verdict:
    return all_between([interval], low=than) if above else all_between([interval], high=than)


def _models_above(task: str, measure: str) -> list[str]:
    """The models that the paper has above the Transformer."""
    paper = PAPER[measure][task]
    return [model for model in MODELS[1:] if paper[model] > paper[BASELINE]]


def time_order(task: str, bench: Report) -> Finding:
    slower, (arms, words) = _models_above(task, "time"), _race(task, bench)
    words |= {"task": task, "but": f", but {', '.join(slower)}" if slower else ""}
    if not arms:
        return found("TAB time, {task}", UNCHECKED, {}, **words)
    shares = {model: _times(arms, model, BASELINE) for model in MODELS[1:]}
    verdicts = {model: _above(share, model in slower, than=1) for model, share in shares.items()}
    medians = {model: _times(arms, model, FUSED).value for model in shares}
    figures: Report = {m: share.figures("median") | {"of_sdpa": medians[m]} for m, share in shares.items()}
    words["notes"] += f", in the median {min(medians.values()):.2f} to {max(medians.values()):.2f} of {FUSED}'s"
    if wrong := [model for model, verdict in verdicts.items() if verdict == "not reproduced"]:
        words["notes"] += f"; otherwise than in the paper: {', '.join(wrong)}"
    words |= {"low": min(i.low for i in shares.values()), "high": max(i.high for i in shares.values())}
    return found("TAB time, {task}", worst(verdicts.values()), figures | {"against": BASELINE}, **words)


def time_of_kernels(task: str, bench: Report) -> Finding:
    """The paper's slowest kernel against its fastest one: is our ratio of the two nearer to the paper's, or to 1?"""
    times, (arms, words) = PAPER["time"][task], _race(task, bench)
    fast, slow = (choose(MACFORMERS, key=times.__getitem__) for choose in (min, max))
    paper, same = times[slow] / times[fast], " (one kernel under two names)" if {fast, slow} == set(TWINS) else ""
    words |= {"task": task, "fast": fast, "slow": slow, "paper": paper, "same": same, "halfway": paper**0.5}
    if not arms:
        return found("TAB time of kernels, {task}", UNCHECKED, {}, **words)
    ratio = _times(arms, slow, fast)
    verdict = all_between([ratio], low=paper**0.5)
    return found("TAB time of kernels, {task}", verdict, ratio.figures("median"), ratio=ratio, **words)


def accuracy_order(task: str, column: Column | None) -> Finding:
    above, paper = _models_above(task, "accuracy"), PAPER["accuracy"][task]
    below = [model for model in MODELS[1:] if model not in above]
    cells = {model: column.cells[model] for model in MODELS[1:]} if column else {}
    figures = {m: Interval(v.difference, v.low, v.high) for m, cell in cells.items() if (v := cell.versus)}
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
