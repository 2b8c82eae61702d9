"""Run records -> the cells of Table 2, and what they can carry.

Records are only put into one table if they ran under the same conditions. What differs from the paper's protocol is in
the table's title; a model with a changed key is a row of its own.
"""

import json
import math
import shlex
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Self

import numpy as np

from macformer.harness import record as records
from macformer.harness.record import Record
from macformer.report import statistics
from macformer.report.statistics import LEVEL, Comparison, Noise, Outcomes

ROOT = Path(__file__).parent.parent.parent
PAPER = json.loads((ROOT / "results" / "paper.json").read_text())
MODELS = tuple(PAPER["accuracy"]["text"])  # in the paper's order
TASKS = tuple(PAPER["accuracy"])
WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text())  # of tables and figures
BASELINE = "transformer"
MACHINE = ("device_name", "threads", "precision", "torch")
SEEDS = (0, 1, 2)  # of configs/experiment/table2.yaml
TRUNKS = ("plain", "identity", "identity, ppSBN")  # what `make bench` times beside models: layers without an attention
COSTS = ("time", "memory")
AS_TIMED = {"accumulate": 1, "compile": False, "tf32": False}  # of the trainer: what `make bench` times
Floors = dict[str, Any]  # as an entry of results/floors.json: what trivial baselines reach on some data
NO_FLOORS: Floors = {"test_accuracy": {}, "test_examples": 0, "dev_accuracy": {}}
Bench = dict[str, Any]  # as results/bench/models.json: models timed in turn on the same batches


@dataclass(frozen=True)
class Measure:
    """A number and the ends of its interval: of an accuracy 95%, of a cost its spread or the range of the rounds."""

    value: float
    low: float
    high: float
    spread: float | None = None  # standard deviation over the seeds; None with one seed
    n: int = 1  # seeds or rounds
    beats_floor: bool | None = None  # is `low` above the best trivial baseline; None: that is not known

    @classmethod
    def over(cls, rounds: list[float]) -> Self:
        """The median and the range."""
        return cls(median(rounds), min(rounds), max(rounds), n=len(rounds))

    def minus(self, other: Self) -> "Measure":
        """With Newcombe's interval, as if of two test sets."""
        value = self.value - other.value
        low = value - math.hypot(self.value - self.low, other.high - other.value)
        return Measure(value, low, value + math.hypot(self.high - self.value, other.value - other.low))


Measures = dict[str, Measure]  # time and memory relative to the Transformer's, accuracy as a share


@dataclass
class Cell:
    """One row of one task."""

    row: str  # the model's name, with its changed keys
    model: str
    runs: list[Record] = field(default_factory=list)  # by seed
    ours: Measures = field(default_factory=dict)
    raced: Measures = field(default_factory=dict)  # by the interleaved benchmark of results/bench/models.json
    paper: Measures = field(default_factory=dict)
    gap: Measures = field(default_factory=dict)  # ours minus the paper's; none if the task is another one
    versus: Comparison | None = None  # the Transformer
    p_holm: float | None = None
    supported: bool = False  # may the difference be named: two seeds of both, a small p, more than the noise

    @cached_property
    def outcomes(self) -> Outcomes:
        return np.stack([run.quality.outcomes() for run in self.runs if run.quality])

    @property
    def papers_own(self) -> Measures:
        """The paper's values where this is their row: they stand beside causal rows, too, but count once."""
        return self.paper if self.row == published(self.row) else {}

    @property
    def accuracies(self) -> dict[int, float]:
        """By seed."""
        return dict(zip((run.seed for run in self.runs), self.outcomes.mean(1).tolist(), strict=True))

    @property
    def costs(self) -> dict[str, list[float]]:
        """Training seconds and peak bytes of each run."""
        seconds = [run.time.train_seconds for run in self.runs if run.time]
        return {"time": seconds, "memory": [float(run.memory.peak_bytes) for run in self.runs if run.memory]}


@dataclass
class Column:
    """One task of a table."""

    task: str
    cells: dict[str, Cell]  # by row
    conditions: list[str] = field(default_factory=list)  # what differs from the paper's protocol for this task
    floors: Floors = field(default_factory=NO_FLOORS.copy)
    noise: Noise | None = None
    race_notes: list[str] = field(default_factory=list)  # what the interleaved benchmark left out or scaled

    @property
    def ran(self) -> list[Cell]:
        return [cell for cell in self.cells.values() if cell.runs]

    @property
    def runs(self) -> list[Record]:
        return [run for cell in self.ran for run in cell.runs]

    def pairs(self, cell: Cell) -> int:
        """Seeds of the Transformer and of this cell that its comparison rests on."""
        return min(len(cell.runs), len(self.cells[BASELINE].runs))

    @property
    def best_floor(self) -> str | None:
        """The name of the best trivial baseline on test."""
        reached = self.floors["test_accuracy"]
        return max(reached, key=reached.__getitem__, default=None)

    @property
    def fill(self) -> list[str]:
        """The commands that fill empty cells and lacking seeds, by what was typed for a run that is there."""
        seeds, lacking = {run.seed for run in self.runs} or set(SEEDS), defaultdict(list)
        for model in MODELS:
            lacking[tuple(sorted(seeds - {run.seed for run in self.cells[model].runs}))].append(model)
        typed = self.runs[0].differences.command if self.runs else []
        words = "".join(f" {word if word.startswith('paths.') else shlex.quote(word)}" for word in typed)
        return [
            f"python train.py -m model={','.join(models)} task={self.task} seed={','.join(map(str, lacked))}{words}"
            for lacked, models in sorted(lacking.items())
            if lacked
        ]


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
    def compared(self) -> list[tuple[Column, Cell, Comparison]]:
        return [(column, cell, cell.versus) for column, cell in self.cells if cell.versus]


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


