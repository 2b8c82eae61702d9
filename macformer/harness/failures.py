"""How a run can end early: signals, and errors whose message is one sentence that says what to do about it."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from macformer.harness import device as devices
from macformer.harness.record import Status

PATIENCE = 5.0  # seconds that a checkpoint may take, in which a second SIGINT does no harm


class RunFailed(Exception):
    """A run has come to a bad end, which is its status in its record, or could not even begin."""

    def __init__(self, message: str, status: Status | None = None):
        super().__init__(message)
        self.status = status


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM came, and the run is between two steps or in an evaluation, where nothing is half done."""


class Stop:
    """While entered, SIGINT and SIGTERM are only a request, which `check` raises; a later SIGINT acts at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.asked_at = math.inf
        self.before: dict[int, Any] = {}  # the handlers that were there

    def __enter__(self) -> Self:
        main_thread = threading.current_thread() is threading.main_thread()  # no other may set handlers
        for number in (signal.SIGINT, signal.SIGTERM) if main_thread else ():
            handler = signal.getsignal(number)
            if not callable(handler) or handler is signal.default_int_handler:  # submitit's jobs go on after SIGTERM
                self.before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and time.monotonic() - self.asked_at > PATIENCE:
            self.signal = number
            raise KeyboardInterrupt
        self.signal = self.signal or number
        self.asked_at = min(self.asked_at, time.monotonic())

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self.signal:
            raise Stopped


@contextmanager
def explain_errors(settings: Any) -> Iterator[None]:
    """Turn the errors that a person can do something about, by a trainer's settings, into RunFailed."""
    try:
        yield
    except Exception as error:
        if settings.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = str(error).strip().partition("\n")[0]
            raise RunFailed(f"trainer.compile=true does not work here ({reason}): leave it out") from error
        if devices.is_out_of_memory(error):
            raise RunFailed(
                f"out of memory: raise trainer.accumulate={settings.accumulate} (the same batch in more parts) "
                f"or lower trainer.batch_size={settings.batch_size}",
                "oom",
            ) from error
        if "Error(s) in loading state_dict" in str(error):  # the code has changed since
            raise RunFailed("the checkpoint's weights do not fit this code: train again without it") from error
        raise


def check_finite(name: str, loss: float) -> None:
    if not math.isfinite(loss):
        raise RunFailed(f"{name} is {loss}: lower task.learning_rate", "diverged")
