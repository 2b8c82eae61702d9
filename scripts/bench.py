"""Interleaved benchmarks in one process. `python -m scripts.bench COMMAND --help` says how each is done."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lra_data.base import DataError
from macformer.bench import attention, launches, models, race
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness.config import ConfigError

COMMANDS = {"models": models, "attention": attention, "core": attention, "causal": attention, "launches": launches}
RESULTS = Path(__file__).parent.parent / "results" / "bench"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} should be a whole number, 1 or more")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, module in COMMANDS.items():
        form, said = argparse.RawDescriptionHelpFormatter, f"{module.__doc__}\n{race.__doc__ * (name != 'launches')}"
        command = commands.add_parser(name, description=said, formatter_class=form)
        command.add_argument("--output", type=Path, default=RESULTS, help="folder; default: results/bench")
        if name == "launches":
            command.set_defaults(device="cpu")
            continue
        command.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
        command.add_argument("--rounds", type=positive, default=attention.ROUNDS.get(name))
        if name == "models":
            command.add_argument("--imdb", help="aclImdb_v1.tar.gz, for Text")
            command.add_argument("--models", type=lambda names: names.split(","), help="of configs/model: mine,rfa")
            command.add_argument("--settings", nargs="+", choices=models.ROUNDS, default=list(models.ROUNDS))
        else:
            command.add_argument("--lengths", type=positive, nargs="+", default=attention.LENGTHS[name])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    name, module = options.command, COMMANDS[options.command]
    if name == "attention" and not importlib.util.find_spec("matplotlib"):
        sys.exit("error: matplotlib is not there; pip install 'macformer[figures]' (make setup does)")
    try:
        report = module.measure(options, devices.choose(options.device))
    except (ConfigError, DataError, ValueError) as error:
        sys.exit(f"error: {error}")
    table = module.table(report)
    files.write(options.output / f"{name}.json", json.dumps(report, indent=1) + "\n")
    files.write(options.output / f"{name}.md", table)
    if name == "attention":
        files.write(options.output / "attention.png", attention.plot(report))
    print(f"{table}\nwritten to {options.output}: {name}.json, {name}.md{', attention.png' * (name == 'attention')}")
    return 1 if report.get("no_figure") else 0


if __name__ == "__main__":
    sys.exit(main())
