"""Benchmark training steps of whole models on each task: time, memory, and from which length on Macformer is faster.

    python -m scripts.bench models --imdb data/aclImdb_v1.tar.gz      # 40 minutes on one core
    python -m scripts.bench models --models mine,rfa --settings listops-full --rounds 1 --output /tmp/bench

The models are the paper's, or those of configs/model that --models names; beside them the Transformer with explicit,
checkpointed and fused (SDPA) attention, and our model with the identity for attention, with and without ppSBN.
How time and memory are measured is in docs/protocol.md, "Speed of a model". The settings are

    TASK-full   the paper's protocol: every text padded to the task's length. Ids are random and nothing is padding,
                which costs the same as a padded batch and needs no data
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
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra_data import listops, retrieval, text
from lra_data.base import Task, TaskSpec
from macformer.bench import race as bench
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness.progress import mebibytes
from macformer.harness.trainer import CLIP, EPS

ROUNDS = {"real": 15, "full": 5, "lengths": 10}  # at full length softmax takes up to minutes a step
EXAMPLES = {"train": 4096, "dev": 16, "test": 16}  # a few windows of buckets
TASKS = {"listops": listops, "text": text, "retrieval": retrieval}
TRUNKS = {"identity": "transformer_sdpa", "identity, ppSBN": "macformer_exp"}  # all but the attention of these
BASELINES = ("transformer", "transformer_checkpointed", "transformer_sdpa")
SETTINGS = ("text-real", "listops-real", "listops-full", "text-full", "retrieval-full", "lengths")
PAPER = json.loads((Path(__file__).parents[2] / "results" / "paper.json").read_text())
TOKENS, LENGTHS = 8192, [2**i for i in range(6, 13)]
OVER_LENGTHS = ("rfa", "macformer_exp")  # the other kernels take as long
MEASURED = 0.8  # share of the free memory in which a peak is measured: holes and torch itself take some
SPREAD = 3  # resident bytes to live ones, at most, as kept memory is split up (docs/log.md)
Batch = tuple[Tensor, Tensor]


class Identity(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return v


compose = cache(configs.compose)  # takes longer than some steps


def model(name: str, spec: TaskSpec) -> nn.Module:
    torch.manual_seed(0)
    given = {"attention": Identity} if name in TRUNKS else {}
    return configs.build(compose(f"model={TRUNKS.get(name, name)}"), "model", **asdict(spec), **given)


class Trained:
    """A model with its optimiser, in the precision that train.py takes on this device."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model.to(device).train(), device
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, eps=EPS, weight_decay=0, fused=True)
        self.precision = devices.choose_precision("auto", device)
        self.scaler = devices.scaler(device, self.precision)

    def forward_backward(self, ids: Tensor, labels: Tensor) -> None:
        with devices.autocast(self.device, self.precision):
            loss = F.cross_entropy(self.model(ids), labels)
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
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        state = [*self.model.parameters(), *self.model.buffers(), *moments]
        return devices.peak_bytes(self.device, state, partial(self.forward_backward, ids, labels))

    def estimate_peak(self, ids: Tensor, labels: Tensor, examples: int) -> int:
        """Estimate the peak of so many examples from those of one and two: activations are linear in the batch."""
        one, two = (self.peak(ids[:count], labels[:count]) for count in (1, 2))
        return one + (examples - 1) * (two - one)


class Plan(NamedTuple):
    """How much of a batch one model takes in a step, so that the step needs at most `free` bytes."""

    peak_bytes: int  # of a pass over the longest batch
    examples: int
    longest: int
    free: float

    def part(self, n: int) -> int:
        """How many examples of length n: all, half, a quarter ... or none. What is large is the n x n weights."""
        part, need = self.examples, (n / self.longest) ** 2 * self.peak_bytes
        while need * part / self.examples > self.free:
            part //= 2
        return part


def peak(name: str, spec: TaskSpec, batch: Batch, device: torch.device) -> tuple[int, bool]:
    """Peak bytes of a pass over the batch, no other model alive; whether they are estimated, as it would not fit."""
    trained = Trained(model(name, spec), device)
    need, free = trained.estimate_peak(*batch, len(batch[0])), devices.free_bytes(device)
    too_much = free is not None and need > MEASURED * free
    return need if too_much else trained.peak(*batch), too_much


