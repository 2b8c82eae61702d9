"""Table 2 as Markdown, LaTeX, CSV and JSON: ours beside the paper's, and in two sentences what it supports."""

import json
import re
import textwrap
from collections import Counter
from dataclasses import fields
from statistics import mean
from typing import Any

import pandas as pd

from macformer.harness.progress import duration, mebibytes
from macformer.harness.record import Record
from macformer.report.cells import BASELINE, TASKS, Cell, Column, Measure, Race, Table
from macformer.report.statistics import LEVEL, TWINS, Comparison

MEASURES = ("time", "memory", "accuracy")
DAGGER = "†"
TEX = {ord(character): f"\\{character}" for character in "&%#_{}$"}
TEX |= {ord("\\"): r"\textbackslash{}", ord("~"): r"\textasciitilde{}", ord("^"): r"\textasciicircum{}"}
TEX |= {ord("±"): r"$\pm$", ord(DAGGER): r"\dag{}", ord("`"): "'", ord("<"): "$<$", ord(">"): "$>$"}
LEGEND = (
    "Time (of all training steps, without evaluation, in separate runs: no race) and peak memory of training are means "
    "over the seeds, relative to the Transformer's; accuracy is in percent, ± its standard deviation over n seeds. "
    "Beside each stands the paper's value and, if the task is the paper's, the gap, ours minus the paper's. **Bold** "
    "(*italic*) is better (worse) than the Transformer: Holm-corrected p below 0.05 by a bootstrap over test examples "
    f"and the seeds' spread, by more than the noise floor, with two seeds or more. {DAGGER}: not above the best "
    "floor, the interval considered. Floors are what cheap predictors reach on test, for the paper's values under its "
    "protocol."
)
LEGEND_OF_SETTINGS = (
    "Accuracies in percent, ± and bold as in Table 2. With one seed the interval covers the test set, not the noise of "
    f"training. {DAGGER}: not above the best floor (what the best cheap predictor reaches on the same test split), the "
    "interval considered. Time is that of all training steps, in separate runs: no race."
)


def formats(tables: list[Table], found: list[Record], problems: list[str]) -> dict[str, str]:
    """The text of each file, by its ending."""
    return {
        "md": markdown(tables, found, problems),
        "tex": latex(tables),
        "csv": csv(tables),
        "json": to_json(tables, found, problems),
    }


