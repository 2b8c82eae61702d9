"""Race training steps of whole models at the tasks' real lengths: what attention costs beside everything else.

    python -m scripts.bench_models --imdb data/aclImdb_v1.tar.gz      # under 8 minutes on one core
    python -m scripts.bench_models --rounds 2 --output /tmp/bench     # without Text, for a look

How: one process, one thread, freed memory kept, as train.py has it. A step is forward, cross-entropy, backward, clip by
value, AdamW. In every round each model has a turn of one step, in a new order, all on the same batch; the next round
has another batch, as the trainer makes them with pad=trim and bucket=true. A ratio is taken within a round; its median
and range over the rounds are reported. A round before the first is not counted.

    plain             stock torch modules, all but attention: the values go on as they are, q and k are projected
    identity          our model without ppSBN, the identity for attention: likewise
    identity, ppSBN   the same with pre-SBN of q and k and post-SBN of the values
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.nn import functional as F

from lra_data.base import BYTES, Task, TaskSpec
from macformer import RFAttention, RMFAttention, SoftmaxAttention
from macformer import config as configs
from macformer import device as devices
from macformer import record as records
from macformer.trainer import CLIP, EPS
from scripts.bench_attention import flop as attention_flop

ROOT = Path(__file__).parent.parent
ROUNDS, SLOW_ROUNDS = 25, 5  # the second with softmax at 16 x 4,096: seconds a step
FULL = (16, 4096)
EXAMPLES = {"train": 4096, "dev": 16, "test": 16}  # a few windows of buckets
STEPS = ("plain", "identity", "identity, ppSBN", "macformer_exp", "rfa")
Batch = tuple[Tensor, Tensor]


class Identity(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return v


class PlainLayer(nn.Module):
    """A pre-LN layer as anyone would write it."""

    def __init__(self, width: int, feedforward: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, feedforward),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(feedforward, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        self.to_q(normed)
        self.to_k(normed)
        x = x + self.drop(self.out(self.to_v(normed)))
        return x + self.feedforward(x)


class Plain(nn.Module):
    """Our classifier in stock modules, without attention; sizes as in configs/encoder.yaml."""

    def __init__(self, spec: TaskSpec, sizes: dict[str, Any]):
        super().__init__()
        width, self.length = sizes["width"], spec.length
        self.tokens, self.positions = nn.Embedding(spec.vocabulary, width), nn.Embedding(spec.length, width)
        self.drop = nn.Dropout(sizes["dropout"])
        self.layers = nn.Sequential(
            *(PlainLayer(width, sizes["feedforward"], sizes["dropout"]) for _ in range(sizes["layers"]))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(
            nn.Linear(width, sizes["head_width"]), nn.ReLU(), nn.Linear(sizes["head_width"], spec.classes)
        )

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.layers(self.drop(self.tokens(ids) + self.positions(places))))
        return self.head(x.masked_fill((ids == 0).unsqueeze(-1), 0).sum(1) / self.length)


def composed(name: str) -> Any:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", [f"model={name}", "protocol=paper"])


def model(name: str, spec: TaskSpec) -> nn.Module:
    torch.manual_seed(0)
    if name == "plain":
        return Plain(spec, configs.container(composed("transformer_sdpa"))["model"])
    if name.startswith("identity"):
        like = "macformer_exp" if name.endswith("ppSBN") else "transformer_sdpa"
        return configs.build(composed(like), "model", **asdict(spec), attention=Identity)
    return configs.build(composed(name), "model", **asdict(spec))


def stepper(name: str, trained: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """One training step. The plain trunk has torch's default AdamW, the others the fused one."""
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-4, eps=EPS, weight_decay=0, fused=name != "plain" or None)

    def step(ids: Tensor, labels: Tensor) -> None:
        F.cross_entropy(trained(ids), labels).backward()
        nn.utils.clip_grad_value_(trained.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def flop(name: str, trained: nn.Module, ids: Tensor) -> int:
    """Of the matrix products over tokens, forward and backward: three times those of the forward pass.

    With the identity, q and k have no backward pass. What is computed again does not count, but inside attention.
    """
    sizes = configs.container(composed("macformer_exp"))["model"]
    width, heads, joined = sizes["width"], sizes["heads"], sizes["heads"] * sizes["head_dim"]
    linear = 3 * (4 * width * joined + 2 * width * sizes["feedforward"])
    if name in ("plain", "identity", "identity, ppSBN"):
        linear -= 4 * width * joined
    attentions = (m for m in trained.modules() if isinstance(m, RMFAttention | RFAttention | SoftmaxAttention))
    B, n = ids.shape
    return sizes["layers"] * 2 * B * n * linear + sum(attention_flop(m, B, heads, n) for m in attentions)


def race(
    setting: str, spec: TaskSpec, names: Sequence[str], batches: Iterator[Batch], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Seconds and FLOP of each model and the matmul rate in each round."""
    trained = {name: model(name, spec).to(device).train() for name in names}
    steps = {name: stepper(name, trained[name]) for name in names}
    square = torch.randn(1024, 1024, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    flops: dict[str, list[int]] = {name: [] for name in names}
    rates, shapes, order = [], [], random.Random(0)
    for number in range(rounds + 1):
        print(f"{setting}: round {number} of {rounds}", file=sys.stderr)
        ids, labels = next(batches)
        shapes.append(list(ids.shape))
        for name in order.sample(list(names), len(names)):
            begin = devices.now(device)
            steps[name](ids, labels)
            seconds[name].append(devices.now(device) - begin)
            flops[name].append(flop(name, trained[name], ids))
        begin = devices.now(device)
        for _ in range(4):
            square @ square
        rates.append(4 * 2 * 1024**3 / (devices.now(device) - begin))
    return {
        "setting": setting,
        "shapes": shapes[1:],
        "matmul_rate": rates[1:],
        "arms": {name: {"seconds": seconds[name][1:], "flop": flops[name][1:]} for name in names},
    }


def real(task: Task, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """Batches as the trainer makes them with pad=trim, bucket=true."""
    order, train = task.order(batch_size, seed=0, bucket=True), task.splits["train"]
    made = (train.batch(order.indices(step), trim=True) for step in range(10**6))
    return cast(Iterator[Batch], devices.feed(device, made))


def full(device: torch.device) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    while True:
        ids, labels = rng.integers(1, 257, FULL, np.int32), rng.integers(0, 2, FULL[0])
        yield torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)


def ratios(result: dict[str, Any], name: str, to: str) -> tuple[float, float, float]:
    """Seconds of `name` over those of `to`: median, lowest and highest of the rounds."""
    arms = result["arms"]
    each = [a / b for a, b in zip(arms[name]["seconds"], arms[to]["seconds"], strict=True)]
    return median(each), min(each), max(each)


def claims(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for, and whether this run has it: medians of the rounds."""
    asked = [
        ("macformer_exp / identity", "macformer_exp", "identity", "at most", 1.6),
        ("macformer_exp / identity with ppSBN", "macformer_exp", "identity, ppSBN", "at most", 1.6),
        ("plain trunk / ours", "plain", "identity", "at least", 1.4),
        ("transformer_sdpa / macformer_exp", "transformer_sdpa", "macformer_exp", "at least", 4.0),
    ]
    found = []
    for result in results:
        for text, name, to, sense, bound in asked:
            if not {name, to} <= result["arms"].keys():
                continue
            value, low, high = ratios(result, name, to)
            met = value <= bound if sense == "at most" else value >= bound
            found.append(
                {"claim": f"{result['setting']}: {text}", "sense": sense, "bound": bound}
                | {"value": value, "low": low, "high": high, "met": met}
            )
    return found


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| asked for | | | here (range) | |", "| --- | --- | --: | --: | --- |"]
    for c in report["claims"]:
        lines.append(
            f"| {c['claim']} | {c['sense']} | {c['bound']:.3g} | {c['value']:.3g} ({c['low']:.3g}-{c['high']:.3g}) "
            f"| {'met' if c['met'] else '**not met**'} |"
        )
    lines += ["", *(f"{line}\n" for line in report["left_out"])]
    for result in report["results"]:
        arms, lengths = result["arms"], [n for _, n in result["shapes"]]
        lines += [
            f"**{result['setting']}** (padded to {min(lengths):,}-{max(lengths):,}, median {median(lengths):,.0f}; "
            f"matmul rate {median(result['matmul_rate']) / 1e9:.0f} GFLOP/s; {len(lengths)} rounds)",
            "",
            "| model | ms (range) | times identity (range) | of matmul rate |",
            "| --- | --: | --: | --: |",
        ]
        for name, arm in arms.items():
            ms = [1e3 * s for s in arm["seconds"]]
            each = zip(arm["flop"], arm["seconds"], result["matmul_rate"], strict=True)
            share = median(f / s / rate for f, s, rate in each)
            value, low, high = ratios(result, name, "identity")
            lines.append(
                f"| {name} | {median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f}) | {value:.3g} ({low:.3g}-{high:.3g}) "
                f"| {share:.0%} |"
            )
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imdb", help="aclImdb_v1.tar.gz, for Text")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-full", action="store_true", help="leave 16 x 4,096 out")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "bench")
    options = parser.parse_args(arguments)
    device = devices.choose(options.device)
    devices.prepare(device, 1)
    left_out, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        origins: dict[str, str | None] = {"listops": None, "text": options.imdb}
        for name, origin in origins.items():
            if name == "text" and not origin:
                left_out.append("Text is left out: it needs --imdb (make bench-models IMDB=path).")
                continue
            with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
                config = compose("train", [f"task={name}", "protocol=paper", "model=macformer_exp"])
            config.task.data.examples = EXAMPLES
            task = configs.build(config, "task.data", folder=folder, origin=origin)
            batch = config.task.batch_size
            setting = f"{name}, batch {batch}, real lengths"
            results.append(race(setting, task.spec, STEPS, real(task, batch, device), options.rounds, device))
    if not options.no_full:
        setting, spec = f"{FULL[0]} x {FULL[1]:,}", TaskSpec(BYTES, FULL[1], classes=2, paired=False)
        rounds = min(options.rounds, SLOW_ROUNDS)
        results.append(race(setting, spec, (*STEPS, "transformer_sdpa"), full(device), rounds, device))
    report = {
        "code": records.code().model_dump(),
        "environment": records.environment(device.type, devices.describe(device), 1).model_dump(),
        "left_out": left_out,
        "results": results,
        "claims": claims(results),
    }
    records.write_text(options.output / "models.json", json.dumps(report, indent=1) + "\n")
    records.write_text(options.output / "models.md", table(report))
    print(table(report))
    print(f"written to {options.output}: models.json, models.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
