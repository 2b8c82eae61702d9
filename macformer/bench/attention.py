"""Race attentions, forward and backward, over the length: time, memory, share of the matmul rate.

    python -m scripts.bench attention     # all attentions: about 20 minutes on one core
    python -m scripts.bench core          # RMFA's core against the same formula in plain torch: 2 minutes
    python -m scripts.bench attention --lengths 256 1024 --rounds 3 --output /tmp/bench

In its turn an attention is called again and again for 0.3 s, or once if that takes longer. Random features are drawn
anew for each round. Memory is the peak of live bytes beyond the inputs, of the largest draw. FLOP are counted while the
matrix products happen. An attention that does not agree with its slow definition, output and gradients, gets no figure,
and the exit code is 1. Freed memory goes back as torch has it (allocator: default), or stays with the process as
train.py has it (keeping): n = 4,096 and core.
Shapes: B batch, H heads, n length, d head width, D features.
"""

import gc
import io
import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, get_args

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from macformer import KernelAttention, PreSBN, RFAttention, RMFAttention, SoftmaxAttention
from macformer.bench import race as bench
from macformer.features import Sampling, products
from macformer.folded import FLOOR, plain_attention
from macformer.harness import device as devices

HEAD_DIM, FEATURES, KEPT = 32, 128, 0.9  # the share of keys that the mask keeps
MANY, ONE = (4, 2), (1, 1)  # B, H up to n = 4096; beyond, where the n x n weights of eight heads do not fit any more
HEADLINE = (*MANY, 4096)
CHECKED = [193, 3000]  # lengths at which every draw is compared with its definition: the longer goes another way
TURN = 0.3  # seconds that an attention is called for when it is its turn, if one call does not take longer
SOFTMAX = {
    "explicit": SoftmaxAttention(),
    "checkpointed": SoftmaxAttention(implementation="checkpointed"),
    "sdpa": SoftmaxAttention(implementation="sdpa"),
    "kernel": KernelAttention("exp"),
}
BASELINES = {"explicit": "explicit", "sdpa": "SDPA", "plain": "plain torch", "plain_checkpoint": "plain checkpoint"}
LENGTHS = {"attention": [2**i for i in range(8, 15)], "core": [1024, 2048, 4096]}
ROUNDS = {"attention": 5, "core": 15}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, mask


class PlainTorch(nn.Module):
    """The folded formula of macformer/linear.py as anyone would write it: what does the core there gain?

    Autograd keeps all intermediates for the backward pass; `checkpointed`, they are computed again, as the core does.
    """

    def __init__(self, rmfa: RMFAttention, checkpointed: bool):
        super().__init__()
        self.rmfa, self.checkpointed = rmfa, checkpointed

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self._attend, q, k, v, mask, use_reentrant=False)
        return self._attend(q, k, v, mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        constant, linear, rows, widths = self.rmfa.feature_map.folded(q.dtype)
        assert linear is not None  # of 128 features some have degree 1
        q, k = q * HEAD_DIM**-0.25, k * HEAD_DIM**-0.25
        keep = mask[:, None, :, None].to(q.dtype)
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1) * keep
        query = torch.cat([q @ linear, products(q @ rows.mT, widths)], -1)
        key = torch.cat([k, products(k @ rows.mT, widths)], -1)
        out = query @ (key.mT @ values) + constant * values.sum(2, keepdim=True)
        return out[..., :-1] / torch.maximum(out[..., -1:], self.rmfa.floor * keep.sum(2, keepdim=True))


def attentions(seed: int, command: str = "attention") -> dict[str, nn.Module]:
    """What races, without dropout. From seed to seed only those with random features are others."""

    def rmfa(sampling: Sampling) -> RMFAttention:
        return RMFAttention(HEAD_DIM, FEATURES, sampling=sampling, generator=Generator().manual_seed(seed))

    if command == "core":
        core = rmfa("paper")
        return {"rmfa_paper": core, "plain": PlainTorch(core, False), "plain_checkpoint": PlainTorch(core, True)}
    rfa = RFAttention(HEAD_DIM, FEATURES, generator=Generator().manual_seed(seed))
    return SOFTMAX | {"rfa": rfa} | {f"rmfa_{sampling}": rmfa(sampling) for sampling in get_args(Sampling)}


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


