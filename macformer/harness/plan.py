"""What a configuration stands for before anything is computed: its run's id, record and checkpoint.

train.py runs a cell, the announcement of a sweep counts them: both must find the same files.
"""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from macformer.harness import checkpoint as checkpoints
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import record as records
from macformer.harness.loop import Loop


class Cell:
    """A configuration that fits, with `auto` settled for this machine."""

    def __init__(self, config: DictConfig):
        configs.check_top(config)
        self.config = config
        self.device: torch.device = configs.checked("device", devices.choose, config.device)
        self.trainer: Loop = configs.build(config, "trainer")
        self.trainer.precision = devices.choose_precision(self.trainer.precision, self.device)
        # What ran, not what `auto` may mean elsewhere.
        self.resolved = configs.container(config) | {"device": self.device.type}
        self.resolved["trainer"]["precision"] = self.trainer.precision
        configs.check(config, "model")  # a typing error should not wait for the data

    def load(self) -> Any:
        """The task's data, packed first if need be."""
        paths = self.config.paths
        return configs.build(self.config, "task.data", folder=paths.data, origin=paths.get(self.config.task.name))

    def places(self, fingerprint: str) -> tuple[Path, checkpoints.Checkpoint]:
        """With data of that fingerprint: where the record goes, and the checkpoint."""
        run_id = records.run_id(self.resolved, fingerprint)
        folder = Path(self.config.paths.outputs) / run_id
        checkpoint = checkpoints.Checkpoint(folder, run_id, self.resolved, fingerprint)
        return records.path(self.config.paths.results, self.resolved, run_id), checkpoint
