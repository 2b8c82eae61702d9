"""Benchmark training steps of whole models on each task: time, memory, and from which length on Macformer is faster.

    python -m scripts.bench models --imdb data/aclImdb_v1.tar.gz      # 40 minutes on one core
    python -m scripts.bench models --models mine,rfa --settings listops-full --rounds 1 --output /tmp/bench

The models are the paper's, or those of configs/model that --models names; beside them the Transformer with explicit,
checkpointed and fused (SDPA) attention, and our model with the identity for attention, with and without ppSBN.
How time and memory are measured is in docs/protocol.md, "Speed of a model". The settings are

    TASK-full   the paper's protocol: every text padded to the task's length. Ids are random, and nothing is padding
    TASK-real   real texts, with batches as the trainer makes them with pad=trim and bucket=true
    lengths     as many tokens a batch at every length, with Text's encoder
"""

import itertools
import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra_data import listops, retrieval, text
from lra_data.base import TaskSpec
from macformer.bench import race as bench
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness.progress import mebibytes
from macformer.harness.trainer import CLIP, EPS

# Setting -> rounds. At full length softmax takes up to minutes a step.
ROUNDS = {"text-real": 15, "listops-real": 15, "listops-full": 5, "text-full": 5, "retrieval-full": 5, "lengths": 10}
EXAMPLES = {"train": 4096, "dev": 16, "test": 16}  # a few windows of buckets
TASKS = {"listops": listops, "text": text, "retrieval": retrieval}
TRUNKS = {"identity": "transformer_sdpa", "identity, ppSBN": "macformer_exp"}  # all but the attention of these
BASELINES = ("transformer", "transformer_checkpointed", "transformer_sdpa")
PAPER = json.loads((Path(__file__).parents[2] / "results" / "paper.json").read_text())
TOKENS, LENGTHS = 8192, [2**i for i in range(6, 13)]
OVER_LENGTHS = ("rfa", "macformer_exp")  # the other kernels take as long
MEASURED = 0.8  # share of the free memory in which a peak is measured: holes and torch itself take some
SPREAD = 3  # resident bytes to live ones, at most, as kept memory is split up (docs/log.md)
Report = dict[str, Any]
Batch = tuple[Tensor, Tensor]  # ids, labels
compose = cache(configs.compose)  # takes longer than some steps


