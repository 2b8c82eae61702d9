"""What a sweep adds to Hydra's: notes of its runs, whatever process or host they are in; what it will cost, told first.

Nothing here starts a run: Hydra's sweeper makes the runs, and its launchers start them.
"""

import json
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness import record as records
from macformer.harness.failures import OutOfMemory
from macformer.harness.identity import identity_config
from macformer.harness.plan import RunPlan
from macformer.harness.progress import duration, mebibytes
from macformer.harness.result import Forecast

HERE = ("basic", "joblib")  # launchers whose runs are on this machine
PATIENCE = 5.0  # seconds of steps for a forecast
SETTLED_THERE = ("device", "trainer.precision")  # by the machine that runs it
Cost = tuple[float | None, str, str]  # of a whole run: seconds (None: not known), memory, where they are known from


class Notes:
    """In the sweep's folder, which all its runs can reach: how each of them ended, and whether to begin another."""

    def __init__(self) -> None:
        hydra = HydraConfig.get()
        self.folder = Path(hydra.sweep.dir) / "notes"
        self.launcher: str = hydra.runtime.choices["hydra/launcher"]

    def expect(self, runs: int, at_once: int | None) -> None:
        files.write(self.folder / "expected", json.dumps([runs, at_once]))

    @property
    def expected(self) -> tuple[int, int | None]:
        """Runs of the sweep, and how many of them go on at the same time, if that is known."""
        file = self.folder / "expected"
        runs, at_once = json.loads(file.read_text()) if file.exists() else (0, None)  # this is not a sweep
        return runs, at_once

    @property
    def not_started(self) -> int:
        return max(self.expected[0] - len(list(self.folder.glob("*.job"))), 0)

    @property
    def concurrent(self) -> int | None:
        """Other runs that may be at work beside one of them."""
        runs, at_once = self.expected
        return None if at_once is None else min(runs, at_once) - 1

    @property
    def stopped(self) -> int:
        """The signal that stopped the sweep, or 0."""
        file = self.folder / "stopped"
        return int(file.read_text()) if file.exists() else 0

    def stop(self, number: int) -> None:
        files.write(self.folder / "stopped", str(number))

    def write(self, what: str) -> None:
        """Of this run. The empty note: all is well."""
        hydra = HydraConfig.get()
        text = f"{' '.join(hydra.overrides.task)}: {' '.join(what.split())}" if what else ""
        files.write(self.folder / f"{hydra.job.num:05}.job", text)

    def failures(self) -> list[str]:
        """What the runs have written, in their order."""
        return [text for file in sorted(self.folder.glob("*.job")) if (text := file.read_text())]


class Sweep(Callback):
    """Before the first run: the signals of a sweep over processes, and the announcement if it is wanted."""

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
        at_once = 1 if notes.launcher == "basic" else None
        if notes.launcher == "joblib":
            from joblib import effective_n_jobs  # of an extra

            at_once = effective_n_jobs(config.hydra.launcher.n_jobs)
        runs = list(expand(config))
        notes.expect(len(runs), at_once)
        if self.announce:
            announce(config, runs, at_once)


def _ask(number: int, frame: object) -> None:
    """Ctrl-C goes to the workers of this machine, too: wait for their checkpoints. The second time, do not wait."""
    notes = Notes()
    if notes.stopped:
        raise KeyboardInterrupt(number)
    notes.stop(number)
    print("stopping: no more runs begin; once more leaves those at work alone", file=sys.stderr)


def expand(config: DictConfig) -> Iterator[list[str]]:
    """The overrides of each run, as Hydra's own sweeper makes them: a later word for a key replaces an earlier one."""
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    choices: dict[str, list[str]] = {}
    for word in parser.parse_overrides([*words, *config.hydra.overrides.task]):
        key = word.get_key_element()
        if word.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in word.sweep_string_iterator()]
        else:
            choices[key] = [key if key.startswith("~") else f"{key}={word.get_value_element_as_str()}"]
    return map(list, product(*choices.values()))


def compose(config: DictConfig, words: list[str]) -> DictConfig:
    """The configuration that the run gets, wherever its YAML files are."""
    made = GlobalHydra.instance().config_loader().load_sweep_config(config, words)
    with read_write(made), open_dict(made):
        del made["hydra"]
    return made


def announce(config: DictConfig, runs: list[list[str]], at_once: int | None) -> None:
    """Print how many runs there are, what is done already, what is left to do, and where."""
    launcher = Notes().launcher
    print(f"{len(runs)} cells, by hydra/launcher={launcher}, their records in {config.paths.results}/runs", flush=True)
    every = [(compose(config, words), words) for words in runs]
    if launcher in HERE:
        announce_local(*survey(every), at_once or 1)
    else:
        announce_remote([config for config, _ in every])
    print(flush=True)


def announce_remote(every: list[DictConfig]) -> None:
    """For runs on other machines: neither their device nor their data need be here."""
    finished, unknown, left = 0, 0, 0.0
    for config in every:
        alike = list(finished_alike(configs.container(config), SETTLED_THERE))
        if any(record.seed == config.seed for record in alike):
            finished += 1
        elif alike and alike[0].time:
            left += alike[0].time.total
        else:
            unknown += 1
    print(
        f"  {finished} have records; the others take {duration(left)} one after the other, by records of other seeds"
        f"{f', and {unknown} of them nobody has timed' if unknown else ''}"
    )


