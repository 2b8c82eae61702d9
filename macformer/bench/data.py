"""Measure the data: random batches against Hugging Face datasets, and how long it takes to make and to pack them.

    python -m scripts.bench data --imdb data/aclImdb_v1.tar.gz     # a minute and 1 GB of disk

Random batches of 16 x 4096 ids, ready for the model, from our packed arrays and from `datasets` in numpy format, both
memory-mapped from disk and warm; datasets has its rows padded and as ids already, and need do no more than read. Making
and packing are the programs as people run them, each in a process of its own, with its peak of resident memory.
"""

import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lra_data import base
from macformer.bench import race as bench
from macformer.harness import device as devices

BATCH, LENGTH = 16, 4096
TEXTS, TEXT = 25_000, 4000  # how many, of how many bytes
ROUNDS, CALLS = 15, 100
Reader = Callable[[np.ndarray], np.ndarray]


def readers(folder: Path) -> dict[str, Reader]:
    """The same texts, packed and as a data set on disk."""
    import datasets  # takes seconds

    letters = np.random.default_rng(0).integers(0, 256, (TEXTS, TEXT), np.uint8)
    examples = [((row.tobytes(),), 0) for row in letters]
    few: dict[str, Any] = {"train": examples, "dev": examples[:1], "test": examples[:1]}
    spec = base.TaskSpec(base.BYTES, LENGTH, classes=2, paired=False)
    packed = base.cached(folder, "t", spec, {}, lambda: ("stand-in", few), base.as_text, None).splits["train"]

    rows = np.zeros((TEXTS, LENGTH), np.uint16)
    rows[:, :TEXT] = letters
    rows[:, :TEXT] += 1
    features = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16"), LENGTH)})
    datasets.Dataset.from_dict({"ids": list(rows)}, features).save_to_disk(folder / "datasets")
    hugging = datasets.load_from_disk(folder / "datasets")
    wide, narrow = hugging.with_format("numpy"), hugging.with_format("numpy", dtype=np.int32)
    return {
        "packed": lambda indices: packed.batch(indices, trim=False)[0],
        "datasets (numpy format)": lambda indices: wide[indices]["ids"],
        "datasets (numpy format, int32 as ours)": lambda indices: narrow[indices]["ids"],
    }


def batch_seconds(folder: Path, device: torch.device) -> dict[str, list[float]]:
    """Of each reader, one number a round."""
    arms = readers(folder)
    ours, *others = (read(np.arange(BATCH)) for read in arms.values())
    if not all(np.array_equal(ours, other) for other in others):
        sys.exit("error: they do not give the same ids: no figures")
    batches = np.random.default_rng(1).integers(0, TEXTS, (ROUNDS + 1, CALLS, BATCH))

    def read_all(read: Reader, number: int) -> None:
        for indices in batches[number]:
            read(indices)

    def calls(number: int) -> dict[str, Callable[[], None]]:
        return {name: partial(read_all, read, number) for name, read in arms.items()}

    taken = list(bench.race(calls, ROUNDS, device, label="reading batches"))
    return {name: [each[name] / CALLS for each in taken] for name in arms}


def prepare(*words: str) -> dict[str, float]:
    """`python -m lra_data prepare ...`: its seconds and its peak of resident memory, without workers; Linux alone."""
    print("preparing", *words, file=sys.stderr)
    begin, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "lra_data", "prepare", *words], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if found := re.search(r"VmHWM:\s+(\d+) kB", status):
            peak = int(found[1]) * 1024
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"error: prepare {' '.join(words)} failed")
    return {"seconds": time.perf_counter() - begin, "peak_bytes": peak}


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    environment, times = report["environment"], report["batch_seconds"]
    read, made = [], []
    for name, taken in times.items():
        slower = bench.with_range(bench.ratios(taken, times["packed"]), ".1f")
        read.append([name, bench.with_range([1e6 * seconds for seconds in taken], ".0f"), slower])
    for what, found in report["prepare"].items():
        made.append([what, f"{found['seconds']:.1f}", f"{found['peak_bytes'] / 2**20:,.0f}"])
    lines = [
        f"**The data on {environment['device_name']}, Python {environment['python']}** (`make bench-data`, commit "
        f"{str(report['code']['commit'])[:8]})",
        "",
        f"Random batches of {BATCH} x {LENGTH} from {TEXTS:,} texts of {TEXT:,} bytes, warm; {ROUNDS} rounds of "
        f"{CALLS} batches, interleaved; median (range).",
        "",
        *bench.markdown(["read by", "us a batch", "times ours, within a round"], read, "lrr"),
    ]
    header = ["made by `python -m lra_data prepare`", "seconds", "peak resident MiB (workers not counted)"]
    return "\n".join([*lines, *bench.markdown(header, made, "lrr")])


def measure(options: Namespace, device: torch.device) -> dict[str, Any]:
    devices.prepare(device, 1)  # the allocator as train.py has it, for both
    with tempfile.TemporaryDirectory() as folder:
        seconds, paths = batch_seconds(Path(folder), device), f"paths.data={folder}"
        made = {"ListOps, 100,000 generated": prepare("listops", paths)}
        if options.imdb:
            made["Text, the IMDb archive"] = prepare("text", paths, f"paths.text={Path(options.imdb).resolve()}")
    return bench.provenance(device) | {"batch_seconds": seconds, "prepare": made}
