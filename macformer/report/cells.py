"""Run records -> the cells of Table 2, and what they can carry.

Records are only put into one table if they ran under the same conditions. What differs from the paper's protocol is in
the table's title; a model with a changed key is a row of its own.
"""

import hashlib
import json
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
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
TRUNKS = ("plain", "identity", "identity, ppSBN")  # what `make bench` races beside models: layers without an attention
Measured = dict[str, Any]  # an entry of results/floors.json: what trivial baselines reach on some data


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
    """One row of one task. Accuracies are shares."""

    row: str  # the model's name, with its changed keys
    model: str
    runs: list[Record] = field(default_factory=list)  # by seed
    seconds: float | None = None  # means
    peak_bytes: float | None = None
    time: Measure | None = None
    memory: Measure | None = None
    accuracy: Measure | None = None
    low: float | None = None  # of the accuracy's interval
    high: float | None = None
    beats_floor: bool | None = None  # the best trivial baseline; None: no accuracy
    versus: Comparison | None = None  # the Transformer
    p_holm: float | None = None
    supported: bool = False  # may the difference be named: two seeds of both, a small p, more than the noise
    race: Race | None = None
    paper: dict[str, float] = field(default_factory=dict)  # measure -> the paper's value
    comparable: bool = True  # with it: is the task the paper's?
    paper_low: float | None = None  # of its accuracy's interval, by its test set alone
    paper_high: float | None = None
    paper_beats_floor: bool | None = None
    gap_low: float | None = None  # of the gap in accuracy, by the noise of ours and by the paper's test set
    gap_high: float | None = None

    @cached_property
    def outcomes(self) -> Outcomes:
        return np.stack([run.quality.outcomes() for run in self.runs if run.quality])

    @property
    def accuracies(self) -> dict[int, float]:
        """By seed."""
        return dict(zip((run.seed for run in self.runs), self.outcomes.mean(1).tolist(), strict=True))

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
    floors: dict[str, float]  # what trivial baselines reach on test; the majority class alone if nobody measured that
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


def load(results: Path) -> tuple[list[Record], list[str]]:
    """All records of LRA below results/runs, and one sentence for each file that is none."""
    found, problems = [], []
    for file in sorted((results / "runs").rglob("*.json")):
        try:
            found.append(records.read(file))
        except records.OtherKind:
            continue  # of the translator
        except (OSError, ValueError) as error:
            problems.append(str(error).replace(f"{results}/", "", 1))
    return found, problems


def _committed(name: str) -> Any:
    file = ROOT / "results" / name
    return json.loads(file.read_text()) if file.exists() else None


def floors() -> list[Measured]:
    return (_committed("floors.json") or {"floors": []})["floors"]


def bench() -> dict[str, Any] | None:
    return _committed("bench/models.json")


def read(folder: Path) -> tuple[list[Table], list[Record], list[str]]:
    """The tables of a folder, its records, and the files that are none."""
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not there: give the folder that has runs/ in it")
    found, problems = load(folder)
    return tables(found, floors(), bench(), papers=folder.resolve() == ROOT / "results"), found, problems


def tables(
    found: Iterable[Record], floors: list[Measured], bench: dict[str, Any] | None, papers: bool = False
) -> list[Table]:
    """The paper's protocol first: empty if nobody ran it and there are no other runs, or `papers` asks for it.

    One table for each set of shared conditions, in which tasks as the paper has them stand side by side. So do changed
    ones if the same words made them, as trainer=cpu does of all tasks. Failed runs have no cell.
    `floors` as in results/floors.json, `bench` as in results/bench/models.json.
    """
    settings: dict[Any, list[Record]] = defaultdict(list)
    for run in sorted(found, key=lambda record: record.run_id):
        if run.status == "ok":
            shared = tuple(run.differences.shared), machine(run)
            settings[shared, run.task, own(run), run.data.fingerprint].append(run)
    side_by_side: dict[Any, dict[str, list[Record]]] = defaultdict(dict)
    for (shared, task, changed, _), runs in sorted(settings.items(), key=lambda item: item[0]):
        # What was typed, wherever the data were.
        typed = ([word for word in run.differences.command if not word.startswith("paths.")] for run in runs)
        words = tuple(min(map(sorted, typed))) if changed else ()
        keys = ((shared, bool(changed), words, place) for place in count())
        side_by_side[next(key for key in keys if task not in side_by_side[key])][task] = runs
    made = [_table(columns, floors, bench) for _, columns in sorted(side_by_side.items(), key=lambda item: item[0])]
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