def definition(attention: nn.Module) -> Attend:
    """The same function, slow and plain."""
    if isinstance(attention, PlainTorch):
        return definition(attention.rmfa)
    if not isinstance(attention, RMFAttention | RFAttention):
        return KernelAttention("exp")
    maclaurin = isinstance(attention, RMFAttention)
    floor = attention.floor if isinstance(attention, RMFAttention) else FLOOR

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k = (x * HEAD_DIM**-0.25 if maclaurin else F.normalize(x, dim=-1) for x in (q, k))
        return plain_attention(attention.feature_map(q), attention.feature_map(k), v, mask, floor)

    return plain


def error(attention: nn.Module, device: torch.device, n: int) -> str:
    """Where output (to 1e-5) or gradients (to 1e-4) differ from the definition in float64; nothing if they agree."""
    ours = run(attention, inputs(1, 2, n, device))
    exact = run(definition(attention), inputs(1, 2, n, device, torch.float64))
    for what, x, right in zip(("output", "gradient of q", "gradient of k", "gradient of v"), ours, exact, strict=True):
        off = float((x - right).abs().max() / right.abs().max())
        if not off < (1e-5 if what == "output" else 1e-4):
            return f"the {what} is off by {off:.1e} at n = {n:,}"
    return ""


def race_shape(
    names: list[str], draws: list[dict[str, nn.Module]], B: int, H: int, n: int, device: torch.device
) -> dict[str, Any]:
    """Seconds and FLOP of each attention and the matmul rate in each round; peak bytes, of the largest draw."""
    data, one_head, multiply = inputs(B, H, n, device), inputs(1, 1, n, device), bench.matmul(device)
    every = {draw[name] for draw in draws for name in names}
    flop = {attention: B * H * bench.count_flop(partial(run, attention, one_head)) for attention in every}

    def arms(number: int) -> dict[str, Callable[[], Any]]:
        return {"matmul": multiply} | {name: partial(run, draws[number][name], data) for name in names}

    taken = list(bench.race(arms, len(draws) - 1, device, TURN, seed=n, label=f"B, H, n = {B}, {H}, {n:,}"))
    measured = {}
    for name in names:
        each = [draw[name] for draw in draws]
        measured[name] = {
            "seconds": [seconds[name] for seconds in taken],
            "flop": [flop[attention] for attention in each[1:]],
            "peak_bytes": peak(device, partial(run, max(each, key=flop.__getitem__), data)),
        }
    shape = {"B": B, "H": H, "n": n, "d": HEAD_DIM, "D": FEATURES}
    return {"shape": shape, "matmul_rate": bench.matmul_rate(taken), "arms": measured}


def peak(device: torch.device, work: Callable[[], object]) -> int:
    """Peak of live bytes beyond what lives already."""
    work()  # what it keeps for good it has now
    gc.collect()
    before = torch.cuda.memory_allocated(device) if devices.is_cuda(device) else 0
    return devices.peak_bytes(device, [], work) - before


