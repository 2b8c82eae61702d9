"""What a sweep adds to Hydra's: notes of its runs, whatever process or host they are in; what it will cost, told first.

Nothing here starts a run: Hydra's sweeper makes the cells, and its launchers run them.
"""

import json
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness import record as records
from macformer.harness.checkpoint import CheckpointError
from macformer.harness.loop import OutOfMemory
from macformer.harness.plan import Cell
from macformer.harness.progress import duration, mebibytes

HERE = ("basic", "joblib")  # launchers whose jobs run on this machine
PATIENCE = 5.0  # seconds of steps for the forecast of a cell


class Notes:
    """In the sweep's folder, which all its jobs can reach: how each of them ended, and whether to begin another."""

    def __init__(self) -> None:
        hydra = HydraConfig.get()
        self.folder = Path(hydra.sweep.dir) / "notes"
        self.launcher: str = hydra.runtime.choices["hydra/launcher"]

    def expect(self, jobs: int) -> None:
        files.write(self.folder / "jobs", str(jobs))

    @property
    def unheard(self) -> int:
        """Jobs that have not begun, as far as the sweeper is Hydra's own, which tells how many there are."""
        file = self.folder / "jobs"
        return int(file.read_text()) - len(list(self.folder.glob("*.job"))) if file.exists() else 0

    @property
    def stopped(self) -> int:
        """The signal that stopped the sweep, or 0."""
        file = self.folder / "stopped"
        return int(file.read_text()) if file.exists() else 0

    def stop(self, number: int) -> None:
        files.write(self.folder / "stopped", str(number))

    def write(self, what: str) -> None:
        """Of this job. The empty note: all is well."""
        hydra = HydraConfig.get()
        text = f"{' '.join(hydra.overrides.task)}: {' '.join(what.split())}" if what else ""
        files.write(self.folder / f"{hydra.job.num:05}.job", text)

    def failures(self) -> list[str]:
        """What the jobs have written, in their order."""
        return [text for file in sorted(self.folder.glob("*.job")) if (text := file.read_text())]


class Sweep(Callback):
    """Before the first job: the signals of a sweep over processes, and the announcement if it is wanted."""

    def __init__(self, announce: bool):
        self.announce = announce

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)  # train.py asks for the sweep's folder when all is over
        notes = Notes()
        shutil.rmtree(notes.folder, ignore_errors=True)  # of an earlier sweep, if the user has named the folder
        if notes.launcher == "submitit_slurm" and not shutil.which("srun"):
            sys.exit("error: hydra/launcher=submitit_slurm needs SLURM, and there is no srun here: use sweep=joblib")
        if notes.launcher != "basic":
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _ask)
        notes.expect(len(expand(config)))  # which another sweeper than Hydra's own may not let us know
        if self.announce:
            announce(config, notes.launcher)


def _ask(number: int, frame: object) -> None:
    """Ctrl-C goes to the workers of this machine, too: wait for their checkpoints. The second time, do not wait."""
    notes = Notes()
    if notes.stopped:
        raise KeyboardInterrupt(number)
    notes.stop(number)
    print("stopping: no more runs begin; once more leaves those at work alone", file=sys.stderr)


@dataclass
class Cost:
    """Of one whole run of a model on a task, whatever its seed."""

    seconds: float | None  # None: not known
    memory: str
    source: str  # where it is known from


def announce(config: DictConfig, launcher: str) -> None:
    """How many cells, how long, and where."""
    every = [compose(config, overrides) for overrides in expand(config)]
    print(f"{len(every)} cells, by hydra/launcher={launcher}, their records in {config.paths.results}/runs", flush=True)
    if launcher in HERE:
        tell(*loaded(every), at_once(config, launcher))
    else:
        tell_from_records(every)
    print(flush=True)


def loaded(every: list[DictConfig]) -> tuple[list[tuple[Cell, Any]], Counter[str]]:
    """The cells that can run, with their tasks; what is wrong with the others, and how often."""
    cells, problems = [], Counter[str]()
    tasks: dict[str, Any] = {}
    for config in every:
        try:
            cell = Cell(config)
            key = json.dumps([cell.resolved["task"], cell.resolved["paths"]])
            if key not in tasks:
                tasks[key] = _loaded(cell)
            if isinstance(tasks[key], str):
                problems[f"{cell.config.task.name}: {tasks[key]}"] += 1
            else:
                cells.append((cell, tasks[key]))
        except Exception as error:  # the cell will say it again, when its turn comes
            problems[str(error)] += 1
    return cells, problems


def tell_from_records(every: list[DictConfig]) -> None:
    """Of cells that run elsewhere: neither their device nor their data need be here."""
    finished, unknown, left = 0, 0, 0.0
    for config in every:
        folder = records.path(config.paths.results, configs.container(config), "").parent
        found = [record for record in map(records.finished, sorted(folder.glob("*.json"))) if record]
        alike = [record for record in found if _kind(record.config) == _kind(configs.container(config))]
        if any(record.seed == config.seed for record in alike):
            finished += 1
        elif alike:
            left += _seconds(alike[0])
        else:
            unknown += 1
    print(
        f"  {finished} have records; the others take {duration(left)} one after the other, by records of other seeds"
        f"{f', and {unknown} of them nobody has timed' if unknown else ''}"
    )


