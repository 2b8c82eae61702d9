"""How far a run is, how long it will still take, and what one would cost, from a few of its steps."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from macformer.harness.progress import duration, mebibytes
from macformer.harness.record import Memory

if TYPE_CHECKING:
    from macformer.harness.trainer import Training

STEPS = 20  # after so many, the end of a run is estimated


@dataclass
class Forecast:
    measured_steps: int
    step_seconds: float
    train_seconds: float
    evaluation_seconds: float
    memory: Memory


def forecast(run: "Training", patience: float) -> Forecast:
    """Take a few steps from all over the schedule, evaluate a few batches, and scale both to the whole run.

    After `patience` seconds of steps, not counting the first, no more of them are taken.
    """
    result, total = run.result, run.settings.total_steps
    count = min(STEPS + 1, total)
    feed = run.feed(np.linspace(0, total - 1, count).astype(int).tolist())
    while len(result.losses) < count and sum(result.step_seconds[1:]) < patience:
        run.step(feed)
    seconds = result.step_seconds[1:]  # the first one warms up
    result.note_cuda_peaks(run.device)
    by_length = run.dev_indices[np.argsort(run.splits["dev"].lengths[run.dev_indices], kind="stable")]
    about_four_batches = by_length[:: -(-len(by_length) // (4 * run.settings.batch_size))]
    run.clock.book("pause")
    run.evaluate("dev", about_four_batches, trial=True)
    an_example = run.clock.book("evaluation") / len(about_four_batches)
    run.close()
    assert result.memory
    return Forecast(
        measured_steps=len(seconds),
        step_seconds=float(np.mean(seconds)),
        train_seconds=float(np.mean(seconds)) * total,
        evaluation_seconds=an_example * _examples_to_evaluate(run, 0),
        memory=result.memory,
    )


def line(run: "Training") -> str:
    """Step, loss (mean since the last evaluation), dev accuracy, steps/s, memory, time left."""
    result, step = run.result, len(run.result.losses)
    loss = result.history[-1].train_loss if result.evaluated() == step else np.mean(result.losses[result.evaluated() :])
    parts = [f"step {step:>6,}/{run.settings.total_steps:,}", f"loss {loss:.4f}"]
    if result.history:
        parts.append(f"dev accuracy {result.history[-1].dev_accuracy:6.2%}")
    rate = 1 / mean_step(run)
    parts.append(f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
    if peak := result.peaks.get("peak_bytes"):
        parts.append(mebibytes(peak))
    return "  ".join([*parts, f"{duration(seconds_left(run))} left"])


def expected_end(run: "Training") -> str:
    left = seconds_left(run)
    return f"expected end: {time.strftime('%a %H:%M', time.localtime(time.time() + left))}, in {duration(left)}"


def mean_step(run: "Training") -> float:
    """Mean seconds of the last steps, the slow first one left out."""
    return float(np.mean(run.result.step_seconds[1:][-1000:] or run.result.step_seconds))


def seconds_left(run: "Training") -> float:
    """From the mean step and evaluation; before the first of these, a forward pass counts as a third of a step."""
    result, done = run.result, len(run.result.losses)
    an_example = mean_step(run) / run.settings.batch_size / 3
    if result.history:
        an_example = result.seconds["evaluation"] / (len(result.history) * len(run.dev_indices))
    return (run.settings.total_steps - done) * mean_step(run) + _examples_to_evaluate(run, done) * an_example


def _examples_to_evaluate(run: "Training", done: int) -> int:
    """After `done` steps: dev examples as often as they are due, and the test split for the best and the last."""
    due = sum(map(run.settings.evaluates_after, range(done + 1, run.settings.total_steps + 1)))
    return due * len(run.dev_indices) + 2 * len(run.splits["test"])