def faster(result: dict[str, Any], name: str, to: str) -> list[float]:
    """How many times faster than `to` in each round."""
    return bench.ratios(result["arms"][to]["seconds"], result["arms"][name]["seconds"])


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [f"{name} gets no figure: {why}.\n" for name, why in report["no_figure"].items()]
    for result in report["results"]:
        arms, rate, rows = result["arms"], median(result["matmul_rate"]), []
        lines += [
            "**B, H, n, d, D = {B}, {H}, {n:,}, {d}, {D}**".format(**result["shape"])
            + f" ({result['allocator']} allocator; matmul rate {rate / 1e9:.0f} GFLOP/s)",
            "",
        ]
        baselines = [to for to in BASELINES if to in arms]
        for name, arm in arms.items():
            share = median(bench.ratios(arm["flop"], arm["seconds"])) / rate
            rows.append([name, bench.with_range([1e3 * s for s in arm["seconds"]])])
            rows[-1] += [bench.with_range(faster(result, name, to)) for to in baselines]
            rows[-1] += [f"{arm['peak_bytes'] / 2**20:.1f}", f"{median(arm['flop']) / 1e9:.3g}", f"{share:.0%}"]
        faster_than = "times faster " + " | ".join(f"than {BASELINES[to]} (range)" for to in baselines)
        header = ["attention", "ms (range)", *faster_than.split(" | "), "peak MiB", "GFLOP", "of matmul rate"]
        lines += bench.markdown(header, rows, "l" + "r" * (len(header) - 1))
    return "\n".join(lines)


def plot(report: dict[str, Any]) -> bytes:
    """A PNG."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(11, 8), layout="tight")
    panels = figure.subplots(2, 2, sharex="col")
    for (time, memory), (B, H) in zip(panels.T, (MANY, ONE), strict=True):
        chosen = [r for r in report["results"] if r["shape"]["B"] == B and r["allocator"] == "default"]
        lengths = [r["shape"]["n"] for r in chosen]
        for name in chosen[0]["arms"] if chosen else ():
            style = {"marker": "o", "ms": 4, "ls": "--" if name in SOFTMAX else "-", "label": name}
            ms = [[1e3 * s for s in r["arms"][name]["seconds"]] for r in chosen]
            (line,) = time.plot(lengths, list(map(median, ms)), **style)
            time.fill_between(lengths, list(map(min, ms)), list(map(max, ms)), color=line.get_color(), alpha=0.15, lw=0)
            memory.plot(lengths, [r["arms"][name]["peak_bytes"] / 2**20 for r in chosen], **style)
        time.set(title=f"{B} x {H} heads of width {HEAD_DIM}, D = {FEATURES}", ylabel="ms, forward + backward")
        memory.set(xlabel="length n", ylabel="peak MiB beyond the inputs")
        for panel in (time, memory):
            panel.set(xscale="log", yscale="log")
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
    panels[0, 0].legend(fontsize=8)
    figure.suptitle("{device_name}, {threads} thread, torch {torch}".format(**report["environment"]), fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, dpi=120)
    return content.getvalue()


def measure(options: Namespace, device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    seeds = range(options.rounds + 1)
    draws = [{name: x.to(device) for name, x in attentions(seed, options.command).items()} for seed in seeds]
    no_figure = {}
    for name in draws[0]:
        print(f"comparing {name} with its definition", file=sys.stderr)
        for attention, n in itertools.product({draw[name] for draw in draws}, CHECKED):
            if said := error(attention, device, n):
                no_figure[name] = said
    if "sdpa" in draws[0]:
        few = inputs(1, 2, CHECKED[0], device)
        flop = [bench.count_flop(partial(run, SOFTMAX[name], few)) for name in ("sdpa", "explicit")]
        if flop[0] == flop[1]:
            no_figure["sdpa"] = "torch does not take its fused kernel"
    names = [name for name in draws[0] if name not in no_figure]
    races = [((*MANY, n), "default") for n in options.lengths if n <= HEADLINE[2]]
    if options.command == "core":
        races = [(shape, "keeping") for shape, _ in races]
    else:
        races += [((*ONE, n), "default") for n in options.lengths if n >= 1024]
        races += [(HEADLINE, "keeping")] * (HEADLINE[2] in options.lengths and not devices.is_cuda(device))
    results = []
    for shape, allocator in races:
        if allocator == "keeping":
            devices.prepare(device, 1)  # as train.py has it: what allocates most saves most page faults
        results.append(race_shape(names, draws, *shape, device) | {"allocator": allocator})
    return bench.provenance(device) | {"rounds": options.rounds, "no_figure": no_figure, "results": results}
