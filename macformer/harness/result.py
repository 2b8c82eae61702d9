"""What a run has so far: losses, history, best weights, time and memory; and what a whole one would cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from macformer.harness import device as devices
from macformer.harness.record import Memory, Point, Quality, Status, Time


class Forecast(NamedTuple):
    measured_steps: int
    train_seconds: float
    evaluation_seconds: float
    memory: Memory


@dataclass
class Result:
    """Everything from the losses to the best weights goes into the checkpoint."""

    warmup_steps: int = 0
    losses: list[float] = field(default_factory=list)  # one a step
    step_seconds: list[float] = field(default_factory=list)  # waiting for data included
    seconds: dict[devices.Account, float] = field(default_factory=dict)
    skipped_steps: int = 0  # by the loss scaler: a gradient was not finite
    skipped_in_a_row: int = 0  # up to the last step
    peaks: dict[str, int] = field(default_factory=dict)  # bytes, by the fields of Memory
    history: list[Point] = field(default_factory=list)
    best_weights: dict[str, Any] = field(default_factory=dict)
    quality: Quality | None = None
    status: Status = "ok"
    message: str = ""
    signal: int = 0  # the one that came, perhaps too late to interrupt the run

    def best(self) -> Point:
        """The evaluation with the highest dev accuracy; the earliest of equals."""
        return max(self.history, key=lambda point: point.dev_accuracy)

    def evaluated(self) -> int:
        """The step of the last evaluation."""
        return self.history[-1].step if self.history else 0

    def recent_loss(self) -> float:
        """Mean training loss since the last evaluation, or before it if that was after the last step."""
        recent = self.losses[self.evaluated() :]
        return float(np.mean(recent)) if recent else self.history[-1].train_loss

    def mean_step(self) -> float:
        """Mean seconds of the last steps, the slow first one left out."""
        return float(np.mean(self.step_seconds[1:][-1000:] or self.step_seconds))

    def note_peaks(self, peaks: Mapping[str, int | None], phase: str = "") -> None:
        """Keep what is higher than before; phase="evaluation_" keeps the peaks of evaluations apart."""
        known = {phase + name: value for name, value in peaks.items() if value is not None}
        self.peaks |= {name: max(value, self.peaks.get(name, 0)) for name, value in known.items()}

    @property
    def time(self) -> Time | None:
        """Known if there was a step."""
        if not self.step_seconds:
            return None
        train, warmup = sum(self.step_seconds), sum(self.step_seconds[: self.warmup_steps])
        others = {f"{name}_seconds": self.seconds.get(name, 0.0) for name in ("data_wait", "evaluation", "pause")}
        p10, p50, p90 = np.percentile(self.step_seconds, [10, 50, 90]).tolist()
        return Time(train_seconds=train, warmup_seconds=warmup, **others, step_p10=p10, step_p50=p50, step_p90=p90)

    @property
    def memory(self) -> Memory | None:
        """Known once a step was measured. Reserved bytes are CUDA's alone."""
        if "peak_bytes" not in self.peaks:
            return None
        on_cpu = "peak of live tensor bytes (allocator events) in one extra pass on the longest batch"
        on_cuda = "CUDA allocator's peaks over all steps but the first of a process"
        return Memory(**self.peaks, method=on_cuda if "reserved_bytes" in self.peaks else on_cpu)
