"""The one interleaved benchmark: machines are noisy, so a speed claim is a ratio within a round."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from macformer.harness import device as devices
from macformer.harness import record as records

SQUARE, PRODUCTS = 1024, 4  # of the arm `matmul`
MATMUL_FLOP = PRODUCTS * 2 * SQUARE**3


def race(
    arms: Callable[[int], Mapping[str, Callable[[], Any]]],
    rounds: int,
    device: torch.device,
    seconds: float = 0.0,
    seed: int = 0,
    warm_up: bool = True,
    look: Callable[[str, Any], None] = lambda name, result: None,
) -> Iterator[dict[str, float]]:
    """Mean seconds of a call of each arm, round by round. `arms(number)` are those of round 1, 2, ..., with its data.

    In every round each arm has one turn, in a new order: it is called once, or again and again for `seconds`.
    `warm_up`: a round 0 comes first and does not count. `look` sees what an arm returned, outside the clock; nothing of
    it is kept, or it would be in the way of the others.
    """
    order = random.Random(seed)
    for number in range(0 if warm_up else 1, rounds + 1):
        calls, taken = arms(number), {}
        for name in order.sample(list(calls), len(calls)):
            taken[name], result = devices.time_repeated(device, calls[name], seconds)
            if number:
                look(name, result)
            del result
        if number:
            yield taken


def provenance(device: torch.device, precision: devices.Precision = "float32") -> dict[str, Any]:
    """Which code on which machine, for the report of what was measured on one thread."""
    environment = records.environment(device.type, devices.describe(device), 1, precision)
    return {"code": records.code().model_dump(), "environment": environment.model_dump()}


def matmul(device: torch.device) -> Callable[[], None]:
    """An arm of MATMUL_FLOP operations: how fast the machine multiplies matrices."""
    square = torch.randn(SQUARE, SQUARE, device=device)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            square @ square

    return multiply


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Ours to theirs within each round: median, lowest and highest."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median(each), min(each), max(each)
