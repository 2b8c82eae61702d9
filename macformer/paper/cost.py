"""What attention costs: products counted, and time measured, each as a power of the length and of the features.

Shapes: B batch, H heads, n length, d head width, D features.
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from macformer.attention import RMFAttention, SoftmaxAttention
from macformer.bench.race import count_flop, race
from macformer.paper.finding import Finding, Interval, all_between, found, slopes, student
from macformer.ppsbn import PreSBN

HEAD_DIM, FEATURES = 64, 128
AT = {"n": (1024, 2048, 4096, 8192), "d": (32, 64, 128, 256), "D": (256, 512, 1024, 2048)}
LENGTH = 2048  # where D varies
LINEAR, QUADRATIC = {"high": 1.1}, {"low": 1.8, "high": 2.2}  # exponents that pass for one (or less) and for two
TURN = 0.02  # seconds that an attention is called for when it is its turn, if one call does not take longer
ROUNDS, DRAWS = 10, 4
Attention = Literal["rmfa", "explicit", "sdpa"]  # the latter two are softmax attention
# Claim -> attention, what its time is a power of (n at D = FEATURES, or D at n = LENGTH), and that exponent.
TIMED: dict[str, tuple[Attention, Literal["n", "D"], dict[str, float]]] = {
    "C RMFA at most linear in n": ("rmfa", "n", LINEAR),
    "C softmax quadratic in n": ("explicit", "n", QUADRATIC),
    "C SDPA quadratic in n": ("sdpa", "n", QUADRATIC),
    "C RMFA at most linear in D": ("rmfa", "D", LINEAR),
}


def cost(effort: int) -> Iterator[Finding]:
    yield products("rmfa")
    for claim, rounds in measure(ROUNDS * effort).items():
        yield exponent_of_time(claim, rounds)


def build(name: Attention, d: int, D: int, seed: int = 0) -> nn.Module:
    if name == "rmfa":
        return RMFAttention(d, D, generator=Generator().manual_seed(seed))
    return SoftmaxAttention(implementation=name)


def inputs(n: int, d: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after pre-SBN, and v."""
    q, k, v = (torch.randn(1, 1, n, d, generator=Generator().manual_seed(seed)) for seed in range(3))
    return PreSBN(1e-12)(q), PreSBN(1e-12)(k), v


@torch.no_grad()
def products(name: Attention) -> Finding:
    """Count the multiplications in matrix products: the mean of some draws."""

    def count(n: int = 1024, d: int = HEAD_DIM, D: int = 2048) -> float:
        calls = (partial(build(name, d, D, seed), *inputs(n, d)) for seed in range(DRAWS))
        return sum(map(count_flop, calls)) / DRAWS

    counts = {axis: [count(**{axis: x}) for x in at] for axis, at in AT.items()}
    exponents = {axis: float(slopes(at, counts[axis])) for axis, at in AT.items()}
    verdict = all_between([Interval(e, e, e) for e in exponents.values()], **LINEAR)
    counted = ", ".join(f"{exponents[axis]:.2f} in {axis} ({at[0]:,} to {at[-1]:,})" for axis, at in AT.items())
    return found("C operations", verdict, {"exponents": exponents, "flop": counts}, **LINEAR, counted=counted)


@torch.no_grad()
def measure(rounds: int) -> dict[str, list[list[float]]]:
    """Claim -> seconds of a call: a row a round, a column a length or D."""
    arms = {}
    for claim, (name, axis, _) in TIMED.items():
        for x in AT[axis]:
            n, D = (x, FEATURES) if axis == "n" else (LENGTH, x)
            arms[f"{claim} {x}"] = partial(build(name, HEAD_DIM, D), *inputs(n))
    taken = list(race(lambda number: arms, rounds, torch.device("cpu"), TURN))
    return {
        claim: [[seconds[f"{claim} {x}"] for x in AT[axis]] for seconds in taken]
        for claim, (_, axis, _) in TIMED.items()
    }


def exponent_of_time(claim: str, rounds: list[list[float]]) -> Finding:
    _, axis, bounds = TIMED[claim]
    exponent, at = student(slopes(AT[axis], rounds)), AT[axis]
    over = f"n = {at[0]:,} to {at[-1]:,}" if axis == "n" else f"D = {at[0]} to {at[-1]:,}, n = {LENGTH:,}"
    words = {"over": over, "rounds": len(rounds), "d": HEAD_DIM, "D": FEATURES, **bounds}
    return found(claim, all_between([exponent], **bounds), {"exponent": exponent, "seconds": rounds}, **words)
