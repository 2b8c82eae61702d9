"""Race training steps of whole models on each task: time, memory, and from which length on Macformer is faster.

    python -m scripts.bench models --imdb data/aclImdb_v1.tar.gz      # 40 minutes on one core
    python -m scripts.bench models --models mine,rfa --settings listops-full --rounds 1 --output /tmp/bench

The paper's models race (those of results/paper.json), or those of configs/model that --models names; beside them the
Transformer with explicit, checkpointed and fused (SDPA) attention, and our model with the identity for attention, with
and without ppSBN: all but attention. Freed memory is kept, as train.py has it. A step is forward, cross-entropy,
backward, clip by value, AdamW. Each round has another batch, of which a model takes all or a part (see below).

    TASK-full   the paper's protocol: every text padded to the task's length. Ids are random and nothing is padding,
                which costs the same as a padded batch and needs no data
    TASK-real   real texts, with batches as the trainer makes them with pad=trim and bucket=true
    lengths     as many tokens a batch at every length, with Text's encoder

Memory is the peak of forward and backward of one model on the longest batch, measured as the trainer does, or estimated
from one and two examples where the batch would not fit. On the CPU kept memory is split up, so that up to SPREAD times
what lives is resident: a step for which that is too much takes half of the batch, or a quarter and so on, and its time
is scaled to the whole. A model of which not even one example would fit is left out. The report says all of this.
"""

import itertools
import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from omegaconf import DictConfig
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
ROOM = 0.8  # share of the free memory in which a peak is measured: holes and torch itself take some
SPREAD = 3  # resident bytes to live ones, at most (docs/log.md)
Batch = tuple[Tensor, Tensor]
Raced = tuple[dict[str, Any], list[str]]  # the figures; a sentence for each model without them, or with a part of them


