"""The first 20 losses of each model on tiny ListOps, seed 0: what the golden files hold."""

from dataclasses import asdict
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from macformer import config as configs

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent
OVERRIDES = [
    "task.data.length=64",
    "task.data.max_length=60",
    "task.data.min_length=10",
    "task.data.examples={train:64,dev:8,test:8}",
    "task.learning_rate=1e-3",
    "trainer.warmup_steps=5",
    "trainer.steps=15",
    "trainer.batch_size=8",
    "trainer.evaluate_every=20",
]


def first_losses(model_name: str, data: str) -> list[float]:
    torch.set_num_threads(1)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("train", [f"model={model_name}", "task=listops", *OVERRIDES])
    task = configs.build(config, "task.data", folder=data)
    torch.manual_seed(config.seed)
    model = configs.build(config, "model", **asdict(task.spec))
    return configs.build(config, "trainer").fit(model, task, torch.device("cpu"), config.seed).losses


def read(model_name: str) -> tuple[str, list[float]]:
    """The torch version that the file was made with, and its losses."""
    version, *losses = (FOLDER / f"{model_name}.txt").read_text().split()
    return version, [float(loss) for loss in losses]


def write(model_name: str, losses: list[float]) -> None:
    lines = [torch.__version__.partition("+")[0], *(f"{loss:.7f}" for loss in losses)]
    (FOLDER / f"{model_name}.txt").write_text("\n".join(lines) + "\n")
