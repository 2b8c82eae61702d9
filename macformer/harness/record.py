"""The typed record of one run: what ran, on what, how well, how fast, how large. JSON, written once. No torch."""

import base64
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from macformer.harness import files
from macformer.harness.progress import duration, mebibytes

SCHEMA: Literal[3] = 3
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


class Session(Part):
    """One process that worked on a run; a run that was killed and taken up again has several."""

    began: str  # UTC
    first_step: int
    commit: str | None
    device_name: str
    concurrent: int | None  # other runs of its sweep that may have been at work on the same device; None: not known


class Differences(Part):
    """How a run differs from the paper's protocol, in words; from `python train.py model=M task=T`, that is."""

    model: list[str]  # keys of the model: a row of its own
    task: list[str]  # what holds for this task alone: its data, its learning rate
    shared: list[str]  # what holds for every task: the schedule, the padding
    command: list[str]  # what was typed besides model, task and seed: the same for the runs of one sweep


class Quality(Part):
    test_accuracy: float  # of the weights with the best dev accuracy
    test_examples: int
    correct: str  # test outcomes in file order: base64 of the packed bits
    dev_accuracy: float  # the best
    dev_step: int  # where it was reached
    dev_examples: int
    dev_subset: str  # which ones: a hash of their indices
    last_dev_accuracy: float
    last_test_accuracy: float

    @model_validator(mode="after")
    def _bits_are_the_accuracy(self) -> Self:
        if abs(self.outcomes().mean() - self.test_accuracy) > 1e-6:
            raise ValueError("its test outcomes do not have its test accuracy")
        return self

    def outcomes(self) -> NDArray[np.bool_]:
        """Of each test example, in file order."""
        packed = np.frombuffer(base64.b64decode(self.correct, validate=True), np.uint8)
        if not 0 < self.test_examples <= 8 * len(packed) < self.test_examples + 8:
            raise ValueError(f"{8 * len(packed)} test outcomes for {self.test_examples} examples")
        return np.unpackbits(packed, count=self.test_examples).astype(bool)


class Time(Part):
    train_seconds: Annotated[float, Field(gt=0)]  # all steps, warm-up and waiting for data included; no evaluation
    warmup_seconds: float
    data_wait_seconds: float
    evaluation_seconds: float
    pause_seconds: float  # the harness: checkpoints, measuring memory, the screen, logging
    step_p10: float
    step_p50: float
    step_p90: float


class Memory(Part):
    peak_bytes: int  # of training
    evaluation_peak_bytes: int | None = None
    reserved_bytes: int | None = None  # CUDA: what the allocator held, in training and in evaluation
    evaluation_reserved_bytes: int | None = None
    resident_peak_bytes: int | None = None  # of the process; None if it had other runs before
    method: str


class Point(Part):
    """One evaluation on the way."""

    step: int
    train_loss: float  # mean since the point before
    dev_loss: float
    learning_rate: float
    train_seconds: float
    telemetry: dict[str, float] = {}  # of each layer, if trainer.telemetry is on
    dev_accuracy: float


class Record(Part):
    schema_version: Literal[3] = SCHEMA
    run_id: str
    status: Status
    message: str  # why the run did not end well; empty if it did
    task: str
    model: str
    seed: int
    steps_done: int
    skipped_steps: int = 0  # of these, by float16's loss scaler; older records do not say
    config: dict[str, Any]
    overrides: list[str]
    code: Code
    data: Data
    environment: Environment
    sessions: list[Session]
    concurrent: int | None  # the most of its sessions; None: not known of one of them
    parameters: int
    quality: Quality | None
    time: Time | None
    memory: Memory | None
    history: list[Point]
    kind: Literal["lra"] = "lra"
    differences: Differences
    batch_size: int
    padding: Literal["full", "trim"]
    bucketing: bool

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """What is read out of many records at once must fit together."""
        try:
            names = self.config["task"]["name"], self.config["model"]["name"], self.config["seed"]
        except (KeyError, TypeError):
            raise ValueError("its configuration has no task, model or seed") from None
        if names != (self.task, self.model, self.seed):
            raise ValueError("task, model or seed are not those of the configuration")
        if self.status == "ok" and not (self.quality and self.time and self.memory and self.memory.peak_bytes > 0):
            raise ValueError("it is ok, but lacks quality, time or memory")
        if self.quality and self.quality.test_examples != self.data.examples.get("test"):
            raise ValueError("it was not tested on as many examples as its data have")
        return self


