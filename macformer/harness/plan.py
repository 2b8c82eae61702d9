"""What a configuration stands for before anything is computed: what runs, where, its id, how it differs from the paper.

A run and the announcement of a sweep both plan: they must find the same files.
"""

import re
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from macformer.harness import checkpoint as checkpoints
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import record as records
from macformer.harness.identity import flatten, run_id
from macformer.harness.trainer import Trainer

# Not in `differences`: device, threads and precision stand in the record's environment, the others change no result.
NO_DIFFERENCE = {"seed", "device", "threads", "paths", "logger", "force", "evaluate", "dry_run"}
NO_DIFFERENCE |= {"trainer.precision", "trainer.telemetry", "trainer.checkpoint_every"}


class RunPlan:
    """A configuration that fits, with `auto` settled for this machine."""

    def __init__(self, config: DictConfig):
        configs.fit(configs.container(config), configs.Top, "train.yaml")
        self.config = config
        try:
            self.device: torch.device = devices.choose(config.device)
        except ValueError as error:
            raise configs.ConfigError(str(error)) from None
        self.trainer: Trainer = configs.build(config, "trainer")
        self.trainer.precision = devices.choose_precision(self.trainer.precision, self.device)
        # What ran, not what `auto` may mean elsewhere.
        self.resolved = configs.container(config) | {"device": self.device.type}
        self.resolved["trainer"]["precision"] = self.trainer.precision
        configs.check(config, "model")  # a typing error should not wait for the data

    def task(self) -> Any:
        """The task's data, packed first if need be."""
        paths = self.config.paths
        return configs.build(self.config, "task.data", folder=paths.data, origin=paths.get(self.config.task.name))

    def model(self, task: Any) -> nn.Module:
        """Of this seed, for those data; the process is made ready for it."""
        devices.prepare(self.device, self.config.threads, self.trainer.tf32)
        torch.manual_seed(self.config.seed)
        return configs.build(self.config, "model", **asdict(task.spec))

    def record_and_checkpoint(self, fingerprint: str) -> tuple[Path, checkpoints.Checkpoint]:
        """With data of that fingerprint: where the record goes, and the checkpoint."""
        name = run_id(self.resolved, fingerprint)
        checkpoint = checkpoints.Checkpoint(Path(self.config.paths.outputs) / name, self.resolved, fingerprint)
        return records.path(self.config.paths.results, self.resolved, name), checkpoint


def differences(config: dict[str, Any], overrides: list[str]) -> records.Differences:
    """Key by key, from `python train.py model=M task=T` as the YAML files stand."""
    task = config["task"]["name"]
    actual, (paper, follows) = flatten(config), _paper(config["model"]["name"], task)
    own = [group for group in ("model", "task") if paper[f"{group}.name"] != config[group]["name"]]  # not of ours
    found: dict[str, list[str]] = {"model": [], "task": [], "shared": []}
    for key, value in sorted(actual.items()):
        group, _, name = key.partition(".")
        if name == "name" or group in own or NO_DIFFERENCE & {group, key}:
            continue
        # What follows another key is said there, and must be said if it does not, even if it is the paper's value.
        followed = follows.get(key, "")
        if value == actual.get(followed, paper.get(key, ...)):  # a whole node that was set to null is not in `paper`
            continue
        if group == "protocol" and key not in follows.values():
            continue  # of another task
        if group == "model":
            found["model"].append(f"{name}={value}")
            continue
        change = f"{task if group == 'task' else group} {name}".strip() + f" = {value}"
        if not followed.startswith("task."):  # else the paper's value depends on the task
            change += f" (paper: {paper.get(key)})"
        found["task" if group == "task" else "shared"].append(change)
    for word in overrides:
        if word.startswith("~"):  # a key that was taken out
            found["model" if word.startswith("~model") else "shared"].append(word)
        elif (group := word.lstrip("+").partition(".")[0]) in own:  # with nothing to compare it to
            found[group].append(word)
    # Without what does not decide the result. Where a source is on this machine is left open, and which of its GPUs.
    other: tuple[str, ...] = ("model", "task=", "seed=", "force=", "logger", "sweep=", "hydra", "experiment=table2")
    other += ("paths.data=", "paths.results=", "paths.outputs=")
    typed = [re.sub(r"^(paths\.\w+=).*", r"\1...", word) for word in overrides if not word.startswith(other)]
    command = [re.sub(r"^(device=cuda)\\?:\d+$", r"\1", word) for word in typed]  # a sweep puts \ before the colon
    return records.Differences(**found, command=command)


@cache
def _paper(model: str, task: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The paper's protocol, keys joined by dots, and the keys that take the value of another one."""
    # The default model or task stands in for one that is in no YAML file of ours.
    choices = {"model": model, "task": task}.items()
    known = [f"{group}={name}" for group, name in choices if (configs.CONFIGS / group / f"{name}.yaml").exists()]
    config = configs.compose(*known)
    raw = flatten(OmegaConf.to_container(config))
    follows = {key: value[2:-1] for key, value in raw.items() if str(value).startswith("${")}
    return flatten(configs.container(config)), follows
