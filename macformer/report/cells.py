"""Run records -> the cells of Table 2, and what they can carry.

Records are only put into one table if they ran under the same conditions. What differs from the paper's protocol is in
the table's title; a model with a changed key is a row of its own.
"""

import hashlib
import json
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np

from macformer.harness import record as records
from macformer.harness.record import Record
from macformer.report import statistics
from macformer.report.statistics import LEVEL, TWINS, Comparison, Noise, Outcomes

ROOT = Path(__file__).parent.parent.parent
PAPER = json.loads((ROOT / "results" / "paper.json").read_text())
MODELS = tuple(PAPER["accuracy"]["text"])  # in the paper's order
TASKS = tuple(PAPER["accuracy"])
BASELINE = "transformer"
MACHINE = ("device_name", "threads", "precision", "torch")
SEEDS = (0, 1, 2)  # of configs/experiment/table2.yaml


@dataclass
class Measure:
    """A mean over seeds. Time and memory are relative to the Transformer's."""

    value: float
    spread: float | None  # standard deviation; None with one seed
    seeds: int


@dataclass
class Race:
    """Of results/bench/models.json: ratios to the Transformer of steps on the same batches, in one process."""

    time: float  # median of the rounds
    low: float
    high: float
    rounds: int
    memory: float


@dataclass
class Cell:
    """One row of one task."""

    row: str  # the model's name, with its changed keys
    model: str
    runs: list[Record] = field(default_factory=list)  # by seed
    seconds: float | None = None  # means
    peak_bytes: float | None = None
    time: Measure | None = None
    memory: Measure | None = None
    accuracy: Measure | None = None  # a share, as everything here
    low: float | None = None  # of the accuracy's interval
    high: float | None = None
    beats_floor: bool | None = None  # None: no accuracy
    versus: Comparison | None = None  # the Transformer
    p_holm: float | None = None
    supported: bool = False  # is the difference one that two seeds and more, p and the noise floor allow to name?
    race: Race | None = None
    paper: dict[str, float] = field(default_factory=dict)  # measure -> the paper's value
    comparable: bool = True  # with it: is the task the paper's?
    paper_low: float | None = None  # of its accuracy's interval, by its test set alone
    paper_high: float | None = None
    paper_beats_floor: bool | None = None
    gap_low: float | None = None  # of the gap in accuracy, by the noise of ours and by the paper's test set
    gap_high: float | None = None

    def gap(self, measure: str) -> float | None:
        """Ours minus the paper's; none if the task is another one."""
        ours = getattr(self, measure)
        return ours.value - self.paper[measure] if ours and self.comparable and measure in self.paper else None


@dataclass
class Column:
    """One task of a table."""

    task: str
    conditions: list[str]  # what differs from the paper's protocol, as far as it is this task's
    cells: dict[str, Cell]  # by row
    floors: dict[str, float]  # what cheap predictors reach on test; the majority class alone if nobody measured that
    floors_of: str  # how many examples, and the standard error
    dev_floors: dict[str, float]  # the same on dev, where curves are taken; empty if nobody measured that
    noise: Noise | None
    twins_differ: list[int]  # seeds at which exp and trigh, the same model, have different outcomes
    fill: list[str]  # the commands that fill the empty cells, and those with fewer seeds than others
    race_notes: list[str]  # what could not be raced, or not as it should

    @property
    def runs(self) -> list[Record]:
        return [run for cell in self.cells.values() for run in cell.runs]


@dataclass
class Table:
    conditions: list[str]  # what differs from the paper's protocol
    machine: str | None  # None: there are no runs
    race_machine: str | None
    columns: list[Column]

    @property
    def cells(self) -> list[tuple[Column, Cell]]:
        return [(column, cell) for column in self.columns for cell in column.cells.values()]

    @property
    def full_command(self) -> str:
        """The paper's protocol for the models and tasks that are here."""
        models = dict.fromkeys(run.model for column in self.columns for run in column.runs)
        tasks, seeds = ",".join(column.task for column in self.columns), ",".join(map(str, SEEDS))
        return f"python train.py -m model={','.join(models)} task={tasks} seed={seeds}"


def load(results: Path) -> tuple[list[Record], list[str]]:
    """All records of LRA below results/runs, and one sentence for each file that is none."""
    found, problems = [], []
    for file in sorted((results / "runs").rglob("*.json")):
        try:
            record = records.read(file)
            found += [record] if isinstance(record, Record) else []
        except (OSError, ValueError) as error:
            problems.append(str(error).replace(f"{results}/", "", 1))
    return found, problems


