"""Race all attentions, forward and backward, over the length: time, memory, share of the matmul rate.

    python scripts/bench_attention.py                    # about 20 minutes on one core
    python scripts/bench_attention.py --lengths 256 1024 --rounds 3 --no-model --output /tmp/bench

How: one process, one thread. In every round each attention has a turn, in a new order: it is called once, or again and
again for 0.3 s, and the mean of its calls counts. Random features are drawn anew for each round. A ratio is taken
within a round; its median and range over the rounds are reported. A round before the first is not counted. Memory is
the peak of live bytes beyond the inputs, of the largest draw. An attention that does not agree with its slow definition
gets no figure, and the exit code is 1.
Shapes: B batch, H heads, n length, d head width, D features, W projections and f products of a folded map.
"""

import argparse
import gc
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("error: matplotlib is not there; pip install 'macformer[figures]' (make setup does)")

from lra_data.base import TaskSpec
from macformer import KernelAttention, PreSBN, RFAttention, RMFAttention, SoftmaxAttention
from macformer.features import Sampling
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness.race import MATMUL_FLOP, matmul, provenance, race, ratios
from macformer.linear import FLOOR, plain_attention

ROOT = Path(__file__).parent.parent
HEAD_DIM, FEATURES, KEPT = 32, 128, 0.9  # the share of keys that the mask keeps
MANY = (4, 2)  # B, H up to n = 4096
ONE = (1, 1)  # beyond, where the n x n weights of eight heads do not fit any more
HEADLINE = (*MANY, 4096)
ROUNDS = 5
SHORT, LONG = [193], [3000]  # where every draw, and one draw, is held to its definition
TURN = 0.3  # seconds that an attention is called for when it is its turn, if one call does not take longer
SAMPLINGS = get_args(Sampling)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def attentions(seed: int) -> dict[str, nn.Module]:
    """All of them, without dropout."""

    def rmfa(sampling: Any) -> RMFAttention:
        return RMFAttention(HEAD_DIM, FEATURES, sampling=sampling, generator=torch.Generator().manual_seed(seed))

    return {
        "explicit": SoftmaxAttention(),
        "checkpointed": SoftmaxAttention(implementation="checkpointed"),
        "sdpa": SoftmaxAttention(implementation="sdpa"),
        "kernel": KernelAttention("exp"),
        "rfa": RFAttention(HEAD_DIM, FEATURES, generator=torch.Generator().manual_seed(seed)),
        **{f"rmfa_{sampling}": rmfa(sampling) for sampling in SAMPLINGS},
    }