class Identity(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return v


def model(name: str, spec: TaskSpec) -> nn.Module:
    torch.manual_seed(0)
    given = {"attention": Identity} if name in TRUNKS else {}
    return configs.build(compose(f"model={TRUNKS.get(name, name)}"), "model", **asdict(spec), **given)


class Trained:
    """A model with its optimiser; a step is that of train.py, in the precision that it takes on this device."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model.to(device).train(), device
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, eps=EPS, weight_decay=0, fused=True)
        self.scaler = devices.scaler(device, "auto")

    def forward_backward(self, ids: Tensor, labels: Tensor) -> None:
        with devices.autocast(self.device, "auto"):
            loss = F.cross_entropy(self.model(ids).float(), labels)
        self.scaler.scale(loss).backward()

    def step(self, ids: Tensor, labels: Tensor) -> None:
        self.forward_backward(ids, labels)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def peak(self, ids: Tensor, labels: Tensor) -> int:
        """Peak bytes of forward and backward, with parameters and the optimiser's state."""
        if not self.optimizer.state:
            self.step(ids[:1], labels[:1])
        self.optimizer.zero_grad()
        moments = (moment for state in self.optimizer.state.values() for moment in state.values())
        state = [*self.model.parameters(), *self.model.buffers(), *moments]
        return devices.peak_bytes(self.device, state, partial(self.forward_backward, ids, labels))

    def estimate_peak(self, ids: Tensor, labels: Tensor, examples: int) -> int:
        """Estimate the peak of so many examples from those of one and two: activations are linear in the batch."""
        one, two = (self.peak(ids[:count], labels[:count]) for count in (1, 2))
        return one + (examples - 1) * (two - one)


def fitting(examples: int, need: float, free: float) -> int:
    """Of a batch that needs so many bytes: all examples, half, a quarter ... or none, so that they fit."""
    part = examples
    while need * part / examples > free:
        part //= 2
    return part


def race_steps(
    label: str, spec: TaskSpec, names: Iterable[str], batches: Iterator[Batch], rounds: int, device: torch.device
) -> Report:
    """Seconds and FLOP of each model and the matmul rate in each round; peak bytes on the first batch, the longest.

    Each model takes the part of a batch that fits, and its seconds are scaled to the whole. What is large is the n x n
    weights. `left_out` has a sentence for each that does not take the whole of the longest batch.
    """
    ids, labels = next(batches)
    examples, longest = len(ids), ids.shape[-1]
    devices.keep_freed(False)
    left = math.inf if (bytes_left := devices.free_bytes(device)) is None else bytes_left
    free = left / SPREAD  # for a step, whose freed memory is kept
    trained, peaks, left_out = {}, {}, []
    for name in names:
        try:
            one = Trained(model(name, spec), device)
            peak = one.estimate_peak(ids, labels, examples)
            estimated = peak > MEASURED * left
            peak = peak if estimated else one.peak(ids, labels)
        except (RuntimeError, MemoryError) as error:
            if not devices.is_out_of_memory(error):
                raise
            left_out.append(f"{label} is without {name}: {str(error).splitlines()[0]}.")
            continue
        if count := fitting(examples, peak, free):
            trained[name], peaks[name] = one, peak
        if count < examples:
            outcome = f"it is timed on at least {count} of them and scaled" if count else "not even one fits"
            needs = mebibytes(peak) + " (estimated from batches of 1 and 2)" * estimated
            only = f"only {mebibytes(int(free))} are free: {outcome}."
            left_out.append(f"{label}: a step of {name} on {examples} examples needs {needs}, and {only}")
    devices.keep_freed(True)

    raced = list(itertools.islice(batches, rounds + 1))  # the first warms up

    def part(name: str, n: int) -> int:
        return fitting(examples, (n / longest) ** 2 * peaks[name], free)

    def arms(number: int) -> dict[str, Callable[[], object]]:
        ids, labels = raced[number]
        parts = {name: part(name, ids.shape[-1]) for name in trained}
        return {name: partial(trained[name].step, ids[:count], labels[:count]) for name, count in parts.items()}

    seconds, rates = bench.race_with_rate(arms, rounds, device, label=label)
    shapes, measured = [(len(ids), ids.shape[-1]) for ids, _ in raced[1:]], {}
    for name, each in trained.items():
        of_one = {n: partial(each.forward_backward, ids[:1, ..., :n], labels[:1]) for _, n in shapes}
        flop = {n: bench.count_flop(work) for n, work in of_one.items()}
        parts = [part(name, n) for _, n in shapes]
        measured[name] = {
            "seconds": [s * examples / count for s, count in zip(seconds[name], parts, strict=True)],
            "examples": parts,
            "flop": [size * flop[n] for size, n in shapes],
            "peak_bytes": peaks[name],
        }
    return {"shapes": shapes, "matmul_rate": rates, "arms": measured, "left_out": left_out}


def full(spec: TaskSpec, batch_size: int, n: int, device: torch.device) -> Iterator[Batch]:
    """Random ids, nothing padded."""
    rng, shape = np.random.default_rng(0), (batch_size, 2, n) if spec.paired else (batch_size, n)
    while True:
        ids = rng.integers(1, spec.vocabulary, shape, np.int32)
        labels = rng.integers(0, spec.classes, batch_size)
        yield torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)


def batches_of(
    setting: str, imdb: str | None, folder: str, device: torch.device
) -> tuple[Report, TaskSpec, Iterator[Any]]:
    """What the report says of a setting, the task, whose sizes are those of its YAML, and the batches."""
    name, kind = setting.split("-")
    config = configs.compose(f"task={name}")
    size, spec, trim = config.task.batch_size, TASKS[name].spec(config.task.data.length), kind == "real"
    keys = {"setting": setting, "task": name, "padding": "trim" if trim else "full", "bucket": trim, "batch_size": size}
    if not trim:
        return keys, spec, full(spec, size, spec.length, device)
    config.task.data.examples = EXAMPLES
    task = configs.build(config, "task.data", folder=folder, origin=imdb if name == "text" else None)
    order, train = task.order(size, seed=0, bucket=True), task.splits["train"]
    longest = np.resize(np.argsort(-train.lengths, kind="stable"), size)
    chosen = itertools.chain([longest], map(order.indices, itertools.count()))
    return keys, spec, devices.feed(device, (train.batch(indices, trim=True) for indices in chosen))


def crossing(lengths: Sequence[int], ratios: Sequence[float]) -> float:
    """From which length on the ratios are below 1, interpolated in log n: 0 if all are, inf if the last is not."""
    last = max((i for i, ratio in enumerate(ratios) if ratio >= 1), default=-1)
    if last in (-1, len(lengths) - 1):
        return 0.0 if last == -1 else math.inf
    (n, longer), (above, below) = lengths[last : last + 2], ratios[last : last + 2]
    return n * (longer / n) ** ((above - 1) / (above - below))