def _table(by_task: dict[str, list[Record]], floors: list[Measured], bench: dict[str, Any] | None) -> Table:
    """The runs of each task have the same conditions; the paper's tasks are there even without runs of them."""
    runs = [run for each in by_task.values() for run in each]
    changed = any(run.differences.shared or own(run) for run in runs)
    tasks = [task for task in TASKS if task in by_task or not changed] + sorted(by_task.keys() - set(TASKS))
    columns = [_column(task, by_task.get(task, []), floors, bench) for task in tasks]
    conditions = list(dict.fromkeys(condition for column in columns for condition in column.conditions))
    table = Table(conditions, machine(runs[0]) if runs else None, None, columns)
    compared = [(column, cell, cell.versus) for column, cell in table.cells if cell.versus]
    corrected = statistics.holm([versus.p for _, _, versus in compared])
    for (column, cell, versus), p in zip(compared, corrected, strict=True):
        cell.p_holm = p
        seeds = min(len(cell.runs), len(column.cells[BASELINE].runs))
        beyond_noise = column.noise is not None and abs(versus.difference) > column.noise.floor
        cell.supported = seeds >= 2 and p < LEVEL and beyond_noise
    if bench and any(cell.race for _, cell in table.cells):
        table.race_machine = bench["environment"]["device_name"]
    return table


def _column(task: str, runs: list[Record], floors: list[Measured], bench: dict[str, Any] | None) -> Column:
    raced, race_notes = _race(task, runs, bench)
    models = {name: name for name in (*MODELS, *raced)} | {row(run): run.model for run in runs}
    cells, order = {}, [*MODELS, *sorted(set(models.values()) - set(MODELS))]  # a model before its changed rows
    for name, model in sorted(models.items(), key=lambda each: (order.index(each[1]), each[0] != each[1], each[0])):
        # Two records of one seed differ in a key that this task does not read: the first counts.
        by_seed = {run.seed: run for run in reversed(runs) if row(run) == name}
        cells[name] = Cell(name, model, [by_seed[seed] for seed in sorted(by_seed)], race=raced.get(name))
    of_paper = _measured(
        task, floors, lambda each: each["protocol"] == "paper" and each.get("whole") and each["source"] != "stand-in"
    )
    measured = of_paper
    if runs:
        data = runs[0].data
        measured = _measured(task, floors, lambda each: each["fingerprint"] == data.fingerprint)
        measured = measured or {"test_examples": data.examples["test"], "test_accuracy": {"majority": data.majority}}
    baseline, reached = cells[BASELINE], measured.get("test_accuracy", {})
    for cell in cells.values():
        cell.comparable = not any(map(own, runs))
        _measure(cell, task, baseline.runs, reached, of_paper.get("test_accuracy", {}))
    ran = {name: cell for name, cell in cells.items() if cell.runs}
    noise = statistics.noise({name: cell.accuracies for name, cell in ran.items()})
    for cell in ran.values() if baseline.runs else ():
        if cell is baseline:
            continue
        digest = hashlib.sha256(cell.outcomes.tobytes() + baseline.outcomes.tobytes()).digest()
        cell.versus = statistics.compare(cell.outcomes, baseline.outcomes, noise, int.from_bytes(digest[:8]))
    one, other = ({run.seed: run.quality and run.quality.correct for run in cells[twin].runs} for twin in TWINS)
    return Column(
        task=task,
        conditions=[*runs[0].differences.shared, *own(runs[0])] if runs else [],
        cells=cells,
        floors=reached,
        floors_of=_floors_of(measured) if reached else "",
        dev_floors=measured.get("dev_accuracy", {}),
        noise=noise,
        twins_differ=[seed for seed, right in one.items() if right != other.get(seed, right)],
        fill=_fill(task, cells, runs[0].differences.command if runs else []),
        race_notes=race_notes,
    )


