"""What a run shows while it goes on: one live line on a terminal, a plain line now and then elsewhere. No torch."""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

LIVE, PLAIN = 0.5, 60.0  # seconds between two looks, on a terminal and elsewhere


class Screen:
    """`live` is called all the time and shows its text when it is time; `line` prints a line that stays."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(disable=not self.terminal, bar_format="{desc}", leave=False)
        self.shown = time.monotonic()

    def live(self, text: Callable[[], str]) -> None:
        if time.monotonic() - self.shown >= (LIVE if self.terminal else PLAIN):
            show = self.bar.set_description_str if self.terminal else self.line
            show(text())
            self.shown = time.monotonic()

    def line(self, text: str) -> None:
        tqdm.write(text)
        sys.stdout.flush()
        self.shown = time.monotonic()

    def close(self) -> None:
        self.bar.close()


def duration(seconds: float) -> str:
    """3 days 4 h, 1:02:03 below two days, 2:03 below an hour, 3.4 s below a minute."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
