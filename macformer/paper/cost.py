"""What attention costs: products counted, and time measured, each as a power of the length and of the features.

Shapes: B batch, H heads, n length, d head width, D features.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from macformer.attention import RMFAttention, SoftmaxAttention
from macformer.bench.race import race
from macformer.paper.finding import Finding, Interval, all_between, found, slopes, student
from macformer.ppsbn import PreSBN

HEAD_DIM, FEATURES = 64, 128
AT = {"n": (1024, 2048, 4096, 8192), "d": (32, 64, 128, 256), "D": (256, 512, 1024, 2048)}
LENGTH = 2048  # where D varies
LINEAR, QUADRATIC = {"high": 1.1}, {"low": 1.8, "high": 2.2}  # exponents that pass for one (or less) and for two
TURN = 0.02  # seconds that an attention is called for when it is its turn, if one call does not take longer
ROUNDS, DRAWS = 10, 4
Make = Callable[[int, int, int], nn.Module]  # d, D, seed


def rmfa(d: int, D: int, seed: int) -> nn.Module:
    return RMFAttention(d, D, generator=Generator().manual_seed(seed))


def softmax(d: int, D: int, seed: int) -> nn.Module:
    return SoftmaxAttention()


def sdpa(d: int, D: int, seed: int) -> nn.Module:
    return SoftmaxAttention(implementation="sdpa")


class Timed(NamedTuple):
    """An attention whose time is a power of n, at D = FEATURES, or of D, at n = LENGTH."""

    make: Make
    axis: Literal["n", "D"]
    exponents: dict[str, float]  # `low` and `high`: between them the exponent should be


TIMED = {
    "C RMFA at most linear in n": Timed(rmfa, "n", LINEAR),
    "C softmax quadratic in n": Timed(softmax, "n", QUADRATIC),
    "C SDPA quadratic in n": Timed(sdpa, "n", QUADRATIC),
    "C RMFA at most linear in D": Timed(rmfa, "D", LINEAR),
}


def cost(effort: int) -> Iterator[Finding]:
    yield products(rmfa)
    for claim, rounds in measure(ROUNDS * effort).items():
        yield exponent_of_time(claim, rounds)


def inputs(n: int, d: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after pre-SBN, and v."""
    q, k, v = (torch.randn(1, 1, n, d, generator=Generator().manual_seed(seed)) for seed in range(3))
    return PreSBN(1e-12)(q), PreSBN(1e-12)(k), v


def products(make: Make) -> Finding:
    """Count the multiplications in matrix products with torch's counter: the mean of some draws."""

    def count(n: int = 1024, d: int = HEAD_DIM, D: int = 2048) -> float:
        total = 0
        for seed in range(DRAWS):
            attention, data = make(d, D, seed), inputs(n, d)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                attention(*data)
            total += counter.get_total_flops()
        return total / DRAWS

    counts = {name: [count(**{name: x}) for x in values] for name, values in AT.items()}
    exponents = {name: slopes(AT[name], [counts[name]])[0] for name in AT}
    verdict = all_between([Interval(e, e, e) for e in exponents.values()], **LINEAR)
    counted = ", ".join(f"{exponents[name]:.2f} in {name} ({x[0]:,} to {x[-1]:,})" for name, x in AT.items())
    return found("C operations", verdict, {"exponents": exponents, "flop": counts}, LINEAR | {"counted": counted})


def measure(rounds: int) -> dict[str, list[list[float]]]:
    """Claim -> seconds of a call: a row a round, a column a length or D."""
    data = {n: inputs(n) for n in AT["n"]}

    @torch.no_grad()
    def call(attention: nn.Module, n: int) -> object:
        return attention(*data[n])

    arms = {}
    for claim, (make, axis, _) in TIMED.items():
        for x in AT[axis]:
            n, D = (x, FEATURES) if axis == "n" else (LENGTH, x)
            arms[f"{claim} {x}"] = partial(call, make(HEAD_DIM, D, 0), n)
    taken = list(race(lambda number: arms, rounds, torch.device("cpu"), TURN))
    return {
        claim: [[seconds[f"{claim} {x}"] for x in AT[timed.axis]] for seconds in taken]
        for claim, timed in TIMED.items()
    }


def exponent_of_time(claim: str, rounds: list[list[float]]) -> Finding:
    _, axis, bounds = TIMED[claim]
    exponent, at = student(slopes(AT[axis], rounds)), AT[axis]
    over = f"n = {at[0]:,} to {at[-1]:,}" if axis == "n" else f"D = {at[0]} to {at[-1]:,}, n = {LENGTH:,}"
    figures = {"exponent": exponent, "seconds": rounds}
    words = {"over": over, "rounds": len(rounds), "d": HEAD_DIM, "D": FEATURES}
    return found(claim, all_between([exponent], **bounds), figures, words | bounds)