def _measure(
    cell: Cell, task: str, baseline: list[Record], floors: dict[str, float], of_paper: dict[str, float]
) -> None:
    """What the paper and the runs of a cell say, and whether it is above the trivial baselines despite the noise."""
    if cell.row in PAPER["accuracy"].get(task, {}):
        cell.paper = {measure: PAPER[measure][task][cell.row] for measure in ("time", "memory")}
        cell.paper["accuracy"] = theirs = PAPER["accuracy"][task][cell.row] / 100
        examples = PAPER["test_examples"][task]
        cell.paper_low, cell.paper_high = statistics.interval(np.arange(examples)[None] < round(theirs * examples))
        cell.paper_beats_floor = cell.paper_low > max(of_paper.values()) if of_paper else None
    if not cell.runs:
        return
    seconds, of_baseline = ([run.time.train_seconds for run in runs if run.time] for runs in (cell.runs, baseline))
    cell.seconds, cell.time = mean(seconds), _ratio(seconds, of_baseline)
    peaks, of_baseline = (
        [float(run.memory.peak_bytes) for run in runs if run.memory] for runs in (cell.runs, baseline)
    )
    cell.peak_bytes, cell.memory = mean(peaks), _ratio(peaks, of_baseline)
    each = list(cell.accuracies.values())
    cell.accuracy = Measure(mean(each), stdev(each) if len(each) > 1 else None, len(each))
    cell.low, cell.high = statistics.interval(cell.outcomes)
    cell.beats_floor = cell.low > max(floors.values())
    gap = cell.gap("accuracy")
    if gap is not None and cell.paper_low is not None and cell.paper_high is not None:
        ours = cell.accuracy.value  # Newcombe: as if of two test sets
        cell.gap_low = gap - math.hypot(ours - cell.low, cell.paper_high - theirs)
        cell.gap_high = gap + math.hypot(cell.high - ours, theirs - cell.paper_low)


def _ratio(ours: list[float], theirs: list[float]) -> Measure | None:
    """The ratio of the means. Its spread: that of ours and that of theirs, relative, added as squares."""
    if not theirs:
        return None
    ratio, spread = mean(ours) / mean(theirs), None
    if min(len(ours), len(theirs)) > 1:
        parts = [stdev(values) / mean(values) for values in ([ours] if ours == theirs else [ours, theirs])]
        spread = ratio * math.hypot(*parts)
    return Measure(ratio, spread, len(ours))


def _measured(task: str, floors: list[Measured], fits: Callable[[Measured], Any]) -> Measured:
    """Those of the most training examples; empty if there are none. Older ones were not measured on test."""
    fitting = [each for each in floors if each["task"] == task and "test_accuracy" in each and fits(each)]
    return max(fitting, key=lambda each: each["train_examples"], default={})


def _floors_of(measured: Measured) -> str:
    """On how much they were measured, and how well."""
    best, examples = max(measured["test_accuracy"].values()), measured["test_examples"]
    error = 100 * (best * (1 - best) / examples) ** 0.5
    return f"{examples:,} examples (standard error of the best: {error:.1f})"


def _race(task: str, runs: list[Record], bench: dict[str, Any] | None) -> tuple[dict[str, Race], list[str]]:
    """By model, at the batches of these runs on their machine, without runs at the paper's; and what was not raced."""
    if not bench:
        return {}, []
    wanted: tuple[Any, ...] = task, "full", False, PAPER["batch_size"].get(task)
    if runs:
        first = runs[0]
        wanted = task, first.padding, first.bucketing, first.batch_size
        data, trainer = first.config["task"]["data"], first.config["trainer"]
        changed = any(data.get(key) != value for key, value in PAPER["lengths"].get(task, {}).items())
        elsewhere = any(bench["environment"][key] != getattr(first.environment, key) for key in MACHINE)
        if changed or elsewhere or trainer.get("accumulate", 1) > 1 or trainer.get("compile") or trainer.get("tf32"):
            return {}, []  # no race was run so
    keys, races = ("task", "padding", "bucket", "batch_size"), {}
    fitting = (result for result in bench["results"] if tuple(result[key] for key in keys) == wanted)
    if not (result := next(fitting, None)):
        return {}, []
    theirs = result["arms"].get(BASELINE)
    for name in result["arms"].keys() - set(TRUNKS) if theirs else ():  # without the Transformer there are no ratios
        ours = result["arms"][name]
        ratios = [mine / its for mine, its in zip(ours["seconds"], theirs["seconds"], strict=True)]
        memory = ours["peak_bytes"] / theirs["peak_bytes"]
        races[name] = Race(median(ratios), min(ratios), max(ratios), len(ratios), memory)
    return races, [line for line in bench["left_out"] if line.startswith(result["setting"])]


def _fill(task: str, cells: dict[str, Cell], command: list[str]) -> list[str]:
    """By what was typed for a run that is there: other models, and the seeds that they lack."""
    seeds = {run.seed for cell in cells.values() for run in cell.runs} or set(SEEDS)
    lacking: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for model in MODELS:
        if lacked := seeds - {run.seed for run in cells[model].runs}:
            lacking[tuple(sorted(lacked))].append(model)
    words = " ".join(["", *(word if word.startswith("paths.") else shlex.quote(word) for word in command)])
    return [
        f"python train.py -m model={','.join(models)} task={task} seed={','.join(map(str, lacked))}{words}"
        for lacked, models in sorted(lacking.items())
    ]
