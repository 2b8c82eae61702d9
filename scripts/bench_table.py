"""How long a thousand records take to become Table 2: `python -m scripts.bench_table`. The records are made up."""

import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from macformer.harness import config as configs
from macformer.harness import record as records
from macformer.harness.identity import run_id
from macformer.harness.plan import differences
from macformer.report.cells import MODELS, ROOT, TASKS

SEEDS, ROUNDS = 48, 5


def made_up(
    config: dict[str, Any],
    overrides: Sequence[str] = (),
    seconds: float = 10.0,
    peak: int = 1000,
    accuracy: float = 0.37,
    status: records.Status = "ok",
    examples: int = 2000,
    concurrent: int = 0,
) -> records.Record:
    """The record that a run of this configuration could leave. Its names, seed and accuracy decide what is right."""
    names: dict[str, Any] = {"task": config["task"]["name"], "model": config["model"]["name"], "seed": config["seed"]}
    entropy = int.from_bytes(hashlib.sha256(" ".join(map(str, [*names.values(), accuracy])).encode()).digest()[:8])
    right = np.random.default_rng(entropy).permutation(examples) < round(accuracy * examples)
    shares = [step / 11_000 for step in range(500, 11_001, 500)]
    no_time = dict.fromkeys(records.Time.model_fields, 0.0)
    machine: dict[str, Any] = {"device": "cpu", "device_name": "Test CPU", "threads": 1, "precision": "float32"}
    return records.Record(
        **names,
        differences=differences(config, list(overrides)),
        batch_size=config["trainer"]["batch_size"],
        padding=config["trainer"]["pad"],
        bucketing=config["trainer"]["bucket"],
        run_id=run_id(config, "f"),
        status=status,
        message="" if status == "ok" else "why it failed",
        steps_done=11_000,
        config=config,
        overrides=list(overrides),
        code=records.Code(commit=None, dirty=None),
        data=records.Data(
            fingerprint="f",
            source="generated",
            examples={"train": 96000, "dev": 2000, "test": examples},
            majority=0.17,
        ),
        environment=records.Environment(python="3.11", torch="2", **machine),
        sessions=[],
        concurrent=concurrent,
        parameters=1,
        quality=records.Quality(
            test_accuracy=float(right.mean()),
            test_examples=examples,
            correct=records.pack_bits(right),
            last_dev_accuracy=accuracy,
            last_test_accuracy=accuracy,
            dev_accuracy=accuracy,
            dev_step=11_000,
            dev_examples=2000,
            dev_subset="",
        ),
        time=records.Time(**no_time | {"train_seconds": seconds}),
        memory=records.Memory(peak_bytes=peak, method="counted"),
        history=[
            records.Point(
                step=round(11_000 * share),
                train_loss=2.3 - accuracy * share,
                dev_loss=2.3 - accuracy * share,
                dev_accuracy=accuracy * share,
                learning_rate=1e-4,
                train_seconds=seconds * share,
            )
            for share in shares
        ],
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cells = [
            configs.container(configs.compose(f"model={model}", f"task={task}"))
            for model, task in product(MODELS, TASKS)
        ]
        rng = np.random.default_rng(0)
        for config, seed in product(cells, range(SEEDS)):
            accuracy, examples = rng.normal(0.4, 0.01), 2000 if config["task"]["name"] == "listops" else 25_000
            record = made_up(config | {"seed": seed}, accuracy=accuracy, examples=examples)
            records.write(record, records.path(folder, record.config, record.run_id))
        seconds = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "scripts/table.py", folder], check=True, capture_output=True, cwd=ROOT)
            seconds.append(time.perf_counter() - begin)
    count = len(cells) * SEEDS
    print(f"{count:,} records: {median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f}, {ROUNDS} processes)")


if __name__ == "__main__":
    main()
