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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from macformer.bench.race import provenance
from macformer.harness import device as devices
from macformer.harness import files
from macformer.paper import random_data
from macformer.paper.random_data import FEATURES, FIXED, LENGTHS, Settings

try:
    from macformer.paper import maps
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not there; pip install 'macformer[figures]' (make setup does)")

ROOT = Path(__file__).parent.parent
STATE = ROOT / "outputs" / "figure_rmfa"  # what is measured so far
QUICK, FULL = (1, 12), (16, 100)  # examples, repeats


def text_of(report: dict[str, Any]) -> str:
    """JSON with a line for each cell."""
    parts = []
    for key, value in report.items():
        lines = json.dumps(value)
        if isinstance(value, list) and isinstance(value[0], dict):
            lines = "[\n" + ",\n".join(f" {json.dumps(each)}" for each in value) + "\n]"
        parts.append(f"{json.dumps(key)}: {lines}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the paper's 16 examples and 100 repeats: about 11 hours")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="default: 200, 400 .. 4000")
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES, help="default: 8, 16 .. 2048")
    parser.add_argument("--repeats", type=int, help=f"default: {QUICK[1]}, with --full {FULL[1]}")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "figures")
    options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    batch, repeats = FULL if options.full else QUICK
    repeats = given.get("repeats", repeats)
    try:
        settings = Settings(batch, repeats, tuple(options.lengths), tuple(options.features))
        device = devices.choose(options.device)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if "output" not in given and given.keys() & {"lengths", "features", "repeats"}:
        sys.exit("error: other lengths, features or repeats need an --output: results/figures has the whole map")
    if options.output.exists() and not options.output.is_dir():
        sys.exit(f"error: --output {options.output} is a file: give a folder")
    devices.prepare(device, 1)
    command = "python -m scripts.figure_rmfa" + " --full" * options.full
    for name in (name for name in given if name not in ("full", "output")):
        command += f" --{name} {' '.join(map(str, given[name])) if isinstance(given[name], list) else given[name]}"
    how = {"quick": not options.full, "batch": batch, **FIXED, "repeats": repeats, "threads": 1, "command": command}
    head = {**provenance(device), "settings": how}
    if complaint := random_data.wrong(settings, device):
        sys.exit(f"error: {complaint}")
    identity = json.dumps([asdict(settings), head], sort_keys=True)  # other code or another machine begins anew
    state = STATE / f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"
    try:
        samples = random_data.measure_all(settings, device, state)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on after the last whole repeat", file=sys.stderr)
        sys.exit(130)
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        sys.exit(f"error: not enough memory for softmax at n = {settings.lengths[-1]:,}; use shorter --lengths")
    report = head | random_data.report(settings, samples)
    contents: dict[str, str | bytes] = {"rmfa.json": text_of(report)}
    contents |= {"rmfa.csv": maps.csv(report), "rmfa.md": maps.markdown(report)}
    for drawn in maps.draw(report):
        contents |= {f"{drawn.name}.png": drawn.png, f"{drawn.name}.svg": drawn.svg}
    for name, content in contents.items():
        files.write(options.output / name, content)
    state.unlink()
    print("\n".join(maps.findings(report)))
    print(f"written to {options.output}: {', '.join(contents)}")


if __name__ == "__main__":
    main()
