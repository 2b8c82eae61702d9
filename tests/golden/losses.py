"""The first 20 losses of each model on tiny ListOps, and of translators on a small Multi30K made here; seed 0."""

from dataclasses import asdict
from pathlib import Path

import torch

from macformer.harness import config as configs
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

TRANSLATORS = {  # name of the golden file -> what it is
    "seq2seq": ["ppsbn=without"],
    "seq2seq_ppsbn": ["ppsbn=with"],
    "seq2seq_rmfa": ["ppsbn=with", "attention=rmfa_exp"],
}
SMALL = [
    *("model.width=32", "model.heads=2", "model.head_dim=16", "model.layers=1", "model.feedforward=32"),
    *("task.data.vocabulary=400", "trainer.epochs=1", "trainer.steps_per_epoch=20", "trainer.warmup_steps=5"),
]


def first_losses(name: str, data: str) -> list[float]:
    torch.set_num_threads(1)
    if name in TRANSLATORS:
        config = configs.compose(*TRANSLATORS[name], *SMALL, root="translate")
        pairs = captions()
        write_multi30k(Path(data) / "multi30k", {"train": pairs[:200], "dev": pairs[200:210], "test": pairs[210:220]})
    else:
        config = configs.compose(f"model={name}", "task=listops", *OVERRIDES)
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
