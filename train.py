"""Train one model on one task and record the result: python train.py model=macformer_exp task=listops.

The translator is another configuration of the same program: python train.py -cn translate ppsbn=with.
"""

import os
import signal
import sys
import traceback
from dataclasses import asdict
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from lra_data.base import SPLITS, DataError
from macformer import checkpoint as checkpoints
from macformer import config as configs
from macformer import device as devices
from macformer import record as records
from macformer import sweep as sweeps
from macformer.cell import Cell
from macformer.loop import CannotRun, Look, Loop, OutOfMemory, load_weights
from macformer.progress import Screen, duration, mebibytes

EXIT = {"diverged": 3, "oom": 4}  # interrupted: 128 + the signal's number; anything else: 1
LAUNCHERS = ("joblib", "submitit", "ray")  # whose own errors say that a process of theirs died


class RunFailed(Exception):
    """The run came to a bad end, which is in its record."""

    def __init__(self, message: str, status: str = ""):
        super().__init__(message)
        self.status = status


EXPECTED = (configs.ConfigError, DataError, checkpoints.CheckpointError, CannotRun, OutOfMemory, RunFailed, OSError)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    overrides = list(HydraConfig.get().overrides.task)
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        run(config, overrides)
        return
    notes = sweeps.Notes()
    if notes.stopped:
        return
    notes.write("it began and has not told its end: it was killed, or is still at work")
    try:
        run(config, overrides)
        notes.write("")
    except KeyboardInterrupt as stop:
        notes.write("")
        notes.stop(signal_of(stop))
        if notes.launcher == "basic":
            raise  # else this is a worker, and the others are to save their checkpoints, too
    except Exception as error:
        notes.write(str(error))
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        print(f"failed: {error}", flush=True)
        raise  # Hydra tells it when all runs are over


def run(config: DictConfig, overrides: list[str]) -> records.Run | None:
    """Compose -> task -> model -> fit -> record."""
    cell = Cell(config)
    device, trainer, resolved = cell.device, cell.trainer, cell.resolved
    task = cell.load()
    file, checkpoint = cell.places(task.fingerprint)
    run_id = checkpoint.run_id
    code = records.code()
    finished = records.finished(file)
    if finished and not (config.force or config.evaluate or config.dry_run):
        print(f"{run_id} is finished: {file} (force=true repeats it)")
        if finished.code.commit != code.commit:
            print(f"warning: that record was made by commit {finished.code.commit}, this is {code.commit}")
        return finished

    devices.prepare(device, config.threads, trainer.tf32)
    torch.manual_seed(config.seed)
    model = configs.build(config, "model", **asdict(task.spec))
    parameters = sum(p.numel() for p in model.parameters())
    environment = records.environment(device.type, devices.describe(device), config.threads, trainer.precision)
    sizes = " / ".join(f"{len(task.splits[split]):,}" for split in SPLITS)
    print(f"{config.model.name} ({parameters:,} parameters) on {config.task.name} ({task.source}: {sizes})")
    if config.evaluate:
        with trainer.plainly():
            evaluate_only(config.evaluate, resolved, trainer, model, task, device, config.seed)
        return None
    where = "nothing is recorded: a dry run" if config.dry_run else f"record: {file}"
    print(f"{trainer.total_steps:,} steps on {environment.device_name} ({device.type}, {trainer.precision}); {where}")
    if config.dry_run:
        forecast(trainer, model, task, device, config.seed)
        return None

    trainer.goal(task, config.seed)  # settings that do not fit the data should fail now, and leave nothing behind
    file.parent.mkdir(parents=True, exist_ok=True)  # a place that cannot be written should fail now, not at the end
    with checkpoint.alone():
        finished = records.finished(file)  # another process may just have finished it
        if finished and not config.force:
            return finished
        saved = checkpoint.unfinished(finished)
        if saved:
            print(f"going on from step {saved['step']:,} ({checkpoint.file}; delete it to start anew)")
            if checkpoint.sessions[-1].commit != code.commit:
                print(f"warning: commit {checkpoint.sessions[-1].commit} saved it, this is {code.commit}")
        checkpoint.begin(saved["step"] + 1 if saved else 1, code.commit, environment.device_name)
        logger = None
        if config.logger:
            began = checkpoint.sessions[0].began
            logger = configs.build(config, "logger", settings=resolved, run_id=run_id, began=began)
        log = logger.log if logger else None
        result = trainer.fit(model, task, device, config.seed, checkpoint.save, saved, log)
        record = trainer.record(
            run_id=run_id,
            status=result.status,
            message=result.message,
            task=config.task.name,
            model=config.model.name,
            seed=config.seed,
            steps_done=len(result.losses),
            config=resolved,
            overrides=overrides,
            code=code,
            data=records.Data(
                fingerprint=task.fingerprint,
                source=task.source,
                examples={split: len(task.splits[split]) for split in SPLITS},
                majority=task.majority,
            ),
            environment=environment,
            sessions=checkpoint.sessions,
            parameters=parameters,
            quality=result.quality,
            time=result.time,
            memory=result.memory,
            history=result.history,
        )
        if record.status == "ok" or not finished:  # a repeat that fails does not cost the finished record
            records.write(record, file)
        if record.status == "ok":
            checkpoint.finish(record.steps_done)
        elif record.status == "diverged":
            checkpoint.drop()  # it would diverge again
        if logger:
            logger.finish(file)
    print(records.summary(record))
    if record.status == "interrupted":
        print(
            f"the same command goes on from {checkpoint.file}" if checkpoint.file.exists() else "nothing is saved yet"
        )
    if result.signal:  # it may have come too late for this run: a sweep is to stop all the same
        raise KeyboardInterrupt(result.signal)
    if record.status != "ok":
        raise RunFailed(f"{run_id} ended as {record.status}: {record.message}", record.status)
    return record