def floors() -> list[Floors]:
    return json.loads((ROOT / "results" / "floors.json").read_text())["floors"]


def bench() -> Bench:
    return json.loads((ROOT / "results" / "bench" / "models.json").read_text())


def read(folder: Path) -> tuple[list[Table], list[Record], list[str]]:
    """The tables of a folder, its records, and the files that are none."""
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not there: give the folder that has runs/ in it")
    found, problems = load(folder)
    return tables(found, floors(), bench(), papers=folder.resolve() == ROOT / "results"), found, problems


def tables(found: list[Record], floors: list[Floors], bench: Bench | None, papers: bool = False) -> list[Table]:
    """The paper's protocol first: empty if nobody ran it and there are no other runs, or `papers` asks for it.

    One table for each set of shared conditions, in which tasks as the paper has them stand side by side. So do changed
    ones if the same words made them, as trainer=cpu does of all tasks. Failed runs have no cell.
    """
    settings: dict[Any, list[Record]] = defaultdict(list)
    for run in sorted(found, key=lambda record: record.run_id):
        if run.status == "ok":
            shared = tuple(run.differences.shared), machine(run)
            settings[shared, run.task, own(run), run.data.fingerprint].append(run)
    side_by_side: dict[Any, dict[str, list[Record]]] = defaultdict(dict)
    for (shared, task, changed, _), runs in sorted(settings.items()):
        # What was typed, wherever the data were.
        typed = ([word for word in run.differences.command if not word.startswith("paths.")] for run in runs)
        words = tuple(min(map(sorted, typed))) if changed else ()
        keys = ((shared, bool(changed), words, place) for place in count())
        side_by_side[next(key for key in keys if task not in side_by_side[key])][task] = runs
    made = [_table(columns, floors, bench) for _, columns in sorted(side_by_side.items())]
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


def published(row: str) -> str:
    """The row of the paper's that this one is compared with: causal Macformers with those that the paper has."""
    return row.removesuffix(" (direction=causal)").removesuffix("_released") if row.startswith("macformer") else row


def machine(record: Record) -> str:
    environment = record.environment
    names = dict.fromkeys([*(session.device_name for session in record.sessions), environment.device_name])
    threads = f"{environment.threads} thread{'s' * (environment.threads > 1)}"
    return f"{' and '.join(names)} ({threads}, {environment.precision}, torch {environment.torch})"


def _table(by_task: dict[str, list[Record]], floors: list[Floors], bench: Bench | None) -> Table:
    """The runs of each task have the same conditions; the paper's tasks are there even without runs of them."""
    runs = [run for each in by_task.values() for run in each]
    changed = any(run.differences.shared or own(run) for run in runs)
    tasks = [task for task in TASKS if task in by_task or not changed] + sorted(by_task.keys() - set(TASKS))
    columns = [_column(task, by_task.get(task, []), floors, bench) for task in tasks]
    conditions = list(dict.fromkeys(condition for column in columns for condition in column.conditions))
    race_machine = bench["environment"]["device_name"] if bench else None
    table = Table(conditions, machine(runs[0]) if runs else None, race_machine, columns)
    corrected = statistics.holm([versus.p for _, _, versus in table.compared])
    for (column, cell, versus), p in zip(table.compared, corrected, strict=True):
        beyond_noise = column.noise is not None and abs(versus.difference) > column.noise.floor
        cell.p_holm, cell.supported = p, column.pairs(cell) >= 2 and p < LEVEL and beyond_noise
    return table


