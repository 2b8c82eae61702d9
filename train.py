"""Train one model on one task and record the result: python train.py model=macformer_exp task=listops."""

import os
import signal
import sys
import traceback

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from macformer.harness import config as configs
from macformer.harness import sweep as sweeps
from macformer.harness.run import EXPECTED, run

EXIT = {"diverged": 3, "oom": 4}  # interrupted: 128 + the signal's number; anything else: 1
LAUNCHERS = ("joblib", "submitit", "ray")  # whose own errors say that a process of theirs died


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
        run(config, overrides, notes.concurrent)
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
        if notes.not_started:
            print(f"{notes.not_started} of the sweep's runs did not begin: the same command goes on", file=sys.stderr)
            code = code or 1
        if notes.stopped:
            code = 128 + notes.stopped
    return code


if __name__ == "__main__":
    sys.exit(command())
