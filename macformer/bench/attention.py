"""Benchmark attentions, forward and backward, over the length: time, memory, share of the matmul rate.

    python -m scripts.bench attention     # all attentions: about 20 minutes on one core
    python -m scripts.bench core          # RMFA's core against the same formula in plain torch: 2 minutes
    python -m scripts.bench causal        # RMFA and RFA of itself and earlier tokens against that of all: 4 minutes
    python -m scripts.bench attention --lengths 256 1024 --rounds 3 --output /tmp/bench

In its turn an attention is called repeatedly for 0.3 s, or once if that takes longer. Each round has another draw of
random features. Memory is the peak of live bytes beyond the inputs, for the draw with the most FLOP. An attention that
does not agree with its slow definition, in output and gradients, gets no figure, and the exit code is 1. Freed memory
goes back as in torch by default (allocator: default), or stays with the process as in train.py (keeping).
Shapes: B batch, H heads, n length, d head width, D features.
"""

import gc
import io
import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from macformer import KernelAttention, PreSBN, RFAttention, RMFAttention, SoftmaxAttention
from macformer.bench import race as bench
from macformer.features import Sampling
from macformer.folded import FLOOR, folded_attention, plain_attention
from macformer.harness import device as devices

HEAD_DIM, FEATURES, KEPT = 32, 128, 0.9  # the share of keys that the mask keeps
MANY, ONE = (4, 2), (1, 1)  # B, H: beyond n = 4096 the n x n weights of eight heads do not fit any more
RUNS: dict[str, list[tuple[int, int, int, float, str]]] = {  # B, H, the shortest and the longest n, the allocator
    "attention": [(*MANY, 1, 4096, "default"), (*ONE, 1024, math.inf, "default"), (*MANY, 4096, 4096, "keeping")],
    "core": [(*MANY, 1, 4096, "keeping")],
    "causal": [(*MANY, 1, 4096, "keeping")],
}
CHECKED = [193, 3000]  # lengths at which every draw is compared with its definition: the longer goes another way
TURN = 0.3  # seconds that an attention is called for when it is its turn, if one call does not take longer
SOFTMAX = {
    "explicit": SoftmaxAttention(),
    "checkpointed": SoftmaxAttention(implementation="checkpointed"),
    "sdpa": SoftmaxAttention(implementation="sdpa"),
    "kernel": KernelAttention("exp"),
}
BASELINES = {"explicit": "explicit", "sdpa": "SDPA", "plain": "plain torch", "plain_checkpoint": "plain checkpoint"}
BOTH_WAYS = {"rmfa_paper": "RMFA both ways", "rfa": "RFA both ways", "causal_plain": "plain causal"}
LENGTHS = {"attention": [2**i for i in range(8, 15)], "core": [1024, 2048, 4096], "causal": [1024, 1030, 2048, 4096]}
ROUNDS = {"attention": 5, "core": 15, "causal": 15}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, mask


class PlainTorch(RMFAttention):
    """The folded formula of macformer/linear.py as anyone would write it: autograd keeps all intermediates."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        rows, folded = self.feature_map.folded(q.dtype)
        return folded_attention(q, k, v, mask, rows, replace(folded, floor=self.floor), causal)


class CheckpointedPlainTorch(PlainTorch):
    """The same, but the intermediates are computed again in the backward pass, as the core does."""

    def forward(self, *data: Any) -> Tensor:
        return checkpoint(super().forward, *data, use_reentrant=False)


class Causal(nn.Module):
    """The attention, where a token sees itself and earlier ones."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, *data: Tensor) -> Tensor:
        return self.attention(*data, True)


