"""The paper's first toy experiment (Figure 3): error and time of RMFA_exp against softmax attention on random data.

q, k and v are normal random numbers, q and k go through pre-SBN, and both attentions see the same rows. The paper
leaves open over what the error is summed and what V is: we sum over everything, V is N(0, 1), and two more errors stand
beside the paper's (`scales`).

Shapes: B batch, H heads, n length, d head width, D features.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from tqdm import trange

from macformer.attention import RMFAttention, SoftmaxAttention
from macformer.bench.race import race
from macformer.check import require_int
from macformer.features import Sampling
from macformer.folded import plain_attention
from macformer.harness import files
from macformer.harness.device import is_cuda
from macformer.paper.experiments import ERRORS, SOFTMAX
from macformer.paper.finding import rounded
from macformer.ppsbn import PreSBN

HEADS, HEAD_DIM, EPS, KERNEL = 8, 64, 1e-12, "exp"
FIXED = {"heads": HEADS, "head_dim": HEAD_DIM, "eps": EPS, "kernel": KERNEL}  # as the report names them
SAMPLINGS: tuple[Sampling, ...] = ("paper", "release", "exact01")
TURN = 0.02  # seconds that an arm is called for when it is its turn, if one call does not take longer
CHECKED = 500  # tokens on which a map is compared with its definition; the larger maps take them in several pieces
Sample = dict[str, dict[str, float]]  # arm -> seconds and errors, of one repeat at one length


@dataclass(frozen=True)
class Settings:
    batch: int
    repeats: int
    lengths: Sequence[int] = tuple(range(200, 4001, 200))
    features: Sequence[int] = tuple(2**k for k in range(3, 12))

    def __post_init__(self) -> None:
        require_int(batch=self.batch, repeats=self.repeats, features=min(self.features))
        require_int(2, lengths=min(self.lengths))  # averaging V is exact for one token
        for name, values in (("lengths", self.lengths), ("features", self.features)):
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name}={' '.join(map(str, values))} must be rising, each number once")

    def maps(self, n: int) -> list[tuple[Sampling, int]]:
        """Sampling and D of each RMFA at that length: at the longest, all samplings with each D that they allow."""
        longest = n == self.lengths[-1]
        samplings = SAMPLINGS if longest else SAMPLINGS[:1]
        found = [(name, D) for name in samplings for D in self.features if name != "exact01" or D >= HEAD_DIM + 2]
        return [*found, ("order1", HEAD_DIM + 1)] if longest else found


def inputs(batch: int, n: int, r: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after pre-SBN, and v, of repeat r: the same on every device."""
    rng = _generator("inputs", r, n)
    q, k, v = (torch.randn(batch, HEADS, n, HEAD_DIM, generator=rng).to(device) for _ in range(3))
    pre = PreSBN(eps=EPS)
    return pre(q), pre(k), v


def rmfa(sampling: Sampling, D: int, n: int, r: int) -> RMFAttention:
    """RMFA with the draw of repeat r at length n: no two cells share one."""
    return RMFAttention(HEAD_DIM, D, kernel=KERNEL, sampling=sampling, generator=_generator(sampling, D, r, n))


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
    """Measure repeat r at length n. Explicit softmax gives the reference, before the clock starts.

    `warm_up`: every arm has a turn that does not count first.
    """
    data, sample = inputs(settings.batch, n, r, device), Sample()

    def call(attention: nn.Module) -> list[Tensor]:
        """On the CPU softmax takes the examples one by one: the weights of 16 of 8 heads and 4,000 tokens are 8 GB."""
        parts = 1 if isinstance(attention, RMFAttention) or is_cuda(device) else settings.batch
        return [attention(*part) for part in zip(*(x.chunk(parts) for x in data), strict=True)]

    arms: dict[str, nn.Module] = {name: SoftmaxAttention(implementation=name) for name in SOFTMAX}
    arms |= {f"{sampling} {D}": rmfa(sampling, D, n, r).to(device) for sampling, D in settings.maps(n)}
    calls = {name: partial(call, arm) for name, arm in arms.items()}
    exact = torch.cat(call(arms["explicit"]))
    relative_to = scales(exact, data[-1])

    def look(name: str, out: list[Tensor]) -> None:
        error = _squares(torch.cat(out) - exact)
        sample[name] = {kind: error / scale for kind, scale in relative_to.items()}

    order = _generator("order", r, n).initial_seed()
    (taken,) = race(lambda number: calls, 1, device, TURN, order, warm_up, look)
    return rounded({name: errors | {"seconds": taken[name]} for name, errors in sample.items()})


@torch.no_grad()
def check(settings: Settings, device: torch.device) -> None:
    """Compare one draw of each map with its definition; raise ValueError if they differ."""
    q, k, v = inputs(1, CHECKED, 0, device)
    for sampling, D in settings.maps(settings.lengths[-1]):
        attention = rmfa(sampling, D, CHECKED, 0).to(device)
        phi_q, phi_k = (attention.feature_map(x.double() * HEAD_DIM**-0.25) for x in (q, k))
        truth = plain_attention(phi_q, phi_k, v.double(), None, attention.floor)
        off = float((attention(q, k, v) - truth).abs().max() / truth.abs().max())
        if not off < 1e-5:
            sentence = f"RMFA with {sampling} features, D = {D}, is off its plain definition by {off:.1e}"
            raise ValueError(f"{sentence}: nothing is reported")


def measure_all(settings: Settings, device: torch.device, state: Path) -> list[list[Sample]]:
    """Measure repeat by repeat. `state` keeps every repeat that is done, and those in it are not measured again."""
    samples: list[list[Sample]] = json.loads(state.read_text()) if state.exists() else []
    if first := len(samples):
        print(f"going on after repeat {first} of {settings.repeats} ({state.name})", flush=True)
    for r in trange(first, settings.repeats, initial=first, total=settings.repeats, desc="repeats"):
        samples.append([measure(settings, r, n, device, warm_up=r == first) for n in settings.lengths])
        files.write(state, json.dumps(samples))
    return samples


def report(settings: Settings, samples: list[list[Sample]]) -> dict[str, Any]:
    """The samples of each repeat and length, by cell."""
    at = {n: [repeat[number] for repeat in samples] for number, n in enumerate(settings.lengths)}

    def cell(n: int, sampling: str, D: int) -> dict[str, Any]:
        return {"n": n, "D": D} | {
            key: [each[f"{sampling} {D}"][key] for each in at[n]] for key in (*ERRORS, "seconds")
        }

    longest = settings.lengths[-1]
    return {
        "lengths": list(settings.lengths),
        "features": list(settings.features),
        "cells": [cell(n, "paper", D) for n in settings.lengths for D in settings.features],
        "softmax": [{"n": n} | {arm: [each[arm]["seconds"] for each in at[n]] for arm in SOFTMAX} for n in at],
        "samplings": [{"sampling": name, "D": D} | cell(longest, name, D) for name, D in settings.maps(longest)],
    }


def _squares(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _generator(*words: object) -> Generator:
    """Its seed depends on the words alone, and is the same in every process."""
    return Generator().manual_seed(random.Random(repr(words)).getrandbits(62))
