"""Race training steps of whole models on each task: time, memory, and from which length on Macformer is faster.

    python -m scripts.bench_models --imdb data/aclImdb_v1.tar.gz      # 36 minutes on one core
    python -m scripts.bench_models --settings listops-full --rounds 1 --output /tmp/bench

How: one process, one thread, freed memory kept, as train.py has it. A step is forward, cross-entropy, backward, clip by
value, AdamW. In every round each model has a turn of one step, in a new order, all on the same batch (or on a part of
it, see below); the next round has another batch. A ratio is taken within a round; its median and range over the rounds
are reported. A round before the first is not counted.

    TASK-full   the paper's protocol: every text padded to the task's length. Ids are random and nothing is padding,
                which costs the same as a padded batch and needs no data
    TASK-real   real texts, with batches as the trainer makes them with pad=trim and bucket=true
    lengths     as many tokens a batch at every length, with Text's encoder

    plain             stock torch modules, all but attention: the values go on as they are, q and k are projected
    identity          our model without ppSBN, the identity for attention: likewise
    identity, ppSBN   the same with pre-SBN of q and k and post-SBN of the values

Memory is the peak of forward and backward of one model on the longest batch, measured as the trainer does, or foretold
from one and two examples where the batch would not fit. On the CPU kept memory is split up, so that up to SPREAD times
what lives is resident: a step for which that is too much takes half of the batch, or a quarter and so on, and its time
is scaled to the whole. A model of which not even one example would fit is left out. All of it is said.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra_data import listops, retrieval, text
from lra_data.base import DataError, Task, TaskSpec
from macformer import RFAttention, RMFAttention, SoftmaxAttention
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness.progress import duration, mebibytes
from macformer.harness.race import MATMUL_FLOP, matmul, provenance, race, ratios
from macformer.harness.trainer import CLIP, EPS
from scripts.bench_attention import flop as attention_flop
from scripts.table import find_block, write_block

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- written by `make bench` -->", "<!-- until here: bench -->"
ROUNDS = {"real": 15, "full": 5, "lengths": 10}  # at full length softmax takes up to minutes a step
EXAMPLES = {"train": 4096, "dev": 16, "test": 16}  # a few windows of buckets
TASKS = {"listops": listops, "text": text, "retrieval": retrieval}
TRUNKS = ("plain", "identity", "identity, ppSBN")
BASELINES = ("transformer", "transformer_checkpointed", "transformer_sdpa")
LINEAR = ("rfa", "macformer_exp")
MODELS = (*BASELINES, *LINEAR, "macformer_inv", "macformer_trigh", "macformer_log", "macformer_sqrt")
SETTINGS = {  # the one that can lack its data comes first
    "text-real": (*TRUNKS, *BASELINES, *LINEAR),
    "listops-real": (*TRUNKS, *BASELINES, *LINEAR),
    "listops-full": MODELS,
    "text-full": (*TRUNKS, *MODELS),
    "retrieval-full": MODELS,
}
TOKENS, LENGTHS = 8192, [2**i for i in range(6, 13)]
ROOM = 0.8  # share of the free memory in which a peak is measured: holes and torch itself take some
SPREAD = 3  # resident bytes to live ones, at most (docs/log.md)
Batch = tuple[Tensor, Tensor]
Raced = tuple[
    dict[str, Any], list[str]
]  # what was measured; a sentence for each model that is left out or takes a part of the batch


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


@cache
def encoder() -> dict[str, Any]:
    """The sizes that all models share."""
    return configs.container(configs.compose())["model"]


def model(name: str, spec: TaskSpec) -> nn.Module:
    torch.manual_seed(0)
    if name == "plain":
        return Plain(spec, encoder())
    if name.startswith("identity"):
        like = "macformer_exp" if name.endswith("ppSBN") else "transformer_sdpa"
        return configs.build(configs.compose(f"model={like}"), "model", **asdict(spec), attention=Identity)
    return configs.build(configs.compose(f"model={name}"), "model", **asdict(spec))


def adamw(name: str, trained: nn.Module) -> torch.optim.Optimizer:
    """The plain trunk has torch's default, the others the fused one."""
    return torch.optim.AdamW(trained.parameters(), 1e-4, eps=EPS, weight_decay=0, fused=name != "plain" or None)


