"""Measure the data: random batches against Hugging Face datasets, and how long it takes to make and to pack them.

    python scripts/bench_data.py                              # some minutes and 4 GB of disk
    python scripts/bench_data.py --imdb data/aclImdb_v1.tar.gz --pairs 2000 --output /tmp/bench

How: random batches of 16 x 4096 ids, ready for the model, from our packed arrays and from `datasets` in numpy format,
both memory-mapped from disk and warm; datasets has its rows padded and as ids already, and need do no more than read.
In every round each has its turn, in a new order, on the same batches; a ratio is taken within a round. Making and
packing are the programs as people run them, each in a process of its own, with its peak of resident memory.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch

from lra_data import base, listops, retrieval
from lra_data.base import Split, TaskSpec
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness.race import provenance, race, ratios

ROOT = Path(__file__).parent.parent
BATCH, LENGTH, TEXT = 16, 4096, 4000
TEXTS = 25_000
ROUNDS, CALLS = 15, 100
OFFICIAL = 5.2e-3  # seconds an expression: LRA's own generator on such a machine, as the project's notes have it
EXPRESSIONS = 5_000


def arms(folder: Path) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The same texts, packed and as a data set on disk."""
    letters = np.random.default_rng(0).integers(0, 256, (TEXTS, TEXT), np.uint8)
    examples = [((row.tobytes(),), 0) for row in letters]
    few: dict[str, Any] = {"train": examples, "dev": examples[:1], "test": examples[:1]}
    spec = TaskSpec(base.BYTES, LENGTH, classes=2, paired=False)
    packed: Split = base.cached(folder, "t", spec, {}, lambda: ("stand-in", few), base.as_text, None).splits["train"]

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


def batch_seconds(folder: Path) -> dict[str, list[float]]:
    """Of each reader, one number a round."""
    readers = arms(folder)
    ours, *others = (read(np.arange(BATCH)) for read in readers.values())
    if not all(np.array_equal(ours, other) for other in others):
        sys.exit("error: they do not give the same ids: no figures")
    batches = np.random.default_rng(1).integers(0, TEXTS, (ROUNDS + 1, CALLS, BATCH))

    def read_all(read: Callable[[np.ndarray], np.ndarray], number: int) -> None:
        for indices in batches[number]:
            read(indices)

    taken = list(
        race(
            lambda r: {name: partial(read_all, read, r) for name, read in readers.items()}, ROUNDS, torch.device("cpu")
        )
    )
    return {name: [each[name] / CALLS for each in taken] for name in readers}


def prepare(*words: str) -> dict[str, float]:
    """`python -m lra_data prepare ...`: its seconds and its peak of resident memory, without workers; Linux alone."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lra_data", "prepare", *words], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if found := re.search(r"VmHWM:\s+(\d+) kB", status):
            peak = int(found[1]) * 1024
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"error: prepare {' '.join(words)} failed")
    return {"seconds": time.perf_counter() - begin, "peak_bytes": peak}


def write_pairs(folder: Path, pairs: dict[str, int]) -> int:
    """Files like LRA's, of letters at random, 4,500 bytes a text; returns the bytes of the train file."""
    rng = np.random.default_rng(2)
    pool = rng.choice(np.frombuffer(b"etaoin shrdlu ", np.uint8), 2**24).tobytes()
    for split, file in retrieval.FILES.items():
        with open(folder / file, "wb", buffering=2**20) as stream:
            sizes = rng.integers(2000, 7000, (pairs[split], 2)).tolist()
            starts = rng.integers(0, len(pool) - 7000, (pairs[split], 2)).tolist()
            for number, (size, start) in enumerate(zip(sizes, starts, strict=True)):
                one, two = (pool[at : at + long] for at, long in zip(start, size, strict=True))
                stream.write(b"%d.0\tA%d\tB%d\t%b\t%b\n" % (number % 2, number, number, one, two))
    return (folder / retrieval.FILES["train"]).stat().st_size


def one_core() -> float:
    """Seconds to draw an expression of LRA's lengths and to write it as LRA's generator does, on one core."""
    begin = time.perf_counter()
    drawn = sum(1 for _ in itertools.islice(listops.generate(0), EXPRESSIONS))
    return (time.perf_counter() - begin) / drawn


def table(report: dict[str, Any]) -> str:
    environment = report["environment"]
    times = report["batch_seconds"]
    lines = [
        f"**The data on {environment['device_name']}, Python {environment['python']}** (`make bench-data`, commit "
        f"{str(report['code']['commit'])[:8]})",
        "",
        f"Random batches of {BATCH} x {LENGTH} from {TEXTS:,} texts of {TEXT:,} bytes, warm; {ROUNDS} rounds of "
        f"{CALLS} batches, interleaved; median (range).",
        "",
        "| read by | us a batch | times ours, within a round |",
        "| --- | --: | --: |",
    ]
    for name, taken in times.items():
        slower, least, most = ratios(taken, times["packed"])
        microseconds = f"{1e6 * median(taken):.0f} ({1e6 * min(taken):.0f}-{1e6 * max(taken):.0f})"
        lines.append(f"| {name} | {microseconds} | {slower:.1f} ({least:.1f}-{most:.1f}) |")
    lines += [
        "",
        "| made by `python -m lra_data prepare` | seconds | peak resident MiB (workers not counted) |",
        "| --- | --: | --: |",
    ]
    for what, told in report["prepare"].items():
        lines.append(f"| {what} | {told['seconds']:.1f} | {told['peak_bytes'] / 2**20:,.0f} |")
    own = report["listops_seconds_one_core"]
    lines += [
        "",
        f"One core draws and writes an expression of LRA's lengths in {1e3 * own:.2f} ms; LRA's own generator takes "
        f"{1e3 * OFFICIAL:.1f} ms on such a machine (not measured by this script): {OFFICIAL / own:.0f} times as long.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imdb", help="the IMDb archive, to time its packing")
    parser.add_argument("--pairs", type=int, default=retrieval.PAIRS["train"], help="of Retrieval's train file")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "bench")
    options = parser.parse_args()
    device = devices.choose("cpu")
    devices.prepare(device, 1)  # the allocator as train.py has it, for both
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = batch_seconds(folder)
        paths = f"paths.data={folder}"
        made = {"ListOps, 100,000 generated": prepare("listops", paths)}
        if options.imdb:
            made["Text, the IMDb archive"] = prepare("text", paths, f"paths.text={Path(options.imdb).resolve()}")
        size = write_pairs(folder, retrieval.PAIRS | {"train": options.pairs})
        made[f"Retrieval, a generated train file of {size / 1e9:.2f} GB"] = prepare("retrieval", paths)
        made["Retrieval once more: the check of its sha256"] = prepare("retrieval", paths)
    report = {
        **provenance(device),
        "batch_seconds": seconds,
        "prepare": made,
        "listops_seconds_one_core": one_core(),
    }
    files.write(options.output / "data.json", json.dumps(report, indent=1) + "\n")
    files.write(options.output / "data.md", table(report))
    print(table(report))
    print(f"written to {options.output}: data.json, data.md")


if __name__ == "__main__":
    main()