def inputs(B: int, H: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Inputs:
    """q, k (rows of length one, as after pre-SBN), v, the output's gradient, the mask; laid out as in the model."""
    rng = torch.Generator().manual_seed(n)
    q, k, v, grad = (torch.randn(B, n, H, HEAD_DIM, generator=rng).transpose(1, 2).to(device, dtype) for _ in range(4))
    mask = (torch.arange(n) < math.ceil(KEPT * n)).expand(B, -1).to(device)
    q, k = (PreSBN()(x).detach().requires_grad_() for x in (q, k))
    return q, k, v.requires_grad_(), grad, mask


def run(attention: Callable[..., Tensor], data: Inputs) -> tuple[Tensor, ...]:
    q, k, v, grad, mask = data
    out = attention(q, k, v, mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def definition(attention: nn.Module) -> Callable[..., Tensor]:
    """The same function, slow and plain."""
    if not isinstance(attention, RMFAttention | RFAttention):
        return KernelAttention("exp")
    maclaurin = isinstance(attention, RMFAttention)
    floor = attention.floor if isinstance(attention, RMFAttention) else FLOOR

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        phi_q, phi_k = (
            attention.feature_map(x * HEAD_DIM**-0.25 if maclaurin else F.normalize(x, dim=-1)) for x in (q, k)
        )
        return plain_attention(phi_q, phi_k, v, mask, floor)

    return plain


def wrong(attention: nn.Module, device: torch.device, n: int) -> str:
    """Why it gets no figure, or nothing: output to 1e-5 and gradients to 1e-4 of the definition in float64."""
    ours = run(attention, inputs(1, 2, n, device))
    exact = run(definition(attention), inputs(1, 2, n, device, torch.float64))
    for what, x, truth in zip(("output", "gradient of q", "gradient of k", "gradient of v"), ours, exact, strict=True):
        error = float((x - truth).abs().max() / truth.abs().max())
        if not error < (1e-5 if what == "output" else 1e-4):
            return f"the {what} is off by {error:.1e} at n = {n:,}"
    if isinstance(attention, SoftmaxAttention) and attention.implementation == "sdpa":
        with torch.profiler.profile() as profiler:
            run(attention, inputs(1, 2, n, device))
        fused = ("flash_attention", "efficient_attention")  # with a mask CUDA has the second alone
        if not any(name in event.key for event in profiler.key_averages() for name in fused):
            return "SDPA is not on its flash path"
    return ""


def flop(attention: nn.Module, B: int, H: int, n: int) -> int:
    """Of the matrix products, forward and backward. A product of an n x a and an a x b matrix has 2 n a b."""
    d = HEAD_DIM
    if isinstance(attention, RMFAttention):  # for q and k: W three times; [x, F] with the values six times
        _, linear, rows, widths = attention.feature_map.folded(torch.float32)
        W, block = rows.shape[1], (0 if linear is None else d) + (widths[0] if widths else 0)
        return 12 * B * H * n * d * (W + block)
    if isinstance(attention, RFAttention):  # the frequencies are trained: W four times
        return B * H * n * d * (16 * FEATURES // 2 + 12 * FEATURES)
    products = {"checkpointed": 8, "sdpa": 7}.get(getattr(attention, "implementation", ""), 6)
    return 2 * products * B * H * n * n * d


def measure(names: list[str], B: int, H: int, n: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Seconds and FLOP of each attention and the matmul rate in each round; peak bytes, of the largest draw."""
    data = inputs(B, H, n, device)
    draws = [{name: arm.to(device) for name, arm in attentions(seed).items()} for seed in range(rounds + 1)]
    multiply = matmul(device)

    def arms(number: int) -> dict[str, Callable[[], Any]]:
        show(f"B, H, n = {B}, {H}, {n:,}: round {number} of {rounds}")
        return {"matmul": multiply} | {name: partial(run, draws[number][name], data) for name in names}

    taken = list(race(arms, rounds, device, TURN, seed=n))
    measured = {}
    for name in names:
        show(f"B, H, n = {B}, {H}, {n:,}: memory of {name}")
        flops = [flop(draw[name], B, H, n) for draw in draws]
        largest = draws[flops.index(max(flops))][name]
        memory = peak(device, partial(run, largest, data))
        measured[name] = {"seconds": [each[name] for each in taken], "flop": flops[1:], "peak_bytes": memory}
    show("")
    return {
        "shape": {"B": B, "H": H, "n": n, "d": HEAD_DIM, "D": FEATURES},
        "matmul_rate": [MATMUL_FLOP / each["matmul"] for each in taken],
        "arms": measured,
    }


def peak(device: torch.device, work: Callable[[], Any]) -> int:
    """Peak of live bytes beyond what lives already."""
    work()  # what it keeps for good it has now
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        return devices.peak_bytes(device, [], work) - before
    return devices.peak_bytes(device, [], work)


def model_memory(device: torch.device, batch: int = 16, n: int = 4096) -> dict[str, int]:
    """Peak bytes of a training step of the LRA model, parameters included, without attention dropout."""
    arms = {
        "transformer, checkpointed": ["model=transformer", "model.attention.implementation=checkpointed"],
        "transformer_sdpa": ["model=transformer_sdpa"],
        "rfa": ["model=rfa"],
        **{f"macformer_exp, {s}": ["model=macformer_exp", f"model.attention.sampling={s}"] for s in SAMPLINGS},
    }
    ids, labels = torch.randint(1, 257, (batch, n), device=device), torch.zeros(batch, dtype=torch.long, device=device)
    found = {}
    for name, overrides in arms.items():
        show(f"memory of a model: {name}")
        config = configs.compose(*overrides)
        if "dropout" in config.model.attention:
            config.model.attention.dropout = 0.0
        torch.manual_seed(0)
        model = configs.build(config, "model", **asdict(TaskSpec(512, n, 2, paired=False))).to(device)

        def step(model: nn.Module = model) -> None:
            F.cross_entropy(model(ids), labels).backward()
            model.zero_grad()

        found[name] = devices.peak_bytes(device, model.parameters(), step)
    show("")
    return found


def accuracy(device: torch.device, draws: int = 10) -> dict[str, dict[str, list[float]]]:
    """The paper's toy data, d = 64, n = 4,000, kernel exp: squared error of each draw, relative to what.

    nmse: to |exact|^2. deviation: to |exact - mean(v)|^2, so that plain averaging of v gets 1.
    """
    show("accuracy of the samplings")
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4000, 64, generator=rng).to(device) for _ in range(3))
    q, k = PreSBN(eps=1e-12)(q), PreSBN(eps=1e-12)(k)
    exact = KernelAttention("exp")(q, k, v)
    found: dict[str, dict[str, list[float]]] = {}
    for sampling in SAMPLINGS:
        found[sampling] = {"nmse": [], "deviation": []}
        for seed in range(draws):
            draw = torch.Generator().manual_seed(seed)
            attention = RMFAttention(64, FEATURES, sampling=sampling, generator=draw).to(device)
            error = (attention(q, k, v) - exact).square().sum()
            found[sampling]["nmse"].append(float(error / exact.square().sum()))
            found[sampling]["deviation"].append(float(error / (exact - v.mean(2, keepdim=True)).square().sum()))
    show("")
    return found


def faster(result: dict[str, Any], name: str, to: str) -> tuple[float, float, float]:
    """How many times faster than `to`: median, lowest and highest of the rounds."""
    return ratios(result["arms"][to]["seconds"], result["arms"][name]["seconds"])


def claims(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What issue 3 asked for, and whether this run has it: medians of the rounds."""
    found = []

    def claim(text: str, value: float, least: float) -> None:
        found.append({"claim": text, "value": value, "least": least, "met": value >= least})

    races = {
        (r["shape"]["B"], r["shape"]["n"]): r
        for r in report["results"]
        if r["allocator"] == "default" and not report["no_figure"]
    }
    if headline := races.get((MANY[0], HEADLINE[2])):
        for name, to, least in (
            ("paper", "explicit", 50),
            ("paper", "sdpa", 15),
            ("order1", "explicit", 200),
            ("order1", "sdpa", 60),
        ):
            text = f"n = 4,096: rmfa_{name}, times faster than {to}"
            claim(text, faster(headline, f"rmfa_{name}", to)[0], least)
        bytes_of = {name: arm["peak_bytes"] for name, arm in headline["arms"].items()}
        claim(
            "n = 4,096: memory of checkpointed softmax / rmfa_paper",
            bytes_of["checkpointed"] / bytes_of["rmfa_paper"],
            8,
        )
        claim("n = 4,096: memory of SDPA / rmfa_paper", bytes_of["sdpa"] / bytes_of["rmfa_paper"], 1 / 1.2)
    if short := races.get((MANY[0], 256)):
        claim("n = 256: rmfa_paper, times faster than explicit", faster(short, "rmfa_paper", "explicit")[0], 1)
    if (1, 4096) in races and (1, 16384) in races:
        near, far = (faster(races[1, n], "rmfa_paper", "explicit")[0] for n in (4096, 16384))
        claim("one head: gain over explicit at n = 16,384 / at n = 4,096", far / near, 1)
    if model := report["model_peak_bytes"]:
        ours = model["macformer_exp, paper"]
        claim(
            "model: memory of the checkpointed Transformer / macformer_exp",
            model["transformer, checkpointed"] / ours,
            8,
        )
        claim("model: memory of the SDPA Transformer / macformer_exp", model["transformer_sdpa"] / ours, 1 / 1.15)
    errors = {sampling: mean(error["nmse"]) for sampling, error in report["accuracy"].items()}
    claim("squared error of paper / exact01", errors["paper"] / errors["exact01"], 300)
    return found


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| asked for | at least | here | |", "| --- | --: | --: | --- |"]
    for c in report["claims"]:
        lines.append(f"| {c['claim']} | {c['least']:.3g} | {c['value']:.3g} | {'met' if c['met'] else '**not met**'} |")
    lines.append("")
    for result in report["results"]:
        shape, arms = result["shape"], result["arms"]
        lines += [
            f"**B, H, n, d, D = {shape['B']}, {shape['H']}, {shape['n']:,}, {shape['d']}, {shape['D']}**"
            f" ({result['allocator']} allocator; matmul rate {median(result['matmul_rate']) / 1e9:.0f} GFLOP/s)",
            "",
            "| attention | ms (range) | times faster than explicit (range) | than SDPA (range) "
            "| peak MiB | GFLOP | of matmul rate |",
            "| --- | --: | --: | --: | --: | --: | --: |",
        ]
        for name, arm in arms.items():
            ms = [1e3 * s for s in arm["seconds"]]
            share = median(f / s for f, s in zip(arm["flop"], arm["seconds"], strict=True)) / median(
                result["matmul_rate"]
            )
            to_softmax = [
                "{:.3g} ({:.3g}-{:.3g})".format(*faster(result, name, to)) if to in arms else ""
                for to in ("explicit", "sdpa")
            ]
            lines.append(
                f"| {name} | {median(ms):.3g} ({min(ms):.3g}-{max(ms):.3g}) | {to_softmax[0]} | {to_softmax[1]} "
                f"| {arm['peak_bytes'] / 2**20:.1f} | {median(arm['flop']) / 1e9:.3g} | {share:.0%} |"
            )
        lines.append("")
    lines += [
        "**Squared error of RMFA against exact attention: kernel exp, D = 128, d = 64, n = 4,000, random normal q, k, v"
        " after pre-SBN** (mean and standard deviation of the draws)",
        "",
        "| sampling | relative to the output | relative to its distance from mean(V): averaging V gets 1 |",
        "| --- | --: | --: |",
    ]
    for sampling, errors in report["accuracy"].items():
        cells = (f"{mean(values):.2g} ± {stdev(values):.1g}" for values in errors.values())
        lines.append(f"| {sampling} | {' | '.join(cells)} |")
    lines.append("")
    if report["model_peak_bytes"]:
        lines += [
            "**A training step of the LRA model, batch 16, n = 4,096**",
            "",
            "| model | peak MiB |",
            "| --- | --: |",
        ]
        lines += [f"| {name} | {size / 2**20:,.0f} |" for name, size in report["model_peak_bytes"].items()]
        lines.append("")
    return "\n".join(lines)


def plot(report: dict[str, Any]) -> bytes:
    """A PNG."""
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), sharex="col")
    for column, (B, H) in enumerate((MANY, ONE)):
        chosen = [
            r for r in report["results"] if (r["shape"]["B"], r["shape"]["H"]) == (B, H) and r["allocator"] == "default"
        ]
        chosen.sort(key=lambda r: r["shape"]["n"])
        if not chosen:
            continue
        lengths = [r["shape"]["n"] for r in chosen]
        for name in chosen[0]["arms"]:
            style = {"marker": "o", "ms": 4, "ls": "-" if name.startswith(("rmfa", "rfa")) else "--", "label": name}
            seconds = [r["arms"][name]["seconds"] for r in chosen]
            (line,) = panels[0, column].plot(lengths, [1e3 * median(s) for s in seconds], **style)
            low, high = ([1e3 * f(s) for s in seconds] for f in (min, max))
            panels[0, column].fill_between(lengths, low, high, color=line.get_color(), alpha=0.15, lw=0)
            panels[1, column].plot(lengths, [r["arms"][name]["peak_bytes"] / 2**20 for r in chosen], **style)
        panels[0, column].set(
            title=f"{B} x {H} heads of width {HEAD_DIM}, D = {FEATURES}", ylabel="ms, forward + backward"
        )
        panels[1, column].set(xlabel="length n", ylabel="peak MiB beyond the inputs")
        for panel in panels[:, column]:
            panel.set(xscale="log", yscale="log")
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
    panels[0, 0].legend(fontsize=8)
    environment = report["environment"]
    figure.suptitle(
        f"{environment['device_name']}, {environment['threads']} thread, torch {environment['torch']}", fontsize=10
    )
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, dpi=120)
    return content.getvalue()


def show(text: str) -> None:
    """What is going on: on one line that is written over, or line by line where that cannot be."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(8, 15)])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "bench")
    parser.add_argument("--no-model", action="store_true", help="leave the memory of the whole model out")
    options = parser.parse_args(arguments)
    device = devices.choose(options.device)
    torch.set_num_threads(1)
    complaints = {}
    for seed in range(
        options.rounds + 1
    ):  # the very draws that will race; long sequences take another way than short ones
        for name, attention in attentions(seed).items():
            show(f"is {name} right? (draw {seed})")
            for n in SHORT if seed else SHORT + LONG:
                if complaint := wrong(attention.to(device), device, n):
                    complaints[name] = complaint
    for name, complaint in complaints.items():
        print(f"{name} gets no figure: {complaint}")
    names = [name for name in attentions(seed=0) if name not in complaints]

    shapes = [(*MANY, n) for n in options.lengths if n <= HEADLINE[2]] + [
        (*ONE, n) for n in options.lengths if n >= 1024
    ]
    results = [measure(names, *shape, options.rounds, device) | {"allocator": "default"} for shape in shapes]
    model = {} if options.no_model else model_memory(device)
    if device.type == "cpu" and HEADLINE in shapes:
        devices.prepare(device, 1)  # as train.py does: freed memory is kept, and explicit softmax saves its page faults
        results.append(measure(names, *HEADLINE, options.rounds, device) | {"allocator": "keeping"})
    report = {
        **provenance(device),
        "rounds": options.rounds,
        "no_figure": complaints,
        "results": results,
        "accuracy": accuracy(device),
        "model_peak_bytes": model,
    }
    report["claims"] = claims(report)
    files.write(options.output / "attention.json", json.dumps(report, indent=1) + "\n")
    files.write(options.output / "attention.md", table(report))
    files.write(options.output / "attention.png", plot(report))
    print(table(report))
    print(f"written to {options.output}: attention.json, attention.md, attention.png")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