class Identity(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return v


@cache  # composing takes longer than some steps
def model_config(name: str) -> DictConfig:
    return configs.compose(f"model={TRUNKS.get(name, name)}")


def model(name: str, spec: TaskSpec) -> nn.Module:
    torch.manual_seed(0)
    given = {"attention": Identity} if name in TRUNKS else {}
    return configs.build(model_config(name), "model", **asdict(spec), **given)


class Trained:
    """A model with its optimiser, in the precision that train.py takes on this device."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model.to(device).train(), device
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, eps=EPS, weight_decay=0, fused=True)
        self.precision = devices.choose_precision("auto", device)
        self.scaler = devices.scaler(device, self.precision)

    def step(self, ids: Tensor, labels: Tensor) -> None:
        self.scaler.scale(self._loss(ids, labels)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def both_ways(self, ids: Tensor, labels: Tensor) -> None:
        self._loss(ids, labels).backward()
        self.optimizer.zero_grad()

    def peak(self, ids: Tensor, labels: Tensor) -> int:
        """Peak bytes of forward and backward, with parameters and the optimiser's state."""
        if not self.optimizer.state:
            self.step(ids[:1], labels[:1])
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        state = [*self.model.parameters(), *self.model.buffers(), *moments]
        return devices.peak_bytes(self.device, state, partial(self.both_ways, ids, labels))

    def estimate_peak(self, ids: Tensor, labels: Tensor, examples: int) -> int:
        """That of so many examples, from one and two of them: activations are linear in the batch."""
        one, two = (self.peak(ids[:count], labels[:count]) for count in (1, 2))
        return one + (examples - 1) * (two - one)

    def _loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        with devices.autocast(self.device, self.precision):
            return F.cross_entropy(self.model(ids), labels)


def peak(name: str, spec: TaskSpec, batch: Batch, device: torch.device) -> tuple[int, bool]:
    """Peak bytes of a pass over the batch, no other model alive; whether they are estimated, as it would not fit."""
    trained = Trained(model(name, spec), device)
    need, free = trained.estimate_peak(*batch, len(batch[0])), devices.free_bytes(device)
    too_much = free is not None and need > ROOM * free
    return need if too_much else trained.peak(*batch), too_much


def part_of(examples: int, need: float, room: float) -> int:
    """How many of the examples a step may take for `need`, that of all of them, to fit: all, half, a quarter ..."""
    part = examples
    while part > 1 and need * part / examples > room:
        part //= 2
    return part


def race_steps(
    setting: str, spec: TaskSpec, names: Sequence[str], batches: Iterator[Batch], rounds: int, device: torch.device
) -> Raced:
    """Seconds and FLOP of each model and the matmul rate in each round; peak bytes on the first batch, the longest."""
    longest = next(batches)
    examples, longest_n = len(longest[0]), longest[0].shape[-1]
    devices.keep_freed(False)
    free = devices.free_bytes(device)
    room = math.inf if free is None else free / SPREAD  # for a step, as its freed memory is kept
    peaks: dict[str, int] = {}
    said = []
    for name in names:
        try:
            need, estimated = peak(name, spec, longest, device)
            if need / examples > room:
                one = f"a step on one of {examples} examples would need {mebibytes(need // examples)}"
                raise MemoryError(f"{one}, and only {mebibytes(int(room))} are free for it")
        except (RuntimeError, MemoryError) as error:
            if not devices.is_out_of_memory(error):
                raise
            said.append(f"{setting} is without {name}: {str(error).splitlines()[0]}.")
            continue
        peaks[name] = need
        if need > room:
            how = " (estimated from batches of 1 and 2)" * estimated
            or_more = " or more, by the length" * setting.endswith("real")
            said.append(
                f"{setting}: a step of {name} on {examples} examples needs {mebibytes(need)}{how}, and only "
                f"{mebibytes(int(room))} are free for it: it took {part_of(examples, need, room)} of them{or_more}, "
                "and its time is scaled to all."
            )
    devices.keep_freed(True)
    trained = {name: Trained(model(name, spec), device) for name in peaks}
    multiply = bench.matmul(device)
    flop: dict[tuple[str, int], int] = {}  # of one example, by model and length
    shapes: list[list[int]] = []  # of each round, the warm-up first
    parts: list[dict[str, int]] = []

    def arms(number: int) -> dict[str, Callable[[], object]]:
        ids, labels = next(batches)
        n = ids.shape[-1]
        share = (n / longest_n) ** 2  # what is large is the n x n weights
        shapes.append([len(ids), n])
        parts.append({name: part_of(examples, share * need, room) for name, need in peaks.items()})
        for name in (name for name in peaks if (name, n) not in flop):
            flop[name, n] = bench.count_flop(partial(trained[name].both_ways, ids[:1], labels[:1]))
        steps = {name: partial(trained[name].step, ids[:part], labels[:part]) for name, part in parts[-1].items()}
        return {"matmul": multiply, **steps}

    taken = list(bench.race(arms, rounds, device, label=setting))
    measured = {}
    for name in peaks:
        part = [each[name] for each in parts[1:]]
        measured[name] = {
            "seconds": [each[name] * examples / count for each, count in zip(taken, part, strict=True)],
            "examples": part,
            "flop": [flop[name, n] * batch for batch, n in shapes[1:]],
            "peak_bytes": peaks[name],
        }
    return {"shapes": shapes[1:], "matmul_rate": bench.matmul_rate(taken), "arms": measured}, said


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


def race_lengths(names: Sequence[str], rounds: int, device: torch.device) -> Raced:
    """Seconds at every length, with as many tokens a batch, and the break-even lengths."""
    spec, results, left_out = text.spec(configs.compose("task=text").task.data.length), [], []
    for n in LENGTHS:
        batches = full(spec, TOKENS // n, n, device)
        result, said = race_steps(f"lengths, n = {n:,}", spec, names, batches, rounds, device)
        results.append({"n": n, "arms": {name: {"seconds": arm["seconds"]} for name, arm in result["arms"].items()}})
        left_out += said
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
    """From which length on each model is faster than the Transformers: by the medians, and by each round alone."""
    found = []
    models = dict.fromkeys(name for result in results for name in result["arms"] if name not in BASELINES)
    for name, to in itertools.product(reversed(models), ("transformer_sdpa", "transformer")):
        each = [(result["n"], slower(result, name, to)) for result in results if {name, to} <= result["arms"].keys()]
        if not each:
            continue
        rounds = [crossing([(n, ratios[i]) for n, ratios in each]) for i in range(len(each[0][1]))]
        n, low, high = crossing([(n, median(ratios)) for n, ratios in each]), min(rounds), max(rounds)
        where = {0.0: "at every length measured", math.inf: "at no length measured"}.get(n, f"from n = {n:,.0f} on")
        ends = {0.0: f"below {each[0][0]:,}", math.inf: f"above {each[-1][0]:,}"}
        spread = " to ".join(ends.get(x, f"{x:,.0f}") for x in (low, high))
        numbers = {key: x if 0 < x < math.inf else None for key, x in {"n": n, "low": low, "high": high}.items()}
        says = f"{name} is faster than {to} {where} (single rounds: {spread})."
        found.append({"model": name, "baseline": to, **numbers, "says": says})
    return found


def slower(result: dict[str, Any], name: str, to: str) -> list[float]:
    """Seconds of `name` over those of `to` in each round."""
    return bench.ratios(result["arms"][name]["seconds"], result["arms"][to]["seconds"])


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [f"{line}\n" for line in report["left_out"]]
    for result in report["results"]:
        lengths, rates, arms = [n for _, n in result["shapes"]], result["matmul_rate"], result["arms"]
        lines += [
            f"**{result['setting']}** (batches of {result['batch_size']}, padded to {min(lengths):,}-{max(lengths):,}, "
            f"median {median(lengths):,.0f}; matmul rate {median(rates) / 1e9:.0f} GFLOP/s; rounds: {len(lengths)})",
            "",
        ]
        rows = []
        for name, arm in arms.items():
            share = median(f / s / rate for f, s, rate in zip(arm["flop"], arm["seconds"], rates, strict=True))
            memory = f"{arm['peak_bytes'] / arms[BASELINES[0]]['peak_bytes']:.3g}" if BASELINES[0] in arms else "-"
            rows.append([name, milliseconds(result, name), *(times(result, name, to) for to in BASELINES)])
            rows[-1] += [f"{arm['peak_bytes'] / 2**20:,.0f}", memory, f"{share:.0%}"]
        header = ["model", "ms (range)", *(f"time / {to} (range)" for to in BASELINES)]
        lines += bench.markdown([*header, "peak MiB", "memory / transformer", "of matmul rate"], rows, "lrrrrrrr")
    if results := report["lengths"]["results"]:
        tokens, break_evens = report["lengths"]["tokens"], report["lengths"]["break_even"]
        names = list(dict.fromkeys(name for result in results for name in result["arms"]))
        pairs = [(found["model"], found["baseline"]) for found in break_evens]
        lines += [f"**lengths** ({tokens:,} tokens a batch, Text's encoder; ms and ratios of time, with ranges)", ""]
        rows = [
            [f"{result['n']:,}", *(milliseconds(result, name) for name in names), *(times(result, *p) for p in pairs)]
            for result in results
        ]
        header = ["n", *names, *(" / ".join(pair) for pair in pairs)]
        lines += [
            *bench.markdown(header, rows, "r" * len(header)),
            *(f"- {found['says']}" for found in break_evens),
            "",
        ]
    return "\n".join(lines)


def milliseconds(result: dict[str, Any], name: str) -> str:
    seconds = result["arms"][name]["seconds"] if name in result["arms"] else []
    return bench.with_range([1e3 * s for s in seconds], ".0f") if seconds else "-"


def times(result: dict[str, Any], name: str, to: str) -> str:
    """The ratio with its range; a dash where one of the two is not there."""
    return bench.with_range(slower(result, name, to)) if {name, to} <= result["arms"].keys() else "-"


def measure(options: Namespace, device: torch.device) -> dict[str, Any]:
    for name in options.models or ():
        model_config(name)  # an unknown name is an error now, not when half of the work is done
    names = list(dict.fromkeys([*TRUNKS, *BASELINES, *(options.models or PAPER["accuracy"]["text"])]))
    over_lengths = list(dict.fromkeys([BASELINES[0], BASELINES[2], *(options.models or OVER_LENGTHS)]))
    devices.prepare(device, 1)
    unnamed = (name for name in SETTINGS if name not in options.settings)
    left_out = [f"{name} is left out: --settings does not name it." for name in unnamed]
    results, lengths = [], {"tokens": TOKENS, "results": [], "break_even": []}
    with tempfile.TemporaryDirectory() as folder:
        for setting in (name for name in SETTINGS if name in options.settings):
            rounds = options.rounds or ROUNDS[setting.rpartition("-")[2]]
            if setting == "lengths":
                lengths, said = race_lengths(over_lengths, rounds, device)
            elif setting == "text-real" and not options.imdb:
                said = ["text-real is left out: it needs --imdb (make bench IMDB=path)."]
            else:
                spec, shape, batches = batches_of(setting, options.imdb, folder, device)
                result, said = race_steps(setting, spec, names, batches, rounds, device)
                results.append({"setting": setting, **shape, **result})
            left_out += said
    provenance = bench.provenance(device, devices.choose_precision("auto", device))
    return provenance | {"left_out": left_out, "results": results, "lengths": lengths}
