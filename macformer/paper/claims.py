"""All claims by group: measured, judged and put into words, for results/claims.md and the README."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from macformer.paper import experiments
from macformer.paper.cost import cost
from macformer.paper.finding import CONFIDENCE, MEANING, WORDS, Finding
from macformer.paper.memory import memory
from macformer.paper.similarity import similarity
from macformer.paper.theorems import theorem1, theorem2, theorem3
from macformer.report import cells

RESULTS = cells.ROOT / "results"


def read(name: str) -> dict[str, Any] | None:
    file = RESULTS / name
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except ValueError as error:
        raise SystemExit(f"error: {file} is not whole ({error}): delete it, or make it anew") from error


def table2(effort: int) -> list[Finding]:
    records, _ = cells.load(RESULTS)
    bench = cells.bench()
    return experiments.table2(cells.tables(records, cells.floors(), bench, papers=True)[0], bench)


Measure = Callable[[int], Iterable[Finding]]  # takes the effort: 10 is for ten times the draws
AREAS: dict[str, dict[str, Measure]] = {
    "Theorems and algorithm": {"T1": theorem1, "T2": theorem2, "T3": theorem3},
    "Kernels": {"K": similarity},
    "Cost and memory": {"C": cost, "M": memory},
    "Toy experiments": {
        "F3": lambda effort: experiments.figure3(read("figures/rmfa.json")),
        "F4": lambda effort: experiments.figure4(read("figures/ppsbn.json")),
    },
    "Table 2": {"TAB": table2},
}
GROUPS = {group: measure for groups in AREAS.values() for group, measure in groups.items()}


def markdown(report: dict[str, Any]) -> str:
    """All findings as one table."""
    code, findings = report["code"], report["findings"]
    counts = Counter(finding["verdict"] for finding in findings)
    rows = []
    for f in findings:
        words = [f["id"] + " ⏱" * f["clock"], f["claim"], f["where"], f["measured"], f"**{f['verdict']}**"]
        rows.append("| " + " | ".join([*(word.replace("|", "\\|") for word in words), f"`{f['command']}`"]) + " |")
    return WORDS["pages"]["claims"].format(
        command=report["command"],
        commit=code["commit"][:7],
        changes=", with changes" * code["dirty"],
        verdicts="\n".join(f"- **{verdict}** ({counts[verdict]}): {meaning}" for verdict, meaning in MEANING.items()),
        confidence=CONFIDENCE,
        rows="\n".join(rows),
        **report["environment"],
    )


def summary(report: dict[str, Any]) -> str:
    """Five lines for the README, one an area: how many claims have which verdict; what is reproduced is not named."""
    lines = []
    for area, groups in AREAS.items():
        findings = [finding for finding in report["findings"] if finding["id"].split()[0] in groups]
        of = {verdict: [f["id"] for f in findings if f["verdict"] == verdict] for verdict in MEANING}
        named = {verdict: "" if verdict == "reproduced" else f" ({'; '.join(ids)})" for verdict, ids in of.items()}
        counts = ", ".join(f"{len(ids)} {verdict}{named[verdict]}" for verdict, ids in of.items() if ids)
        lines.append(f"- **{area}**: {counts}.")
    return "\n".join(lines)
