"""The paper's first toy experiment (Figure 3): error and time of RMFA_exp against softmax attention, as heat maps.

    python -m scripts.figure_rmfa              # quick: one example of 8 heads, 12 repeats; 5 to 6 minutes on one core
    python -m scripts.figure_rmfa --full       # the paper's: 16 examples, 100 repeats; about 11 hours on one core
    python -m scripts.figure_rmfa --lengths 64 256 --features 8 128 --repeats 2 --output /tmp/figure

How: one process, one thread, freed memory kept, forward passes alone. In every repeat and at every length there are new
data and new features. Explicit softmax, SDPA and RMFA with each D have a turn, in a random order: called once, or again
and again for 20 ms, and the mean of the calls counts. Pre-SBN is outside the clock: both attentions see its rows. A
ratio is taken within a repeat. On the CPU softmax takes its examples one by one. At the longest length the other
samplings of features race along. What was measured is kept after every repeat: the same command goes on from there
after a kill.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from macformer.bench.race import provenance
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness.progress import Screen, duration
from macformer.paper import random_data
from macformer.paper.random_data import Sample, Settings

try:
    from macformer.paper import maps
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not there; pip install 'macformer[figures]' (make setup does)")

ROOT = Path(__file__).parent.parent
STATE = ROOT / "outputs" / "figure_rmfa"  # what is measured so far
QUICK, FULL = (1, 12), (16, 100)  # examples, repeats


def measure(settings: Settings, device: torch.device, state: Path) -> list[list[Sample]]:
    """Repeat by repeat, from where `state` ends."""
    samples: list[list[Sample]] = json.loads(state.read_text()) if state.exists() else []
    screen, first, work = Screen(), len(samples), [_work(settings, n) for n in settings.lengths]
    if samples:
        screen.line(f"going on after repeat {first} of {settings.repeats} ({state.name})")
    begin = time.monotonic()

    def text(r: int, at: int) -> str:
        done = (r - first) * sum(work) + sum(work[:at])
        left = (settings.repeats - first) * sum(work) - done
        told = f", {duration((time.monotonic() - begin) / done * left)} left" if done else ""
        return f"repeat {r + 1} of {settings.repeats}, n = {settings.lengths[at]:,}{told}"

    try:
        for r in range(first, settings.repeats):
            fresh = []
            for at, n in enumerate(settings.lengths):
                screen.live(partial(text, r, at))
                fresh.append(random_data.measure(settings, r, n, device, warm_up=r == first))
            samples.append(fresh)
            files.write(state, json.dumps(samples))
    finally:
        screen.close()
    return samples


def _work(settings: Settings, n: int) -> float:
    """About how the time of a repeat is shared out to the lengths."""
    return n * (2 * n + sum(D for _, D in settings.maps(n)))


def text_of(report: dict[str, Any]) -> str:
    """JSON with a line for each cell."""
    parts = []
    for key, value in report.items():
        lines = json.dumps(value)
        if isinstance(value, list) and isinstance(value[0], dict):
            lines = "[\n" + ",\n".join(f" {json.dumps(each)}" for each in value) + "\n]"
        parts.append(f"{json.dumps(key)}: {lines}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the paper's 16 examples and 100 repeats: about 11 hours")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(random_data.LENGTHS), help="default: 200, 400 .. 4000"
    )
    parser.add_argument(
        "--features", type=int, nargs="+", default=list(random_data.FEATURES), help="default: 8, 16 .. 2048"
    )
    parser.add_argument("--repeats", type=int, help=f"default: {QUICK[1]}, with --full {FULL[1]}")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "figures")
    options = parser.parse_args(arguments)
    batch, repeats = FULL if options.full else QUICK
    command = ["python -m scripts.figure_rmfa"] + ["--full"] * options.full
    for name in ("lengths", "features", "repeats", "device"):
        if (given := getattr(options, name)) != parser.get_default(name):
            command += [f"--{name}", *map(str, given if isinstance(given, list) else [given])]
    try:
        repeats = repeats if options.repeats is None else options.repeats
        settings = Settings(batch, repeats, tuple(options.lengths), tuple(options.features))
        device = devices.choose(options.device)
        if options.output == parser.get_default("output") and any(
            getattr(options, name) != parser.get_default(name) for name in ("lengths", "features", "repeats")
        ):
            raise ValueError("other lengths, features or repeats need an --output: results/figures has the whole map")
        if options.output.exists() and not options.output.is_dir():
            raise ValueError(f"--output {options.output} is a file: give a folder")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    devices.prepare(device, 1)
    head = {
        **provenance(device),
        "settings": {
            "quick": not options.full,
            "batch": batch,
            "heads": random_data.HEADS,
            "head_dim": random_data.HEAD_DIM,
            "eps": random_data.EPS,
            "kernel": random_data.KERNEL,
            "repeats": repeats,
            "threads": 1,
            "command": " ".join(command),
        },
    }
    if complaint := random_data.wrong(settings, device):
        print(f"error: {complaint}", file=sys.stderr)
        return 1
    identity = json.dumps([asdict(settings), head], sort_keys=True)  # other code or another machine begins anew
    state = STATE / f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"
    try:
        samples = measure(settings, device, state)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on after the last whole repeat", file=sys.stderr)
        return 130
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        print(
            f"error: not enough memory for softmax at n = {max(settings.lengths):,}; use shorter --lengths",
            file=sys.stderr,
        )
        return 1
    report = head | random_data.report(settings, samples)
    contents = {
        "rmfa.json": text_of(report).encode(),
        "rmfa.csv": maps.csv(report).encode(),
        "rmfa.md": maps.markdown(report).encode(),
    }
    for figure in maps.draw(report):
        contents |= {f"{figure.name}.png": figure.png, f"{figure.name}.svg": figure.svg}
    for name, content in contents.items():
        files.write(options.output / name, content)
    state.unlink()
    print("\n".join(maps.findings(report)))
    print(f"written to {options.output}: {', '.join(contents)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
