"""What makes a run the run that it is: its id hashes what was trained, not where code or files stand. No torch."""

import hashlib
import json
from typing import Any

# A decisive key that is not in a configuration has this value. Frozen: if a YAML file gets a new default, the old one
# stays here. A new key comes in with the value that stands for how it was before, and so changes no id. An argument
# that a constructor has a default for is here with that default, or not at all.
DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "model._target_": "Classifier",
    "model.width": 64,
    "model.heads": 2,
    "model.head_dim": 32,
    "model.layers": 2,
    "model.feedforward": 128,
    "model.head_width": 128,
    "model.dropout": 0.1,
    "model.pooling": "padded",
    "model.attention._target_": "RMFAttention",
    "model.attention.head_dim": 32,
    "model.attention.features": 128,
    "model.attention.kernel": "exp",
    "model.attention.sampling": "paper",
    "model.attention.p": 2.0,
    "model.attention.redraw": None,
    "model.attention.implementation": "explicit",
    "model.pre_sbn._target_": "PreSBN",
    "model.pre_sbn.eps": 1e-13,
    "model.pre_sbn.statistics": "token",
    "model.post_sbn._target_": "PostSBN",
    "model.post_sbn.per_head": False,
    "task.data._target_": "load",
    "task.data.length": 2048,
    "task.data.min_length": 500,
    "task.data.max_length": 2000,
    "task.data.brackets": False,
    "task.data.dev": "test",
    "task.data.examples.train": 96000,
    "task.data.examples.dev": 2000,
    "task.data.examples.test": 2000,
    "task.data.seed": 0,
    "trainer._target_": "Trainer",
    "trainer.warmup_steps": 1000,
    "trainer.steps": 10000,
    "trainer.batch_size": 32,
    "trainer.learning_rate": 1e-4,
    "trainer.evaluate_every": 500,
    "trainer.dev_examples": 2000,
    "trainer.cycle_momentum": True,
    "trainer.pad": "full",
    "trainer.bucket": False,
    "trainer.accumulate": 1,
    "trainer.precision": "float32",
    "trainer.tf32": False,
    "trainer.compile": False,
}
NOT_DECISIVE = ("trainer.name", "trainer.telemetry", "trainer.checkpoint_every")


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots. A class goes by its bare name, wherever it stands."""
    if not isinstance(tree, dict):
        return {prefix: tree.rpartition(".")[2] if prefix.endswith("_target_") else tree}
    return {key: value for name in tree for key, value in flatten(tree[name], f"{prefix}.{name}".strip(".")).items()}


def identity_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that decide a run's result, joined by dots: names, seed, what the constructors get, all defaults."""
    tree = {key: config.get(key) for key in ("seed", "device", "threads", "model", "trainer")}
    tree["task"] = {key: config["task"].get(key) for key in ("name", "data")}
    flat = flatten(tree).items()
    return DEFAULTS | {key: value for key, value in flat if not key.endswith("_partial_") and key not in NOT_DECISIVE}


def run_id(config: dict[str, Any], fingerprint: str) -> str:
    """task.model.seed.hash8. The hash covers the data and every decisive key that is not at its default."""
    changed = {key: value for key, value in identity_config(config).items() if value != DEFAULTS.get(key, ...)}
    digest = hashlib.sha256(json.dumps([fingerprint, changed], sort_keys=True).encode()).hexdigest()
    return f"{config['task']['name']}.{config['model']['name']}.{config['seed']}.{digest[:8]}"
