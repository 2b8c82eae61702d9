"""python -m lra_data prepare listops|text|retrieval [key=value ...], with the same keys as train.py."""

import argparse
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from lra_data.base import SPLITS, DataError, Task


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lra_data",
        description="Prepare the data of a task.",
        epilog="Example: python -m lra_data prepare listops paths.data=data task.data.examples.train=1000",
    )
    parser.add_argument("command", choices=["prepare"])
    parser.add_argument("task", choices=["listops", "text", "retrieval"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    arguments = parser.parse_args()
    try:
        task = prepare(arguments.task, arguments.overrides)
    except ValidationError as error:
        first = error.errors()[0]
        sys.exit(f"error: task.data.{'.'.join(map(str, first['loc']))}={first['input']}: {first['msg']}")
    except (DataError, HydraException, OmegaConfBaseException, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    sizes = ", ".join(f"{split} {len(task.splits[split]):,}" for split in SPLITS)
    print(f"{arguments.task} is ready ({task.source}): {sizes}; fingerprint {task.fingerprint[:8]}")


def prepare(name: str, overrides: list[str]) -> Task:
    with initialize_config_dir(str(Path(__file__).parent.parent / "configs"), version_base="1.3"):
        config = compose("train", [f"task={name}", *overrides])
    return instantiate(config.task.data, _convert_="all")(folder=config.paths.data)


if __name__ == "__main__":
    main()
