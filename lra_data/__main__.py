"""python -m lra_data prepare | doctor | show: make the data of a task, examine it, look at an example."""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from lra_data import floors
from lra_data.base import DATA_VERSION, SPLITS, DataError, Task, alone, replacing

CONFIGS = Path(__file__).parent.parent / "configs"
TASKS = sorted(file.stem for file in (CONFIGS / "task").glob("*.yaml"))
PROTOCOLS = sorted((file.stem for file in (CONFIGS / "protocol").glob("*.yaml")), reverse=True)  # paper first
EPILOG = """\
key=value: as for train.py. Examples:
  python -m lra_data prepare listops
  python -m lra_data prepare text paths.text=hub
  python -m lra_data doctor listops text
  python -m lra_data show text --index 3 --split dev protocol=clean
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lra_data",
        description="The data of the tasks: make them, examine them, look at them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="prepare | doctor | show")
    preparing = commands.add_parser("prepare", help="pack the data of a task (train.py does it on first use, too)")
    examining = commands.add_parser("doctor", help="make what can be made, check it, measure its floors")
    showing = commands.add_parser("show", help="one example as the model sees it")
    for command in (preparing, showing):
        command.add_argument("task", choices=TASKS)
    showing.add_argument("--index", type=int, default=0, help="its place in the split, from 0")
    showing.add_argument("--split", choices=SPLITS, default="train")
    examining.add_argument("words", nargs="*", metavar="task | key=value", help=f"default: {' '.join(TASKS)}")
    for command in (preparing, showing):
        command.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    # Overrides may stand on either side of --index and --split.
    arguments, rest = parser.parse_known_args()
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    try:
        if arguments.command == "prepare":
            prepare(arguments.task, arguments.overrides + rest)
        elif arguments.command == "show":
            show(arguments.task, arguments.split, arguments.index, arguments.overrides + rest)
        else:
            doctor(arguments.words + rest)
    except (DataError, HydraException, OmegaConfBaseException, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        print("interrupted: nothing half-made was left behind", file=sys.stderr)
        sys.exit(130)


def composed(name: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [f"task={name}", *overrides])


def load(name: str, overrides: list[str]) -> tuple[DictConfig, Task]:
    """The data that `python train.py task=NAME ...` would use, made first if need be."""
    config = composed(name, overrides)
    try:
        make = instantiate(config.task.data, _convert_="all")
        return config, make(folder=config.paths.data, origin=config.paths.get(name))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        where = {"folder": "paths.data", "origin": f"paths.{name}"}.get(key, f"task.data.{key}")
        value = "" if first["type"] == "missing_argument" else f"={first['input']}"
        raise DataError(f"{where}{value}: {first['msg']}") from None


def prepare(name: str, overrides: list[str]) -> None:
    _, task = load(name, overrides)
    sizes = ", ".join(f"{split} {len(task.splits[split]):,}" for split in SPLITS)
    print(f"{name} is ready ({task.source}): {sizes}; fingerprint {task.fingerprint[:8]}; in {task.home}")


def show(name: str, split: str, index: int, overrides: list[str]) -> None:
    _, task = load(name, overrides)
    data = task.splits[split]
    if not 0 <= index < len(data):
        raise DataError(f"--index {index}: the {split} split of {name} has the examples 0 to {len(data) - 1}")
    ids, labels = data.batch(np.array([index]), trim=False)
    classes = task.spec.classes
    print(f"{name}, {split}, example {index} of {len(data):,} ({task.source}): label {labels[0]} of 0 to {classes - 1}")
    for side, text in zip(ids.reshape(-1, task.spec.length), data.texts(index), strict=True):
        print(f"\n{len(text):,} ids, then {task.spec.length - len(text):,} of 0, which is padding:")
        print(textwrap.fill(" ".join(map(str, side[: len(text)])), 110))
        print(f"\ntext:\n{task.decode(text)}")


def doctor(words: list[str]) -> None:
    """Reports on each task under each protocol; exits with 1 unless all that was asked for is ready."""
    overrides = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if unknown := [name for name in names if name not in TASKS]:
        raise DataError(f"task={unknown[0]} is not known; choose of {', '.join(TASKS)}")
    protocols = [[f"protocol={protocol}"] for protocol in PROTOCOLS]
    if any(word.startswith("protocol=") for word in overrides):
        protocols = [[]]
    ready = True
    for name in names or TASKS:
        seen: set[str] = set()
        for protocol in protocols:
            try:
                config, task = load(name, protocol + overrides)
            except (DataError, OSError) as error:
                print(f"{name}{''.join(f', {word}' for word in protocol)}: NOT READY. {error}\n")
                ready = False
                break
            if task.fingerprint not in seen:  # some protocols do not change a task
                seen.add(task.fingerprint)
                print(_report(name, config.protocol.name, task))
                measured = floors.measure(name, task)
                for split in measured:
                    print(_floors(task, split, measured[split]))
                file = Path(config.paths.results) / "floors.json"
                usual = composed(name, [f"protocol={config.protocol.name}"])
                whole = config.task.data == usual.task.data
                with alone(file):
                    _keep(file, name, config.protocol.name, whole, task, measured)
                print(f"  written to {file}\n")
    sys.exit(0 if ready else 1)


def _report(name: str, protocol: str, task: Task) -> str:
    lines = [
        f"{name}, protocol={protocol}: ready. Source: {task.source}, made from {task.manifest.origin}; fingerprint "
        f"{task.fingerprint[:8]}",
        f"  {task.home} (data version {DATA_VERSION}); the sha256 of every split is that of its manifest",
        f"  {'split':6}{'examples':>10}   tokens: min    10%  median    90%    max    mean   labels in %",
    ]
    for split in SPLITS:
        told = task.manifest.splits[split]
        long = told.lengths
        numbers = f"{long.min:>11,}{long.p10:>7,}{long.median:>8,}{long.p90:>7,}{long.max:>7,}{long.mean:>8,.0f}"
        labels = " ".join(f"{100 * count / told.examples:.1f}" for count in told.labels)
        lines.append(f"  {split:6}{told.examples:>10,}   {numbers}   {labels}")
    return "\n".join(lines)


def _floors(task: Task, split: str, measured: dict[str, float]) -> str:
    best = max(measured.values())
    count = len(task.splits[split])
    error = 100 * (best * (1 - best) / count) ** 0.5
    scores = ", ".join(f"{title} {accuracy:.2%}" for title, accuracy in measured.items())
    return f"  floors on {split} ({count:,} examples, standard error {error:.1f}): {scores}"


def _keep(file: Path, name: str, protocol: str, whole: bool, task: Task, measured: dict[str, dict[str, float]]) -> None:
    """Put the floors into the file; those of other data stay, unless another data version made them.

    `whole`: the data are as the YAML of the task and the protocol have them, not shortened.
    """
    entry: dict[str, Any] = {
        "data_version": DATA_VERSION,
        "task": name,
        "protocol": protocol,
        "whole": whole,
        "source": task.source,
        "fingerprint": task.fingerprint,
        "train_examples": len(task.splits["train"]),
    }
    for split, accuracy in measured.items():
        entry |= {f"{split}_examples": len(task.splits[split]), f"{split}_accuracy": accuracy}
    try:
        known: list[dict[str, Any]] = json.loads(file.read_text())["floors"] if file.exists() else []
        same = [old for old in known if old["fingerprint"] == task.fingerprint]
        entry["whole"] |= any(old.get("whole", False) for old in same)  # the setting cut nothing off
        kept = [old for old in known if old["fingerprint"] != task.fingerprint and old["data_version"] == DATA_VERSION]
        ordered = sorted([*kept, entry], key=lambda floor: (floor["task"], floor["protocol"], floor["fingerprint"]))
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{file} is damaged: delete it, and it will be made anew") from None
    with replacing(file) as temporary:
        temporary.write_text(json.dumps({"floors": ordered}, indent=2) + "\n")


if __name__ == "__main__":
    main()
