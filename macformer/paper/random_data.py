"""The paper's first toy experiment (Figure 3): error and time of RMFA_exp against softmax attention on random data.

q, k and v are normal random numbers, q and k go through pre-SBN, and both attentions see the same rows. The paper
leaves open over what the error is summed and what V is: we sum over everything, V is N(0, 1), and two more errors stand
beside the paper's (`scales`).

Shapes: B batch, H heads, n length, d head width, D features.
"""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from macformer.attention import RMFAttention, SoftmaxAttention
from macformer.bench.race import race
from macformer.check import require_int
from macformer.features import Sampling
from macformer.harness.device import is_cuda
from macformer.linear import plain_attention
from macformer.ppsbn import PreSBN

HEADS, HEAD_DIM, EPS, KERNEL = 8, 64, 1e-12, "exp"
LENGTHS = tuple(range(200, 4001, 200))
FEATURES = tuple(2**k for k in range(3, 12))
ERRORS = ("nmse", "nmse_offset", "deviation")
TURN = 0.02  # seconds that an arm is called for when it is its turn, if one call does not take longer
CHECKED = 500  # tokens on which a map is held to its definition; the larger maps take them in several pieces
DIGITS = 6  # that the report keeps
Sample = dict[str, dict[str, float]]  # arm -> seconds and errors, of one repeat at one length


@dataclass(frozen=True)
class Settings:
    batch: int
    repeats: int
    lengths: tuple[int, ...] = LENGTHS
    features: tuple[int, ...] = FEATURES

    def __post_init__(self) -> None:
        require_int(batch=self.batch, repeats=self.repeats)
        require_int(features=min(self.features, default=0))
        require_int(2, lengths=min(self.lengths, default=0))  # averaging V is exact for one token
        for name, values in (("lengths", self.lengths), ("features", self.features)):
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name}={' '.join(map(str, values))} must be rising, each number once")

    def maps(self, n: int) -> list[tuple[Sampling, int]]:
        """Sampling and D of each RMFA at that length: at the longest, all samplings with each D that they allow."""
        paper: list[tuple[Sampling, int]] = [("paper", D) for D in self.features]
        if n < self.lengths[-1]:
            return paper
        release: list[tuple[Sampling, int]] = [("release", D) for D in self.features]
        exact01: list[tuple[Sampling, int]] = [("exact01", D) for D in self.features if D >= HEAD_DIM + 2]
        return [*paper, *release, *exact01, ("order1", HEAD_DIM + 1)]


