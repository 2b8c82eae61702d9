"""Records that nobody ran, for tests of what reads records."""

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np

from macformer.harness import config as configs
from macformer.harness import record as records
from macformer.harness.identity import run_id
from macformer.harness.plan import differences


@cache
def _config(*overrides: str) -> dict[str, Any]:
    return configs.container(configs.compose(*overrides))


def make(words: str, accuracy: float = 0.37, **known: Any) -> records.Record:
    """make("rfa seed=1 trainer=cpu", 0.4) -> the record that such a run could leave; the first word is its model."""
    overrides = f"model={words}".split()
    return made_up(deepcopy(_config(*overrides)), overrides, accuracy=accuracy, **known)


def changed(record: records.Record, part: str, **values: Any) -> records.Record:
    """A copy with other values in one part of it."""
    return record.model_copy(update={part: getattr(record, part).model_copy(update=values)})


def made_up(
    config: dict[str, Any],
    overrides: Sequence[str] = (),
    accuracy: float = 0.37,
    seconds: float = 10.0,
    peak: int = 1000,
    status: records.Status = "ok",
    concurrent: int = 0,
) -> records.Record:
    """The record that a run of this configuration could leave. Its names, seed and accuracy decide what is right."""
    names = {"task": config["task"]["name"], "model": config["model"]["name"], "seed": config["seed"]}
    entropy = int.from_bytes(hashlib.sha256(" ".join(map(str, [*names.values(), accuracy])).encode()).digest()[:8])
    right = np.random.default_rng(entropy).permutation(2000) < round(accuracy * 2000)
    dev = {"dev_accuracy": accuracy, "dev_step": 11_000, "dev_examples": 2000, "dev_subset": ""}
    test = {"test_accuracy": float(right.mean()), "test_examples": 2000, "correct": records.pack_bits(right)}
    machine = {"device": "cpu", "device_name": "Test CPU", "threads": 1, "precision": "float32"}
    examples = {"train": 96_000, "dev": 2000, "test": 2000}
    trainer, shares = config["trainer"], [step / 11_000 for step in range(500, 11_001, 500)]
    losses = [dict.fromkeys(("train_loss", "dev_loss"), 2.3 - accuracy * share) for share in shares]
    return records.Record(
        **names,
        differences=differences(config, list(overrides)),
        batch_size=trainer["batch_size"],
        padding=trainer["pad"],
        bucketing=trainer["bucket"],
        run_id=run_id(config, "f"),
        status=status,
        message="" if status == "ok" else "why it failed",
        steps_done=11_000,
        config=config,
        overrides=list(overrides),
        code=records.Code(commit=None, dirty=None),
        data=records.Data(fingerprint="f", source="generated", examples=examples, majority=0.17),
        environment=records.Environment(python="3.11", torch="2", **machine),
        sessions=[],
        concurrent=concurrent,
        parameters=1,
        quality=records.Quality(**dev, **test, last_dev_accuracy=accuracy, last_test_accuracy=accuracy),
        time=records.Time(**dict.fromkeys(records.Time.model_fields, 0.0) | {"train_seconds": seconds}),
        memory=records.Memory(peak_bytes=peak, method="counted"),
        history=[
            records.Point(
                **loss,
                step=round(11_000 * share),
                dev_accuracy=accuracy * share,
                learning_rate=1e-4,
                train_seconds=seconds * share,
            )
            for share, loss in zip(shares, losses, strict=True)
        ],
    )
