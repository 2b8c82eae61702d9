"""What a sweep adds to Hydra's: notes of its runs, whatever process or host they are in, and an announcement.

Nothing here starts a run: Hydra's sweeper makes the runs, and its launchers start them.
"""

import json
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness import record as records
from macformer.harness.identity import identity_config
from macformer.harness.plan import RunPlan
from macformer.harness.progress import duration, mebibytes

PATIENCE = 5.0  # seconds of steps for a forecast


class Notes:
    """In the sweep's folder, which all its runs can reach: how each of them ended, and whether to begin another."""

    def __init__(self) -> None:
        hydra = HydraConfig.get()
        self.folder = Path(hydra.sweep.dir) / "notes"
        self.launcher: str = hydra.runtime.choices["hydra/launcher"]
        # Runs; others on the device of each, if known.
        self.expected, self.concurrent = self._read("expected", (0, None))
        self.stopped: int = self._read("stopped", 0)  # the signal that stopped the sweep

    def _read(self, name: str, default: Any) -> Any:
        """The default if nobody has written it yet, or this is not a sweep."""
        file = self.folder / name
        return json.loads(file.read_text()) if file.exists() else default

    def write(self, name: str, content: object) -> None:
        files.write(self.folder / name, json.dumps(content))

    def tell(self, what: str) -> None:
        """How this run ended; nothing if all is well."""
        hydra = HydraConfig.get()
        text = f"{' '.join(hydra.overrides.task)}: {' '.join(what.split())}" if what else ""
        self.write(f"{hydra.job.num:05}.job", text)

    def failures(self) -> list[str]:
        """What the runs have told, in their order."""
        return [text for file in sorted(self.folder.glob("*.job")) if (text := self._read(file.name, ""))]

    def report(self, code: int) -> int:
        """Print what failed or did not begin, and return the exit code of the whole."""
        failures, not_started = self.failures(), self.expected - len(list(self.folder.glob("*.job")))
        if failures:
            print(f"error: {len(failures)} of the sweep's runs failed:", *failures, sep="\n", file=sys.stderr)
        if not_started > 0:
            print(f"{not_started} of the sweep's runs did not begin: the same command goes on", file=sys.stderr)
        return 128 + self.stopped if self.stopped else code or int(bool(failures) or not_started > 0)


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
        at_once = 1 if notes.launcher == "basic" else None
        gpus: list[str] = []  # that its runs have to themselves
        if notes.launcher == "joblib":
            from joblib import effective_n_jobs  # of an extra

            at_once, gpus = effective_n_jobs(config.hydra.launcher.n_jobs), devices.gpus(config.device)
            if gpus:
                at_once = min(at_once, len(gpus))
                with read_write(config.hydra):
                    config.hydra.launcher.n_jobs = at_once  # the launcher is not made yet
        for number in (signal.SIGINT, signal.SIGTERM) if notes.launcher != "basic" else ():
            signal.signal(number, _ask)
        loader = GlobalHydra.instance().config_loader()
        words = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        parsed = OverridesParser.create(loader).parse_overrides([*words, *config.hydra.overrides.task])
        (runs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        notes.write("expected", (len(runs), 0 if gpus else at_once and min(len(runs), at_once) - 1))
        if self.announce:
            where = f"their records in {config.paths.results}/runs"
            print(f"{len(runs)} cells, by hydra/launcher={notes.launcher}, {where}", flush=True)
            keys = [str(key) for key in config if key != "hydra"]
            announce([OmegaConf.masked_copy(loader.load_sweep_config(config, run), keys) for run in runs], at_once)


def _ask(number: int, frame: object) -> None:
    """Ctrl-C goes to the workers of this machine, too: wait for their checkpoints. The second time, do not wait."""
    notes = Notes()
    if notes.stopped:
        raise KeyboardInterrupt(number)
    notes.write("stopped", number)
    print("stopping: no more runs begin; once more leaves those at work alone", file=sys.stderr)


class Cost(NamedTuple):  # of a whole run
    seconds: float | None = None  # not known
    memory: str = ""
    source: str = ""


class Cell(NamedTuple):
    state: Literal["finished", "go on", "begin"]
    share: float = 0.0  # that is left to do
    cost: Cost = Cost()


def announce(every: list[DictConfig], at_once: int | None) -> None:
    """Print what will fail, is finished, goes on or begins, and how long it takes. at_once=None: on other machines."""
    problems, rows = Counter[str](), defaultdict[tuple[str, str], list[Cell]](list)
    costs: dict[str, Cost] = {}
    fingerprints: dict[str, str | Exception] = {}  # errors too: a hub out of reach is slow to say so
    for config in every:
        try:
            cell = survey_here(config, fingerprints, costs) if at_once else survey_elsewhere(config)
            rows[config.task.name, config.model.name].append(cell)
            fit = config
        except Exception as error:  # the run will say it again, when its turn comes
            problems[f"{config.task.name}: {error}"] += 1
    for problem, times in problems.items():
        print(f"  {times} will fail: {problem}")
    if not rows:
        return
    print("  task       model            finished  go on  begin          a run       memory  known from")
    for (task, model), cells in rows.items():
        count = Counter(cell.state for cell in cells)
        seconds, memory, source = next((cell.cost for cell in cells if cell.state != "finished"), Cost())
        a_run = "" if seconds is None else duration(seconds)
        counts = f"{count['finished']:8} {count['go on']:6} {count['begin']:6}"
        print(f"  {task:10} {model:16} {counts} {a_run:>14} {memory:>12}  {source}")
    ahead = [cell for cells in rows.values() for cell in cells if cell.state != "finished"]
    left = sum(cell.share * (cell.cost.seconds or 0) for cell in ahead) / (at_once or 1)
    unknown = sum(cell.cost.seconds is None for cell in ahead)
    where = "one after the other"
    if at_once:
        device = devices.choose(fit.device)
        end = time.strftime("%a %d %b %H:%M", time.localtime(time.time() + left))
        where = f"on {devices.describe(device)} ({device.type}, {at_once} at a time): until {end}"
    known = f" ({unknown} cells of unknown time left out)" if unknown else ""
    print(f"  in all {duration(left)} {where}{known}; checkpoints in {fit.paths.outputs}\n", flush=True)


def survey_elsewhere(config: DictConfig) -> Cell:
    """From records alone: neither the device nor the data of another machine need be here."""
    known = records_alike(configs.container(config), "device", "trainer.precision")  # settled there
    if config.seed in [record.seed for record in known] and not config.force:
        return Cell("finished")
    return Cell("begin", 1, next(map(recorded_cost, known), Cost()))


def survey_here(config: DictConfig, fingerprints: dict[str, str | Exception], costs: dict[str, Cost]) -> Cell:
    """From records of a machine like this one, or from a few steps. What is found is kept for the other cells."""
    plan = RunPlan(config)
    key = json.dumps([plan.resolved["task"], plan.resolved["paths"]])
    if key not in fingerprints:
        try:
            fingerprints[key] = plan.task().fingerprint
        except Exception as error:
            fingerprints[key] = error
    if isinstance(fingerprint := fingerprints[key], Exception):
        raise fingerprint
    file, checkpoint = plan.record_and_checkpoint(fingerprint)
    finished = records.finished(file)
    if finished and not config.force:
        return Cell("finished")
    saved = checkpoint.unfinished(finished)
    kind = json.dumps([_kind(plan.resolved), fingerprint], sort_keys=True)
    if kind not in costs:
        known = [each for each in records_alike(plan.resolved) if each.data.fingerprint == fingerprint]
        machine = devices.describe(plan.device)
        same = (recorded_cost(each) for each in known if each.environment.device_name == machine)
        costs[kind] = next(same, None) or estimate_cost(plan)
    left = 1 - saved["step"] / plan.trainer.total_steps if saved else 1
    return Cell("go on" if saved else "begin", left, costs[kind])


def _kind(config: dict[str, Any], *ignored: str) -> dict[str, Any]:
    return {key: value for key, value in identity_config(config).items() if key not in ("seed", *ignored)}


def records_alike(config: dict[str, Any], *ignored: str) -> list[records.Record]:
    """Finished runs that differ from this one only in their seed and in the keys to be ignored."""
    folder = records.path(config["paths"]["results"], config, "").parent
    found = map(records.finished, sorted(folder.glob("*.json")))
    return [each for each in found if each and _kind(each.config, *ignored) == _kind(config, *ignored)]


def recorded_cost(record: Any) -> Cost:
    seconds = record.time.train_seconds + record.time.evaluation_seconds + record.time.pause_seconds
    return Cost(seconds, mebibytes(record.memory.peak_bytes), f"seed {record.seed}")


def estimate_cost(plan: RunPlan) -> Cost:
    """From a few steps, in a process of its own: its memory is free again for the runs, on the CPU and on a GPU."""
    print(f"  timing a few steps of {plan.config.model.name} on {plan.config.task.name}", flush=True)
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(_time_steps, plan).result()
    except Exception as error:  # out of memory, say; the run will say it again, when its turn comes
        return Cost(source=f"nothing: {error}")


def _time_steps(plan: RunPlan) -> Cost:
    task = plan.task()
    found = plan.trainer.forecast(plan.model(task), task, plan.device, plan.config.seed, PATIENCE)
    seconds = found.train_seconds + found.evaluation_seconds
    return Cost(seconds, mebibytes(found.memory.peak_bytes), f"{found.measured_steps} steps")
