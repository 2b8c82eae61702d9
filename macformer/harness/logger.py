"""Curves, configuration and the record to Weights & Biases, besides the record on disk."""

import re
from pathlib import Path
from typing import Any, Literal

import wandb

Mode = Literal["auto", "online", "offline"]


class Wandb:
    """mode="auto" is online for whoever is logged in and offline for all others: no question, no network."""

    def __init__(self, project: str, mode: Mode, dir: str, settings: dict[str, Any], run_id: str, began: str):
        if mode == "auto":
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        Path(dir).mkdir(parents=True, exist_ok=True)
        self.run_id = run_id
        # A run that goes on after a kill goes on there, too; a repeat of a finished one is another.
        name = f"{run_id}.{re.sub('[^0-9]', '', began)}"
        try:
            self.run = wandb.init(project=project, mode=mode, dir=dir, config=settings, id=name, resume="allow")
        except wandb.Error as error:
            raise ValueError(f"mode={mode} does not work: {error}; use mode=offline") from error

    def log(self, point: dict[str, Any]) -> None:
        self.run.log(point, step=point["step"])

    def finish(self, record: Path) -> None:
        """The record as an artifact."""
        self.run.log_artifact(str(record), name=self.run_id, type="record")
        self.run.finish()