def floors() -> list[dict[str, Any]]:
    """Of results/floors.json, if it is there."""
    file = ROOT / "results" / "floors.json"
    return json.loads(file.read_text())["floors"] if file.exists() else []


def bench() -> dict[str, Any] | None:
    """Of results/bench/models.json, if it is there."""
    file = ROOT / "results" / "bench" / "models.json"
    return json.loads(file.read_text()) if file.exists() else None


def tables(
    found: Iterable[Record], floors: list[dict[str, Any]], bench: dict[str, Any] | None, papers: bool = False
) -> list[Table]:
    """The paper's protocol first: empty if nobody ran it and there are no other runs, or `papers` asks for it.

    One table for each set of shared conditions, in which tasks as the paper has them stand side by side. So do changed
    ones if the same words made them, as trainer=cpu does of all tasks. Failed runs have no cell.
    `floors` as in results/floors.json, `bench` as in results/bench/models.json.
    """
    groups: dict[Any, dict[str, dict[Any, list[Record]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for run in sorted(found, key=lambda record: record.run_id):
        if run.status == "ok":
            shared = tuple(run.differences.shared), machine(run)
            groups[shared][run.task][own(run), run.data.fingerprint].append(run)
    made = []
    for _, by_task in sorted(groups.items(), key=lambda group: group[0]):
        side_by_side: dict[Any, dict[str, list[Record]]] = defaultdict(dict)
        for task, settings in by_task.items():
            for (changed, _), runs in sorted(settings.items(), key=lambda item: item[0]):
                # What was typed, wherever the data were.
                typed = ([word for word in run.differences.command if word[:6] != "paths."] for run in runs)
                words = tuple(min(map(sorted, typed))) if changed else ()
                place = next(place for place in count() if task not in side_by_side[bool(changed), words, place])
                side_by_side[bool(changed), words, place][task] = runs
        made += [_table(columns, floors, bench) for _, columns in sorted(side_by_side.items())]
    made.sort(key=lambda table: bool(table.conditions))  # the paper's protocol first, whatever the machine
    if not made or (papers and made[0].conditions):
        made.insert(0, _table({}, floors, bench))
    return made


def own(record: Record) -> tuple[str, ...]:
    """What is not the paper's of this run's task."""
    stand_in = [f"{record.task} on STAND-IN data, not LRA's"] * (record.data.source == "stand-in")
    return (*stand_in, *record.differences.task)


def row(record: Record) -> str:
    changed = record.differences.model
    return record.model + (f" ({', '.join(changed)})" if changed else "")


def machine(record: Record) -> str:
    environment = record.environment
    names = dict.fromkeys([*(session.device_name for session in record.sessions), environment.device_name])
    threads = f"{environment.threads} thread{'s' * (environment.threads > 1)}"
    return f"{' and '.join(names)} ({threads}, {environment.precision}, torch {environment.torch})"


def _table(columns: dict[str, list[Record]], floors: list[dict[str, Any]], bench: dict[str, Any] | None) -> Table:
    runs = [run for column in columns.values() for run in column]
    shared = [condition for run in runs for condition in run.differences.shared]
    every = [*TASKS, *sorted(columns.keys() - set(TASKS))]
    of_tasks = [condition for task in every for run in columns.get(task, []) for condition in own(run)]
    conditions = list(dict.fromkeys(shared + of_tasks))
    tasks = [task for task in every if task in columns or not conditions]
    made = [_column(task, columns.get(task, []), floors, bench) for task in tasks]
    compared = [cell for column in made for cell in column.cells.values() if cell.versus]
    for cell, p in zip(compared, statistics.holm([c.versus.p for c in compared if c.versus]), strict=True):
        cell.p_holm = p
    for column in made:
        for cell in column.cells.values():
            cell.supported = _supported(cell, column.cells[BASELINE], column.noise)
    raced = any(cell.race for column in made for cell in column.cells.values())
    race_machine = bench["environment"]["device_name"] if raced and bench else None
    return Table(conditions, machine(runs[0]) if runs else None, race_machine, made)


def _supported(cell: Cell, baseline: Cell, noise: Noise | None) -> bool:
    """May the difference from the Transformer be named? Two seeds of both, a small p, more than the noise."""
    if not (cell.versus and cell.p_holm is not None and noise):
        return False
    return (
        min(len(cell.runs), len(baseline.runs)) >= 2
        and cell.p_holm < LEVEL
        and abs(cell.versus.difference) > noise.floor
    )


def _column(task: str, runs: list[Record], floors: list[dict[str, Any]], bench: dict[str, Any] | None) -> Column:
    by_row: dict[str, dict[int, Record]] = defaultdict(dict)
    for run in runs:  # two records of one seed differ in a key that this task does not read: the first counts
        by_row[row(run)].setdefault(run.seed, run)
    race = _raced(task, runs, bench)
    raced = _races(race["arms"]) if race else {}
    cells = {name: Cell(name, name) for name in (*MODELS, *raced)}
    for name, by_seed in by_row.items():
        ordered = [by_seed[seed] for seed in sorted(by_seed)]
        cells[name] = Cell(name, ordered[0].model, ordered)
    cells = dict(sorted(cells.items(), key=lambda item: _order(item[1])))
    the_papers = measured = _floors(
        task, [f for f in floors if f["protocol"] == "paper" and f.get("whole") and f["source"] != "stand-in"]
    )
    if runs:
        data = runs[0].data
        assert data.majority is not None, "LRA has labels"
        measured = _floors(task, [floor for floor in floors if floor["fingerprint"] == data.fingerprint])
        measured = measured or {"test_examples": data.examples["test"], "test_accuracy": {"majority": data.majority}}
    known = measured.get("test_accuracy", {})
    outcomes = {name: _outcomes(cell.runs) for name, cell in cells.items() if cell.runs}
    for name, cell in cells.items():
        cell.race = raced.get(name)
        cell.comparable = not any(map(own, runs))
        _set_paper(cell, task, the_papers.get("test_accuracy", {}))
        if cell.runs:
            _measure(cell, cells[BASELINE].runs, outcomes[name], max(known.values()))
    seeded = {
        name: dict(zip((run.seed for run in cells[name].runs), each, strict=True)) for name, each in outcomes.items()
    }
    noise = statistics.noise({name: {s: float(each.mean()) for s, each in seeded[name].items()} for name in seeded})
    for name in outcomes.keys() - {BASELINE} if BASELINE in outcomes else ():
        digest = hashlib.sha256(outcomes[name].tobytes() + outcomes[BASELINE].tobytes()).digest()
        entropy = int.from_bytes(digest[:8])
        cells[name].versus = statistics.compare(outcomes[name], outcomes[BASELINE], noise, entropy)
    one, other = (seeded.get(twin, {}) for twin in TWINS)
    return Column(
        task=task,
        conditions=list(dict.fromkeys(word for run in runs for word in (*run.differences.shared, *own(run)))),
        cells=cells,
        floors=known,
        floors_of=_floors_of(measured) if known else "",
        dev_floors=measured.get("dev_accuracy", {}),
        noise=noise,
        twins_differ=[seed for seed in one if seed in other and not np.array_equal(one[seed], other[seed])],
        fill=_fill(task, cells, runs[0].differences.command if runs else []),
        race_notes=[line for line in bench["left_out"] if line.startswith(race["setting"])] if bench and race else [],
    )


def _order(cell: Cell) -> tuple[Any, ...]:
    """The paper's models in its order, each before its changed ones, then others."""
    known = cell.model in MODELS
    return not known, MODELS.index(cell.model) if known else 0, cell.model, cell.row != cell.model, cell.row


def _outcomes(runs: list[Record]) -> Outcomes:
    return np.stack([run.quality.outcomes() for run in runs if run.quality])


def _set_paper(cell: Cell, task: str, floors: dict[str, float]) -> None:
    """The paper's values, and whether its accuracy beats the floors by more than its test set's noise."""
    if cell.row not in PAPER["accuracy"].get(task, {}):
        return
    cell.paper = {measure: PAPER[measure][task][cell.row] for measure in ("time", "memory")}
    cell.paper["accuracy"] = accuracy = PAPER["accuracy"][task][cell.row] / 100
    examples = PAPER["test_examples"][task]
    cell.paper_low, cell.paper_high = statistics.interval(np.arange(examples)[None] < round(accuracy * examples))
    if floors:
        cell.paper_beats_floor = cell.paper_low > max(floors.values())


def _measure(cell: Cell, baseline: list[Record], outcomes: Outcomes, floor: float) -> None:
    """Fill in what the runs of a cell say."""
    seconds, their_seconds = ([run.time.train_seconds for run in runs if run.time] for runs in (cell.runs, baseline))
    peaks, their_peaks = (
        [float(run.memory.peak_bytes) for run in runs if run.memory] for runs in (cell.runs, baseline)
    )
    cell.seconds, cell.peak_bytes = mean(seconds), mean(peaks)
    cell.time, cell.memory = _ratio(seconds, their_seconds), _ratio(peaks, their_peaks)
    each = outcomes.mean(1).tolist()
    cell.accuracy = Measure(mean(each), stdev(each) if len(each) > 1 else None, len(each))
    cell.low, cell.high = statistics.interval(outcomes)
    cell.beats_floor = cell.low > floor
    gap = cell.gap("accuracy")
    if gap is not None and cell.paper_low is not None and cell.paper_high is not None:
        ours, theirs = cell.accuracy.value, cell.paper["accuracy"]  # Newcombe: as if of two test sets
        cell.gap_low = gap - math.hypot(ours - cell.low, cell.paper_high - theirs)
        cell.gap_high = gap + math.hypot(cell.high - ours, theirs - cell.paper_low)


def _ratio(ours: list[float], theirs: list[float]) -> Measure | None:
    """The ratio of the means. Its spread: that of ours and that of theirs, relative, added as squares."""
    if not theirs:
        return None
    ratio = mean(ours) / mean(theirs)
    spread = None
    if min(len(ours), len(theirs)) > 1:
        parts = [stdev(values) / mean(values) for values in ([ours] if ours == theirs else [ours, theirs])]
        spread = ratio * math.hypot(*parts)
    return Measure(ratio, spread, len(ours))


def _floors(task: str, floors: list[dict[str, Any]]) -> dict[str, Any]:
    """Those of the most training examples; empty if there are none. Older ones were not measured on test."""
    fitting = [floor for floor in floors if floor["task"] == task and "test_accuracy" in floor]
    return max(fitting, key=lambda floor: floor["train_examples"], default={})


def _floors_of(measured: dict[str, Any]) -> str:
    """On how much they were measured, and how well."""
    highest, examples = max(measured["test_accuracy"].values()), measured["test_examples"]
    error = 100 * (highest * (1 - highest) / examples) ** 0.5
    return f"{examples:,} examples (standard error of the best: {error:.1f})"


def _raced(task: str, runs: list[Record], bench: dict[str, Any] | None) -> dict[str, Any] | None:
    """The race at the batches of these runs, on their machine; without runs, at the paper's, on any."""
    wanted: tuple[Any, ...] = task, "full", False, PAPER["batch_size"][task] if task in TASKS else None
    if not bench:
        return None
    if runs:
        first, raced_on = runs[0], bench["environment"]
        wanted = task, first.padding, first.bucketing, first.batch_size
        lengths, trainer = first.config["task"]["data"], first.config["trainer"]
        changed = task in TASKS and any(lengths.get(key) != value for key, value in PAPER["lengths"][task].items())
        if changed or trainer.get("accumulate", 1) > 1 or trainer.get("compile") or trainer.get("tf32"):  # no race has
            return None
        if any(raced_on[key] != getattr(first.environment, key) for key in MACHINE):
            return None
    keys = ("task", "padding", "bucket", "batch_size")
    return next((result for result in bench["results"] if tuple(result[key] for key in keys) == wanted), None)


def _races(arms: dict[str, Any]) -> dict[str, Race]:
    """By model; what is raced besides models (a trunk alone) is left out, and all if the Transformer did not fit."""
    baseline = arms.get(BASELINE)
    if not baseline:
        return {}
    races = {}
    for name, arm in arms.items():
        if (ROOT / "configs" / "model" / f"{name}.yaml").exists():
            ratios = [ours / theirs for ours, theirs in zip(arm["seconds"], baseline["seconds"], strict=True)]
            memory = arm["peak_bytes"] / baseline["peak_bytes"]
            races[name] = Race(median(ratios), min(ratios), max(ratios), len(ratios), memory)
    return races


def _fill(task: str, cells: dict[str, Cell], command: list[str]) -> list[str]:
    """By what was typed for a run that is there: other models, and the seeds that they lack."""
    seeds = {run.seed for cell in cells.values() for run in cell.runs} or set(SEEDS)
    lacking: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for model in MODELS:
        lacking[tuple(sorted(seeds - {run.seed for run in cells[model].runs}))].append(model)
    words = [word if word.startswith("paths.") else shlex.quote(word) for word in command]
    return [
        f"python train.py -m model={','.join(models)} {' '.join([f'task={task}', f'seed={numbers}', *words])}"
        for numbers, models in ((",".join(map(str, lacked)), models) for lacked, models in sorted(lacking.items()))
        if numbers
    ]