def finished_alike(config: dict[str, Any], ignored: tuple[str, ...] = ()) -> Iterator[records.Record]:
    """Finished runs that differ from this one only in their seed and in the keys to be ignored."""

    def kind(config: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in identity_config(config).items() if key not in ("seed", *ignored)}

    for file in sorted(records.path(config["paths"]["results"], config, "").parent.glob("*.json")):
        record = records.finished(file)
        if record and kind(record.config) == kind(config):
            yield record


@dataclass
class Planned:
    plan: RunPlan
    fingerprint: str  # of its data
    finished: bool
    step: int  # of the checkpoint that it goes on from, or 0


def survey(every: list[tuple[DictConfig, list[str]]]) -> tuple[list[Planned], Counter[str]]:
    """The runs that can begin; what is wrong with the others, and how often."""
    planned, problems = [], Counter[str]()
    fingerprints: dict[str, str | Exception] = {}  # errors too: a hub that cannot be reached is slow to say so
    for config, words in every:
        try:
            plan = RunPlan(config, words)
            key = json.dumps([plan.resolved["task"], plan.resolved["paths"]])
            if key not in fingerprints:
                try:
                    fingerprints[key] = plan.task().fingerprint
                except Exception as error:
                    fingerprints[key] = error
            if isinstance(fingerprint := fingerprints[key], Exception):
                raise fingerprint
            file, checkpoint = plan.record_and_checkpoint(fingerprint)
            record = records.finished(file)
            finished = bool(record) and not config.force
            saved = None if finished else checkpoint.unfinished(record)
            planned.append(Planned(plan, fingerprint, finished, saved["step"] if saved else 0))
        except Exception as error:  # the run will say it again, when its turn comes
            problems[f"{config.task.name}: {error}"] += 1
    return planned, problems


@dataclass
class Row:
    """The runs of one model on one task."""

    states: Counter[str] = field(default_factory=Counter)
    cost: Cost = (None, "", "")


def announce_local(planned: list[Planned], problems: Counter[str], at_once: int) -> None:
    """What will fail, what is finished, what goes on from a checkpoint, what begins; the time of one run and of all."""
    for problem, times in problems.items():
        print(f"  {times} will fail: {problem}")
    if not planned:
        return
    rows, costs = defaultdict[tuple[str, str], Row](Row), dict[str, Cost]()
    left, unknown = 0.0, 0
    for each in planned:
        plan = each.plan
        row = rows[plan.config.task.name, plan.config.model.name]
        row.states["finished" if each.finished else "go on" if each.step else "begin"] += 1
        if each.finished:
            continue
        kind = json.dumps([identity_config(plan.resolved) | {"seed": None}, each.fingerprint], sort_keys=True)
        costs[kind] = row.cost = costs.get(kind) or recorded(plan, each.fingerprint) or estimate_cost(plan)
        left += (row.cost[0] or 0) * (1 - each.step / plan.trainer.total_steps) / at_once
        unknown += row.cost[0] is None
    print("  task       model            finished  go on  begin          a run       memory  known from")
    for (task, model), row in rows.items():
        (seconds, memory, source), states = row.cost, row.states
        time_of_one = "" if seconds is None else duration(seconds)
        print(
            f"  {task:10} {model:16} {states['finished']:8} {states['go on']:6} {states['begin']:6} "
            f"{time_of_one:>14} {memory:>12}  {source}"
        )
    plan, end = planned[0].plan, time.strftime("%a %d %b %H:%M", time.localtime(time.time() + left))
    known = f", {unknown} cells of unknown time left out" if unknown else ""
    print(
        f"  in all {duration(left)} on {devices.describe(plan.device)} ({plan.device.type}, {at_once} at a time)"
        f"{known}: until {end}; checkpoints in {plan.config.paths.outputs}"
    )


def recorded(plan: RunPlan, fingerprint: str) -> Cost | None:
    """From the record of another seed on a machine like this one."""
    for record in finished_alike(plan.resolved):
        same = record.environment.device_name == devices.describe(plan.device)
        if same and record.data.fingerprint == fingerprint and record.memory and record.time:
            return record.time.total, mebibytes(record.memory.peak_bytes), f"seed {record.seed}"
    return None


def estimate_cost(plan: RunPlan) -> Cost:
    """From a few steps, in a process of its own: its memory is free again for the runs, on the CPU and on a GPU."""
    print(f"  timing a few steps of {plan.config.model.name} on {plan.config.task.name}", flush=True)
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            cost = process.submit(forecast, plan.config, plan.overrides).result()
    except OutOfMemory:
        return None, "too much", "a few steps"
    except BrokenProcessPool:
        return None, "killed", "a few steps"
    except Exception as error:  # the run will say it again, when its turn comes
        return None, "", f"nothing: {error}"
    steps = f"{cost.measured_steps} step{'s' * (cost.measured_steps > 1)}"
    return cost.train_seconds + cost.evaluation_seconds, mebibytes(cost.memory.peak_bytes), steps


def forecast(config: DictConfig, overrides: list[str]) -> Forecast:
    plan = RunPlan(config, overrides)
    task = plan.task()
    return plan.trainer.forecast(plan.model(task), task, plan.device, config.seed, PATIENCE)