def step(trained: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> None:
    """In the precision that train.py takes on this device."""
    precision = devices.choose_precision("auto", ids.device)
    scaler = devices.scaler(ids.device, precision)
    scaler.scale(loss(trained, ids, labels, precision)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(trained.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def loss(trained: nn.Module, ids: Tensor, labels: Tensor, precision: devices.Precision) -> Tensor:
    with devices.autocast(ids.device, precision):
        return F.cross_entropy(trained(ids), labels)


def flop(name: str, trained: nn.Module, ids: Tensor) -> int:
    """Of the matrix products over tokens, forward and backward: three times those of the forward pass.

    With the identity, q and k have no backward pass. What is computed again does not count, but inside attention.
    """
    sizes = encoder()
    width, heads, joined = sizes["width"], sizes["heads"], sizes["heads"] * sizes["head_dim"]
    linear = 3 * (4 * width * joined + 2 * width * sizes["feedforward"])
    if name in TRUNKS:
        linear -= 4 * width * joined
    attentions = (m for m in trained.modules() if isinstance(m, RMFAttention | RFAttention | SoftmaxAttention))
    tokens, n = ids.numel(), ids.shape[-1]
    return sizes["layers"] * 2 * tokens * linear + sum(attention_flop(m, tokens // n, heads, n) for m in attentions)


def peaks_of(trained: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[int], int]:
    """Number of examples -> peak bytes of a pass over them, with parameters and optimiser state."""
    ids, labels = batch
    device = ids.device
    step(trained, optimizer, ids[:1], labels[:1])  # the optimiser has its moments now
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]

    def of(examples: int) -> int:
        def work() -> None:
            precision = devices.choose_precision("auto", device)
            loss(trained, ids[:examples], labels[:examples], precision).backward()
            optimizer.zero_grad()

        return devices.peak_bytes(device, [*trained.parameters(), *trained.buffers(), *moments], work)

    return of


def foretold(of: Callable[[int], int], examples: int) -> int:
    """From one and two examples: activations are linear in the batch."""
    one = of(1)
    return one + (examples - 1) * (of(2) - one)


def peak(name: str, spec: TaskSpec, batch: Batch, device: torch.device) -> tuple[int, bool]:
    """Peak bytes of a pass over the batch, no other model alive; whether they are foretold, as it would not fit."""
    trained = model(name, spec).to(device).train()
    of, examples = peaks_of(trained, adamw(name, trained), batch), len(batch[0])
    need, free = foretold(of, examples), devices.free_bytes(device)
    too_much = free is not None and need > ROOM * free
    return need if too_much else of(examples), too_much


def part_of(examples: int, need: float, room: float) -> int:
    """How many of the examples a step may take for `need`, that of all of them, to fit: all, half, a quarter ..."""
    part = examples
    while part > 1 and need * part / examples > room:
        part //= 2
    return part


def measure(
    setting: str,
    spec: TaskSpec,
    names: Sequence[str],
    longest: Batch,
    batches: Iterator[Batch],
    rounds: int,
    device: torch.device,
) -> Raced:
    """Seconds and FLOP of each model and the matmul rate in each round, peak bytes on the longest batch; who is out."""
    devices.keep_freed(False)
    free = devices.free_bytes(device)
    room = math.inf if free is None else free / SPREAD  # for a step, as its freed memory is kept
    examples = len(longest[0])
    or_more = " or more, by the length" * setting.endswith("real")
    peaks: dict[str, int] = {}
    left_out = []
    for name in names:
        print(f"{setting}: memory of {name}", file=sys.stderr)
        try:
            need, foretelling = peak(name, spec, longest, device)
            if need / examples > room:
                raise MemoryError(
                    f"a step on one of {examples} examples would need {mebibytes(need // examples)}, and there is room "
                    f"for {mebibytes(int(room))}"
                )
            peaks[name] = need
            if need > room:
                left_out.append(
                    f"{setting}: a step of {name} on {examples} examples needs {mebibytes(need)}"
                    f"{' (foretold from one and two of them)' * foretelling}, and there is room for "
                    f"{mebibytes(int(room))}: it took {part_of(examples, need, room)} of them{or_more}, "
                    "and its time is scaled to all."
                )
        except (RuntimeError, MemoryError) as error:
            if not devices.is_out_of_memory(error):
                raise
            left_out.append(f"{setting} is without {name}: {str(error).splitlines()[0]}.")
    devices.keep_freed(True)
    trained = {name: model(name, spec).to(device).train() for name in peaks}
    optimizers = {name: adamw(name, trained[name]) for name in peaks}
    multiply = matmul(device)
    begin = devices.now(device)
    # Of each round, the warm-up first: the batch's shape, and of each model how many examples it took, and the FLOP.
    shapes: list[list[int]] = []
    parts: list[dict[str, int]] = []
    flops: list[dict[str, int]] = []

    def arms(number: int) -> dict[str, Callable[[], object]]:
        each = (devices.now(device) - begin) / max(number, 1)
        left = f", {duration(each * (rounds + 1 - number))} left of it" * (number > 0)
        print(f"{setting}: round {number} of {rounds}{left}", file=sys.stderr)
        ids, labels = next(batches)
        share = (ids.shape[-1] / longest[0].shape[-1]) ** 2  # what is large is the n x n weights
        shapes.append([len(ids), ids.shape[-1]])
        parts.append({name: part_of(examples, share * peaks[name], room) for name in peaks})
        flops.append({name: flop(name, trained[name], ids) for name in peaks})
        steps = {
            name: partial(step, trained[name], optimizers[name], ids[:part], labels[:part])
            for name, part in parts[-1].items()
        }
        return {"matmul": multiply, **steps}

    taken = list(race(arms, rounds, device))
    return {
        "shapes": shapes[1:],
        "matmul_rate": [MATMUL_FLOP / seconds["matmul"] for seconds in taken],
        "arms": {
            name: {
                "seconds": [
                    seconds[name] * examples / part[name] for seconds, part in zip(taken, parts[1:], strict=True)
                ],
                "examples": [part[name] for part in parts[1:]],
                "flop": [each[name] for each in flops[1:]],
                "peak_bytes": peaks[name],
            }
            for name in peaks
        },
    }, left_out


def real(task: Task, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """The longest batch, for memory; then batches as the trainer makes them with pad=trim, bucket=true."""
    order, train = task.order(batch_size, seed=0, bucket=True), task.splits["train"]
    longest = np.resize(np.argsort(-train.lengths, kind="stable"), batch_size)
    chosen = itertools.chain([longest], (order.indices(step) for step in itertools.count()))
    return cast(Iterator[Batch], devices.feed(device, (train.batch(indices, trim=True) for indices in chosen)))


def full(spec: TaskSpec, batch_size: int, n: int, device: torch.device) -> Iterator[Batch]:
    rng, shape = np.random.default_rng(0), (batch_size, 2, n) if spec.paired else (batch_size, n)
    while True:
        ids = rng.integers(1, spec.vocabulary, shape, np.int32)
        labels = rng.integers(0, spec.classes, batch_size)
        yield torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)


def over_lengths(rounds: int, device: torch.device) -> Raced:
    """Seconds at every length, with as many tokens a batch, and the break-even lengths."""
    spec = text.spec(configs.compose("task=text").task.data.length)
    names, results, left_out = ("transformer", "transformer_sdpa", *LINEAR), [], []
    for n in LENGTHS:
        batches = full(spec, TOKENS // n, n, device)
        result, out = measure(f"lengths, n = {n:,}", spec, names, next(batches), batches, rounds, device)
        results.append({"n": n, "arms": {name: {"seconds": arm["seconds"]} for name, arm in result["arms"].items()}})
        left_out += out
    return {"tokens": TOKENS, "results": results, "break_even": break_even(results)}, left_out


def crossing(points: Sequence[tuple[int, float]]) -> float:
    """From which n on the ratios are below 1, interpolated in log n: 0 if they all are, inf if the last is not."""
    slower = [i for i, (_, ratio) in enumerate(points) if ratio >= 1]
    if not slower:
        return 0.0
    if slower[-1] == len(points) - 1:
        return math.inf
    (n, above), (longer, below) = points[slower[-1]], points[slower[-1] + 1]
    return n * (longer / n) ** ((above - 1) / (above - below))


def break_even(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the medians of the ratios; lowest and highest of the rounds, each round by itself."""
    found = []
    for name, to in itertools.product(reversed(LINEAR), ("transformer_sdpa", "transformer")):
        both = [result for result in results if {name, to} <= result["arms"].keys()]
        pairs = [(r["n"], r["arms"][name]["seconds"], r["arms"][to]["seconds"]) for r in both]
        each = [(n, [a / b for a, b in zip(ours, theirs, strict=True)]) for n, ours, theirs in pairs]
        if not each:
            continue
        at = crossing([(n, median(rounds)) for n, rounds in each])
        of_rounds = [crossing([(n, rounds[i]) for n, rounds in each]) for i in range(len(each[0][1]))]
        low, high = min(of_rounds), max(of_rounds)
        if at == 0:
            says = f"{name} is faster than {to} at every length measured"
        elif at == math.inf:
            says = f"{name} is faster than {to} at no length measured"
        else:
            says = f"{name} is faster than {to} from n = {at:,.0f} on"
        spread = " to ".join(
            {0.0: f"below {each[0][0]:,}", math.inf: f"above {each[-1][0]:,}"}.get(x, f"{x:,.0f}") for x in (low, high)
        )
        told = {"n": at, "low": low, "high": high}
        found.append(
            {"model": name, "baseline": to}
            | {key: value if 0 < value < math.inf else None for key, value in told.items()}
            | {"says": f"{says} (single rounds: {spread})."}
        )
    return found


def run(setting: str, folder: str, imdb: str | None, rounds: int | None, device: torch.device) -> Raced:
    """One setting of SETTINGS, its sizes those of the task's YAML."""
    name, _, kind = setting.partition("-")
    config = configs.compose(f"task={name}")
    batch_size, spec, trim = config.task.batch_size, TASKS[name].spec(config.task.data.length), kind == "real"
    if trim:
        config.task.data.examples = EXAMPLES
        task = configs.build(config, "task.data", folder=folder, origin=imdb if name == "text" else None)
        batches = real(task, batch_size, device)
    else:
        batches = full(spec, batch_size, spec.length, device)
    result, left_out = measure(setting, spec, SETTINGS[setting], next(batches), batches, rounds or ROUNDS[kind], device)
    shape = {"task": name, "padding": "trim" if trim else "full", "bucket": trim, "batch_size": batch_size}
    return {"setting": setting, **shape, **result}, left_out


def slower(result: dict[str, Any], name: str, to: str) -> tuple[float, float, float]:
    """Seconds of `name` over those of `to`: median, lowest and highest of the rounds."""
    return ratios(result["arms"][name]["seconds"], result["arms"][to]["seconds"])


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
        for what, name, to, sense, bound in asked:
            if not {name, to} <= result["arms"].keys() or (to == "macformer_exp" and result["setting"] != "text-full"):
                continue
            value, low, high = slower(result, name, to)
            met = value <= bound if sense == "at most" else value >= bound
            found.append(
                {"claim": f"{result['setting']}: {what}", "sense": sense, "bound": bound}
                | {"value": value, "low": low, "high": high, "met": met}
            )
    return found


def summary(report: dict[str, Any]) -> str:
    """For the README: what was asked for, and the break-even lengths."""
    code, machine = report["code"], report["environment"]["device_name"]
    commit = f"{str(code['commit'])[:7]}{', with changes' if code['dirty'] else ''}"
    return "\n".join(
        [
            f"One thread of {machine}, commit {commit}; medians of the rounds, and their range:",
            "",
            *asked_for(report),
            "",
            f"At {report['lengths']['tokens']:,} tokens a batch:",
            "",
            *(f"- {told['says']}" for told in report["lengths"]["break_even"]),
            "",
        ]
    )


def asked_for(report: dict[str, Any]) -> list[str]:
    lines = ["| asked for | | | here (range) | |", "| --- | --- | --: | --: | --- |"]
    for c in report["claims"]:
        lines.append(
            f"| {c['claim']} | {c['sense']} | {c['bound']:.3g} | {c['value']:.3g} ({c['low']:.3g}-{c['high']:.3g}) "
            f"| {'met' if c['met'] else '**not met**'} |"
        )
    return lines


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [*asked_for(report), "", *(f"{line}\n" for line in report["left_out"])]
    for result in report["results"]:
        lengths = [n for _, n in result["shapes"]]
        lines += [
            f"**{result['setting']}** (batches of {result['batch_size']}, padded to {min(lengths):,}-{max(lengths):,}, "
            f"median {median(lengths):,.0f}; matmul rate {median(result['matmul_rate']) / 1e9:.0f} GFLOP/s; "
            f"rounds: {len(lengths)})",
            "",
            f"| model | ms (range) | {' | '.join(f'time / {to} (range)' for to in BASELINES)} "
            "| peak MiB | memory / transformer | of matmul rate |",
            "| --- | --: | --: | --: | --: | --: | --: | --: |",
        ]
        for name, arm in result["arms"].items():
            each = zip(arm["flop"], arm["seconds"], result["matmul_rate"], strict=True)
            share = median(f / s / rate for f, s, rate in each)
            memory = "-"
            if "transformer" in result["arms"]:
                memory = f"{arm['peak_bytes'] / result['arms']['transformer']['peak_bytes']:.3g}"
            lines.append(
                f"| {name} | {milliseconds(arm)} | {' | '.join(times(result, name, to) for to in BASELINES)} "
                f"| {arm['peak_bytes'] / 2**20:,.0f} | {memory} | {share:.0%} |"
            )
        lines.append("")
    lengths = report["lengths"]
    if lengths["results"]:
        names = list(dict.fromkeys(name for result in lengths["results"] for name in result["arms"]))
        pairs = [(told["model"], told["baseline"]) for told in lengths["break_even"]]
        lines += [
            f"**lengths** ({lengths['tokens']:,} tokens a batch, Text's encoder; ms and ratios of time, with ranges)",
            "",
            f"| n | {' | '.join(names)} | {' | '.join(f'{name} / {to}' for name, to in pairs)} |",
            f"| --: |{' --: |' * (len(names) + len(pairs))}",
        ]
        for result in lengths["results"]:
            cells = [milliseconds(result["arms"][name]) if name in result["arms"] else "-" for name in names]
            cells += [times(result, name, to) for name, to in pairs]
            lines.append(f"| {result['n']:,} | {' | '.join(cells)} |")
        lines += ["", *(f"- {told['says']}" for told in lengths["break_even"]), ""]
    return "\n".join(lines)


def milliseconds(arm: dict[str, Any]) -> str:
    ms = [1e3 * s for s in arm["seconds"]]
    return f"{median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f})"


def times(result: dict[str, Any], name: str, to: str) -> str:
    """The ratio with its range; a dash where one of the two is not there."""
    if not {name, to} <= result["arms"].keys():
        return "-"
    return "{:.3g} ({:.3g}-{:.3g})".format(*slower(result, name, to))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imdb", help="aclImdb_v1.tar.gz, for Text")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    every = [*SETTINGS, "lengths"]
    parser.add_argument("--settings", nargs="+", choices=every, default=every)
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "bench")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1 is needed")
    shown = options.output.resolve() == ROOT / "results" / "bench" and options.settings == every  # in the README
    if shown:
        find_block(BEGIN, END)  # now, not when all the work is done
    device = devices.choose(options.device)
    devices.prepare(device, 1)
    left_out = [f"{name} is left out: --settings does not name it." for name in every if name not in options.settings]
    results = []
    lengths: dict[str, Any] = {"tokens": TOKENS, "results": [], "break_even": []}
    with tempfile.TemporaryDirectory() as folder:
        for setting in (setting for setting in SETTINGS if setting in options.settings):
            if setting == "text-real" and not options.imdb:
                left_out.append("text-real is left out: it needs --imdb (make bench IMDB=path).")
                continue
            try:
                result, out = run(setting, folder, options.imdb, options.rounds, device)
            except DataError as error:
                sys.exit(f"error: {error}")
            results.append(result)
            left_out += out
    if "lengths" in options.settings:
        lengths, out = over_lengths(options.rounds or ROUNDS["lengths"], device)
        left_out += out
    report = {
        **provenance(device, devices.choose_precision("auto", device)),
        "left_out": left_out,
        "claims": claims(results),
        "results": results,
        "lengths": lengths,
    }
    files.write(options.output / "models.json", json.dumps(report, indent=1) + "\n")
    files.write(options.output / "models.md", table(report))
    if shown:
        write_block(BEGIN, END, summary(report))
    print(table(report))
    print(f"written to {options.output}: models.json, models.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