def break_even(results: list[Report]) -> list[Report]:
    """From which length on each model is faster than the Transformers: by the medians, and by each round alone."""
    found = []
    names = dict.fromkeys(name for result in results for name in result["arms"] if name not in BASELINES)
    for name, to in itertools.product(reversed(names), ("transformer_sdpa", "transformer")):
        measured = {each["n"]: ratios for each in results if (ratios := bench.ratios(each["arms"], name, to))}
        if not measured:
            continue
        lengths = list(measured)
        rounds = [crossing(lengths, ratios) for ratios in zip(*measured.values(), strict=True)]
        n, low, high = crossing(lengths, list(map(median, measured.values()))), min(rounds), max(rounds)
        where = {0.0: "at every length measured", math.inf: "at no length measured"}.get(n, f"from n = {n:,.0f} on")
        ends = {0.0: f"below {lengths[0]:,}", math.inf: f"above {lengths[-1]:,}"}
        spread = " to ".join(ends.get(x, f"{x:,.0f}") for x in (low, high))
        says = f"{name} is faster than {to} {where} (single rounds: {spread})."
        known = {key: x if 0 < x < math.inf else None for key, x in {"n": n, "low": low, "high": high}.items()}
        found.append({"model": name, "baseline": to, **known, "says": says})
    return found


def table(report: Report) -> str:
    """Markdown."""
    parts = [f"{line}\n" for line in report["left_out"]]
    for result in report["results"]:
        lengths, rates, arms, rows = [n for _, n in result["shapes"]], result["matmul_rate"], result["arms"], []
        memory = arms.get(BASELINES[0], {}).get("peak_bytes")
        for name, arm in arms.items():
            share = median(f / s / rate for f, s, rate in zip(arm["flop"], arm["seconds"], rates, strict=True))
            row = {
                "model": name,
                "ms (range)": bench.milliseconds(arms, name, ".0f"),
                **{f"time / {to} (range)": bench.with_range(bench.ratios(arms, name, to)) for to in BASELINES},
                "peak MiB": f"{arm['peak_bytes'] / 2**20:,.0f}",
                f"memory / {BASELINES[0]}": f"{arm['peak_bytes'] / memory:.3g}" if memory else "-",
                "of matmul rate": f"{share:.0%}",
            }
            rows.append(row)
        padded = f"padded to {min(lengths):,}-{max(lengths):,}, median {median(lengths):,.0f}"
        rate = f"matmul rate {median(rates) / 1e9:.0f} GFLOP/s; rounds: {len(lengths)}"
        parts.append(bench.section(result["setting"], f"batches of {result['batch_size']}, {padded}; {rate}", rows))
    if results := report["lengths"]["results"]:
        says, rows = report["lengths"]["break_even"], []
        names = dict.fromkeys(name for result in results for name in result["arms"])
        for n, arms in (result.values() for result in results):
            row = {"n": f"{n:,}"} | {name: bench.milliseconds(arms, name, ".0f") for name in names}
            pairs = ((found["model"], found["baseline"]) for found in says)
            rows.append(row | {" / ".join(pair): bench.with_range(bench.ratios(arms, *pair)) for pair in pairs})
        details = f"{report['lengths']['tokens']:,} tokens a batch, Text's encoder; ms and ratios of time, with ranges"
        parts.append(bench.section("lengths", details, rows, "--:"))
        parts.append("".join(f"- {found['says']}\n" for found in says))
    return "\n".join(parts)


def measure(options: Namespace, device: torch.device) -> Report:
    for name in options.models or ():
        compose(f"model={name}")  # an unknown name is an error now, not when half of the work is done
    names = dict.fromkeys([*TRUNKS, *BASELINES, *(options.models or PAPER["accuracy"]["text"])])
    over_lengths = dict.fromkeys([BASELINES[0], BASELINES[2], *(options.models or OVER_LENGTHS)])
    absent = {} if options.imdb else {"text-real": "it needs --imdb (make bench IMDB=path)"}
    absent |= {setting: "--settings does not name it" for setting in ROUNDS if setting not in options.settings}
    left_out = [f"{setting} is left out: {why}." for setting, why in absent.items()]
    results, lengths = [], []
    devices.prepare(device, 1)
    with tempfile.TemporaryDirectory() as folder:
        for setting in (setting for setting in ROUNDS if setting not in (*absent, "lengths")):
            keys, spec, batches = batches_of(setting, options.imdb, folder, device)
            raced = race_steps(setting, spec, names, batches, options.rounds or ROUNDS[setting], device)
            left_out += raced.pop("left_out")
            results.append(keys | raced)
    spec, rounds = text.spec(LENGTHS[-1]), options.rounds or ROUNDS["lengths"]
    for n in LENGTHS if "lengths" not in absent else ():
        batches = full(spec, TOKENS // n, n, device)
        raced = race_steps(f"lengths, n = {n:,}", spec, over_lengths, batches, rounds, device)
        left_out += raced["left_out"]
        lengths.append({"n": n, "arms": {name: {"seconds": arm["seconds"]} for name, arm in raced["arms"].items()}})
    over_length = {"tokens": TOKENS, "results": lengths, "break_even": break_even(lengths)}
    provenance = bench.provenance(device, devices.choose_precision("auto", device))
    return provenance | {"left_out": left_out, "results": results, "lengths": over_length}