def markdown(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """All of them, then the runs that failed and the files that are no records."""
    parts = ["\n".join([*_title(table), "", *_body(table)]) for table in tables]
    return "\n\n".join([*parts, *_failures(found, problems), LEGEND]) + "\n"


def _failures(found: list[Record], problems: list[str]) -> list[str]:
    failed = [f"{run.run_id} ended as {run.status}: {run.message}" for run in found if run.status != "ok"]
    return [
        "\n".join([f"**{heading}**", "", *(f"- {line}" for line in lines)])
        for heading, lines in (("Failed runs", sorted(failed)), ("Files left out", problems))
        if lines
    ]


def settings(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """A row for each model in each setting: for sweeps over settings, of which each would be a table of its own."""
    placed: dict[str, list[tuple[Table, Column]]] = {task: [] for task in TASKS}
    for table in tables:
        for column in table.columns:
            placed.setdefault(column.task, []).extend([(table, column)] if column.runs else [])
    parts = [part for task, columns in placed.items() if columns for part in _settings(task, columns)]
    parts = parts or ["**Settings side by side: no runs yet**"]
    return "\n\n".join([*parts, *_failures(found, problems), LEGEND_OF_SETTINGS]) + "\n"


def _settings(task: str, placed: list[tuple[Table, Column]]) -> list[str]:
    """Title, rows and notes of one task."""
    changes = [[*column.conditions, f"on {table.machine}"] for table, column in placed]
    common = [change for change in changes[0] if all(change in each for each in changes)]
    rows = []
    for (_, column), own in zip(placed, changes, strict=True):
        besides = "; ".join(change.partition(" (paper: ")[0] for change in own if change not in common)
        floor = max(column.floors, key=lambda name: column.floors[name])
        for cell in column.cells.values():
            best = [100 * run.quality.dev_accuracy for run in cell.runs if run.quality]
            if best and cell.seconds:
                shown = {
                    "model": cell.row,
                    "besides": besides or "-",
                    "data": f"{cell.runs[0].data.source} {cell.runs[0].data.fingerprint[:8]}",
                    "test accuracy": _accuracy(cell),
                    "95% interval": _interval(cell),
                    "best floor": f"{100 * column.floors[floor]:.2f} ({floor})",
                    "best dev accuracy": f"{mean(best):.2f}",
                    "time": duration(cell.seconds),
                }
                rows.append({key: value.replace("|", "\\|") for key, value in shown.items()})
    body = pd.DataFrame(rows).to_markdown(index=False, colalign=["left"] * 3 + ["right"] * 5, disable_numparse=True)
    which = "none" if all(column.conditions for _, column in placed) else "not all"
    head = (
        f"**{task}: settings side by side, {which} of them the paper's protocol. In all: {'; '.join(common) or '-'}**"
    )
    notes = _about_runs(task, [run for _, column in placed for run in column.runs])
    return [head, body, *(["\n".join(f"- {line}" for line in notes)] if notes else [])]


def title(table: Table) -> str:
    """All that sets this table apart."""
    if not table.machine:
        return "Table 2, the paper's protocol: no runs yet"
    data = [f"{c.task} {c.runs[0].data.source} {c.runs[0].data.fingerprint[:8]}" for c in table.columns if c.runs]
    if not table.conditions:
        return f"Table 2, the paper's protocol, on {table.machine}; data: {', '.join(data)}"
    conditions = "; ".join(table.conditions)
    return f"Table 2 on {table.machine}, data: {', '.join(data)}, NOT the paper's protocol: {conditions}"


def notes(table: Table) -> list[str]:
    """What one must know to read the table, a line each."""
    lines = [line for column in table.columns for line in _notes(column)]
    if table.race_machine:
        rounds = max(cell.race.rounds for _, cell in table.cells if cell.race)
        lines.append(
            f"raced: training steps of all models in turn on the same batches in one process, on {table.race_machine}; "
            f"median (range) of {rounds} rounds (`make bench`, results/bench/models.md)."
        )
    lines += [f"raced: {line}" for column in table.columns for line in column.race_notes]
    if table.conditions:
        lines.append(
            "**This is a shortened or changed protocol, not the paper's.** The full one (11,000 steps): "
            f"`{table.full_command}`."
        )
    lines += [f"to fill the empty cells of {c.task}: `{command}`" for c in table.columns for command in c.fill]
    return lines


def verdict(table: Table) -> list[str]:
    """What the table supports, and what it does not: a sentence each."""
    differences = [
        f"on {column.task} {cell.row} is {'better' if versus.difference > 0 else 'worse'} than the Transformer "
        f"by {abs(100 * versus.difference):.2f} points ({_range(100 * versus.low, 100 * versus.high, '+.2f')})"
        for column, cell in table.cells
        if cell.supported and (versus := cell.versus)
    ]
    nothing = "nothing on accuracy, neither a difference from the Transformer nor that there is none"
    return [
        f"**Supported:** {'; '.join(differences) or nothing}.",
        f"**Not supported:** {'; '.join(_unsupported(table))}.",
    ]


def _unsupported(table: Table) -> list[str]:
    said = []
    compared = [(column, cell) for column, cell in table.cells if cell.versus]
    rest = [(column, cell) for column, cell in compared if not cell.supported]
    if rest:
        single = sum(min(len(cell.runs), len(column.cells[BASELINE].runs)) < 2 for column, cell in rest)
        why = f" ({single} of them with one seed, which supports none)" if single else ""
        which = f"{len(rest)}{' other' * (len(rest) < len(compared))} cell{'s' * (len(rest) > 1)}"
        said.append(f"the difference from the Transformer in {which}{why}")
    for ours, flag in (("our", "beats_floor"), ("the paper's", "paper_beats_floor")):
        judged = [(column.task, getattr(cell, flag)) for column, cell in table.cells if getattr(cell, flag) is not None]
        low, of = Counter(task for task, beats in judged if not beats), Counter(task for task, _ in judged)
        if low:
            tasks = ", ".join(f"{low[task]} of {of[task]} on {task}" for task in low)
            said.append(f"that {ours} accuracies marked {DAGGER} take more than a cheap predictor ({tasks})")
    if not any(cell.versus for _, cell in table.cells):
        said.insert(0, "any difference of ours, as there are no runs of the Transformer and another model to compare")
    return said or ["nothing else was compared"]


def _body(table: Table) -> list[str]:
    lines = []
    for column in table.columns:
        shown = frame(column)
        lines += [shown.to_markdown(colalign=["left"] + ["right"] * shown.shape[1], disable_numparse=True), ""]
    return [*lines, *verdict(table), "", *(f"- {line}" for line in notes(table))]


def _title(table: Table) -> list[str]:
    """One paragraph, wrapped for the screen."""
    return textwrap.wrap(f"**{title(table)}**", 110, break_long_words=False, break_on_hyphens=False)


def frame(column: Column) -> pd.DataFrame:
    """A task as text: a row for each model and each floor."""
    raced = any(cell.race for cell in column.cells.values())
    rows = {}
    for row, cell in column.cells.items():
        shown: dict[str, str] = {}
        for measure in ("time", "memory"):
            shown[measure] = _relative(getattr(cell, measure))
            shown[f"paper (gap){' ' * (measure == 'memory')}"] = _paper(cell, measure)
            if raced:
                shown[f"{measure}, raced"] = _raced(cell, measure)
        shown["accuracy"] = _accuracy(cell)
        shown["95% interval"] = _interval(cell)
        shown["paper (gap)  "] = _paper(cell, "accuracy")
        versus = cell.versus
        shown["minus transformer (95%)"] = (
            f"{100 * versus.difference:+.2f} ({_range(100 * versus.low, 100 * versus.high, '+.2f')})" if versus else "-"
        )
        shown["p, Holm"] = "-" if cell.p_holm is None else f"{cell.p_holm:.4f}"
        rows[row] = shown
    for name, accuracy in column.floors.items():
        rows[f"floor: {name}"] = {"accuracy": f"{100 * accuracy:.2f}"}
    rows = {row.replace("|", "\\|"): shown for row, shown in rows.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(column.task).fillna("")


def _relative(measure: Measure | None) -> str:
    if not measure:
        return "-"
    return f"{measure.value:.3f}" + (f" ± {measure.spread:.3f}" if measure.spread is not None else "")


def _raced(cell: Cell, measure: str) -> str:
    if not cell.race:
        return "-"
    if measure == "memory":
        return f"{cell.race.memory:.3f}"
    return f"{cell.race.time:.3f} ({_range(cell.race.low, cell.race.high, '.3f')})"


def _accuracy(cell: Cell) -> str:
    if not cell.accuracy:
        return "-"
    text = f"{100 * cell.accuracy.value:.2f}"
    if cell.accuracy.spread is not None:
        text += f" ± {100 * cell.accuracy.spread:.2f}"
    text += f" (n={cell.accuracy.seeds})"
    if cell.supported and cell.versus:
        mark = "**" if cell.versus.difference > 0 else "*"
        text = f"{mark}{text}{mark}"
    return text if cell.beats_floor else f"{text} {DAGGER}"


def _interval(cell: Cell) -> str:
    return _range(100 * cell.low, 100 * cell.high) if cell.low is not None and cell.high is not None else "-"


def _paper(cell: Cell, measure: str) -> str:
    """The paper's value, and the gap if there is one of ours."""
    if measure not in cell.paper:
        return "-"
    scale, digits = (100, 2) if measure == "accuracy" else (1, 3)
    text = f"{scale * cell.paper[measure]:.{digits}f}"
    if measure == "accuracy" and cell.paper_beats_floor is False:
        text += f" {DAGGER}"
    gap = cell.gap(measure)
    return text if gap is None else f"{text} ({scale * gap:+.{digits}f})"


def _range(low: float, high: float, digits: str = ".2f") -> str:
    return f"{low:{digits}} to {high:{digits}}"


def _notes(column: Column) -> list[str]:
    lines = []
    if column.runs:
        runs = column.runs
        data = runs[0].data
        sizes = " / ".join(f"{count:,}" for count in data.examples.values())
        # Without the Transformer there are no ratios: then what each row took.
        told = {row: cell for row, cell in column.cells.items() if cell.runs}
        told = {"the Transformer": told[BASELINE]} if BASELINE in told else told
        absolute = ", ".join(
            f"{row} took {duration(cell.seconds)} and {mebibytes(int(cell.peak_bytes))}"
            for row, cell in told.items()
            if cell.seconds and cell.peak_bytes
        )
        lines.append(f"{column.task}: {data.source} data, {sizes} examples; {absolute}.")
        lines += _about_runs(column.task, runs)
        if any(len(cell.runs) == 1 for cell in column.cells.values()):
            lines.append(f"{column.task}: with one seed the interval covers the test set, not the noise of training.")
        lines += _noise(column)
        lines += _gaps(column)
    if column.floors:
        lines.append(f"{column.task}: the floors were measured on test, {column.floors_of}.")
    return lines


def _about_runs(task: str, runs: list[Record]) -> list[str]:
    """What their accuracies and times must be read with."""
    lines = []
    if any(run.config["task"]["data"].get("dev") == "test" for run in runs):
        lines.append(f"{task}: dev is the test split, as in the base code: the weights were chosen on test examples.")
    again = sum(len(run.sessions) > 1 for run in runs)
    if again:
        lines.append(f"{task}: {again} of {len(runs)} runs were stopped and taken up again.")
    commits = sorted({f"{str(run.code.commit)[:8]}{' with changes' if run.code.dirty else ''}" for run in runs})
    if len(commits) > 1:
        lines.append(f"{task}: the runs are of several commits: {', '.join(commits)}.")
    if beside := sum(bool(run.concurrent) for run in runs):
        lines.append(f"{task}: {beside} of {len(runs)} runs had others beside them: their times are no race.")
    return lines


def _gaps(column: Column) -> list[str]:
    """Ours against the paper's, as far as the sizes of the test sets can tell."""
    gaps = {
        row: (100 * gap, 100 * cell.gap_low, 100 * cell.gap_high)
        for row, cell in column.cells.items()
        if (gap := cell.gap("accuracy")) is not None and cell.gap_low is not None and cell.gap_high is not None
    }
    if not gaps:
        return []
    told = ", ".join(f"{row} {gap:+.2f} ({_range(low, high, '+.2f')})" for row, (gap, low, high) in gaps.items())
    beyond = ", ".join(row for row, (_, low, high) in gaps.items() if not low <= 0 <= high)
    return [
        f"{column.task}: accuracy minus the paper's, with 95% by our interval and the size of its test set: {told}; "
        f"beyond that noise: {beyond or 'none'}."
    ]


def _noise(column: Column) -> list[str]:
    """The A/A pair, and what two runs of one model differ by."""
    lines, noise = [], column.noise
    if not noise:
        lines.append(
            f"{column.task}: no model has two seeds that differ: the noise of training is not known, "
            "and p is without it."
        )
    else:
        twins = (
            f"{TWINS[0]} at one seed minus {TWINS[1]} at another, which is the same model: {100 * noise.twins:.2f}, at "
            f"most {100 * (noise.largest or 0):.2f}, in {noise.pairs} pairs"
            if noise.twins is not None
            else f"no pair of {TWINS[0]} and {TWINS[1]} at different seeds"
        )
        lines.append(
            f"{column.task}: the noise floor is {100 * noise.floor:.2f} points, the root mean square difference of two "
            f"runs of one model (all models pooled: {100 * noise.pooled:.2f}, {noise.degrees} degrees of freedom; "
            f"{twins})."
        )
    if column.twins_differ:
        lines.append(
            f"{column.task}: WARNING: {TWINS[0]} and {TWINS[1]} are the same model, but have other outcomes at seed "
            f"{', '.join(map(str, column.twins_differ))}: another commit, or arithmetic that is not deterministic."
        )
    return lines


def latex(tables: list[Table]) -> str:
    """One table environment each, for booktabs: the tasks one below the other, as in Markdown, with fewer columns."""
    return "\n".join("\n".join(_latex(table)) for table in tables)


def _latex(table: Table) -> list[str]:
    lines = [
        "% made by `make table`; needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\scriptsize\setlength{\tabcolsep}{3pt}",
    ]
    for number, column in enumerate(table.columns):
        shown = frame(column)
        shown = shown[[name for name in shown if not re.match("minus|.+raced", str(name))]]
        if not number:
            lines += [rf"\begin{{tabular}}{{l{'r' * shown.shape[1]}}}", r"\toprule"]
        else:
            lines.append(r"\midrule")
        lines.append(" & ".join(map(tex, [column.task, *shown])) + r" \\ \midrule")
        lines += [" & ".join(map(tex, [row, *values])) + r" \\" for row, *values in shown.itertuples(name=None)]
    told = [line for column in table.columns for line in _notes(column)]
    caption = " ".join([title(table) + ".", *verdict(table), LEGEND, *told])
    return [*lines, r"\bottomrule", r"\end{tabular}", rf"\caption{{{tex(caption)}}}", r"\end{table}", ""]


def tex(text: str) -> str:
    """Markdown's marks and TeX's own characters, as TeX."""
    text = text.translate(TEX)
    for mark, command in (("**", "textbf"), ("*", "textit")):
        parts = text.split(mark)
        if len(parts) % 2 == 0:
            continue
        text = "".join(part if i % 2 == 0 else f"\\{command}{{{part}}}" for i, part in enumerate(parts))
    return text


def csv(tables: list[Table]) -> str:
    """A line for each cell and each floor, for further use; accuracies as shares."""
    lines = [line for number, table in enumerate(tables, 1) for line in _lines(number, table)]
    return pd.DataFrame(lines).to_csv(index=False, lineterminator="\n", float_format="%.9g")


def _lines(number: int, table: Table) -> list[dict[str, Any]]:
    lines = []
    shared = {"table": number, "machine": table.machine, "conditions": "; ".join(table.conditions)}
    for column, cell in table.cells:
        line: dict[str, Any] = shared | {"task": column.task, "row": cell.row, "model": cell.model}
        line |= {"seeds": " ".join(str(run.seed) for run in cell.runs)}
        line |= {"train_seconds": cell.seconds, "peak_bytes": cell.peak_bytes}
        for measure in MEASURES:
            ours = getattr(cell, measure)
            line[measure], line[f"{measure}_spread"] = (ours.value, ours.spread) if ours else (None, None)
            line[f"{measure}_paper"], line[f"{measure}_gap"] = cell.paper.get(measure), cell.gap(measure)
        line |= {"accuracy_gap_low": cell.gap_low, "accuracy_gap_high": cell.gap_high}
        line |= {"accuracy_low": cell.low, "accuracy_high": cell.high, "beats_floor": cell.beats_floor}
        line |= {f"versus_{part.name}": getattr(cell.versus, part.name, None) for part in fields(Comparison)}
        line |= {"p_holm": cell.p_holm, "supported": cell.supported}
        line |= {f"raced_{part.name}": getattr(cell.race, part.name, None) for part in fields(Race)}
        lines.append(line | {"runs": " ".join(run.run_id for run in cell.runs)})
    for column in table.columns:
        for name, accuracy in column.floors.items():
            lines.append(shared | {"task": column.task, "row": f"floor: {name}", "accuracy": accuracy})
    return lines


def to_json(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """Everything, with the ids of the runs in place of the runs."""

    def plain(thing: Any) -> Any:
        if isinstance(thing, Record):
            return thing.run_id
        told = (
            {"title": title(thing), "verdict": verdict(thing), "notes": notes(thing)}
            if isinstance(thing, Table)
            else {}
        )
        return told | {part.name: getattr(thing, part.name) for part in fields(thing)}

    failed = {run.run_id: f"{run.status}: {run.message}" for run in found if run.status != "ok"}
    whole = {"level": LEVEL, "tables": tables, "failed": dict(sorted(failed.items())), "left_out": problems}
    return json.dumps(whole, indent=1, default=plain) + "\n"
