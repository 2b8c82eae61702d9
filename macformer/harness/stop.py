"""Signals: SIGINT and SIGTERM ask a run to stop where nothing is half done."""

import math
import signal
import threading
import time
from typing import Self

PATIENCE = 5.0  # seconds that a checkpoint may take, in which a second SIGINT does no harm


class Stopped(Exception):
    """SIGINT or SIGTERM came, and the run is between two steps or in an evaluation, where nothing is half done."""


class Stop:
    """While entered, SIGINT and SIGTERM are only a request, which `check` raises; a later SIGINT acts at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.asked_at = math.inf

    def __enter__(self) -> Self:
        main_thread = threading.current_thread() is threading.main_thread()  # no other may set handlers
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if main_thread}
        for number, handler in list(self.before.items()):
            if callable(handler) and handler is not signal.default_int_handler:
                del self.before[number]  # somebody else's: submitit's jobs go on after SIGTERM
        for number in self.before:
            signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and time.monotonic() - self.asked_at > PATIENCE:
            raise KeyboardInterrupt
        self.signal = self.signal or number
        self.asked_at = min(self.asked_at, time.monotonic())

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self.signal:
            raise Stopped