def plan_steps(
    setting: str, spec: TaskSpec, names: Iterable[str], batch: Batch, device: torch.device
) -> tuple[dict[str, Plan], list[str]]:
    """Plan the steps of the models that fit; a sentence for each that takes a part of the batch, or does not fit."""
    devices.keep_freed(False)
    examples, *_, n = batch[0].shape
    left = devices.free_bytes(device)
    plans, said, free = {}, [], math.inf if left is None else left / SPREAD
    for name in names:
        try:
            need, estimated = peak(name, spec, batch, device)
        except (RuntimeError, MemoryError) as error:
            if not devices.is_out_of_memory(error):
                raise
            said.append(f"{setting} is without {name}: {str(error).splitlines()[0]}.")
            continue
        plan = Plan(need, examples, n, free)
        if (part := plan.part(n)) < examples:
            or_more = " or more, by the length," * setting.endswith("real")
            outcome = f"it is timed on {part}{or_more} of them and scaled" if part else "not even one fits"
            needs = mebibytes(need) + " (estimated from batches of 1 and 2)" * estimated
            only = f"and only {mebibytes(int(free))} are free: {outcome}."
            said.append(f"{setting}: a step of {name} on {examples} examples needs {needs}, {only}")
        if part:
            plans[name] = plan
    devices.keep_freed(True)
    return plans, said


