"""The paper's first toy experiment (Figure 3): error and time of RMFA_exp against softmax attention, as heat maps.

    python -m scripts.figure_rmfa              # quick: one example of 8 heads, 12 repeats; 5 to 6 minutes on one core
    python -m scripts.figure_rmfa --full       # the paper's: 16 examples, 100 repeats; about 11 hours on one core
    python -m scripts.figure_rmfa --lengths 64 256 --features 8 128 --repeats 2 --output /tmp/figure

One process, one thread, forward passes alone. In every repeat and at every length there are new data and new features,
and explicit softmax, SDPA and RMFA with each D take turns in a random order, each called once or again and again for
20 ms. Pre-SBN is outside the clock. At the longest length the other samplings race along. After a kill the same command
goes on after the last whole repeat.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from macformer.bench.race import provenance
from macformer.harness import device as devices
from macformer.harness import files

try:
    from macformer.paper import figure3
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not there; pip install 'macformer[figures]' (make setup does)")

ROOT = Path(__file__).parent.parent
HOME = ROOT / "results" / "figures"
STATE = ROOT / "outputs" / "figure_rmfa"  # what is measured so far
QUICK, FULL = figure3.Settings(batch=1, repeats=12), figure3.Settings(batch=16, repeats=100)


def text_of(report: dict[str, Any]) -> str:
    """JSON with a line for each cell."""
    parts = {key: json.dumps(value) for key, value in report.items()}
    for key in ("cells", "softmax", "samplings"):
        parts[key] = "[\n" + ",\n".join(f" {json.dumps(row)}" for row in report[key]) + "\n]"
    return "{\n" + ",\n".join(f'"{key}": {part}' for key, part in parts.items()) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the paper's 16 examples and 100 repeats: about 11 hours")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 200, 400 .. 4000")
    parser.add_argument("--features", type=int, nargs="+", help="default: 8, 16 .. 2048")
    parser.add_argument("--repeats", type=int, help=f"default: {QUICK.repeats}, with --full {FULL.repeats}")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=HOME)
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    keys = ("lengths", "features", "repeats")
    changed = {key: value for key in keys if (value := getattr(options, key)) is not None}
    try:
        settings = replace(FULL if options.full else QUICK, **changed)
        device = devices.choose(options.device)
        if changed and options.output == HOME:
            raise ValueError("other lengths, features or repeats need an --output: results/figures has the whole map")
        if options.output.is_file():
            raise ValueError(f"--output {options.output} is a file: give a folder")
        devices.prepare(device, 1)
        figure3.check(settings, device)
    except ValueError as error:
        sys.exit(f"error: {error}")
    how = {"quick": not options.full, "batch": settings.batch} | figure3.FIXED
    how |= {"repeats": settings.repeats, "threads": 1, "command": " ".join(["python -m scripts.figure_rmfa", *words])}
    head = provenance(device) | {"settings": how}
    identity = hashlib.sha256(json.dumps(head).encode())  # another command, other code or another machine begins anew
    state = STATE / f"{identity.hexdigest()[:12]}.json"
    try:
        samples = figure3.measure_all(settings, device, state)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on after the last whole repeat", file=sys.stderr)
        sys.exit(130)
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        sys.exit(f"error: not enough memory for softmax at n = {settings.lengths[-1]:,}; use shorter --lengths")
    report = head | figure3.report(settings, samples)
    files.write(options.output / "rmfa.json", text_of(report))
    files.write(options.output / "rmfa.md", figure3.markdown(report))
    for drawn in figure3.draw(report):
        drawn.write(options.output)
    state.unlink()
    print("\n".join(figure3.findings(report)))
    print(f"written to {options.output}: rmfa.json, rmfa.md, rmfa-maps.{{png,svg}}, rmfa-samplings.{{png,svg}}")


if __name__ == "__main__":
    main()
