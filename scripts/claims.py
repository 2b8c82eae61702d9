"""Measure and judge what the paper claims: results/claims.md, results/claims.json and five lines of the README.

    python -m scripts.claims            # all of it, about four minutes on one core
    python -m scripts.claims T1 K       # some groups, on the screen alone
    python -m scripts.claims --full     # ten times the draws and rounds: intervals a third as wide

T1, T2, T3: the theorems. K: the kernels. C: cost. M: memory. F3, F4: the two toy experiments. TAB: Table 2.
F3, F4 and TAB are judged from what `make figure-rmfa`, `make bench` and train.py have written.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from lra_data.base import TaskSpec
from macformer.bench import models as bench_models
from macformer.bench.race import provenance
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness.progress import duration
from macformer.paper import experiments
from macformer.paper.as_published import OneByOne, RunningSum, StepwiseSoftmax
from macformer.paper.cost import cost
from macformer.paper.finding import LEVEL, MEANING, Finding, Verdict
from macformer.paper.similarity import similarity
from macformer.paper.theorems import theorem1, theorem2, theorem3
from macformer.report import cells
from scripts.table import find_block, write_block

RESULTS = cells.ROOT / "results"
BEGIN, END = "<!-- written by `make claims` -->", "<!-- until here: claims -->"
MODELS = ("transformer", "transformer_checkpointed", "rfa", *experiments.MACFORMERS)
AS_PUBLISHED = {  # name -> the model that it is, but for its attention
    "base code": ("transformer", partial(StepwiseSoftmax, 0.1)),
    "release": ("macformer_exp", partial(RunningSum, 32)),
}


def read(name: str) -> dict[str, Any] | None:
    file = RESULTS / name
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except ValueError as error:
        sys.exit(f"error: {file} is not whole ({error}): delete it, or make it anew")


def memory(effort: int) -> Iterator[Finding]:
    """Peaks of one and two examples at the task's full length, and so of the paper's batch."""
    peaks: dict[str, dict[str, int]] = {}
    for task in cells.TASKS:
        config = configs.compose(f"task={task}")
        spec = bench_models.TASKS[task].spec(config.task.data.length)
        batch = next(bench_models.full(spec, 2, spec.length, torch.device("cpu")))
        peaks[task] = {}
        for name in (*MODELS, *AS_PUBLISHED):
            trained = as_published(name, spec) if name in AS_PUBLISHED else bench_models.model(name, spec)
            step = bench_models.Trained(trained, torch.device("cpu"))
            peaks[task][name] = step.estimate_peak(*batch, config.task.batch_size)
        yield experiments.memory(task, peaks[task])
    yield experiments.equal_memory(peaks)
    yield experiments.memory_of_rfa(peaks)


def as_published(name: str, spec: TaskSpec) -> nn.Module:
    model, attention = AS_PUBLISHED[name]
    torch.manual_seed(0)  # as bench_models.model does
    built = configs.build(configs.compose(f"model={model}"), "model", **asdict(spec), attention=attention)
    return OneByOne(built) if spec.paired else built


def table2(effort: int) -> list[Finding]:
    found, _ = cells.load(RESULTS)
    bench = cells.bench()
    return experiments.table2(cells.tables(found, cells.floors(), bench, papers=True)[0], bench)


GROUPS: dict[str, Callable[[int], Iterable[Finding]]] = {
    "T1": theorem1,
    "T2": theorem2,
    "T3": theorem3,
    "K": similarity,
    "C": cost,
    "M": memory,
    "F3": lambda effort: experiments.figure3(read("figures/rmfa.json")),
    "F4": lambda effort: experiments.figure4(read("figures/ppsbn.json")),
    "TAB": table2,
}
AREAS = {
    "Theorems and algorithm": ("T1", "T2", "T3"),
    "Kernels": ("K",),
    "Cost and memory": ("C", "M"),
    "Toy experiments": ("F3", "F4"),
    "Table 2": ("TAB",),
}
SHARES = {"T1": 80, "T2": 21, "T3": 6, "K": 1, "C": 14, "M": 100}  # seconds of a quick run, for the time that is left
NO_DRAWS = ("M", "F3", "F4", "TAB")  # these take no longer with --full


def markdown(report: dict[str, Any]) -> str:
    """All findings as one table."""
    code, machine = report["code"], report["environment"]
    lines = [
        "# The paper's claims, checked",
        "",
        f"Written by `{report['command']}` (commit {code['commit'][:7]}{', with changes' if code['dirty'] else ''}; "
        f"{machine['device_name']}, {machine['threads']} thread, torch {machine['torch']}); the figures are in "
        "[claims.json](claims.json). One row a claim. Verdicts:",
        "",
        *(f"- **{verdict}** ({count(report, verdict)}): {meaning}" for verdict, meaning in MEANING.items()),
        "",
        "A range in brackets is an interval, if the row does not say otherwise; those of one row hold together with "
        f"probability {100 * (1 - LEVEL):g}%. Rows with a clock (⏱) rest on times of this machine; all others are "
        "seeded and come out the same again. What the words mean: [docs/math.md](../docs/math.md).",
        "",
        "| | the paper says | where | measured | verdict | command |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for f in report["findings"]:
        words = [f["id"] + " ⏱" * f["clock"], f["claim"], f["where"], f["measured"], f"**{f['verdict']}**"]
        lines.append("| " + " | ".join([*(word.replace("|", "\\|") for word in words), f"`{f['command']}`"]) + " |")
    return "\n".join(lines) + "\n"


def count(report: dict[str, Any], verdict: Verdict) -> int:
    return Counter(f["verdict"] for f in report["findings"])[verdict]


def summary(report: dict[str, Any]) -> str:
    """Five lines for the README, one an area: how many claims have which verdict; what is reproduced is not named."""
    lines = []
    for area, groups in AREAS.items():
        told = []
        for verdict in get_args(Verdict):
            ids = [f["id"] for f in report["findings"] if f["verdict"] == verdict and f["id"].split()[0] in groups]
            names = "" if verdict == "reproduced" else f" ({'; '.join(ids)})"
            told += [f"{len(ids)} {verdict}{names}"] * bool(ids)
        lines.append(f"- **{area}**: {', '.join(told)}.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all, written")
    parser.add_argument("--full", action="store_true", help="ten times the draws and rounds (about 25 minutes)")
    options = parser.parse_args(arguments)
    if unknown := [group for group in options.groups if group not in GROUPS]:
        sys.exit(f"error: {unknown[0]} is no group of claims; choose from {', '.join(GROUPS)}")
    if not options.groups:
        find_block(BEGIN, END)  # now, not when all the work is done
    chosen, effort = options.groups or list(GROUPS), 10 if options.full else 1
    devices.prepare(torch.device("cpu"), threads=1)
    findings: list[Finding] = []
    shares = {group: SHARES.get(group, 1) * (1 if group in NO_DRAWS else effort) for group in chosen}
    begin, done, total = time.monotonic(), 0, sum(shares.values())
    for number, group in enumerate(chosen, 1):
        left = (time.monotonic() - begin) / done * (total - done) if done else total
        print(f"[{number}/{len(chosen)}] {group}, about {duration(left)} left", flush=True)
        for finding in GROUPS[group](effort):
            print(f"  {finding.id}: {finding.verdict}\n    {finding.claim}\n    {finding.measured}", flush=True)
            findings.append(finding)
        done += shares[group]
    if options.groups:
        return
    report = {
        "command": "python -m scripts.claims" + " --full" * options.full,
        **provenance(torch.device("cpu")),
        "findings": [finding.plain() for finding in findings],
    }
    files.write(RESULTS / "claims.json", json.dumps(report, indent=1) + "\n")
    files.write(RESULTS / "claims.md", markdown(report))
    write_block(BEGIN, END, summary(report))
    took = duration(time.monotonic() - begin)
    print(f"written in {took}: results/claims.md, results/claims.json, and the README's summary")


if __name__ == "__main__":
    main()
