"""The data of the tasks: make them, examine them, look at them.

commands:
    prepare   pack the data of a task (train.py does it on first use, too)
    doctor    make what can be made, check it, measure what trivial baselines reach
    show      one example as the model sees it

key=value: as for train.py. Examples:
    python -m lra_data prepare listops
    python -m lra_data prepare text paths.text=hub
    python -m lra_data doctor listops text
    python -m lra_data show text --index 3 --split dev protocol=clean
"""

import json
import sys
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from inspect import signature
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from lra_data import baselines
from lra_data.base import DATA_VERSION, LENGTHS, SPLITS, DataError, Task, lock

CONFIGS = Path(__file__).parent.parent / "configs"


def main() -> None:
    parser = ArgumentParser("python -m lra_data", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "doctor", "show"))
    parser.add_argument("words", nargs="*", metavar="task | key=value", help="default: all tasks")
    parser.add_argument("--index", type=int, default=0, help="of the example to show, from 0")
    parser.add_argument("--split", choices=SPLITS, default="train", help="of the example to show")
    parser.add_argument("--config-dir", type=Path, default=CONFIGS, help="a folder with task/NAME.yaml of your own")
    options = parser.parse_intermixed_args()  # words may stand on either side of --index
    own = options.config_dir.absolute()
    known = sorted({file.stem for folder in (CONFIGS, own) for file in folder.glob("task/*.yaml")})
    tasks = [word for word in options.words if "=" not in word] or known
    overrides = [f"hydra.searchpath=[{own.as_uri()}]", *(word for word in options.words if "=" in word)]
    try:
        if unknown := set(tasks) - set(known):
            raise DataError(f"task={min(unknown)} is not known; choose of {', '.join(known)}")
        if options.command == "doctor":
            ready = [doctor(name, overrides) for name in tasks]
            sys.exit(0 if all(ready) else 1)
        for name in tasks:
            task = load(compose_task(name, overrides))
            if options.command == "show":
                show(name, task, options.split, options.index)
            else:
                sizes = ", ".join(f"{split} {len(task.splits[split]):,}" for split in SPLITS)
                print(f"{name} is ready ({task.source}): {sizes}; fingerprint {task.fingerprint[:8]}; in {task.home}")
    except (DataError, HydraException, OmegaConfBaseException, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        print("interrupted: nothing half-made was left behind", file=sys.stderr)
        sys.exit(130)


def compose_task(name: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [f"task={name}", *overrides])


def load(config: DictConfig) -> Task:
    """The data that `python train.py task=NAME ...` would use, made first if need be."""
    make = instantiate(config.task.data, _partial_=True, _convert_="all")
    places = {"folder": config.paths.data, "origin": config.paths.get(config.task.name)}
    try:
        return make(**{key: places[key] for key in places if key in signature(make.func).parameters})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        where = {"folder": "paths.data", "origin": f"paths.{config.task.name}"}.get(key, f"task.data.{key}")
        value = "" if first["type"] == "missing_argument" else f"={first['input']}"
        raise DataError(f"{where}{value}: {first['msg']}") from None


def show(name: str, task: Task, split: str, index: int) -> None:
    data = task.splits[split]
    if not 0 <= index < len(data):
        raise DataError(f"--index {index}: the {split} split of {name} has the examples 0 to {len(data) - 1}")
    label, last = data.labels[index], task.spec.classes - 1
    print(f"{name}, {split}, example {index} of {len(data):,} ({task.source}): label {label} of 0 to {last}")
    for text in data.texts(index):
        print(f"\n{len(text):,} ids, then {task.spec.length - len(text):,} of 0, which is padding:")
        print(textwrap.fill(" ".join(str(token + 1) for token in text.tolist()), 110))
        print(f"\ntext:\n{task.decode(text)}")


def doctor(name: str, overrides: list[str]) -> bool:
    """Reports on the task under each protocol and keeps what the baselines reach; False if it is not ready."""
    seen: set[str] = set()
    for protocol in ("protocol=paper", "protocol=clean"):  # if you give one, it outdoes both
        words = [protocol, *overrides]
        config = compose_task(name, words)
        try:
            task = load(config)
        except (DataError, OSError) as error:
            print(f"{name}, protocol={config.protocol.name}: NOT READY. {error}\n")
            return False
        if task.fingerprint not in seen:  # some protocols do not change a task
            usual = compose_task(name, [word for word in words if word.startswith(("protocol=", "hydra."))])
            _examine(config, task, whole=config.task.data == usual.task.data)
        seen.add(task.fingerprint)
    return True


def _examine(config: DictConfig, task: Task, whole: bool) -> None:
    """`whole`: the data are as the YAML files have them, not shortened."""
    name, protocol, file = config.task.name, config.protocol.name, Path(config.paths.results) / "floors.json"
    made = f"Source: {task.source}, made from {task.manifest.origin}; fingerprint {task.fingerprint[:8]}"
    print(f"{name}, protocol={protocol}: ready. {made}")
    print(f"  {task.home} (data version {DATA_VERSION}); the sha256 of every split is that of its manifest")
    print(f"  {'split':6}{'examples':>10}   tokens:{''.join(f'{title:>8}' for title in LENGTHS)}   labels in %")
    for split in SPLITS:
        packed = task.manifest.splits[split]
        lengths = "".join(f"{packed.lengths[title]:>8,.0f}" for title in LENGTHS)
        labels = " ".join(f"{100 * count / packed.examples:.1f}" for count in packed.labels)
        print(f"  {split:6}{packed.examples:>10,}          {lengths}   {labels}")
    entry = {"data_version": DATA_VERSION, "task": name, "protocol": protocol, "whole": whole, "source": task.source}
    entry |= {"fingerprint": task.fingerprint, "train_examples": len(task.splits["train"])}
    for part, accuracies in baselines.measure(name, task).items():
        count, best = len(task.splits[part]), max(accuracies.values())
        entry |= {f"{part}_examples": count, f"{part}_accuracy": accuracies}
        deviation = 100 * (best * (1 - best) / count) ** 0.5
        scores = ", ".join(f"{title} {accuracy:.2%}" for title, accuracy in accuracies.items())
        print(f"  baselines on {part} ({count:,} examples, standard error {deviation:.1f}): {scores}")
    keep(file, entry)
    print(f"  written to {file}\n")


def keep(file: Path, entry: dict[str, Any]) -> None:
    """Put the entry into the file; those of other data stay, unless another data version made them."""
    with lock(file):
        try:
            known: list[dict[str, Any]] = json.loads(file.read_text())["floors"] if file.exists() else []
            same = [old for old in known if old["fingerprint"] == entry["fingerprint"]]
            entry["whole"] |= any(old.get("whole", False) for old in same)  # the setting cut nothing off
            kept = [old for old in known if old not in same and old["data_version"] == DATA_VERSION]
            kept = sorted([*kept, entry], key=lambda old: (old["task"], old["protocol"], old["fingerprint"]))
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{file} is damaged: delete it, and it will be made anew") from None
        temporary = file.with_name(f".{file.name}.tmp")
        temporary.write_text(json.dumps({"floors": kept}, indent=2) + "\n")
        temporary.replace(file)


if __name__ == "__main__":
    main()
