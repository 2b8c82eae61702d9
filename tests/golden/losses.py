"""The first 20 losses of each model on tiny ListOps, and of translators on a small Multi30K made here; seed 0."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from macformer.attention import RMFAttention
from macformer.harness import config as configs
from macformer.paper import multi30k
from macformer.paper.translation import Settings, Training
from tests.conftest import captions, write_multi30k

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

WITH = {"pre_sbn": True, "post_sbn": True}
TRANSLATORS: dict[str, tuple[dict[str, bool], Any]] = {  # name of the golden file -> its ppSBN and its attention
    "seq2seq": ({}, None),
    "seq2seq_ppsbn": (WITH, None),
    "seq2seq_rmfa": (WITH, partial(RMFAttention, head_dim=16)),
}
DIRECTED = {  # name of the golden file -> what is said on the command line
    "macformer_exp_causal": ["model=macformer_exp", "model.direction=causal"],
    "rfa_backward": ["model=rfa", "model.direction=backward"],
}
SIZES = {"width": 32, "heads": 2, "head_dim": 16, "layers": 1, "feedforward": 32, "vocabulary": 400}
SCHEDULE = {"epochs": 1, "steps_per_epoch": 20, "warmup_steps": 5}


def first_losses(name: str, data: str) -> list[float]:
    torch.set_num_threads(1)
    if name in TRANSLATORS:
        return first_losses_of_translator(*TRANSLATORS[name], Path(data))
    config = configs.compose(*DIRECTED.get(name, [f"model={name}"]), "task=listops", *OVERRIDES)
    task = configs.build(config, "task.data", folder=data)
    torch.manual_seed(config.seed)
    model = configs.build(config, "model", **asdict(task.spec))
    return configs.build(config, "trainer").fit(model, task, torch.device("cpu"), config.seed).losses


def first_losses_of_translator(ppsbn: dict[str, bool], attention: Any, folder: Path) -> list[float]:
    pairs = captions()
    write_multi30k(folder, {"train": pairs[:200], "dev": pairs[200:210], "test": pairs[210:220]})
    settings = Settings(**ppsbn, **SIZES, **SCHEDULE)
    return Training(settings, multi30k.load(folder, settings.vocabulary), attention).train_epoch()


def read(model_name: str) -> tuple[str, list[float]]:
    """The torch version that the file was made with, and its losses."""
    version, *losses = (FOLDER / f"{model_name}.txt").read_text().split()
    return version, [float(loss) for loss in losses]


def write(model_name: str, losses: list[float]) -> None:
    lines = [torch.__version__.partition("+")[0], *(f"{loss:.7f}" for loss in losses)]
    (FOLDER / f"{model_name}.txt").write_text("\n".join(lines) + "\n")