def attentions(seed: int, device: torch.device, command: str = "attention") -> dict[str, nn.Module]:
    """What is benchmarked, without dropout. The seed changes only those with random features."""

    def draw(make: type[nn.Module], **given: str) -> nn.Module:
        return make(HEAD_DIM, FEATURES, generator=Generator().manual_seed(seed), **given).to(device)

    if command == "core":
        core = {"rmfa_paper": RMFAttention, "plain": PlainTorch, "plain_checkpoint": CheckpointedPlainTorch}
        return {name: draw(make) for name, make in core.items()}
    if command == "causal":
        both = {"rmfa_paper": draw(RMFAttention), "rfa": draw(RFAttention)}
        causal = {"rmfa_causal": both["rmfa_paper"], "rfa_causal": both["rfa"]}
        causal["causal_plain"] = draw(CheckpointedPlainTorch)
        return both | {name: Causal(each) for name, each in causal.items()}
    rmfa = {f"rmfa_{sampling}": draw(RMFAttention, sampling=sampling) for sampling in get_args(Sampling)}
    return SOFTMAX | {"rfa": draw(RFAttention)} | rmfa


def inputs(B: int, H: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Inputs:
    """q, k (rows of length one, as after pre-SBN), v, the output's gradient, the mask; laid out as in the model."""
    rng = Generator().manual_seed(n)
    q, k, v, grad = (torch.randn(B, n, H, HEAD_DIM, generator=rng).transpose(1, 2).to(device, dtype) for _ in range(4))
    mask = (torch.arange(n) < math.ceil(KEPT * n)).expand(B, -1).to(device)
    q, k = (PreSBN()(x).detach().requires_grad_() for x in (q, k))
    return q, k, v.requires_grad_(), grad, mask


def run(attention: Attend, data: Inputs) -> tuple[Tensor, ...]:
    """Forward and backward: the output, and the gradients of q, k and v."""
    q, k, v, grad, mask = data
    out = attention(q, k, v, mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


@cache
def flop_of_a_head(attention: Attend, n: int, device: torch.device) -> int:
    return bench.count_flop(partial(run, attention, inputs(1, 1, n, device)))


def definition(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute the same function as the attention, slowly and plainly."""
    if causal := isinstance(attention, Causal):
        attention = attention.attention
    if not isinstance(attention, RMFAttention | RFAttention):
        return KernelAttention("exp")(q, k, v, mask)
    fourier = isinstance(attention, RFAttention)
    phi_q, phi_k = (attention.feature_map(F.normalize(x, dim=-1) if fourier else x * HEAD_DIM**-0.25) for x in (q, k))
    return plain_attention(phi_q, phi_k, v, mask, FLOOR, causal)  # a_0 of exp is 1


def fault(name: str, draws: list[nn.Module], device: torch.device) -> str:
    """Where a draw differs from its definition in float64, relative to the largest value; nothing if all agree."""
    print(f"comparing {name} with its definition", file=sys.stderr)
    for attention, n in itertools.product(set(draws), CHECKED):
        ours = run(attention, inputs(1, 2, n, device))
        exact = run(partial(definition, attention), inputs(1, 2, n, device, torch.float64))
        off = [float((x - right).abs().max() / right.abs().max()) for x, right in zip(ours, exact, strict=True)]
        if not (off[0] < 1e-5 and all(each < 1e-4 for each in off[1:])):
            numbers = ", ".join(f"{each:.1e}" for each in off)
            return f"its output and gradients of q, k and v are off by {numbers} at n = {n:,}"
    return ""


def race_shape(
    draws: dict[str, list[nn.Module]], rounds: int, B: int, H: int, n: int, device: torch.device
) -> dict[str, Any]:
    """Seconds and FLOP of each attention and the matmul rate in each round; peak bytes of the draw with most FLOP.

    An attention has a draw for each round, the warm-up first.
    """
    data, measured = inputs(B, H, n, device), {}

    def arms(number: int) -> dict[str, Callable[[], Any]]:
        return {name: partial(run, each[number], data) for name, each in draws.items()}

    label = f"B, H, n = {B}, {H}, {n:,}"
    seconds, rates = bench.race_with_rate(arms, rounds, device, seconds=TURN, seed=n, label=label)
    for name, each in draws.items():
        flop = [B * H * flop_of_a_head(draw, n, device) for draw in each]
        work = partial(run, each[flop.index(max(flop))], data)
        work()  # what it keeps for good it has now
        gc.collect()
        peak = devices.peak_bytes(device, data, work) - sum(x.nbytes for x in data)
        measured[name] = {"seconds": seconds[name], "flop": flop[1:], "peak_bytes": peak}
    shape = {"B": B, "H": H, "n": n, "d": HEAD_DIM, "D": FEATURES}
    return {"shape": shape, "matmul_rate": rates, "arms": measured}


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    parts = [f"{name} gets no figure: {why}.\n" for name, why in report["no_figure"].items()]
    for result in report["results"]:
        arms, rate, rows = result["arms"], median(result["matmul_rate"]), []
        baselines = {
            to: words for to, words in (BOTH_WAYS if "rfa_causal" in arms else BASELINES).items() if to in arms
        }
        for name, arm in arms.items():
            row = {"attention": name, "ms (range)": bench.milliseconds(arms, name, ".3g")}
            for to, words in baselines.items():
                faster = "times faster " * (len(row) == 2)
                row[f"{faster}than {words} (range)"] = bench.with_range(bench.ratios(arms, to, name))
            row |= {"peak MiB": f"{arm['peak_bytes'] / 2**20:.1f}", "GFLOP": f"{median(arm['flop']) / 1e9:.3g}"}
            reached = median(flop / seconds for flop, seconds in zip(arm["flop"], arm["seconds"], strict=True))
            rows.append(row | {"of matmul rate": f"{reached / rate:.0%}"})
        title = "B, H, n, d, D = {B}, {H}, {n:,}, {d}, {D}".format(**result["shape"])
        details = f"{result['allocator']} allocator; matmul rate {rate / 1e9:.0f} GFLOP/s"
        parts.append(bench.section(title, details, rows))
    return "\n".join(parts)


def plot(report: dict[str, Any]) -> bytes:
    """A PNG."""
    from matplotlib.figure import Figure  # an extra

    figure, content = Figure(figsize=(11, 8), layout="tight"), io.BytesIO()
    panels = figure.subplots(2, 2, sharex="col")
    rows = ("seconds", 1e3, "ms, forward + backward"), ("peak_bytes", 2**-20, "peak MiB beyond the inputs")
    for (i, (key, scale, unit)), (j, (B, H)) in itertools.product(enumerate(rows), enumerate((MANY, ONE))):
        chosen = [r for r in report["results"] if r["shape"]["B"] == B and r["allocator"] == "default"]
        lengths, panel = [r["shape"]["n"] for r in chosen], panels[i, j]
        for name in chosen[0]["arms"] if chosen else ():
            y = scale * np.array([np.atleast_1d(r["arms"][name][key]) for r in chosen])
            panel.plot(lengths, np.median(y, 1), marker="o", ms=4, ls="--" if name in SOFTMAX else "-", label=name)
            panel.fill_between(lengths, y.min(1), y.max(1), alpha=0.15, lw=0)
        panel.set(title=f"{B} x {H} heads of width {HEAD_DIM}, D = {FEATURES}", xlabel="length n", ylabel=unit)
        panel.set(xscale="log", yscale="log", xticks=lengths, xticklabels=[f"{n:,}" for n in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle("{device_name}, {threads} thread, torch {torch}".format(**report["environment"]), fontsize=10)
    figure.savefig(content, dpi=120)
    return content.getvalue()


def measure(options: Namespace, device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    by_seed = [attentions(seed, device, options.command) for seed in range(options.rounds + 1)]
    draws = {name: [each[name] for each in by_seed] for name in by_seed[0]}
    no_figure = {name: said for name in draws if (said := fault(name, draws[name], device))}
    draws = {name: draws[name] for name in draws if name not in no_figure}
    results = []
    for B, H, shortest, longest, allocator in RUNS[options.command]:
        if allocator == "keeping":
            devices.prepare(device, 1)  # as train.py has it: what allocates most saves most page faults
        for n in (n for n in options.lengths if shortest <= n <= longest):
            results.append(race_shape(draws, options.rounds, B, H, n, device) | {"allocator": allocator})
    return bench.provenance(device) | {"rounds": options.rounds, "no_figure": no_figure, "results": results}
