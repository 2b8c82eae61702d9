"""Run records -> the cells of Table 2, and what they can carry.

Records are only put into one table if they ran under the same conditions. What differs from the paper's protocol
(that is, from `python train.py model=M task=T` as the YAML files stand) is in the table's title; a model with a
changed key is a row of its own.
"""

import hashlib
import json
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

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
# Device, threads and precision stand in the environment.
NOT_CONDITIONS = ("name", "seed", "device", "threads", "precision", *records.NOT_IN_RUN_ID)


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
    groups: dict[Any, dict[str, dict[Any, list[Run]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in sorted(found, key=lambda record: record.run_id):
        if record.status == "ok":
            run = _place(record)
            groups[run.shared, run.machine][record.task][run.own, record.data.fingerprint].append(run)
    made = []
    for _, by_task in sorted(groups.items(), key=lambda group: group[0]):
        side_by_side: dict[Any, dict[str, list[Run]]] = defaultdict(dict)
        for task, settings in by_task.items():
            for (own, _), runs in sorted(settings.items(), key=lambda item: item[0]):
                words = min(run.words for run in runs) if own else ()
                place = next(place for place in count() if task not in side_by_side[bool(own), words, place])
                side_by_side[bool(own), words, place][task] = runs
        made += [_table(columns, floors, bench) for _, columns in sorted(side_by_side.items())]
    made.sort(key=lambda table: bool(table.conditions))  # the paper's protocol first, whatever the machine
    if not made or (papers and made[0].conditions):
        made.insert(0, _table({}, floors, bench))
    return made


@dataclass
class Run:
    """A record, and how its conditions differ from the paper's protocol."""

    record: Record
    row: str
    shared: tuple[str, ...]  # conditions that hold for all tasks of a table
    own: tuple[str, ...]  # those of its task

    @property
    def words(self) -> tuple[str, ...]:
        """What was typed that holds for all cells of a sweep, less where things are and go."""
        other = ("model", "task=", "seed=", "experiment=table2", "force=", "paths.", "logger", "sweep=", "hydra")
        return tuple(sorted(word for word in self.record.overrides if not word.startswith(other)))

    @property
    def machine(self) -> str:
        environment = self.record.environment
        names = dict.fromkeys([*(session.device_name for session in self.record.sessions), environment.device_name])
        threads = f"{environment.threads} thread{'s' * (environment.threads > 1)}"
        return f"{' and '.join(names)} ({threads}, {environment.precision}, torch {environment.torch})"


@dataclass
class Paper:
    """`python train.py model=M task=T` as the YAML files stand: the paper's protocol, keys joined by dots."""

    values: dict[str, Any]
    follows: dict[str, str]  # keys that take the value of another one


@cache
def _paper(model: str, task: str) -> Paper:
    """Empty for a model or task that has no YAML any more."""
    of_model, of_task = _composed(f"model={model}"), _composed(f"task={task}")
    if not (of_model.values and of_task.values):
        return Paper({}, {})
    # A model's keys do not depend on the task, nor a task's on the model: composing is slow.
    merged = [
        {key: value for key, value in rest.items() if not key.startswith("model.")}
        | {key: value for key, value in own.items() if key.startswith("model.")}
        for rest, own in ((of_task.values, of_model.values), (of_task.follows, of_model.follows))
    ]
    return Paper(*merged)


@cache
def _composed(choice: str) -> Paper:
    before = GlobalHydra.instance().hydra  # somebody may be composing
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = compose("train", [choice])
    except MissingConfigException:
        return Paper({}, {})
    finally:
        GlobalHydra.instance().hydra = before
    raw = records.flat(OmegaConf.to_container(config))
    follows = {key: value[2:-1] for key, value in raw.items() if str(value).startswith("${")}
    return Paper(records.flat(OmegaConf.to_container(config, resolve=True)), follows)


def _place(record: Record) -> Run:
    """Sort a run's differences into row, shared and own conditions."""
    actual, paper = records.flat(record.config), _paper(record.model, record.task)
    row, shared, own = [], [], []
    if record.data.source == "stand-in":
        own.append(f"{record.task} on STAND-IN data, not LRA's")
    for key, value in sorted(actual.items()):  # keys that came after the record do not count
        group, _, name = key.partition(".")
        original = paper.values.get(key)
        emptied = value is None and any(other.startswith(f"{key}.") for other in paper.values)  # a whole node
        if group in NOT_CONDITIONS or name in NOT_CONDITIONS:
            continue
        # What follows another key is said there, and must be said if it does not, even if it is the paper's value.
        usual = actual.get(paper.follows[key], original) if key in paper.follows else original
        if value == usual and not emptied:
            continue
        if group == "protocol" and key not in paper.follows.values():
            continue  # of another task
        change = f"{name or group} = {value}"
        if not paper.follows.get(key, "").startswith("task."):  # else the paper's value depends on the task
            change += f" (paper: {original})"
        if group == "model":
            row.append(f"{name}={value}")
        elif group == "task":
            own.append(f"{record.task} {change}")
        else:
            shared.append(f"{group} {change}" if name else change)
    for word in (word for word in record.overrides if word.startswith("~")):  # a key that was taken out
        (row if word.startswith("~model") else shared).append(word)
    label = record.model + (f" ({', '.join(row)})" if row else "")
    return Run(record, label, tuple(shared), tuple(own))


def _table(columns: dict[str, list[Run]], floors: list[dict[str, Any]], bench: dict[str, Any] | None) -> Table:
    runs = [run for column in columns.values() for run in column]
    shared = [condition for run in runs for condition in run.shared]
    every = [*TASKS, *sorted(columns.keys() - set(TASKS))]
    own = [condition for task in every for run in columns.get(task, []) for condition in run.own]
    conditions = list(dict.fromkeys(shared + own))
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
    return Table(conditions, runs[0].machine if runs else None, race_machine, made)


def _supported(cell: Cell, baseline: Cell, noise: Noise | None) -> bool:
    """May the difference from the Transformer be named? Two seeds of both, a small p, more than the noise."""
    if not (cell.versus and cell.p_holm is not None and noise):
        return False
    return (
        min(len(cell.runs), len(baseline.runs)) >= 2
        and cell.p_holm < LEVEL
        and abs(cell.versus.difference) > noise.floor
    )


def _column(task: str, runs: list[Run], floors: list[dict[str, Any]], bench: dict[str, Any] | None) -> Column:
    by_row: dict[str, dict[int, Record]] = defaultdict(dict)
    for run in runs:  # two records of one seed differ in a key that this task does not read: the first counts
        by_row[run.row].setdefault(run.record.seed, run.record)
    race = _raced(task, runs, bench)
    raced = _races(race["arms"]) if race else {}
    cells = {row: Cell(row, row) for row in (*MODELS, *raced)}
    for row, by_seed in by_row.items():
        ordered = [by_seed[seed] for seed in sorted(by_seed)]
        cells[row] = Cell(row, ordered[0].model, ordered)
    cells = dict(sorted(cells.items(), key=lambda item: _order(item[1])))
    the_papers = measured = _floors(
        task, [f for f in floors if f["protocol"] == "paper" and f.get("whole") and f["source"] != "stand-in"]
    )
    if runs:
        data = runs[0].record.data
        assert data.majority is not None, "LRA has labels"
        measured = _floors(task, [floor for floor in floors if floor["fingerprint"] == data.fingerprint])
        measured = measured or {"test_examples": data.examples["test"], "test_accuracy": {"majority": data.majority}}
    known = measured.get("test_accuracy", {})
    outcomes = {row: _outcomes(cell.runs) for row, cell in cells.items() if cell.runs}
    for row, cell in cells.items():
        cell.race = raced.get(row)
        cell.comparable = not any(run.own for run in runs)
        _set_paper(cell, task, the_papers.get("test_accuracy", {}))
        if cell.runs:
            _measure(cell, cells[BASELINE].runs, outcomes[row], max(known.values()))
    seeded = {row: dict(zip((run.seed for run in cells[row].runs), outcomes[row], strict=True)) for row in outcomes}
    noise = statistics.noise({row: {s: float(each.mean()) for s, each in seeded[row].items()} for row in seeded})
    for row in outcomes.keys() - {BASELINE} if BASELINE in outcomes else ():
        digest = hashlib.sha256(outcomes[row].tobytes() + outcomes[BASELINE].tobytes()).digest()
        entropy = int.from_bytes(digest[:8])
        cells[row].versus = statistics.compare(outcomes[row], outcomes[BASELINE], noise, entropy)
    one, other = (seeded.get(twin, {}) for twin in TWINS)
    return Column(
        task=task,
        conditions=list(dict.fromkeys(condition for run in runs for condition in run.shared + run.own)),
        cells=cells,
        floors=known,
        floors_of=_floors_of(measured) if known else "",
        dev_floors=measured.get("dev_accuracy", {}),
        noise=noise,
        twins_differ=[seed for seed in one if seed in other and not np.array_equal(one[seed], other[seed])],
        fill=_fill(task, cells, runs[0].record.overrides if runs else []),
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


def _raced(task: str, runs: list[Run], bench: dict[str, Any] | None) -> dict[str, Any] | None:
    """The race at the batches of these runs, on their machine; without runs, at the paper's, on any."""
    config, environment = _paper(BASELINE, task).values, None
    if runs:
        first = runs[0].record
        paper, config, environment = config, config | records.flat(first.config), first.environment
        same = [f"task.data.{key}" for key in ("length", "min_length", "max_length")]
        same += [f"trainer.{key}" for key in ("accumulate", "compile", "tf32")]
        if any(config.get(key) != paper.get(key) for key in same):
            return None
    if not (bench and config):
        return None
    machine = bench["environment"]
    if environment and any(machine[key] != getattr(environment, key) for key in MACHINE):
        return None
    batches = task, config.get("pad"), config.get("bucket"), config.get("trainer.batch_size")
    keys = ("task", "padding", "bucket", "batch_size")
    return next((result for result in bench["results"] if tuple(result[key] for key in keys) == batches), None)


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


def _fill(task: str, cells: dict[str, Cell], overrides: list[str]) -> list[str]:
    """By the words of a run that is there: other models, and the seeds that they lack. Its folders are its own."""
    seeds = {run.seed for cell in cells.values() for run in cell.runs} or set(SEEDS)
    lacking: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for model in MODELS:
        lacking[tuple(sorted(seeds - {run.seed for run in cells[model].runs}))].append(model)
    skip = ("model", "task=", "seed=", "force=", "paths.data=", "paths.results=", "paths.outputs=", "logger")
    kept = [word for word in overrides if not word.startswith(skip)]
    kept = [f"{word.partition('=')[0]}=..." if word.startswith("paths.") else shlex.quote(word) for word in kept]
    return [
        f"python train.py -m model={','.join(models)} {' '.join([f'task={task}', f'seed={numbers}', *kept])}"
        for numbers, models in ((",".join(map(str, lacked)), models) for lacked, models in sorted(lacking.items()))
        if numbers
    ]