class OtherKind(ValueError):
    """The file is a record, but not of a run on LRA."""


def path(results: str | Path, config: dict[str, Any], run: str) -> Path:
    return Path(results) / "runs" / config["task"]["name"] / config["model"]["name"] / f"{run}.json"


def read(file: Path) -> Record:
    """A record, or ValueError with one sentence on what is wrong with the file."""
    try:
        return Record.model_validate_json(file.read_bytes())
    except ValidationError as error:
        wrong = {each["loc"]: each["input"] for each in error.errors()}
        if ("kind",) in wrong:
            raise OtherKind(f"{file} is a record of kind {wrong['kind',]!r}, not of a run on LRA") from None
        why = f"is not a run record of schema {SCHEMA}: {complaint(error)}"
        if version := wrong.get(("schema_version",)):
            why = f"has schema {version}, and schema {SCHEMA} is read here: run it anew (CHANGELOG.md)"
        raise ValueError(f"{file} {why}") from None


def complaint(error: ValidationError) -> str:
    """The first key that is wrong, and what is wrong with it."""
    first = error.errors()[0]
    return " ".join([".".join(map(str, first["loc"])), first["msg"]]).strip()


def finished(file: Path) -> Record | None:
    """The record of a run that need not be repeated: one that is there, whole, and ok."""
    try:
        record = read(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"warning: {error}; it does not count as finished")
        return None
    return record if record.status == "ok" else None


def summary(record: Record) -> str:
    """A few lines for the screen at the end of a run."""
    lines = [f"{record.status}: {record.message}"] if record.status != "ok" else []
    if quality := record.quality:
        lines.append(
            f"test accuracy {quality.test_accuracy:.2%} of {quality.test_examples:,} (best dev "
            f"{quality.dev_accuracy:.2%} at step {quality.dev_step:,}; the last weights "
            f"{quality.last_test_accuracy:.2%}; majority class {record.data.majority:.2%})"
        )
    if time := record.time:
        steps = " / ".join(f"{1000 * seconds:.3g}" for seconds in (time.step_p10, time.step_p50, time.step_p90))
        lines.append(
            f"training {duration(time.train_seconds)} ({steps} ms a step, p10 / p50 / p90; waiting for data "
            f"{time.data_wait_seconds / time.train_seconds:.2%}); evaluation {duration(time.evaluation_seconds)}; "
            f"harness {duration(time.pause_seconds)}"
        )
    if skipped := record.skipped_steps:
        lines.append(f"skipped {skipped:,} of {record.steps_done:,} steps, whose gradients were not finite in float16")
    if memory := record.memory:
        peaks = {"training": memory.peak_bytes, "evaluation": memory.evaluation_peak_bytes}
        peaks["the process"] = memory.resident_peak_bytes
        known = (f"of {what} {mebibytes(peak)}" for what, peak in peaks.items() if peak is not None)
        lines.append(f"peak memory {', '.join(known)}")
    return "\n".join(lines)


def write(record: Record, file: Path) -> None:
    files.write(file, record.model_dump_json(indent=2) + "\n")


def pack_bits(correct: NDArray[np.bool_]) -> str:
    return base64.b64encode(np.packbits(correct).tobytes()).decode()


def code() -> Code:
    """Commit of the checkout that this file stands in, and whether tracked files differ from it."""
    folder = str(Path(__file__).parent)
    command = ["git", "-C", folder, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return Code(commit=None, dirty=None)
    return Code(commit=commit.removesuffix("-dirty"), dirty=commit.endswith("-dirty"))


def environment(device: str, device_name: str, threads: int, precision: str = "float32") -> Environment:
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    return Environment(device=device, device_name=device_name, threads=threads, precision=precision, **versions)