def race_steps(
    setting: str, spec: TaskSpec, names: Iterable[str], batches: Iterator[Batch], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Seconds and FLOP of each model and the matmul rate in each round; peak bytes on the first batch, the longest."""
    longest = ids, labels = next(batches)
    plans, said = plan_steps(setting, spec, names, longest, device)
    trained = {name: Trained(model(name, spec), device) for name in plans}
    shapes = []  # of each round, the warm-up first

    def arms(number: int) -> dict[str, Callable[[], object]]:
        ids, labels = next(batches)
        shapes.append([len(ids), ids.shape[-1]])
        parts = {name: plan.part(ids.shape[-1]) for name, plan in plans.items()}
        return {name: partial(trained[name].step, ids[:part], labels[:part]) for name, part in parts.items()}

    seconds, rates = bench.race_beside_matmul(arms, rounds, device, label=setting)
    del shapes[0]
    lengths, measured = [n for _, n in shapes], {}
    for name, plan in plans.items():
        passes = {n: partial(trained[name].forward_backward, ids[:1, ..., :n], labels[:1]) for n in lengths}
        flop = {n: bench.count_flop(passes[n]) for n in passes}
        parts = [plan.part(n) for n in lengths]
        measured[name] = {
            "seconds": [s * plan.examples / part for s, part in zip(seconds[name], parts, strict=True)],
            "examples": parts,
            "flop": [size * flop[n] for size, n in shapes],
            "peak_bytes": plan.peak_bytes,
        }
    return {"shapes": shapes, "matmul_rate": rates, "arms": measured, "left_out": said}


def real(task: Task, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """The longest batch, for memory; then batches as the trainer makes them with pad=trim, bucket=true."""
    order, train = task.order(batch_size, seed=0, bucket=True), task.splits["train"]
    longest = np.resize(np.argsort(-train.lengths, kind="stable"), batch_size)
    chosen = itertools.chain([longest], (order.indices(step) for step in itertools.count()))
    return cast(Iterator[Batch], devices.feed(device, (train.batch(indices, trim=True) for indices in chosen)))


def full(spec: TaskSpec, batch_size: int, n: int, device: torch.device) -> Iterator[Batch]:
    """Random ids, nothing padded."""
    rng, shape = np.random.default_rng(0), (batch_size, 2, n) if spec.paired else (batch_size, n)
    while True:
        ids = rng.integers(1, spec.vocabulary, shape, np.int32)
        labels = rng.integers(0, spec.classes, batch_size)
        yield torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)


def batches_of(
    setting: str, imdb: str | None, folder: str, device: torch.device
) -> tuple[TaskSpec, dict[str, Any], Iterator[Batch]]:
    """A task, its sizes those of its YAML, as TASK-real or TASK-full has it."""
    name, _, kind = setting.partition("-")
    config = configs.compose(f"task={name}")
    size, spec, trim = config.task.batch_size, TASKS[name].spec(config.task.data.length), kind == "real"
    shape = {"task": name, "padding": "trim" if trim else "full", "bucket": trim, "batch_size": size}
    if not trim:
        return spec, shape, full(spec, size, spec.length, device)
    config.task.data.examples = EXAMPLES
    task = configs.build(config, "task.data", folder=folder, origin=imdb if name == "text" else None)
    return spec, shape, real(task, size, device)


def crossing(lengths: Sequence[int], ratios: Sequence[float]) -> float:
    """From which length on the ratios are below 1, interpolated in log n: 0 if all are, inf if the last is not."""
    if ratios[-1] >= 1:
        return math.inf
    for i in reversed(range(len(lengths) - 1)):
        if ratios[i] >= 1:
            share = (ratios[i] - 1) / (ratios[i] - ratios[i + 1])
            return lengths[i] * (lengths[i + 1] / lengths[i]) ** share
    return 0.0


def break_even(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From which length on each model is faster than the Transformers: by the medians, and by each round alone."""
    found = []
    names = dict.fromkeys(name for result in results for name in result["arms"] if name not in BASELINES)
    for name, to in itertools.product(reversed(names), ("transformer_sdpa", "transformer")):
        measured = [(each["n"], ratios) for each in results if (ratios := bench.ratios(each["arms"], name, to))]
        if not measured:
            continue
        lengths, by_length = zip(*measured, strict=True)
        n = crossing(lengths, [median(ratios) for ratios in by_length])
        rounds = [crossing(lengths, ratios) for ratios in zip(*by_length, strict=True)]
        numbers = {"n": n, "low": min(rounds), "high": max(rounds)}
        where = {0.0: "at every length measured", math.inf: "at no length measured"}.get(n, f"from n = {n:,.0f} on")
        ends = {0.0: f"below {lengths[0]:,}", math.inf: f"above {lengths[-1]:,}"}
        spread = " to ".join(ends.get(x, f"{x:,.0f}") for x in (min(rounds), max(rounds)))
        known = {key: x if 0 < x < math.inf else None for key, x in numbers.items()}
        says = f"{name} is faster than {to} {where} (single rounds: {spread})."
        found.append({"model": name, "baseline": to, **known, "says": says})
    return found


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    parts = [f"{line}\n" for line in report["left_out"]]
    for result in report["results"]:
        lengths, rates, arms, rows = [n for _, n in result["shapes"]], result["matmul_rate"], result["arms"], []
        details = (
            f"batches of {result['batch_size']}, padded to {min(lengths):,}-{max(lengths):,}, "
            f"median {median(lengths):,.0f}; matmul rate {median(rates) / 1e9:.0f} GFLOP/s; rounds: {len(lengths)}"
        )
        for name, arm in arms.items():
            share = median(f / s / rate for f, s, rate in zip(arm["flop"], arm["seconds"], rates, strict=True))
            memory = f"{arm['peak_bytes'] / arms[BASELINES[0]]['peak_bytes']:.3g}" if BASELINES[0] in arms else "-"
            row = {"model": name, "ms (range)": bench.milliseconds(arms, name, ".0f")}
            row |= {f"time / {to} (range)": bench.with_range(bench.ratios(arms, name, to)) for to in BASELINES}
            row |= {"peak MiB": f"{arm['peak_bytes'] / 2**20:,.0f}", "memory / transformer": memory}
            rows.append(row | {"of matmul rate": f"{share:.0%}"})
        parts.append(bench.section(result["setting"], details, rows))
    if results := report["lengths"]["results"]:
        break_evens, rows = report["lengths"]["break_even"], []
        names = dict.fromkeys(name for result in results for name in result["arms"])
        for n, arms in ((result["n"], result["arms"]) for result in results):
            row = {"n": f"{n:,}"} | {name: bench.milliseconds(arms, name, ".0f") for name in names}
            for model, to in ((found["model"], found["baseline"]) for found in break_evens):
                row[f"{model} / {to}"] = bench.with_range(bench.ratios(arms, model, to))
            rows.append(row)
        details = f"{report['lengths']['tokens']:,} tokens a batch, Text's encoder; ms and ratios of time, with ranges"
        parts.append(bench.section("lengths", details, rows, "--:"))
        parts.append("".join(f"- {found['says']}\n" for found in break_evens))
    return "\n".join(parts)


def measure(options: Namespace, device: torch.device) -> dict[str, Any]:
    for name in options.models or ():
        compose(f"model={name}")  # an unknown name is an error now, not when half of the work is done
    names = dict.fromkeys([*TRUNKS, *BASELINES, *(options.models or PAPER["accuracy"]["text"])])
    over_lengths = dict.fromkeys([BASELINES[0], BASELINES[2], *(options.models or OVER_LENGTHS)])
    absent = {} if options.imdb else {"text-real": "it needs --imdb (make bench IMDB=path)"}
    absent |= {setting: "--settings does not name it" for setting in SETTINGS if setting not in options.settings}
    left_out = [f"{setting} is left out: {why}." for setting, why in absent.items()]
    results, lengths = [], []
    devices.prepare(device, 1)
    with tempfile.TemporaryDirectory() as folder:
        for setting in (setting for setting in SETTINGS if setting not in absent):
            rounds = options.rounds or ROUNDS[setting.rpartition("-")[2]]
            if setting != "lengths":
                spec, shape, batches = batches_of(setting, options.imdb, folder, device)
                measured = race_steps(setting, spec, names, batches, rounds, device)
                left_out += measured.pop("left_out")
                results.append({"setting": setting, **shape, **measured})
                continue
            spec = text.spec(configs.compose("task=text").task.data.length)
            for n in LENGTHS:
                batches = full(spec, TOKENS // n, n, device)
                measured = race_steps(f"lengths, n = {n:,}", spec, over_lengths, batches, rounds, device)
                left_out += measured["left_out"]
                arms = {name: {"seconds": arm["seconds"]} for name, arm in measured["arms"].items()}
                lengths.append({"n": n, "arms": arms})
    provenance = bench.provenance(device, devices.choose_precision("auto", device))
    over_length = {"tokens": TOKENS, "results": lengths, "break_even": break_even(lengths)}
    return provenance | {"left_out": left_out, "results": results, "lengths": over_length}
