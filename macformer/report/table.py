"""Table 2 as Markdown, LaTeX, CSV and JSON: ours beside the paper's, and in two sentences what it supports."""

import csv
import io
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from statistics import mean
from typing import Any

from macformer.harness.progress import duration, mebibytes
from macformer.harness.record import Record
from macformer.report.cells import BASELINE, SEEDS, TASKS, Cell, Column, Measure, Race, Table
from macformer.report.statistics import LEVEL, TWINS, Comparison

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
SETTINGS = ["model", "besides", "data", "test accuracy", "95% interval", "best floor", "best dev accuracy", "time"]
Lines = list[list[str]]  # the rows of a table, the first with its headers


def formats(tables: list[Table], found: list[Record], problems: list[str]) -> dict[str, str]:
    """The text of each file, by its ending."""
    return {
        "md": markdown(tables, found, problems),
        "tex": "\n".join(line for table in tables for line in _latex(table)),
        "csv": to_csv(tables),
        "json": to_json(tables, found, problems),
    }


def markdown(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """All of them, then the runs that failed and the files that are no records."""
    parts = []
    for table in tables:  # the title is one paragraph, wrapped for the screen
        parts += ["\n".join(textwrap.wrap(f"**{title(table)}**", 110, break_long_words=False, break_on_hyphens=False))]
        parts += [_grid(lines(column)) for column in table.columns]
        parts += ["\n".join(verdict(table)), _bullets(notes(table))]
    return "\n\n".join([*parts, *_failures(found, problems), LEGEND]) + "\n"


def _grid(rows: Lines, left: int = 1) -> str:
    """A Markdown table with `left` columns of words, its source padded for the screen."""
    rows = [[text.replace("|", "\\|") for text in row] for row in rows]
    widths = [max(len(header) + 2, *map(len, texts)) for header, *texts in zip(*rows, strict=True)]
    header, *others = (
        "| " + " | ".join(f"{text:{'<' if i < left else '>'}{widths[i]}}" for i, text in enumerate(row)) + " |"
        for row in rows
    )
    rules = [":" + "-" * (width + 1) if i < left else "-" * (width + 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([header, f"|{'|'.join(rules)}|", *others])


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _failures(found: list[Record], problems: list[str]) -> list[str]:
    failed = sorted(f"{run.run_id} ended as {run.status}: {run.message}" for run in found if run.status != "ok")
    listed = {"Failed runs": failed, "Files left out": problems}
    return [f"**{heading}**\n\n{_bullets(sentences)}" for heading, sentences in listed.items() if sentences]


def settings(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """A row for each model in each setting: for sweeps over settings, of which each would be a table of its own."""
    ran, parts = [(table, column) for table in tables for column in table.columns if column.runs], []
    for task in dict.fromkeys([*TASKS, *(column.task for _, column in ran)]):
        placed = [([*column.conditions, f"on {table.machine}"], column) for table, column in ran if column.task == task]
        if not placed:
            continue
        common = [change for change in placed[0][0] if all(change in changes for changes, _ in placed)]
        rows = [SETTINGS]
        for changes, column in placed:
            own = "; ".join(change.partition(" (paper: ")[0] for change in changes if change not in common)
            floor = max(column.floors, key=column.floors.__getitem__)
            best = f"{100 * column.floors[floor]:.2f} ({floor})"
            for cell in (cell for cell in column.cells.values() if cell.runs):
                accuracy, interval = COLUMNS["accuracy"](cell), COLUMNS["95% interval"](cell)
                dev = f"{mean(100 * run.quality.dev_accuracy for run in cell.runs if run.quality):.2f}"
                took = duration(cell.seconds or 0)
                rows.append([cell.row, own or "-", _data(column), accuracy, interval, best, dev, took])
        which = "none" if all(column.conditions for _, column in placed) else "not all"
        head = f"{task}: settings side by side, {which} of them the paper's protocol. In all: "
        about = [f"{task}: {fact}" for fact in _about_runs([run for _, column in placed for run in column.runs])]
        parts += [f"**{head}{'; '.join(common) or '-'}**", _grid(rows, left=3), *([_bullets(about)] if about else [])]
    parts = parts or ["**Settings side by side: no runs yet**"]
    return "\n\n".join([*parts, *_failures(found, problems), LEGEND_OF_SETTINGS]) + "\n"


def _data(column: Column) -> str:
    data = column.runs[0].data
    return f"{data.source} {data.fingerprint[:8]}"


def title(table: Table) -> str:
    """All that sets this table apart."""
    if not table.machine:
        return "Table 2, the paper's protocol: no runs yet"
    data = ", ".join(f"{column.task} {_data(column)}" for column in table.columns if column.runs)
    if not table.conditions:
        return f"Table 2, the paper's protocol, on {table.machine}; data: {data}"
    return f"Table 2 on {table.machine}, data: {data}, NOT the paper's protocol: {'; '.join(table.conditions)}"


def verdict(table: Table) -> list[str]:
    """What the table supports, and what it does not: a sentence each."""
    compared = [(column, cell, cell.versus) for column, cell in table.cells if cell.versus]
    differences = [
        f"on {column.task} {cell.row} is {'better' if versus.difference > 0 else 'worse'} than the Transformer "
        f"by {abs(100 * versus.difference):.2f} points ({_range(versus, '+.2f')})"
        for column, cell, versus in compared
        if cell.supported
    ]
    nobody = "any difference of ours, as there are no runs of the Transformer and another model to compare"
    open_questions = [] if compared else [nobody]
    if rest := [(column, cell) for column, cell, _ in compared if not cell.supported]:
        single = sum(min(len(cell.runs), len(column.cells[BASELINE].runs)) < 2 for column, cell in rest)
        why = f" ({single} of them with one seed, which supports none)" if single else ""
        which = f"{len(rest)}{' other' * (len(rest) < len(compared))} cell{'s' * (len(rest) > 1)}"
        open_questions.append(f"the difference from the Transformer in {which}{why}")
    for whose, flag in (("our", "beats_floor"), ("the paper's", "paper_beats_floor")):
        judged = [(column.task, getattr(cell, flag)) for column, cell in table.cells if getattr(cell, flag) is not None]
        low, of = Counter(task for task, beats in judged if not beats), Counter(task for task, _ in judged)
        if low:
            tasks = ", ".join(f"{low[task]} of {of[task]} on {task}" for task in low)
            open_questions.append(f"that {whose} accuracies marked {DAGGER} take more than a cheap predictor ({tasks})")
    nothing = "nothing on accuracy, neither a difference from the Transformer nor that there is none"
    return [
        f"**Supported:** {'; '.join(differences) or nothing}.",
        f"**Not supported:** {'; '.join(open_questions) or 'nothing else was compared'}.",
    ]


def lines(column: Column, without: Sequence[str] = ()) -> Lines:
    """A task as text: a row for each model and each floor."""
    raced = any(cell.race for cell in column.cells.values())
    shown = [header for header in COLUMNS if header not in without and (raced or not header.endswith("raced"))]
    rows = [[row, *(COLUMNS[header](cell) or "-" for header in shown)] for row, cell in column.cells.items()]
    for name, share in column.floors.items():
        rows.append([f"floor: {name}", *(f"{100 * share:.2f}" * (header == "accuracy") for header in shown)])
    return [[column.task, *shown], *rows]


# Header -> text of a cell; none: "-". Spaces keep equal headers apart.
COLUMNS: dict[str, Callable[[Cell], Any]] = {
    "time": lambda cell: cell.time and _mean(cell.time),
    "paper (gap)": lambda cell: _paper(cell, "time"),
    "time, raced": lambda cell: cell.race and f"{cell.race.time:.3f} ({_range(cell.race, '.3f', 1)})",
    "memory": lambda cell: cell.memory and _mean(cell.memory),
    "paper (gap) ": lambda cell: _paper(cell, "memory"),
    "memory, raced": lambda cell: cell.race and f"{cell.race.memory:.3f}",
    "accuracy": lambda cell: cell.accuracy and _accuracy(cell),
    "95% interval": lambda cell: cell.accuracy and _range(cell),
    "paper (gap)  ": lambda cell: _paper(cell, "accuracy"),
    "minus transformer (95%)": lambda cell: (
        cell.versus and f"{100 * cell.versus.difference:+.2f} ({_range(cell.versus, '+.2f')})"
    ),
    "p, Holm": lambda cell: None if cell.p_holm is None else f"{cell.p_holm:.4f}",
}
WIDE = ("time, raced", "memory, raced", "minus transformer (95%)")  # LaTeX has no room for them


def _mean(measure: Measure, scale: int = 1, digits: int = 3) -> str:
    text = f"{scale * measure.value:.{digits}f}"
    return text if measure.spread is None else f"{text} ± {scale * measure.spread:.{digits}f}"


def _range(of: Any, form: str = ".2f", scale: int = 100) -> str:
    """Of a cell, a comparison or a race."""
    return f"{scale * of.low:{form}} to {scale * of.high:{form}}"


def _accuracy(cell: Any) -> str:
    mark = ("**" if cell.versus.difference > 0 else "*") if cell.supported else ""
    dagger = "" if cell.beats_floor else f" {DAGGER}"
    return f"{mark}{_mean(cell.accuracy, 100, 2)} (n={cell.accuracy.seeds}){mark}{dagger}"


def _paper(cell: Cell, measure: str) -> str | None:
    """The paper's value, and the gap if there is one of ours."""
    if measure not in cell.paper:
        return None
    scale, digits = (100, 2) if measure == "accuracy" else (1, 3)
    dagger = f" {DAGGER}" if measure == "accuracy" and cell.paper_beats_floor is False else ""
    text, gap = f"{scale * cell.paper[measure]:.{digits}f}{dagger}", cell.gap(measure)
    return text if gap is None else f"{text} ({scale * gap:+.{digits}f})"


def notes(table: Table) -> list[str]:
    """What one must know to read the table, a line each."""
    made = _facts(table)
    if rounds := [cell.race.rounds for _, cell in table.cells if cell.race]:
        made.append(
            f"raced: training steps of all models in turn on the same batches in one process, on {table.race_machine}; "
            f"median (range) of {max(rounds)} rounds (`make bench`, results/bench/models.md)."
        )
    made += [f"raced: {line}" for column in table.columns for line in column.race_notes]
    if table.conditions:
        models = ",".join(dict.fromkeys(run.model for column in table.columns for run in column.runs))
        tasks, seeds = ",".join(column.task for column in table.columns), ",".join(map(str, SEEDS))
        made.append(
            "**This is a shortened or changed protocol, not the paper's.** The full one (11,000 steps): "
            f"`python train.py -m model={models} task={tasks} seed={seeds}`."
        )
    return [*made, *(f"to fill the empty cells of {c.task}: `{command}`" for c in table.columns for command in c.fill)]


def _facts(table: Table) -> list[str]:
    """Of each task."""
    return [f"{column.task}: {fact}" for column in table.columns for fact in _about(column)]


def _about(column: Column) -> Iterator[str]:
    if runs := column.runs:
        sizes = " / ".join(f"{count:,}" for count in runs[0].data.examples.values())
        # Without the Transformer there are no ratios: then what each row took.
        ran: dict[str, Any] = {row: cell for row, cell in column.cells.items() if cell.runs}
        ran = {"the Transformer": ran[BASELINE]} if BASELINE in ran else ran
        took = [
            f"{row} took {duration(cell.seconds)} and {mebibytes(int(cell.peak_bytes))}" for row, cell in ran.items()
        ]
        yield f"{runs[0].data.source} data, {sizes} examples; {', '.join(took)}."
        yield from _about_runs(runs)
        if any(len(cell.runs) == 1 for cell in column.cells.values()):
            yield "with one seed the interval covers the test set, not the noise of training."
        yield from _about_noise(column)
    gaps: list[Any] = [cell for cell in column.cells.values() if cell.gap_low is not None]
    if gaps:
        points = [(cell.row, *(100 * x for x in (cell.gap("accuracy"), cell.gap_low, cell.gap_high))) for cell in gaps]
        listed = ", ".join(f"{row} {gap:+.2f} ({low:+.2f} to {high:+.2f})" for row, gap, low, high in points)
        beyond = ", ".join(cell.row for cell in gaps if not cell.gap_low <= 0 <= cell.gap_high)
        yield (
            f"accuracy minus the paper's, with 95% by our interval and the size of its test set: {listed}; "
            f"beyond that noise: {beyond or 'none'}."
        )
    if column.floors:
        yield f"the floors were measured on test, {column.floors_of}."


def _about_runs(runs: list[Record]) -> Iterator[str]:
    """What their accuracies and times must be read with."""
    if any(run.config["task"]["data"].get("dev") == "test" for run in runs):
        yield "dev is the test split, as in the base code: the weights were chosen on test examples."
    if again := sum(len(run.sessions) > 1 for run in runs):
        yield f"{again} of {len(runs)} runs were stopped and taken up again."
    commits = sorted({f"{str(run.code.commit)[:8]}{' with changes' if run.code.dirty else ''}" for run in runs})
    if len(commits) > 1:
        yield f"the runs are of several commits: {', '.join(commits)}."
    if beside := sum(bool(run.concurrent) for run in runs):
        yield f"{beside} of {len(runs)} runs had others beside them: their times are no race."


def _about_noise(column: Column) -> Iterator[str]:
    """The A/A pair, and what two runs of one model differ by."""
    one, other = TWINS
    if noise := column.noise:
        twins = f"no pair of {one} and {other} at different seeds"
        if noise.twins is not None:
            twins = (
                f"{one} at one seed minus {other} at another, which is the same model: {100 * noise.twins:.2f}, at "
                f"most {100 * (noise.largest or 0):.2f}, in {noise.pairs} pairs"
            )
        yield (
            f"the noise floor is {100 * noise.floor:.2f} points, the root mean square difference of two runs of one "
            f"model (all models pooled: {100 * noise.pooled:.2f}, {noise.degrees} degrees of freedom; {twins})."
        )
    else:
        yield "no model has two seeds that differ: the noise of training is not known, and p is without it."
    if column.twins_differ:
        yield (
            f"WARNING: {one} and {other} are the same model, but have other outcomes at seed "
            f"{', '.join(map(str, column.twins_differ))}: another commit, or arithmetic that is not deterministic."
        )


def _latex(table: Table) -> Iterator[str]:
    """A table environment for booktabs: the tasks one below the other, as in Markdown, with fewer columns."""
    yield "% made by `make table`; needs \\usepackage{booktabs}"
    yield r"\begin{table}"
    yield r"\centering\scriptsize\setlength{\tabcolsep}{3pt}"
    for number, column in enumerate(table.columns):
        header, *rows = (" & ".join(map(tex, row)) + r" \\" for row in lines(column, without=WIDE))
        yield r"\midrule" if number else rf"\begin{{tabular}}{{l{'r' * header.count('&')}}}" + "\n" + r"\toprule"
        yield rf"{header} \midrule"
        yield from rows
    yield r"\bottomrule"
    yield r"\end{tabular}"
    yield rf"\caption{{{tex(' '.join([title(table) + '.', *verdict(table), LEGEND, *_facts(table)]))}}}"
    yield r"\end{table}"
    yield ""


def tex(text: str) -> str:
    """Markdown's marks and TeX's own characters, as TeX."""
    text = text.translate(TEX)
    for mark, command in (("**", "textbf"), ("*", "textit")):
        parts = text.split(mark)
        if len(parts) % 2:
            text = "".join(part if i % 2 == 0 else f"\\{command}{{{part}}}" for i, part in enumerate(parts))
    return text


def to_csv(tables: list[Table]) -> str:
    """A line for each cell and each floor, for further use; accuracies as shares."""
    rows: list[dict[str, Any]] = []
    for number, table in enumerate(tables, 1):
        shared = {"table": number, "machine": table.machine, "conditions": "; ".join(table.conditions)}
        for column, cell in table.cells:
            row: dict[str, Any] = shared | {"task": column.task, "row": cell.row, "model": cell.model}
            row |= {"seeds": " ".join(str(run.seed) for run in cell.runs)}
            row |= {"train_seconds": cell.seconds, "peak_bytes": cell.peak_bytes}
            for measure in ("time", "memory", "accuracy"):
                ours = getattr(cell, measure)
                row |= {measure: ours and ours.value, f"{measure}_spread": ours and ours.spread}
                row |= {f"{measure}_paper": cell.paper.get(measure), f"{measure}_gap": cell.gap(measure)}
            row |= {f"accuracy_{name}": getattr(cell, name) for name in ("gap_low", "gap_high", "low", "high")}
            row |= {"beats_floor": cell.beats_floor}
            row |= {f"versus_{part.name}": getattr(cell.versus, part.name, None) for part in fields(Comparison)}
            row |= {"p_holm": cell.p_holm, "supported": cell.supported}
            row |= {f"raced_{part.name}": getattr(cell.race, part.name, None) for part in fields(Race)}
            rows.append(row | {"runs": " ".join(run.run_id for run in cell.runs)})
        for column in table.columns:
            for name, share in column.floors.items():
                rows.append(shared | {"task": column.task, "row": f"floor: {name}", "accuracy": share})
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.9g}" if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()


def to_json(tables: list[Table], found: list[Record], problems: list[str]) -> str:
    """Everything, with the ids of the runs in place of the runs."""

    def plain(thing: Any) -> Any:
        if isinstance(thing, Record):
            return thing.run_id
        texts = {"title": title, "verdict": verdict, "notes": notes} if isinstance(thing, Table) else {}
        made = {name: text(thing) for name, text in texts.items()}
        return made | {part.name: getattr(thing, part.name) for part in fields(thing)}

    failed = {run.run_id: f"{run.status}: {run.message}" for run in found if run.status != "ok"}
    whole = {"level": LEVEL, "tables": tables, "failed": dict(sorted(failed.items())), "left_out": problems}
    return json.dumps(whole, indent=1, default=plain) + "\n"
