"""Measure and judge what the paper claims: results/claims.md, results/claims.json and five lines of the README.

    python -m scripts.claims            # all of it, about four minutes on one core
    python -m scripts.claims T1 K       # some groups, on the screen alone
    python -m scripts.claims --full     # ten times the draws and rounds: intervals a third as wide

T1, T2, T3: the theorems. K: the kernels. C: cost. M: memory. F3, F4: the two toy experiments. D: the direction of the
sum. TAB: Table 2.
F3, F4, D and TAB are judged from what `make figure-rmfa`, `make figure-ppsbn`, `make bench` and train.py have written.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from macformer.bench.race import provenance
from macformer.harness import device as devices
from macformer.harness import files
from macformer.paper import direction, experiments
from macformer.paper.cost import cost, memory, peaks
from macformer.paper.finding import CONFIDENCE, MEANING, WORDS, Finding, rounded
from macformer.paper.similarity import similarity
from macformer.paper.theorems import theorem1, theorem2, theorem3
from macformer.report import cells
from scripts.table import find_block, write_block

RESULTS = cells.ROOT / "results"
BEGIN, END = "<!-- written by `make claims` -->", "<!-- until here: claims -->"


def read(name: str) -> dict[str, Any] | None:
    file = RESULTS / "figures" / name
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except ValueError as error:
        raise SystemExit(f"error: {file} is not whole ({error}): delete it, or make it anew") from error


def table2(effort: int) -> list[Finding]:
    (records, _), bench = cells.load(RESULTS), cells.bench()
    return experiments.table2(cells.tables(records, cells.floors(), bench, papers=True)[0], bench)


def what_learns(effort: int) -> list[Finding]:
    compared = {"both": (direction.MODEL, cells.BASELINE), "released": ("release", "base code")}
    of = peaks(direction.TASK, [name for names in compared.values() for name in names])
    shares = {kind: of[ours] / of[softmax] for kind, (ours, softmax) in compared.items()}
    return direction.findings(*direction.load(RESULTS), shares)


AREAS: dict[str, dict[str, Callable[[int], Iterable[Finding]]]] = {  # by group; effort 10 is ten times the draws
    "Theorems and algorithm": {"T1": theorem1, "T2": theorem2, "T3": theorem3},
    "Kernels": {"K": similarity},
    "Cost and memory": {"C": cost, "M": memory},
    "Toy experiments": {
        "F3": lambda effort: experiments.figure3(read("rmfa.json")),
        "F4": lambda effort: experiments.figure4(read("ppsbn.json")),
    },
    "Table 2": {"D": what_learns, "TAB": table2},
}
GROUPS = {group: measure for groups in AREAS.values() for group, measure in groups.items()}


def markdown(report: dict[str, Any]) -> str:
    """All findings as one table."""
    counts = Counter(finding["verdict"] for finding in report["findings"])
    verdicts = "\n".join(f"- **{verdict}** ({counts[verdict]}): {meaning}" for verdict, meaning in MEANING.items())
    rows = []
    for f in report["findings"]:
        texts = [f["id"] + " ⏱" * f["clock"], f["claim"], f["where"], f["measured"], f"**{f['verdict']}**"]
        rows.append("| " + " | ".join(text.replace("|", "\\|") for text in [*texts, f"`{f['command']}`"]) + " |")
    words = {"changes": ", with changes" * report["code"]["dirty"], "verdicts": verdicts, "rows": "\n".join(rows)}
    return WORDS["pages"]["claims"].format_map(report | words | {"confidence": CONFIDENCE})


def summary(report: dict[str, Any]) -> str:
    """Five lines for the README, one an area: how many claims have which verdict; what is reproduced is not named."""
    lines = []
    for area, groups in AREAS.items():
        counts = []
        for verdict in MEANING:
            ids = [f["id"] for f in report["findings"] if f["id"].split()[0] in groups and f["verdict"] == verdict]
            names = "" if verdict == "reproduced" else f" ({'; '.join(ids)})"
            counts += [f"{len(ids)} {verdict}{names}"] * bool(ids)
        lines.append(f"- **{area}**: {', '.join(counts)}.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    groups = ", ".join(GROUPS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {groups}; default: all, written")
    parser.add_argument("--full", action="store_true", help="ten times the draws and rounds (about 25 minutes)")
    options = parser.parse_args(arguments)
    if unknown := [group for group in options.groups if group not in GROUPS]:
        sys.exit(f"error: {unknown[0]} is no group of claims; choose from {groups}")
    if not options.groups:
        find_block(BEGIN, END)  # now, not when all the work is done
    devices.prepare(torch.device("cpu"), threads=1)
    findings = []
    for group in options.groups or GROUPS:
        for finding in GROUPS[group](10 if options.full else 1):
            print("{id}: {verdict}\n  {claim}\n  {measured}".format_map(finding), flush=True)
            findings.append(rounded(finding))
    if options.groups:
        return
    command = "python -m scripts.claims" + " --full" * options.full
    report = {"command": command, **provenance(torch.device("cpu")), "findings": findings}
    files.write(RESULTS / "claims.json", json.dumps(report, indent=1) + "\n")
    files.write(RESULTS / "claims.md", markdown(report))
    write_block(BEGIN, END, summary(report))
    print("written: results/claims.md, results/claims.json, and the README's summary")


if __name__ == "__main__":
    main()
