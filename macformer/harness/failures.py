"""What can go wrong in a training, each as one sentence that says what to do about it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from macformer.harness import device as devices
from macformer.harness.record import Status

if TYPE_CHECKING:
    from macformer.harness.trainer import Trainer


class Diverged(Exception):
    """A loss is not finite."""


class CannotRun(Exception):
    """torch.compile does not work here, or saved weights do not fit the code."""


class OutOfMemory(Exception):
    """The machine's memory or the GPU's."""

    status: Status = "oom"


@contextmanager
def explain_errors(settings: "Trainer") -> Iterator[None]:
    """Turn the errors that a person can do something about into one of the above."""
    try:
        yield
    except Exception as error:
        if settings.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = str(error).strip().partition("\n")[0]
            raise CannotRun(f"trainer.compile=true does not work here ({reason}): leave it out") from error
        if devices.is_out_of_memory(error):
            raise OutOfMemory(
                f"out of memory: raise trainer.accumulate={settings.accumulate} (the same batch in more parts) "
                f"or lower trainer.batch_size={settings.batch_size}"
            ) from error
        raise


def check_finite(name: str, loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"{name} is {loss} at step {step}: lower task.learning_rate")


def load_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # the code has changed since
        raise CannotRun("the checkpoint's weights do not fit this code: train again without it") from error
