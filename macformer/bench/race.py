"""A benchmark is interleaved: one process, one thread, rounds. In every round each arm has one turn, in a new order,
all on the same data. Machines are noisy, so a claim about speed is a ratio within a round; the median of the rounds
and their range are reported. A round before the first warms up and is not counted.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from macformer.harness import device as devices
from macformer.harness import record as records

SQUARE, PRODUCTS = 1024, 4  # of the arm `matmul`
MATMUL_FLOP = PRODUCTS * 2 * SQUARE**3
Arms = Callable[[int], Mapping[str, Callable[[], Any]]]  # of a round
Samples = dict[str, list[float]]


def race(
    arms: Arms,
    rounds: int,
    device: torch.device,
    seconds: float = 0.0,
    seed: int = 0,
    warm_up: bool = True,
    look: Callable[[str, Any], None] = lambda name, result: None,
    label: str = "",
) -> Iterator[dict[str, float]]:
    """Yield the mean seconds of a call of each arm, round by round; `arms(number)` gives those of round 1, 2, ...

    In its turn an arm is called once, or again and again for `seconds`. With `warm_up` there is a round 0. `look` sees
    what an arm returned, outside the clock; nothing of it is kept, as it would take the memory that others need. With a
    `label` each round is announced.
    """
    order = random.Random(seed)
    for number in range(1 - warm_up, rounds + 1):
        if label:
            print(f"{label}: round {number} of {rounds}", file=sys.stderr)
        calls, taken = arms(number), {}
        for name in order.sample(list(calls), len(calls)):
            begin, count = devices.now(device), 0
            while count == 0 or devices.now(device) - begin < seconds:
                result, count = calls[name](), count + 1
            taken[name] = (devices.now(device) - begin) / count
            if number:
                look(name, result)
            del result
        if number:
            yield taken


def race_with_rate(arms: Arms, rounds: int, device: torch.device, **options: Any) -> tuple[Samples, list[float]]:
    """Race the arms and `matmul`: the seconds of each arm, and the FLOP a second of `matmul`, in each round."""
    multiply = matmul(device)
    taken = list(race(lambda number: {"matmul": multiply, **arms(number)}, rounds, device, **options))
    seconds = {name: [each[name] for each in taken] for name in taken[0]}
    return seconds, [MATMUL_FLOP / each for each in seconds.pop("matmul")]


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


class FlopCounter(TorchDispatchMode):
    """2 n a b for the product of an n x a and an a x b matrix; fused attention has 2 products forward and 5 backward.

    torch's own counter knows neither products in place nor fused attention on the CPU.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = args[-2:]
            self.total += 2 * a.numel() * b.shape[-1]
        elif name.startswith("_scaled_dot_product"):
            q, k, products = (*args[1:3], 5) if name.endswith("_backward") else (*args[:2], 2)
            self.total += 2 * products * q.numel() * k.shape[-2]
        return func(*args, **(kwargs or {}))


def count_flop(work: Callable[[], object]) -> int:
    with FlopCounter() as counter:
        work()
    return counter.total


def ratios(arms: Mapping[str, Any], name: str, to: str) -> list[float]:
    """Seconds of `name` over those of `to` in each round; none if one of the two has no figures."""
    if not {name, to} <= arms.keys():
        return []
    return [a / b for a, b in zip(arms[name]["seconds"], arms[to]["seconds"], strict=True)]


def with_range(values: Sequence[float], digits: str = ".3g") -> str:
    """The median, and the lowest and the highest in brackets; a dash if there are none."""
    return f"{median(values):{digits}} ({min(values):{digits}}-{max(values):{digits}})" if values else "-"


def milliseconds(arms: Mapping[str, Any], name: str, digits: str) -> str:
    return with_range([1e3 * each for each in arms[name]["seconds"]] if name in arms else [], digits)


def section(title: str, details: str, rows: Sequence[dict[str, str]], first: str = "---") -> str:
    """A title and a table in Markdown, whose header is the keys of the rows. `first` aligns the first column."""
    header = [[*rows[0]], [first] + ["--:"] * (len(rows[0]) - 1)] if rows else []
    lines = [f"| {' | '.join(cells)} |" for cells in (*header, *(row.values() for row in rows))]
    return "\n".join([f"**{title}** ({details})", "", *lines, ""])
