"""Made-up records with every kind of cell, and the tables that they give: golden files."""

from pathlib import Path
from typing import Any

import numpy as np

from macformer.harness import record as records
from macformer.report import cells, statistics, table
from tests.made_up import make

FOLDER = Path(__file__).parent
# Better than the Transformer, worse, the same, and not above a floor of 39%.
ACCURACIES = {"transformer": 0.42, "rfa": 0.47, "macformer_log": 0.422} | dict.fromkeys(statistics.TWINS, 0.385)
FLOORS = [
    {"task": "listops", "protocol": "paper", "source": "generated", "fingerprint": "f", "train_examples": 96_000}
    | {"whole": True, "dev_examples": 1000, "dev_accuracy": {"majority": 0.16, "root operator": 0.3}}
    | {"test_examples": 2000, "test_accuracy": {"majority": 0.17, "root operator": 0.39}}
]
BENCH: dict[str, Any] = {
    "left_out": ["listops-full is without macformer_exp: too large.", "text-full is without rfa: too large."],
    "environment": {"device_name": "Test CPU", "threads": 1, "precision": "float32", "torch": "2"},
    "results": [
        {"setting": "listops-full", "task": "listops", "padding": "full", "bucket": False, "batch_size": 32}
        | {
            "arms": {
                "transformer": {"seconds": [2.0, 2.2, 4.0], "peak_bytes": 1000},
                "transformer_sdpa": {"seconds": [1.0, 1.2, 2.2], "peak_bytes": 300},
                "rfa": {"seconds": [0.2, 0.2, 0.5], "peak_bytes": 250},
                "identity, ppSBN": {"seconds": [0.1, 0.1, 0.2], "peak_bytes": 200},  # no model
            }
        }
    ],
}


def fixture_records() -> list[records.Record]:
    """Three seeds of five models on ListOps, one seed of others; a changed model, other protocols, a failure."""
    words = {f"{model} task=listops seed={seed}": ACCURACIES[model] for model in ACCURACIES for seed in range(3)}
    others = ["rfa task=listops model.attention.features=64", "rfa task=text"]
    others += [f"{model} task=listops trainer=cpu seed=1" for model in ("transformer", "rfa")]
    made = [_record(each, accuracy) for each, accuracy in (words | dict.fromkeys(others, 0.45)).items()]
    return [*made, _record("transformer task=text", 0.0, status="oom")]


def _record(words: str, accuracy: float, **given: Any) -> records.Record:
    """exp and trigh have one id here, and so the same outcomes, as in reality."""
    rng = np.random.default_rng([make(words).seed, round(1000 * accuracy)])
    linear = not words.startswith("transformer")
    seconds, peak = (50.0 if linear else 100.0) * rng.uniform(0.95, 1.05), 600 if linear else 1000
    record = make(words, accuracy + rng.normal(0, 0.005), seconds=seconds, peak=peak * 2**20, **given)
    if record.model == "macformer_trigh":
        record.quality = make(words.replace("trigh", "exp"), record.quality.test_accuracy).quality
    return record


def golden_tables(order: int = 1) -> dict[str, str]:
    """By the file's name."""
    found, problems = fixture_records()[::order], ["runs/broken.json is not a run record of schema 3: Invalid JSON"]
    made = cells.tables(found, FLOORS, BENCH)
    return {"table2.md": table.markdown(made, found, problems), "table2.csv": table.to_csv(made)}
