"""What makes a run the run that it is: its id hashes what was trained, not where code or files stand. No torch."""

import hashlib
import json
from typing import Any

NOT_DECISIVE = ("trainer.name", "trainer.telemetry", "trainer.checkpoint_every")


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots. A class goes by its bare name, wherever it stands."""
    if not isinstance(tree, dict):
        return {prefix: tree.rpartition(".")[2] if prefix.endswith("_target_") else tree}
    return {key: value for name in tree for key, value in flatten(tree[name], f"{prefix}.{name}".strip(".")).items()}


# A decisive key that is not in a configuration has this value. Frozen: if a YAML file gets a new default, the old one
# stays here. A new key comes in with the value that stands for how it was before, and so changes no id. An argument
# that a constructor has a default for is here with that default, or not at all.
DEFAULTS: dict[str, Any] = (
    {"device": "cpu", "threads": 1}
    | flatten({"_target_": "Classifier", "width": 64, "heads": 2, "head_dim": 32, "layers": 2}, "model")
    | flatten(
        {"feedforward": 128, "head_width": 128, "dropout": 0.1, "pooling": "padded", "direction": "both"}, "model"
    )
    | flatten({"_target_": "RMFAttention", "head_dim": 32, "features": 128, "kernel": "exp"}, "model.attention")
    | flatten(
        {"sampling": "paper", "p": 2.0, "redraw": None, "clamp": None, "implementation": "explicit"}, "model.attention"
    )
    | flatten({"_target_": "PreSBN", "eps": 1e-13, "statistics": "token"}, "model.pre_sbn")
    | flatten({"_target_": "PostSBN", "per_head": False, "power": True}, "model.post_sbn")
    | flatten({"_target_": "load", "length": 2048, "min_length": 500, "max_length": 2000, "seed": 0}, "task.data")
    | flatten({"brackets": False, "dev": "test"}, "task.data")
    | flatten({"train": 96000, "dev": 2000, "test": 2000}, "task.data.examples")
    | flatten({"_target_": "Trainer", "warmup_steps": 1000, "steps": 10000, "evaluate_every": 500}, "trainer")
    | flatten({"batch_size": 32, "learning_rate": 1e-4, "dev_examples": 2000, "cycle_momentum": True}, "trainer")
    | flatten({"pad": "full", "bucket": False, "accumulate": 1, "precision": "float32"}, "trainer")
    | flatten({"tf32": False, "compile": False}, "trainer")
)


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