def _column(task: str, runs: list[Record], floors: list[Floors], bench: Bench | None) -> Column:
    raced, race_notes = _race(task, runs, bench) if bench else ({}, [])
    of_paper, of_runs = _floors(task, runs, floors)
    models = {name: name for name in (*MODELS, *raced)} | {row(run): run.model for run in runs}
    # A model before its changed rows, and before what the authors' release makes of it.
    order = [*MODELS, *sorted({*map(published, models.values())} - set(MODELS))]
    # Two records of one seed differ in a key that this task does not read: the first counts.
    by_seed = {(row(run), run.seed): run for run in reversed(runs)}
    cells = {}

    def rank(each: tuple[str, str]) -> Any:
        name, model = each
        return order.index(published(model)), model != published(model), name != model, name

    for name, model in sorted(models.items(), key=rank):
        of_row = [by_seed[key] for key in sorted(by_seed) if key[0] == name]
        cells[name] = Cell(
            name, model, of_row, raced=raced.get(name, {}), paper=_paper(task, published(name), of_paper)
        )
    conditions = [*runs[0].differences.shared, *own(runs[0])] if runs else []
    column, baseline = Column(task, cells, conditions, of_runs, race_notes=race_notes), cells[BASELINE]
    column.noise = statistics.noise({cell.row: cell.accuracies for cell in column.ran})
    for cell in column.ran:
        cell.ours = _ours(cell, baseline, of_runs)
        if not any(map(own, runs)):
            cell.gap = {name: cell.ours[name].minus(cell.paper[name]) for name in cell.ours.keys() & cell.paper.keys()}
        if baseline.runs and cell is not baseline:
            cell.versus = statistics.compare(cell.outcomes, baseline.outcomes, column.noise)
    return column


def _floors(task: str, runs: list[Record], floors: list[Floors]) -> tuple[Floors, Floors]:
    """Those under the paper's protocol, and those of the runs' data, where at least the majority class is known."""
    known = sorted((each for each in floors if each["task"] == task), key=lambda each: -each["train_examples"])
    real = {"protocol": "paper", "whole": True}.items()
    of_paper = of_runs = [each for each in known if real <= each.items() and each["source"] != "stand-in"]
    if runs:
        data = runs[0].data
        majority = NO_FLOORS | {"test_accuracy": {"majority": data.majority}, "test_examples": data.examples["test"]}
        of_runs = [*(each for each in known if each["fingerprint"] == data.fingerprint), majority]
    return next(iter(of_paper), NO_FLOORS), next(iter(of_runs), NO_FLOORS)


def _paper(task: str, row: str, floors: Floors) -> Measures:
    """What the paper has for it; the accuracy's interval is by its test set alone."""
    if row not in PAPER["accuracy"].get(task, {}):
        return {}
    share, examples = PAPER["accuracy"][task][row] / 100, PAPER["test_examples"][task]
    accuracy = _accuracy([share], np.arange(examples)[None] < round(share * examples), floors)
    return {cost: Measure.over([PAPER[cost][task][row]]) for cost in COSTS} | {"accuracy": accuracy}


def _ours(cell: Cell, baseline: Cell, floors: Floors) -> Measures:
    """Costs are ratios of means over the seeds, relative spreads added as squares; none without the Transformer."""
    ours = {"accuracy": _accuracy(list(cell.accuracies.values()), cell.outcomes, floors)}
    for cost, costs in cell.costs.items() if baseline.runs else ():
        both = [costs] if cell is baseline else [costs, baseline.costs[cost]]
        ratio = mean(costs) / mean(baseline.costs[cost])
        spread = ratio * math.hypot(*(stdev(each) / mean(each) for each in both)) if min(map(len, both)) > 1 else None
        ours[cost] = Measure(ratio, ratio - (spread or 0), ratio + (spread or 0), spread, len(costs))
    return ours


def _accuracy(of_seeds: list[float], outcomes: Outcomes, floors: Floors) -> Measure:
    (low, high), reached = statistics.interval(outcomes), floors["test_accuracy"].values()
    spread = stdev(of_seeds) if len(of_seeds) > 1 else None
    return Measure(mean(of_seeds), low, high, spread, len(of_seeds), low > max(reached) if reached else None)


def _race(task: str, runs: list[Record], bench: Bench) -> tuple[dict[str, Measures], list[str]]:
    """By model, at the batches of these runs on their machine, without runs at the paper's; and what was left out."""
    wanted = {"task": task, "padding": "full", "bucket": False, "batch_size": PAPER["batch_size"].get(task)}
    for run in runs[:1]:
        wanted |= {"padding": run.padding, "bucket": run.bucketing, "batch_size": run.batch_size}
        here = all(bench["environment"][key] == getattr(run.environment, key) for key in MACHINE)
        as_long = PAPER["lengths"].get(task, {}).items() <= run.config["task"]["data"].items()
        if not (here and as_long and AS_TIMED.items() <= run.config["trainer"].items()):
            return {}, []
    if not (result := next((each for each in bench["results"] if wanted.items() <= each.items()), None)):
        return {}, []
    arms, raced = result["arms"], {}
    for model in arms.keys() - set(TRUNKS) if BASELINE in arms else ():  # without the Transformer there are no ratios
        rounds = zip(arms[model]["seconds"], arms[BASELINE]["seconds"], strict=True)
        memory = arms[model]["peak_bytes"] / arms[BASELINE]["peak_bytes"]
        raced[model] = {"time": Measure.over([a / b for a, b in rounds]), "memory": Measure.over([memory])}
    return raced, [line for line in bench["left_out"] if line.startswith(result["setting"])]
