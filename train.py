"""Train one model on one task and record the result: python train.py model=macformer_exp task=listops."""

import os
import signal
import sys
import traceback
from contextlib import nullcontext

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import sweep as sweeps
from macformer.harness.run import EXPECTED, run

EXIT = {"diverged": 3, "oom": 4}  # interrupted: 128 + the signal's number; anything else: 1
LIBRARIES = ("hydra", "omegaconf", "joblib", "submitit", "ray")  # whose errors are about the command, or a dead process


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    overrides = list(HydraConfig.get().overrides.task)
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        run(config, overrides)
        return
    notes = sweeps.Notes()
    if notes.stopped:
        return
    notes.tell("it began, but did not report its end: it was killed, or is still running")
    # Only joblib's workers choose a GPU: the others have one at a time, or one that a cluster gave them.
    own_gpu = devices.own_gpu if notes.launcher == "joblib" else nullcontext
    try:
        with own_gpu(config.device) as config.device:
            run(config, overrides, notes.concurrent)
        notes.tell("")
    except KeyboardInterrupt as stop:
        notes.tell("")
        notes.write("stopped", next(iter(stop.args), signal.SIGINT))
        if notes.launcher == "basic":
            raise  # else this is a worker, and the others must save their checkpoints too
    except Exception as error:
        notes.tell(str(error))
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        print(f"failed: {error}", flush=True)
        raise  # Hydra reports it when all runs are over


def command() -> int:
    """Run Hydra's command line. Expected errors are one sentence; the failures of a sweep are listed at its end."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come through to here
    code = 0
    try:
        main()
    except KeyboardInterrupt as stop:
        code = 128 + next(iter(stop.args), signal.SIGINT)
    except Exception as error:
        failures = sweeps.Notes().failures() if HydraConfig.initialized() else []
        if not (failures or isinstance(error, EXPECTED) or type(error).__module__.startswith(LIBRARIES)):
            raise
        sentence = configs.explain(error)
        if not any(sentence in failure for failure in failures):
            print(f"error: {sentence}", file=sys.stderr)
        code = 1 if failures else EXIT.get(getattr(error, "status", ""), 1)
    return sweeps.Notes().report(code) if HydraConfig.initialized() else code


if __name__ == "__main__":
    sys.exit(command())