def inputs(batch: int, n: int, r: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after pre-SBN, and v, of repeat r: the same on every device."""
    rng = torch.Generator().manual_seed(_seed("inputs", r, n))
    q, k, v = (torch.randn(batch, HEADS, n, HEAD_DIM, generator=rng).to(device) for _ in range(3))
    pre = PreSBN(eps=EPS)
    return pre(q), pre(k), v


def rmfa(sampling: Sampling, D: int, n: int, r: int) -> RMFAttention:
    """With the draw of repeat r at length n: no two cells share one."""
    rng = torch.Generator().manual_seed(_seed(sampling, D, r, n))
    return RMFAttention(HEAD_DIM, D, kernel=KERNEL, sampling=sampling, generator=rng)


def scales(exact: Tensor, v: Tensor) -> dict[str, float]:
    """What a squared error |out - exact|^2, summed over everything, is relative to.

    nmse          |exact|^2, the paper's. With V ~ N(0, 1) averaging takes most of V away, and little is left here.
    nmse_offset   |exact + 1|^2: what nmse is for V ~ N(1, 1). A constant added to V goes through both attentions
                  unchanged (through RMFA only while no denominator is floored, which takes a draw almost without
                  constants: one of 256 for D = 8).
    deviation     |exact - mean(v)|^2, so that plain averaging of V gets 1.
    """
    of_mean = _squares(exact - v.mean(2, keepdim=True))
    return {"nmse": _squares(exact), "nmse_offset": _squares(exact + 1), "deviation": of_mean}


@torch.no_grad()
def measure(settings: Settings, r: int, n: int, device: torch.device, warm_up: bool) -> Sample:
    """Repeat r at length n. Explicit softmax gives the reference, before the clock starts.

    `warm_up`: every arm has a turn that does not count first.
    """
    q, k, v = inputs(settings.batch, n, r, device)
    arms: dict[str, nn.Module] = {"explicit": SoftmaxAttention(), "sdpa": SoftmaxAttention(implementation="sdpa")}
    arms |= {_name(sampling, D): rmfa(sampling, D, n, r).to(device) for sampling, D in settings.maps(n)}
    exact = torch.cat(_call(arms["explicit"], q, k, v))
    relative_to = scales(exact, v)
    calls = {name: partial(_call, arm, q, k, v) for name, arm in arms.items()}
    found: Sample = {}

    def look(name: str, out: list[Tensor]) -> None:
        found[name] = {}
        if isinstance(arms[name], RMFAttention):
            error = _squares(out[0] - exact)
            found[name] = {kind: error / scale for kind, scale in relative_to.items()}

    (taken,) = race(lambda number: calls, 1, device, TURN, _seed("order", r, n), warm_up, look)
    for name, took in taken.items():
        found[name]["seconds"] = took
    return found


@torch.no_grad()
def wrong(settings: Settings, device: torch.device) -> str:
    """Which map does not compute what it is defined to, in one sentence, or nothing: one draw of each."""
    q, k, v = inputs(1, CHECKED, 0, device)
    for sampling, D in settings.maps(settings.lengths[-1]):
        attention = rmfa(sampling, D, CHECKED, 0).to(device)
        phi_q, phi_k = (attention.feature_map(x.double() * HEAD_DIM**-0.25) for x in (q, k))
        truth = plain_attention(phi_q, phi_k, v.double(), None, attention.floor)
        off = float((attention(q, k, v) - truth).abs().max() / truth.abs().max())
        if not off < 1e-5:
            return (
                f"RMFA with {sampling} features, D = {D}, is off its plain definition by {off:.1e}: nothing is reported"
            )
    return ""


def report(settings: Settings, samples: list[list[Sample]]) -> dict[str, Any]:
    """The samples of each repeat and length, by cell."""

    def gathered(at: int, sampling: str, D: int) -> dict[str, list[float]]:
        arm = _name(sampling, D)
        return {key: [_rounded(repeat[at][arm][key]) for repeat in samples] for key in (*ERRORS, "seconds")}

    last, longest = len(settings.lengths) - 1, settings.lengths[-1]
    return {
        "lengths": list(settings.lengths),
        "features": list(settings.features),
        "cells": [
            {"n": n, "D": D, **gathered(at, "paper", D)}
            for at, n in enumerate(settings.lengths)
            for D in settings.features
        ],
        "softmax": [
            {"n": n}
            | {arm: [_rounded(repeat[at][arm]["seconds"]) for repeat in samples] for arm in ("explicit", "sdpa")}
            for at, n in enumerate(settings.lengths)
        ],
        "samplings": [
            {"sampling": sampling, "D": D, "n": longest, **gathered(last, sampling, D)}
            for sampling, D in settings.maps(longest)
        ],
    }


def _call(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """On the CPU softmax takes the examples one by one: the weights of 16 of 8 heads and 4,000 tokens are 8 GB."""
    if isinstance(attention, RMFAttention) or is_cuda(q.device):
        return [attention(q, k, v)]
    return [attention(*example) for example in zip(q.split(1), k.split(1), v.split(1), strict=True)]


def _squares(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _name(sampling: str, D: int) -> str:
    return f"{sampling} {D}"


def _seed(*words: object) -> int:
    """Another one for other words, the same in every process."""
    return random.Random(repr(words)).getrandbits(62)


def _rounded(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")
