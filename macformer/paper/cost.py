"""What attention costs: products and time as powers of the length and of the features; peak memory of a training step.

What the paper's memory column seems to compare is written here as the base code and the authors' later release do it.
Nothing trains with it. Shapes: B batch, H heads, n length, d head width, D features.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lra_data import listops, retrieval, text
from lra_data.base import TaskSpec
from macformer.attention import RMFAttention, SoftmaxAttention
from macformer.bench.models import Trained, full
from macformer.bench.race import race
from macformer.features import RandomMaclaurin
from macformer.harness import config as configs
from macformer.model import Classifier
from macformer.paper.experiments import MACFORMERS
from macformer.paper.finding import Finding, Interval, all_between, found, judge, slopes, student
from macformer.ppsbn import PreSBN
from macformer.report.cells import BASELINE, PAPER

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
FAR = 1e6  # what a masked logit loses
FLOOR = 1.0  # of the denominator
CLOSE = 0.1  # relative: a boolean mask of dropout alone, as CUDA has it, is 6% (docs/log.md)
EQUAL = 0.0005  # relative: less is not seen in three digits
SPECS = {"text": text.spec, "listops": listops.spec, "retrieval": retrieval.spec}


def cost(effort: int) -> Iterator[Finding]:
    yield products("rmfa")
    for claim, rounds in measure(ROUNDS * effort).items():
        yield exponent_of_time(claim, rounds)


def attention(name: Attention, d: int, D: int, seed: int = 0) -> nn.Module:
    if name == "rmfa":
        return RMFAttention(d, D, generator=Generator().manual_seed(seed))
    return SoftmaxAttention(implementation=name)


def inputs(n: int, d: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after pre-SBN, and v."""
    q, k, v = (torch.randn(1, 1, n, d, generator=Generator().manual_seed(seed)) for seed in range(3))
    return PreSBN(1e-12)(q), PreSBN(1e-12)(k), v


@torch.no_grad()
def products(name: Attention) -> Finding:
    """Count the multiplications in matrix products with torch's counter: the mean of some draws."""

    def count(n: int = 1024, d: int = HEAD_DIM, D: int = 2048) -> float:
        with FlopCounterMode(display=False) as counter:
            for seed in range(DRAWS):
                attention(name, d, D, seed)(*inputs(n, d))
        return counter.get_total_flops() / DRAWS

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
            arms[f"{claim} {x}"] = partial(attention(name, HEAD_DIM, D), *inputs(n))
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


class StepwiseSoftmax(nn.Module):
    """Checkpointed softmax attention in which every step makes a new n x n matrix."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.drop = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool = False) -> Tensor:
        return checkpoint(self._attend, q, k, v, mask, use_reentrant=False)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        logits = q @ k.mT
        logits = logits / q.shape[-1] ** 0.5  # one name: a matrix is freed when the next one is there
        logits = logits - FAR * (1 - mask[:, None, None, :].to(q.dtype))
        return self.drop(logits.softmax(-1)) @ v


class RunningSum(nn.Module):
    """Causal RMFA, here with the paper's map, that holds the sum over j <= i of Phi(k_j) v_j for every i: O(n D d)."""

    def __init__(self, head_dim: int, features: int = 128):
        super().__init__()
        self.feature_map = RandomMaclaurin(head_dim, features)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool = True) -> Tensor:
        phi_q, phi_k = (self.feature_map(x * x.shape[-1] ** -0.25) for x in (q, k))
        phi_k = phi_k * mask[:, None, :, None]
        sums = (phi_k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)  # (B, H, n, D, d)
        denominator = (phi_q * phi_k.cumsum(2)).sum(-1, keepdim=True)
        return (phi_q.unsqueeze(-2) @ sums).squeeze(-2) / denominator.clamp(min=FLOOR)


class OneByOne(nn.Module):
    """A classifier of pairs that encodes the second text after the first one. Ours takes both in one batch."""

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.classifier = classifier

    def forward(self, ids: Tensor) -> Tensor:
        a, b = (self.classifier.encode(texts) for texts in ids.unbind(1))
        return self.classifier.head(torch.cat([a, b, a * b, a - b], -1))


AS_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {  # name -> the model that it is, but for its attention
    "base code": (BASELINE, {"attention": partial(StepwiseSoftmax, 0.1)}),
    "release": ("macformer_exp", {"attention": partial(RunningSum, 32)}),
}
MODELS = (BASELINE, f"{BASELINE}_checkpointed", "rfa", *MACFORMERS, *AS_PUBLISHED)


def model(name: str, spec: TaskSpec) -> nn.Module:
    config, replaced = AS_PUBLISHED.get(name, (name, {}))
    torch.manual_seed(0)
    built = configs.build(configs.compose(f"model={config}"), "model", **asdict(spec), **replaced)
    return OneByOne(built) if replaced and spec.paired else built


def peak(name: str, spec: TaskSpec, batch_size: int) -> int:
    """Bytes at the peak of a step at full length."""
    cpu = torch.device("cpu")
    return Trained(model(name, spec), cpu).estimate_peak(*next(full(spec, 2, spec.length, cpu)), batch_size)


def memory(effort: int) -> Iterator[Finding]:
    peaks: dict[str, dict[str, int]] = {}
    for task, spec_of in SPECS.items():
        config = configs.compose(f"task={task}").task
        spec = spec_of(config.data.length)
        peaks[task] = {name: peak(name, spec, config.batch_size) for name in MODELS}
        yield of_macformer(task, peaks[task])
    yield equal(peaks)
    yield of_rfa(peaks)


def of_macformer(task: str, peaks: dict[str, int]) -> Finding:
    """`peaks`: model -> peak bytes of a training step at the paper's batch size."""
    paper, macformer = PAPER["memory"][task]["macformer_exp"], peaks["macformer_exp"]
    ours, published = macformer / peaks[BASELINE], peaks["release"] / peaks["base code"]
    verdict = judge(_close(ours, paper), _close(published, paper))
    words = {"task": task, "paper": paper, "close": CLOSE, "ours": ours, "published": published}
    words["checkpointed"] = macformer / peaks[f"{BASELINE}_checkpointed"]
    words["compares"] = ": that is what the paper seems to compare" * (verdict == "reproduced with a correction")
    return found("M {task}", verdict, {"peak_bytes": peaks}, **words)


def equal(peaks: dict[str, dict[str, int]]) -> Finding:
    """`peaks`: task -> model -> peak bytes."""
    spread = {task: max(of[m] for m in MACFORMERS) / min(of[m] for m in MACFORMERS) - 1 for task, of in peaks.items()}
    verdict = judge(max(spread.values()) < EQUAL)
    differences = ", ".join(f"{task} {100 * apart:.2g}%" for task, apart in spread.items())
    return found("M equal for all kernels", verdict, {"largest_difference": spread}, differences=differences)


def of_rfa(peaks: dict[str, dict[str, int]]) -> Finding:
    ours = {task: of["rfa"] / of[BASELINE] for task, of in peaks.items()}
    paper = {task: PAPER["memory"][task]["rfa"] for task in peaks}
    verdict = judge(all(_close(ours[task], paper[task]) for task in peaks))
    words = {key: " / ".join(f"{x:.3f}" for x in of.values()) for key, of in (("ours", ours), ("paper", paper))}
    return found("M RFA", verdict, {"ratio": ours}, **words, tasks=" / ".join(peaks), close=CLOSE)


def _close(ours: float, paper: float) -> bool:
    return abs(ours / paper - 1) < CLOSE