def _kind(config: dict[str, Any]) -> str:
    """What decides a run's time, as far as it is known before it runs."""
    kept = records.decisive(config)
    trainer = {key: value for key, value in kept["trainer"].items() if key != "precision"}
    return json.dumps(kept | {"seed": None, "device": None, "trainer": trainer}, sort_keys=True)


def _seconds(record: records.Run) -> float:
    """Of the whole run."""
    assert record.time
    return record.time.train_seconds + record.time.evaluation_seconds + record.time.pause_seconds


def expand(config: DictConfig) -> list[list[str]]:
    """The overrides of each cell, as Hydra's sweeper makes them."""
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*words, *config.hydra.overrides.task])
    return BasicSweeper.split_arguments(overrides, None)[0]


def compose(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration that the job gets."""
    cell = GlobalHydra.instance().config_loader().load_sweep_config(config, overrides)
    with read_write(cell), open_dict(cell):
        del cell["hydra"]
    return cell


def _loaded(cell: Cell) -> Any:
    """The task, or why it cannot be had."""
    try:
        return cell.load()
    except Exception as error:  # of lra_data, which is not known here
        return str(error)


def at_once(config: DictConfig, launcher: str) -> int:
    """Runs that go on at the same time."""
    if launcher != "joblib":
        return 1
    from joblib import effective_n_jobs  # of an extra

    return effective_n_jobs(config.hydra.launcher.n_jobs)


def tell(cells: list[tuple[Cell, Any]], problems: Counter[str], runs_at_once: int) -> None:
    """What will fail, what is finished, what goes on from a checkpoint, what begins; the time of one and of all."""
    for problem, times in problems.items():
        print(f"  {times} will fail: {problem}")
    costs: dict[str, Cost] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    left, unknown = 0.0, 0
    for cell, task in cells:
        file, checkpoint = cell.places(task.fingerprint)
        row = rows.setdefault(
            (cell.config.task.name, cell.config.model.name),
            {"finished": 0, "go on": 0, "begin": 0, "a run": "", "memory": "", "from": ""},
        )
        finished = records.finished(file)
        if finished and not cell.config.force:
            row["finished"] += 1
            continue
        try:
            saved = checkpoint.unfinished(finished)
        except CheckpointError as error:  # the cell will say it again, when its turn comes
            print(f"  1 will fail: {error}")
            continue
        row["go on" if saved else "begin"] += 1
        kind = json.dumps(records.decisive(cell.resolved) | {"seed": None, "data": task.fingerprint}, sort_keys=True)
        if kind not in costs:
            costs[kind] = recorded(cell, file.parent, task.fingerprint) or foretold(cell)
        cost = costs[kind]
        row["memory"], row["from"] = cost.memory, cost.source
        if cost.seconds is None:
            unknown += 1
            continue
        row["a run"] = duration(cost.seconds)
        left += cost.seconds * (1 - (saved["step"] if saved else 0) / cell.trainer.total_steps)
    if not cells:
        return
    print("  task       model            finished  go on  begin          a run       memory  known from")
    for (name, model), row in rows.items():
        print(
            f"  {name:10} {model:16} {row['finished']:8} {row['go on']:6} {row['begin']:6} {row['a run']:>14} "
            f"{row['memory']:>12}  {row['from']}"
        )
    left /= runs_at_once
    cell = cells[0][0]
    end = time.strftime("%a %d %b %H:%M", time.localtime(time.time() + left))
    known = f", {unknown} cells of unknown time left out" if unknown else ""
    print(
        f"  in all {duration(left)} on {devices.describe(cell.device)} ({cell.device.type}, {runs_at_once} at a time)"
        f"{known}: until {end}; checkpoints in {cell.config.paths.outputs}"
    )


def recorded(cell: Cell, folder: Path, fingerprint: str) -> Cost | None:
    """From the record of another seed on a machine like this one."""
    ours = records.decisive(cell.resolved) | {"seed": None}
    for file in sorted(folder.glob("*.json")):
        record = records.finished(file)
        if (
            record
            and record.memory
            and record.data.fingerprint == fingerprint
            and record.environment.device_name == devices.describe(cell.device)
            and records.decisive(record.config) | {"seed": None} == ours
        ):
            return Cost(_seconds(record), mebibytes(record.memory.peak_bytes), f"seed {record.seed}")
    return None


def foretold(cell: Cell) -> Cost:
    """From a few steps, in a process of its own: its memory is free again for the runs, on the CPU and on a GPU."""
    print(f"  timing a few steps of {cell.config.model.name} on {cell.config.task.name}", flush=True)
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(measure, cell.config).result()
    except OutOfMemory:
        return Cost(None, "too much", "a few steps")
    except BrokenProcessPool:
        return Cost(None, "killed", "a few steps")
    except Exception as error:  # the cell will say it again, when its turn comes
        return Cost(None, "", f"nothing: {error}")


def measure(config: DictConfig) -> Cost:
    cell = Cell(config)
    task = cell.load()
    devices.prepare(cell.device, config.threads, cell.trainer.tf32)
    torch.manual_seed(config.seed)
    with cell.trainer.plainly():
        model = configs.build(config, "model", **asdict(task.spec))
        cost = cell.trainer.forecast(model, task, cell.device, config.seed, PATIENCE)
    seconds = cost.train_seconds + cost.evaluation_seconds
    steps = f"{cost.measured_steps} step{'s' * (cost.measured_steps > 1)}"
    return Cost(seconds, mebibytes(cost.memory.peak_bytes), steps)
