"""The typed record of one run: what ran, on what, how well, how fast, how large. JSON, written once. No torch."""

import base64
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

SCHEMA = 1
NOT_IN_RUN_ID = ("paths", "logger", "telemetry", "force", "evaluate", "dry_run")  # at the top and in the trainer
Status = Literal["ok", "oom", "diverged", "interrupted"]


class Part(BaseModel):
    """A wrong, missing or unknown key in a record is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Code(Part):
    commit: str | None  # None: not a git checkout
    dirty: bool | None


class Data(Part):
    fingerprint: str
    source: Literal["lra", "stand-in", "generated"]
    examples: dict[str, int]
    majority: float  # share of the commonest test label: the best constant answer


class Environment(Part):
    device: str
    device_name: str
    python: str
    torch: str
    threads: int
    precision: str


class Quality(Part):
    test_accuracy: float  # of the weights with the best dev accuracy
    test_examples: int
    correct: str  # test outcomes in file order: base64 of the packed bits
    dev_accuracy: float  # the best
    dev_step: int  # where it was reached
    dev_examples: int
    last_dev_accuracy: float
    last_test_accuracy: float


class Time(Part):
    train_seconds: float  # all steps, warm-up and waiting for data included; no evaluation
    warmup_seconds: float
    data_wait_seconds: float
    evaluation_seconds: float
    step_p10: float
    step_p50: float
    step_p90: float


class Memory(Part):
    peak_bytes: int
    method: str


class Point(Part):
    """One evaluation on the way."""

    step: int
    train_loss: float  # mean since the point before
    dev_loss: float
    dev_accuracy: float
    learning_rate: float
    train_seconds: float
    telemetry: dict[str, float] = {}  # of each layer, if trainer.telemetry is on


class Record(Part):
    schema_version: int = SCHEMA
    run_id: str
    status: Status
    message: str  # why the run did not end well; empty if it did
    task: str
    model: str
    seed: int
    steps_done: int
    config: dict[str, Any]
    overrides: list[str]
    code: Code
    data: Data
    environment: Environment
    parameters: int
    quality: Quality | None
    time: Time | None
    memory: Memory | None
    history: list[Point]


def run_id(config: dict[str, Any], fingerprint: str) -> str:
    """task.model.seed.hash8; the hash covers all that decides the result."""
    trainer = {key: value for key, value in config["trainer"].items() if key not in NOT_IN_RUN_ID}
    decisive = {key: value for key, value in config.items() if key not in NOT_IN_RUN_ID} | {"trainer": trainer}
    text = json.dumps([decisive, fingerprint], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{config['task']['name']}.{config['model']['name']}.{config['seed']}.{digest}"


def path(results: str | Path, config: dict[str, Any], run: str) -> Path:
    return Path(results) / "runs" / config["task"]["name"] / config["model"]["name"] / f"{run}.json"


def read(file: Path) -> Record:
    """A record, or ValueError with one sentence on what is wrong with the file."""
    try:
        return Record.model_validate_json(file.read_bytes())
    except ValueError as error:  # pydantic's errors are ValueErrors
        first = str(error).splitlines()
        raise ValueError(f"{file} is not a run record of schema {SCHEMA}: {' '.join(first[1:3])}") from None


def finished(file: Path) -> Record | None:
    """The record of a run that need not be repeated: one that is there, whole, and ok."""
    if not file.exists():
        return None
    try:
        record = read(file)
    except ValueError as error:
        print(f"warning: {error}; it will be replaced")
        return None
    return record if record.status == "ok" else None


def summary(record: Record) -> str:
    """Two lines for the screen at the end of a run."""
    if not (record.quality and record.time and record.memory):
        return f"{record.status}: {record.message}"
    quality, time, memory = record.quality, record.time, record.memory
    return (
        f"test accuracy {quality.test_accuracy:.2%} of {quality.test_examples:,} (best dev {quality.dev_accuracy:.2%} "
        f"at step {quality.dev_step:,}; majority class {record.data.majority:.2%})\n"
        f"training {time.train_seconds:.1f} s, {1000 * time.step_p50:.0f} ms a step; "
        f"peak memory {memory.peak_bytes / 2**20:.0f} MiB"
    )


def write(record: Record, file: Path) -> None:
    """Under a temporary name, then renamed: a record is whole or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(record.model_dump_json(indent=2) + "\n")
    os.replace(fresh, file)


def pack_bits(correct: NDArray[np.bool_]) -> str:
    return base64.b64encode(np.packbits(correct).tobytes()).decode()


def unpack_bits(text: str, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)


def code() -> Code:
    """Commit of the checkout that this file stands in, and whether tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return Code(commit=git("rev-parse", "HEAD"), dirty=bool(git("status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.CalledProcessError):
        return Code(commit=None, dirty=None)


def environment(device: str, device_name: str, threads: int) -> Environment:
    return Environment(
        device=device,
        device_name=device_name,
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        threads=threads,
        precision="float32",
    )