def evaluate_only(
    name: str, config: dict[str, Any], trainer: Loop, model: nn.Module, task: Any, device: torch.device, seed: int
) -> None:
    """Test the weights of a checkpoint, named by its file or its run's id."""
    saved = checkpoints.load_for(config, task.fingerprint, name)
    goal, screen = trainer.goal(task, seed), Screen()

    def tick(done: int) -> None:
        screen.live(lambda: f"evaluating: {done:,} of {goal.test_examples:,} examples")

    look = Look(model.to(device), device, trainer.precision, tick)
    for which, weights in (("best on dev", saved["best_weights"]), ("last", saved["model"])):
        if weights is None:
            continue
        load_weights(model, weights)
        told = goal.told(goal.test(look))
        screen.line(f"{saved['run_id']}, weights {which} of {saved['step']:,} steps: {told}")
    screen.close()


def forecast(trainer: Loop, model: nn.Module, task: Any, device: torch.device, seed: int) -> None:
    """What the run would cost."""
    with trainer.plainly():
        cost = trainer.forecast(model, task, device, seed)
    total = cost.train_seconds + cost.evaluation_seconds
    print(f"a step takes {1000 * cost.step_seconds:.3g} ms (mean of {cost.measured_steps})")
    print(f"peak memory of training {mebibytes(cost.memory.peak_bytes)} ({cost.memory.method})")
    print(
        f"expected: {duration(total)} in all, {duration(cost.train_seconds)} of it training "
        f"and {duration(cost.evaluation_seconds)} evaluation"
    )


def signal_of(stop: KeyboardInterrupt) -> int:
    return (stop.args or [signal.SIGINT])[0]


def command() -> int:
    """Run Hydra's command line. What can be said in a sentence is; the failures of a sweep are listed at its end."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come through to here
    code = 0
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {configs.explain(error)}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt as stop:
        code = 128 + signal_of(stop)
    except Exception as error:
        listed = HydraConfig.initialized() and sweeps.Notes().failures()
        launchers = type(error).__module__.startswith(LAUNCHERS)
        if not (listed or launchers or isinstance(error, EXPECTED)):
            raise
        if launchers or not any(" ".join(str(error).split()) in note for note in listed or ()):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1 if listed else EXIT.get(getattr(error, "status", ""), 1)
    if HydraConfig.initialized():  # by a sweep, and for it
        notes = sweeps.Notes()
        if failed := notes.failures():
            print("\n".join([f"error: {len(failed)} of the sweep's runs failed:", *failed]), file=sys.stderr)
            code = code or 1
        if notes.unheard:
            print(f"{notes.unheard} of the sweep's runs did not begin: the same command goes on", file=sys.stderr)
            code = code or 1
        if notes.stopped:
            code = 128 + notes.stopped
    return code


if __name__ == "__main__":
    sys.exit(command())
