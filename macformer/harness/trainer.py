"""The training loop: batch, gradient, clip, step, schedule, evaluation on dev, best weights, checkpoint, test.

It knows no model, task or file by name, and returns a plain result.
"""

import copy
import hashlib
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from macformer.harness import device as devices
from macformer.harness import forecast as forecasts
from macformer.harness.device import Precision
from macformer.harness.evaluation import Indices, Outcomes, Split, evaluate, observe
from macformer.harness.failures import Diverged, OutOfMemory, check_finite, explain_errors, load_weights
from macformer.harness.progress import Screen
from macformer.harness.record import Point, Quality, pack_bits
from macformer.harness.result import Result, measure_memory
from macformer.harness.stop import Stop, Stopped

CLIP = 1.0  # gradients are clipped by value
EPS = 1e-6  # of AdamW
STATEFUL = ("model", "optimizer", "schedule", "scaler")  # parts of a training whose state goes into the checkpoint
DRY_SECONDS = 60.0  # a dry run takes fewer steps if they take longer than this
State = dict[str, Any]


@dataclass
class Trainer:
    """AdamW under a linear one-cycle schedule: `warmup_steps` up, then `steps` down.

    pad="full" pads every batch to the task's length, as the base code does; "trim" to its longest text (rounded up),
    which changes no output. `bucket` puts texts of like length into one batch.
    Every `evaluate_every` steps and at the end the model is evaluated on the same `dev_examples` dev examples. The
    weights that are best there (the earliest of equals) are tested on the whole test split, and so are the last ones.
    accumulate=K takes a batch in K parts, one after the other: less memory, the same gradient.
    `precision`: float32, or mixed with bfloat16 or float16 (and a loss scaler); "auto": float16 on CUDA, else float32.
    Modules with a `redraw` are told of each step (`step()`), so that they can make a new draw when it is time.
    `telemetry`: at each evaluation, every module that has a method of that name is asked about a batch of dev texts.
    """

    warmup_steps: Annotated[int, Field(ge=2)]  # the schedule counts the steps between its first and its peak
    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    evaluate_every: PositiveInt
    dev_examples: PositiveInt | Literal["all"]
    cycle_momentum: bool
    pad: Literal["full", "trim"]
    bucket: bool
    accumulate: PositiveInt = 1
    precision: Precision = "float32"
    tf32: bool = False
    compile: bool = False
    checkpoint_every: PositiveInt = 200
    telemetry: bool = False

    def __post_init__(self) -> None:
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate={self.accumulate} must be at most batch_size={self.batch_size}: a part has an example"
            )

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps

    @property
    def trim(self) -> bool:
        return self.pad == "trim"

    def evaluates_after(self, step: int) -> bool:
        return step == self.total_steps or (step > 0 and step % self.evaluate_every == 0)

    def fit(
        self,
        model: nn.Module,
        task: Any,
        device: torch.device,
        seed: int,
        save: Callable[[State], None] | None = None,
        saved: State | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> Result:
        """Train `model` on `device` and test it. A failure is a result with its status, not an exception.

        `save` gets the state of the run every `checkpoint_every` steps, at evaluations and when it is asked to stop;
        `saved` is such a state, to go on from. `log` gets each point of the history.
        """
        result = Result()
        with Stop() as stop:
            try:
                with explain_errors(self), closing(Training(self, model, task, device, seed, stop, result)) as run:
                    if saved:
                        run.load(saved)
                    run.train(save, log)
                    run.test()
            except Diverged as error:
                result.status, result.message = "diverged", str(error)
            except OutOfMemory as error:
                result.status, result.message = "oom", f"after {len(result.losses):,} steps, {error}"
            except (Stopped, KeyboardInterrupt) as error:
                stop.signal = stop.signal if isinstance(error, Stopped) else signal.SIGINT
                result.status = "interrupted"
                result.message = f"{signal.Signals(stop.signal).name} after {len(result.losses):,} steps"
        result.signal = stop.signal
        return result

    def forecast(
        self, model: nn.Module, task: Any, device: torch.device, seed: int, patience: float = DRY_SECONDS
    ) -> forecasts.Forecast:
        """What the whole run would cost."""
        with explain_errors(self):
            return forecasts.forecast(Training(self, model, task, device, seed, Stop(), Result()), patience)


class Training:
    """One training, from its first step or from a saved state to its end."""

    def __init__(
        self,
        settings: Trainer,
        model: nn.Module,
        task: Any,
        device: torch.device,
        seed: int,
        stop: Stop,
        result: Result,
    ):
        self.settings, self.device, self.stop, self.result = settings, device, stop, result
        self.precision = devices.choose_precision(settings.precision, device)
        self.splits: dict[str, Split] = task.splits
        self.order = task.order(settings.batch_size, seed, settings.bucket)
        dev = len(task.splits["dev"])
        count = dev if settings.dev_examples == "all" else settings.dev_examples
        self.dev_indices = np.sort(np.random.default_rng(0).permutation(dev)[:count])  # the same whatever the seed
        self.model = model.to(device)
        if settings.compile:
            self.model.compile()
        rate, steps = settings.learning_rate, settings.total_steps
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, eps=EPS, weight_decay=0, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            rate,
            total_steps=steps,
            pct_start=settings.warmup_steps / steps,
            anneal_strategy="linear",
            cycle_momentum=settings.cycle_momentum,
        )
        self.scaler = devices.scaler(device, self.precision)
        self.redrawn: list[Any] = [module for module in model.modules() if getattr(module, "redraw", None)]
        self.rate = 0.0
        self.first_step = True  # of this process
        self.screen = Screen()
        self.clock = devices.Clock(device, self.result.seconds)

    def train(self, save: Callable[[State], None] | None, log: Callable[[dict[str, Any]], None] | None) -> None:
        def checkpoint() -> None:
            if save:
                save(self.state())

        result, settings = self.result, self.settings
        feed = self.feed(range(len(result.losses), settings.total_steps))
        try:
            while True:
                step = len(result.losses)
                if settings.evaluates_after(step) and result.evaluated() < step:
                    point = self.evaluate_dev()
                    if log:
                        log(point.model_dump(exclude={"telemetry"}) | point.telemetry)
                    checkpoint()
                if step == settings.total_steps:
                    return
                self.stop.check()
                self.step(feed)
                step += 1
                check_finite("the loss", result.losses[-1], step)
                if step == forecasts.STEPS and step < settings.total_steps:
                    self.screen.line(forecasts.expected_end(self))
                self.screen.live(lambda: forecasts.line(self))
                if step % settings.checkpoint_every == 0 or settings.evaluates_after(step):
                    result.note_cuda_peaks(self.device)
                    checkpoint()
        except Stopped:
            checkpoint()
            raise

    def feed(self, steps: Iterable[int]) -> Iterator[tuple[Tensor, ...]]:
        train, trim = self.splits["train"], self.settings.trim
        return devices.feed(self.device, (train.batch(self.order.indices(step), trim) for step in steps))

    def step(self, feed: Iterator[tuple[Tensor, ...]]) -> None:
        """Take the next batch, its gradient, and one step of the optimiser."""
        self.clock.book("pause")
        ids, labels = next(feed)
        waited = self.clock.book("data_wait")
        loss = self.gradient(ids, labels)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        for feature_map in self.redrawn:
            feature_map.step()
        self.rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        self.result.step_seconds.append(waited + self.clock.book("training"))
        self.result.losses.append(float(loss))  # the device is done: nothing waits for this number
        if self.first_step:
            measure_memory(self)
            self.first_step = False

    def gradient(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Accumulate the gradient of the mean loss, part by part, and return the loss."""
        total = torch.zeros((), device=self.device)
        for part, targets in zip(*(x.chunk(self.settings.accumulate) for x in (ids, labels)), strict=True):
            with devices.autocast(self.device, self.precision):
                loss = F.cross_entropy(self.model(part).float(), targets) * (len(targets) / len(labels))
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def evaluate(self, split: str, indices: Indices, trial: bool = False) -> Outcomes:
        """Evaluate, with progress on the screen. Unless it is a trial, a request to stop is heard in between."""

        def tick(done: int) -> None:
            if not trial:
                self.stop.check()
                self.screen.live(lambda: f"evaluating: {done:,} of {len(indices):,} examples")

        size, trim = self.settings.batch_size, self.settings.trim
        return evaluate(self.model, self.splits[split], indices, size, self.device, trim, self.precision, tick)

    def evaluate_dev(self) -> Point:
        """Add a point to the history, and keep the weights if they are the best so far."""
        result, step = self.result, len(self.result.losses)
        self.clock.book("pause")
        outcomes, loss = self.evaluate("dev", self.dev_indices)
        self.clock.book("evaluation")
        result.note_cuda_peaks(self.device, "evaluation_")
        check_finite("the dev loss", loss, step)
        point = Point(
            step=step,
            train_loss=float(np.mean(result.losses[result.evaluated() :])),
            dev_loss=loss,
            dev_accuracy=float(outcomes.mean()),
            learning_rate=self.rate,
            train_seconds=sum(result.step_seconds),
        )
        if self.settings.telemetry:
            some = self.splits["dev"].batch(self.dev_indices[: self.settings.batch_size], self.settings.trim)
            point.telemetry = observe(self.model, next(devices.feed(self.device, [some]))[0])
        result.history.append(point)
        if result.best() is point:
            result.best_weights = {  # not on a GPU, whose memory is measured
                name: value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in self.model.state_dict().items()
            }
        self.screen.line(forecasts.line(self))
        for name, value in point.telemetry.items():
            self.screen.line(f"  {name} {value:.4g}")
        return point

    def test(self) -> None:
        """Test the last weights and, if they are not the same, the best ones, which the model has from then on."""
        result, best, examples = self.result, self.result.best(), len(self.splits["test"])
        self.clock.book("pause")
        outcomes, _ = last, _ = self.evaluate("test", np.arange(examples))
        if best.step != self.settings.total_steps:
            load_weights(self.model, result.best_weights)
            outcomes, _ = self.evaluate("test", np.arange(examples))
        self.clock.book("evaluation")
        result.note_cuda_peaks(self.device, "evaluation_")
        result.quality = Quality(
            test_accuracy=float(outcomes.mean()),
            test_examples=examples,
            correct=pack_bits(outcomes),
            dev_accuracy=best.dev_accuracy,
            dev_step=best.step,
            dev_examples=len(self.dev_indices),
            dev_subset=hashlib.sha256(self.dev_indices.tobytes()).hexdigest()[:8],
            last_dev_accuracy=result.history[-1].dev_accuracy,
            last_test_accuracy=float(last.mean()),
        )

    def state(self) -> State:
        """All that a later process needs. The sampler's state is the number of steps."""
        result = self.result
        result.note_resident_peak()
        self.clock.book("pause")
        return {name: getattr(self, name).state_dict() for name in STATEFUL} | {
            "step": len(result.losses),
            "random": devices.random_state(self.device),
            "rate": self.rate,
            "losses": torch.tensor(result.losses, dtype=torch.float64),
            "step_seconds": torch.tensor(result.step_seconds, dtype=torch.float64),
            "seconds": dict(result.seconds),
            "peaks": result.peaks,
            "history": [point.model_dump() for point in result.history],
            "best_weights": result.best_weights,
        }

    def load(self, saved: State) -> None:
        """Go on from what `state` returned."""
        load_weights(self.model, saved["model"])
        for name in STATEFUL[1:]:
            getattr(self, name).load_state_dict(saved[name])
        devices.set_random_state(self.device, saved["random"])
        self.rate = saved["rate"]
        result = self.result
        result.losses, result.step_seconds = saved["losses"].tolist(), saved["step_seconds"].tolist()
        result.seconds.update(saved["seconds"])
        result.peaks, result.best_weights = saved["peaks"], saved["best_weights"]
        result.history = [Point(**point) for point in saved["history"]]

    def close(self) -> None:
        """Sum up time and memory, of a failed run too."""
        self.screen.close()
        self.clock.book("pause")
        self.result.sum_up(self.device, self.settings.warmup_steps)
