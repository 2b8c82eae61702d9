"""What a run has so far: losses, history, best weights, time and memory; and how its memory is measured."""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from macformer.harness import device as devices
from macformer.harness.device import Account
from macformer.harness.evaluation import longest_batch
from macformer.harness.record import Memory, Point, Quality, Status, Time

if TYPE_CHECKING:
    from macformer.harness.trainer import Training


@dataclass
class Result:
    """Everything down to the best weights goes into the checkpoint."""

    losses: list[float] = field(default_factory=list)  # one a step
    step_seconds: list[float] = field(default_factory=list)  # waiting for data included
    seconds: dict[Account, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)  # bytes, by the fields of Memory
    history: list[Point] = field(default_factory=list)
    best_weights: dict[str, Any] = field(default_factory=dict)
    quality: Quality | None = None
    time: Time | None = None
    memory: Memory | None = None
    status: Status = "ok"
    message: str = ""
    signal: int = 0  # the one that came, perhaps too late to interrupt the run

    def best(self) -> Point:
        """The evaluation with the highest dev accuracy; the earliest of equals."""
        return max(self.history, key=lambda point: point.dev_accuracy)

    def evaluated(self) -> int:
        """The step of the last evaluation."""
        return self.history[-1].step if self.history else 0

    def note_cuda_peaks(self, device: torch.device, phase: str = "") -> None:
        """Keep the allocator's peaks since the last call; phase="evaluation_" keeps those of evaluations apart."""
        if devices.is_cuda(device):
            allocated, reserved = devices.cuda_peaks(device)
            self._raise_peak(f"{phase}peak_bytes", allocated)
            self._raise_peak(f"{phase}reserved_bytes", reserved)

    def note_resident_peak(self) -> None:
        if resident := devices.resident_peak():
            self._raise_peak("resident_peak_bytes", resident)

    def _raise_peak(self, name: str, value: int) -> None:
        self.peaks[name] = max(value, self.peaks.get(name, 0))

    def sum_up(self, device: torch.device, warmup_steps: int) -> None:
        """Time and memory, if there was a step."""
        if not self.losses:
            return
        p10, p50, p90 = np.percentile(self.step_seconds, [10, 50, 90]).tolist()
        self.time = Time(
            train_seconds=sum(self.step_seconds),
            warmup_seconds=sum(self.step_seconds[:warmup_steps]),
            data_wait_seconds=self.seconds["data_wait"],
            evaluation_seconds=self.seconds.get("evaluation", 0.0),
            pause_seconds=self.seconds["pause"],
            step_p10=p10,
            step_p50=p50,
            step_p90=p90,
        )
        self.note_resident_peak()
        if "peak_bytes" in self.peaks:
            how = (
                "CUDA allocator's peaks over all steps but the first of a process"
                if devices.is_cuda(device)
                else "peak of live tensor bytes (allocator events) in one extra pass on the longest batch"
            )
            self.memory = Memory(**self.peaks, method=how)


def measure_memory(run: "Training") -> None:
    """After the first step, when the optimiser has its moments. Untimed; changes nothing.

    CPU: one extra pass of training and one of evaluation, each on the longest texts. CUDA's allocator counts by
    itself in every step; what the first one took is forgotten here.
    """
    if devices.is_cuda(run.device):
        devices.cuda_peaks(run.device)
        return
    if "peak_bytes" in run.result.peaks:  # measured before this process
        return
    model, settings = run.model, run.settings
    before = copy.deepcopy(model.state_dict())  # running averages move with each pass
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    state = [*model.parameters(), *model.buffers(), *(value for value in moments if isinstance(value, Tensor))]
    longest = {name: longest_batch(run.splits[name], settings.batch_size) for name in ("train", "dev")}

    def train() -> None:
        batch = run.splits["train"].batch(longest["train"], settings.trim)
        run.gradient(*next(devices.feed(run.device, [batch])))
        run.optimizer.zero_grad()

    def evaluate() -> None:
        run.evaluate("dev", longest["dev"], trial=True)

    for name, work in (("peak_bytes", train), ("evaluation_peak_bytes", evaluate)):
        run.result.peaks[name] = devices.peak_bytes(run.device, state, work)
    model.load_state_dict(before)
