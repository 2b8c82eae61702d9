"""Table 2 as Markdown and CSV: ours beside the paper's, and in two sentences what it supports."""

import csv
import io
import textwrap
from collections import defaultdict
from dataclasses import fields
from statistics import mean
from types import SimpleNamespace
from typing import Any

from macformer.harness.progress import duration, mebibytes
from macformer.harness.record import Record
from macformer.report.cells import BASELINE, COSTS, SEEDS, TASKS, WORDS, Cell, Column, Measure, Table
from macformer.report.statistics import TWINS, Comparison, Noise

DAGGER, NOTES = "†", WORDS["notes"]
SETTINGS = ["model", "besides", "data", "test accuracy", "95% interval", "best floor", "best dev accuracy", "time"]
Lines = list[list[str]]  # the rows of a table, the first with its headers


def markdown(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """All of them, then the runs that failed and the files that are no records."""
    parts: list[str | list[str]] = []
    for table in tables:
        heading = f"**{title(table)}{': ' * bool(table.conditions)}{'; '.join(table.conditions)}**"
        parts.append(textwrap.fill(heading, 110, break_long_words=False, break_on_hyphens=False))
        parts += [*(_grid(lines(column)) for column in table.columns), "\n".join(verdict(table)), notes(table)]
    return _document(parts, found, problems, "table")


def settings(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """A row for each model in each setting: for sweeps over settings, of which each would be a table of its own."""
    parts: list[str | list[str]] = []
    placed = defaultdict(list)  # task -> its columns, with what differs from the paper's protocol
    for machine, column in ((table.machine, column) for table in tables for column in table.columns if column.runs):
        placed[column.task].append((column, [*column.conditions, f"on {machine}"]))
    for task in sorted(placed, key=[*TASKS, *placed].index):
        columns, rows = placed[task], [SETTINGS]
        common = [change for change in columns[0][1] if all(change in changes for _, changes in columns)]
        for column, changes in columns:
            own = "; ".join(change.partition(" (paper: ")[0] for change in changes if change not in common) or "-"
            best = f"{100 * column.floors['test_accuracy'][column.best_floor]:.2f} ({column.best_floor})"
            for cell in column.ran:
                accuracy, interval = (_texts(cell)[header] for header in ("accuracy", "95% interval"))
                dev = f"{mean(100 * run.quality.dev_accuracy for run in cell.runs if run.quality):.2f}"
                took = duration(mean(cell.costs["time"]))
                rows.append([cell.row, own, _data(column), accuracy, interval, best, dev, took])
        which = "none" if all(column.conditions for column, _ in columns) else "not all"
        head = f"{task}: settings side by side, {which} of them the paper's protocol. In all: "
        about = [f"{task}: {fact}" for fact in _about_runs([run for column, _ in columns for run in column.runs])]
        parts += [f"**{head}{'; '.join(common) or '-'}**", _grid(rows, left=3), about]
    return _document(parts or ["**Settings side by side: no runs yet**"], found, problems, "settings")


def _document(parts: list[str | list[str]], found: list[Record], problems: list[str], legend: str) -> str:
    """Paragraphs and bullets, without those that are empty."""
    failed = sorted(f"{run.run_id} ended as {run.status}: {run.message}" for run in found if run.status != "ok")
    for heading, sentences in (("Failed runs", failed), ("Files left out", problems)):
        parts += [f"**{heading}**", sentences] * bool(sentences)
    parts.append(WORDS["legend"][legend])
    texts = [part if isinstance(part, str) else "\n".join(f"- {each}" for each in part) for part in parts]
    return "\n\n".join(filter(None, texts)) + "\n"


def _grid(rows: Lines, left: int = 1) -> str:
    """A Markdown table with `left` columns of words, its source padded for the screen."""
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        texts = [text.replace("|", "\\|") for text in column]
        width, align = max(len(texts[0]) + 2, *map(len, texts)), "<" if place < left else ">"
        rule = "-" * (width + 1)
        header, *others = (f" {text:{align}{width}} " for text in texts)
        columns.append([header, f":{rule}" if place < left else f"{rule}:", *others])
    return "\n".join(f"|{'|'.join(row)}|" for row in zip(*columns, strict=True))


def title(table: Table) -> str:
    """All that sets this table apart, but for the list of its conditions."""
    if not table.machine:
        return "Table 2, the paper's protocol: no runs yet"
    data = ", ".join(f"{column.task} {_data(column)}" for column in table.columns if column.runs)
    if not table.conditions:
        return f"Table 2, the paper's protocol, on {table.machine}; data: {data}"
    return f"Table 2 on {table.machine}, data: {data}, NOT the paper's protocol"


def _data(column: Column) -> str:
    data = column.runs[0].data
    return f"{data.source} {data.fingerprint[:8]}"


def verdict(table: Table) -> list[str]:
    """What the table supports, and what it does not: a sentence each."""
    words, supported, open_questions = WORDS["verdict"], [], []
    for column, cell, versus in table.compared:
        if cell.supported:
            better = "better" if versus.difference > 0 else "worse"
            which = {"task": column.task, "row": cell.row, "better": better, "by": 100 * abs(versus.difference)}
            supported.append(_show(words["difference"], versus, 100, **which))
    if rest := [column.pairs(cell) for column, cell, _ in table.compared if not cell.supported]:
        cells = f"{len(rest)}{' other' * bool(supported)} cell{'s' * (len(rest) > 1)}"
        single = f" ({rest.count(1)} of them with one seed, which supports none)" if 1 in rest else ""
        open_questions = [words["rest"].format(cells=cells + single)]
    elif not supported:
        open_questions = [words["no_runs"]]
    for whose, kind in (("our", "ours"), ("the paper's", "papers_own")):
        marked = []
        for column in table.columns:
            measures = [getattr(cell, kind) for cell in column.cells.values()]
            beats = [each["accuracy"].beats_floor for each in measures if each]
            if False in beats:
                marked.append(f"{beats.count(False)} of {len(beats)} on {column.task}")
        if marked:
            open_questions.append(words["cheap"].format(whose=whose, marked=", ".join(marked)))
    return [
        f"**Supported:** {'; '.join(supported) or words['no_difference']}.",
        f"**Not supported:** {'; '.join(open_questions) or 'nothing else was compared'}.",
    ]


def lines(column: Column) -> Lines:
    """A task as text: a row for each model and each floor."""
    raced = any(cell.raced for cell in column.cells.values())
    rows = {row: _texts(cell) for row, cell in column.cells.items()}
    headers = [header for header in rows[BASELINE] if raced or not header.endswith("raced")]
    texts = [[row, *(shown[header] or "-" for header in headers)] for row, shown in rows.items()]
    for name, share in column.floors["test_accuracy"].items():
        texts.append([f"floor: {name}", *(f"{100 * share:.2f}" * (header == "accuracy") for header in headers)])
    return [[column.task, *headers], *texts]


def _texts(cell: Cell) -> dict[str, str]:
    """Header -> what a cell has there; empty: nothing. Spaces keep equal headers apart."""
    accuracy, versus = cell.ours.get("accuracy"), cell.versus
    mark = ("**" if versus.difference > 0 else "*") if versus and cell.supported else ""
    return {
        "time": _mean(cell.ours.get("time")),
        "paper (gap)": _paper(cell, "time"),
        "time, raced": _show("{value:.3f} ({low:.3f} to {high:.3f})", cell.raced.get("time")),
        "memory": _mean(cell.ours.get("memory")),
        "paper (gap) ": _paper(cell, "memory"),
        "memory, raced": _show("{value:.3f}", cell.raced.get("memory")),
        "accuracy": f"{mark}{_mean(accuracy, 100, 2)} (n={accuracy.n}){mark}{_dagger(accuracy)}" if accuracy else "",
        "95% interval": _show("{low:.2f} to {high:.2f}", accuracy, 100),
        "paper (gap)  ": _paper(cell, "accuracy", 100, 2),
        "minus transformer (95%)": _show("{difference:+.2f} ({low:+.2f} to {high:+.2f})", versus, 100),
        "p, Holm": "" if cell.p_holm is None else f"{cell.p_holm:.4f}",
    }


def _show(form: str, numbers: Measure | Comparison | Noise | None, scale: int = 1, **others: Any) -> str:
    """Fill the form with the fields of `numbers`, floats scaled, and with `others`; without numbers it is empty."""
    if not numbers:
        return ""
    scaled = {name: scale * value if isinstance(value, float) else value for name, value in vars(numbers).items()}
    return form.format(**scaled, **others)


def _mean(measure: Measure | None, scale: int = 1, digits: int = 3) -> str:
    spread = f" ± {{spread:.{digits}f}}" if measure and measure.spread is not None else ""
    return _show(f"{{value:.{digits}f}}{spread}", measure, scale)


def _paper(cell: Cell, name: str, scale: int = 1, digits: int = 3) -> str:
    """The paper's value, and the gap if there is one of ours."""
    paper, gap = cell.paper.get(name), cell.gap.get(name)
    return f"{_mean(paper, scale, digits)}{_dagger(paper)}{_show(f' ({{value:+.{digits}f}})', gap, scale)}"


def _dagger(measure: Measure | None) -> str:
    return f" {DAGGER}" if measure and measure.beats_floor is False else ""


def notes(table: Table) -> list[str]:
    """What one must know to read the table, a line each."""
    told = [f"{column.task}: {fact}" for column in table.columns for fact in _about(column)]
    if rounds := [cell.raced["time"].n for _, cell in table.cells if cell.raced]:
        told.append(NOTES["raced"].format(machine=table.race_machine, rounds=max(rounds)))
    told += [f"raced: {line}" for column in table.columns for line in column.race_notes]
    if table.conditions:
        models = ",".join(dict.fromkeys(run.model for column in table.columns for run in column.runs))
        tasks, seeds = ",".join(column.task for column in table.columns), ",".join(map(str, SEEDS))
        told.append(NOTES["changed"].format(models=models, tasks=tasks, seeds=seeds))
    return [*told, *(f"to fill the empty cells of {c.task}: `{command}`" for c in table.columns for command in c.fill)]


def _about(column: Column) -> list[str]:
    """How a task was run, and how its accuracies compare with the noise, the paper's and the floors."""
    told, reached = [], column.floors["test_accuracy"]
    if runs := column.runs:
        sizes = " / ".join(f"{count:,}" for count in runs[0].data.examples.values())
        # Without the Transformer there are no ratios: then what each row took.
        ran = {"the Transformer": column.cells[BASELINE]} if column.cells[BASELINE].runs else column.cells
        means = {row: map(mean, cell.costs.values()) for row, cell in ran.items() if cell.runs}
        took = (f"{row} took {duration(time)} and {mebibytes(int(memory))}" for row, (time, memory) in means.items())
        told = [NOTES["runs"].format(source=runs[0].data.source, sizes=sizes, took=", ".join(took)), *_about_runs(runs)]
        told += [NOTES["one_seed"]] * any(len(cell.runs) == 1 for cell in column.ran)
        told += _about_noise(column)
    if gaps := {row: cell.gap["accuracy"] for row, cell in column.cells.items() if cell.gap}:
        listed = ", ".join(_show(NOTES["gap"], gap, 100, row=row) for row, gap in gaps.items())
        beyond = ", ".join(row for row, gap in gaps.items() if not gap.low <= 0 <= gap.high) or "none"
        told.append(NOTES["gaps"].format(gaps=listed, beyond=beyond))
    if reached:
        best, examples = max(reached.values()), column.floors["test_examples"]
        error = 100 * (best * (1 - best) / examples) ** 0.5
        told.append(NOTES["floors"].format(examples=examples, error=error))
    return told


def _about_runs(runs: list[Record]) -> list[str]:
    """What their accuracies and times must be read with."""
    commits = sorted({f"{str(run.code.commit)[:8]}{' with changes' if run.code.dirty else ''}" for run in runs})
    applies = {
        "test_as_dev": any(run.config["task"]["data"].get("dev") == "test" for run in runs),
        "resumed": sum(len(run.sessions) > 1 for run in runs),
        "commits": len(commits) > 1,
        "concurrent": sum(bool(run.concurrent) for run in runs),
    }
    figures = applies | {"runs": len(runs), "commits": ", ".join(commits)}
    return [NOTES[name].format(**figures) for name, how_many in applies.items() if how_many]


def _about_noise(column: Column) -> list[str]:
    """The A/A pair, and what two runs of one model differ by."""
    told = [NOTES["no_noise"]]
    if noise := column.noise:
        twins = _show(NOTES["no_twins" if noise.twins is None else "twins"], noise, 100)
        told = [_show(NOTES["noise"], noise, 100, of_twins=twins)]
    first, second = ({run.seed: run.quality and run.quality.correct for run in column.cells[t].runs} for t in TWINS)
    if differ := [str(seed) for seed, correct in first.items() if correct != second.get(seed, correct)]:
        told.append(NOTES["twins_differ"].format(seeds=", ".join(differ)))
    return told


def to_csv(tables: list[Table]) -> str:
    """A line for each cell and each floor, for further use; accuracies as shares."""
    rows: list[dict[str, Any]] = []
    nothing: Any = SimpleNamespace(**dict.fromkeys(part.name for part in fields(Measure)))
    for number, table in enumerate(tables, 1):
        shared = {"table": number, "machine": table.machine, "conditions": "; ".join(table.conditions)}
        for column, cell in table.cells:
            row: dict[str, Any] = shared | {"task": column.task, "row": cell.row, "model": cell.model}
            row["seeds"] = " ".join(str(run.seed) for run in cell.runs)
            row["train_seconds"], row["peak_bytes"] = (mean(each) if each else None for each in cell.costs.values())
            for name in (*COSTS, "accuracy"):
                ours, paper, gap = (each.get(name, nothing) for each in (cell.ours, cell.paper, cell.gap))
                row |= {name: ours.value, f"{name}_spread": ours.spread}
                row |= {f"{name}_paper": paper.value, f"{name}_gap": gap.value}
            row |= {"accuracy_gap_low": gap.low, "accuracy_gap_high": gap.high, "accuracy_low": ours.low}
            row |= {"accuracy_high": ours.high, "beats_floor": ours.beats_floor}
            row |= {f"versus_{part.name}": getattr(cell.versus, part.name, None) for part in fields(Comparison)}
            row |= {"p_holm": cell.p_holm, "supported": cell.supported}
            time, memory = (cell.raced.get(cost, nothing) for cost in COSTS)
            row |= {"raced_time": time.value, "raced_low": time.low, "raced_high": time.high, "raced_rounds": time.n}
            rows.append(row | {"raced_memory": memory.value, "runs": " ".join(run.run_id for run in cell.runs)})
        for column in table.columns:
            for name, share in column.floors["test_accuracy"].items():
                rows.append(shared | {"task": column.task, "row": f"floor: {name}", "accuracy": share})
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.9g}" if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()
