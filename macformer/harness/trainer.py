"""The training loop: batch, gradient, clip, step, schedule, evaluation on dev, best weights, checkpoint, test."""

import copy
import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch._functorch import config as aot_config
from torch.nn import functional as F

from macformer.harness import device as devices
from macformer.harness.failures import RunFailed, Stop, Stopped, check_finite, explain_errors
from macformer.harness.progress import Screen, duration, mebibytes
from macformer.harness.record import Point, Quality, pack_bits
from macformer.harness.result import Forecast, Result

CLIP = 1.0  # gradients are clipped by value
EPS = 1e-6  # of AdamW
STATEFUL = ("model", "optimizer", "schedule", "scaler")  # parts of a training whose state goes into the checkpoint
STEPS = 20  # after so many, the end of a run is estimated
SKIPPED = 100  # after so many skipped steps in a row a run has diverged
State = dict[str, Any]
Indices = NDArray[np.int64]
Outcomes = tuple[NDArray[np.bool_], float]  # which examples are right, and the mean loss


@dataclass
class Trainer:
    """AdamW under a linear one-cycle schedule: `warmup_steps` up, then `steps` down.

    Every `evaluate_every` steps and at the end the model is evaluated on the same `dev_examples` dev examples. The
    weights that are best there (the earliest of equals) are tested on the whole test split, and so are the last ones.
    Modules with a `redraw` are told of each step (`step()`), so that they can make a new draw when it is time.
    """

    warmup_steps: Annotated[int, Field(ge=2)]  # the schedule counts the steps between its first and its peak
    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    evaluate_every: PositiveInt
    dev_examples: PositiveInt | Literal["all"]
    cycle_momentum: bool
    pad: Literal["full", "trim"]  # to the task's length, as the base code does, or to the batch's: no output changes
    bucket: bool  # texts of like length come into one batch
    accumulate: PositiveInt = 1  # a batch is taken in so many parts: less memory, the same gradient
    precision: devices.Precision = "float32"  # bfloat16 and float16 are mixed ones; auto: float16 on CUDA, else float32
    tf32: bool = False
    compile: bool = False
    checkpoint_every: PositiveInt = 200
    telemetry: bool = False  # each evaluation asks all modules that have a method of this name about a dev batch
    # `_at_work` sets what else a training needs.

    def __post_init__(self) -> None:
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate={self.accumulate} must be at most batch_size={self.batch_size}")

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps

    def evaluates_after(self, step: int) -> bool:
        return step == self.total_steps or (step > 0 and step % self.evaluate_every == 0)

    def fit(
        self,
        model: nn.Module,
        task: Any,
        device: torch.device,
        seed: int,
        save: Callable[[State], None] = lambda state: None,
        saved: State | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> Result:
        """Train `model` on `device` and test it. A failure is a result with its status, not an exception.

        `save` gets the state of the run every `checkpoint_every` steps, at evaluations and when it is asked to stop;
        `saved` is such a state, to go on from. `log` gets each point of the history.
        """
        result = self.result = Result(self.warmup_steps)
        with Stop() as self.stop:
            try:
                with self._at_work(model, task, device, seed):
                    if saved:
                        self._load(saved)
                    self._train(save, log)
                    self._test_last_and_best()
            except RunFailed as error:
                if not error.status:
                    raise
                result.status, result.message = error.status, f"after {len(result.losses):,} steps, {error}"
            except KeyboardInterrupt:
                self.stop.signal = self.stop.signal or signal.SIGINT
                result.status = "interrupted"
                result.message = f"{signal.Signals(self.stop.signal).name} after {len(result.losses):,} steps"
        result.signal = self.stop.signal
        return result

    def forecast(self, model: nn.Module, task: Any, device: torch.device, seed: int, patience: float = 60) -> Forecast:
        """What the whole run would cost, from a few steps of all its schedule and an evaluation of a few batches.

        After `patience` seconds of steps, not counting the first, no more of them are taken.
        """
        self.stop, self.result, total = Stop(), Result(), self.total_steps
        count = min(STEPS + 1, total)
        with self._at_work(model, task, device, seed):
            feed = self._feed("train", map(self.order.indices, np.linspace(0, total - 1, count).astype(int).tolist()))
            while len(self.result.losses) < count and sum(self.result.step_seconds[1:]) < patience:
                self._step(feed)
            self.result.note_peaks(devices.cuda_peaks(device))
            by_length = self.dev_indices[np.argsort(self.splits["dev"].lengths[self.dev_indices], kind="stable")]
            self._evaluate("dev", by_length[:: -(-len(by_length) // (4 * self.batch_size))])  # about four batches
        assert self.result.memory
        steps, (_, evaluation) = len(self.result.losses) - 1, self._seconds_left()
        return Forecast(steps, self.result.mean_step() * total, evaluation, self.result.memory)

    def test(self, model: nn.Module, task: Any, device: torch.device, weights: State) -> Outcomes:
        """What the model with those weights makes of the test split."""
        self.stop, self.result = Stop(), Result()
        with self._at_work(model, task, device, seed=0):
            model.load_state_dict(weights)
            return self._evaluate("test", np.arange(len(self.splits["test"])))

    @contextmanager
    def _at_work(self, model: nn.Module, task: Any, device: torch.device, seed: int) -> Iterator[None]:
        """What a training needs while it goes on; a failed one, too, books its last seconds and its memory."""
        with explain_errors(self):
            self.device, self.splits, self.model = device, task.splits, model.to(device)
            self.order = task.order(self.batch_size, seed, self.bucket)
            dev = np.random.default_rng(0).permutation(len(self.splits["dev"]))  # the same whatever the seed
            self.dev_indices = np.sort(dev if self.dev_examples == "all" else dev[: self.dev_examples])
            if self.compile:
                if hasattr(aot_config, "backward_pass_autocast"):
                    # Else newer torch compiles the backward pass under autocast, even of what leaves it (attention).
                    aot_config.backward_pass_autocast = "off"
                self.model.compile()
            rate, steps = self.learning_rate, self.total_steps
            self.optimizer = torch.optim.AdamW(model.parameters(), rate, eps=EPS, weight_decay=0, fused=True)
            form: dict[str, Any] = {"pct_start": self.warmup_steps / steps, "anneal_strategy": "linear"}
            form["cycle_momentum"] = self.cycle_momentum
            self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, steps, **form)
            self.scaler = devices.scaler(device, self.precision)
            self.scale = self.scaler.get_scale()
            self.redrawn: list[Any] = [module for module in model.modules() if getattr(module, "redraw", None)]
            self.rate = self.example_seconds = 0.0
            self.first_step = True  # of this process
            self.screen, self.clock = Screen(), devices.Clock(device, self.result.seconds)
            try:
                yield
            finally:
                self.screen.close()
                self.clock.book("pause")
                self.result.note_peaks({"resident_peak_bytes": devices.resident_peak()})
                del self.model, self.optimizer, self.schedule, self.scaler, self.redrawn  # a sweep keeps failed runs

    def _train(self, save: Callable[[State], None], log: Callable[[dict[str, Any]], None] | None) -> None:
        result = self.result
        feed = self._feed("train", map(self.order.indices, range(len(result.losses), self.total_steps)))
        try:
            while True:
                step = len(result.losses)
                if self.evaluates_after(step) and result.evaluated() < step:
                    point = self._evaluate_dev()
                    if log:
                        log(point.model_dump(exclude={"telemetry"}) | point.telemetry)
                    save(self._state())
                if step == self.total_steps:
                    return
                self.stop.check()
                self._step(feed)
                step += 1
                check_finite("the loss", result.losses[-1])
                if result.skipped_in_a_row >= SKIPPED:
                    why = f"none of the last {SKIPPED} had a finite gradient in float16"
                    way_out = "use trainer.precision=bfloat16, or lower task.learning_rate"
                    raise RunFailed(f"{why}: {way_out}", "diverged")
                if step == STEPS < self.total_steps:
                    left = sum(self._seconds_left())
                    end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
                    self.screen.line(f"expected end: {end}, in {duration(left)}")
                self.screen.live(self._status)
                if step % self.checkpoint_every == 0 or self.evaluates_after(step):
                    result.note_peaks(devices.cuda_peaks(self.device))
                    save(self._state())
        except Stopped:
            save(self._state())
            raise

    def _feed(self, split: str, batches: Iterable[Indices]) -> Iterator[tuple[Tensor, ...]]:
        trim = self.pad == "trim"
        return devices.feed(self.device, (self.splits[split].batch(indices, trim) for indices in batches))

    def _step(self, feed: Iterator[tuple[Tensor, ...]]) -> None:
        """Take the next batch, its gradient, and one step of the optimiser."""
        self.clock.book("pause")
        ids, labels = next(feed)
        waited = self.clock.book("data_wait")
        loss = self._gradient(ids, labels)
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
        before, self.scale = self.scale, self.scaler.get_scale()
        skipped = self.scale < before or not self.scale  # the scaler lowers its scale then; 0 cannot be lowered
        self.result.skipped_steps += skipped
        self.result.skipped_in_a_row = self.result.skipped_in_a_row + 1 if skipped else 0
        if self.first_step:
            self._measure_memory()
            self.first_step = False

    def _gradient(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Accumulate the gradient of the mean loss, part by part, and return the loss."""
        total = torch.zeros((), device=self.device)
        for part, targets in zip(*(x.chunk(self.accumulate) for x in (ids, labels)), strict=True):
            with devices.autocast(self.device, self.precision):
                loss = F.cross_entropy(self.model(part).float(), targets) * (len(targets) / len(labels))
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _evaluate(self, split: str, indices: Indices) -> Outcomes:
        """Evaluate, timed and with progress on the screen. A request to stop is heard in between."""

        def tick(done: int) -> None:
            self.stop.check()
            self.screen.live(lambda: f"evaluating: {done:,} of {len(indices):,} examples")

        self.clock.book("pause")
        outcomes = self._outcomes(split, indices, tick)
        self.example_seconds = self.clock.book("evaluation") / len(indices)
        self.result.note_peaks(devices.cuda_peaks(self.device), "evaluation_")
        return outcomes

    @torch.inference_mode()
    def _outcomes(self, split: str, indices: Indices, tick: Callable[[int], None] = lambda done: None) -> Outcomes:
        """In the order of `indices`. `tick` is called before each batch with the number of examples that are done."""
        self.model.eval()
        by_length = np.argsort(self.splits[split].lengths[indices], kind="stable")  # so that trimming pays
        batches = np.split(indices[by_length], range(self.batch_size, len(indices), self.batch_size))
        right: list[Tensor] = []
        losses: list[Tensor] = []
        for ids, labels in self._feed(split, batches):
            tick(len(right) * self.batch_size)
            with devices.autocast(self.device, self.precision):
                logits = self.model(ids).float()
            right.append(logits.argmax(-1) == labels)
            losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        self.model.train()
        outcomes = np.empty(len(indices), bool)
        outcomes[by_length] = torch.cat(right).cpu().numpy()
        return outcomes, float(torch.stack(losses).double().sum()) / len(indices)

    def _evaluate_dev(self) -> Point:
        """Add a point to the history, and keep the weights if they are the best so far."""
        result, step = self.result, len(self.result.losses)
        outcomes, loss = self._evaluate("dev", self.dev_indices)
        check_finite("the dev loss", loss)
        point = Point(
            step=step,
            train_loss=result.recent_loss(),
            dev_loss=loss,
            dev_accuracy=float(outcomes.mean()),
            learning_rate=self.rate,
            train_seconds=sum(result.step_seconds),
        )
        if self.telemetry:
            point.telemetry = self._telemetry()
        result.history.append(point)
        if result.best() is point:
            weights = self.model.state_dict().items()
            on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in weights}
            result.best_weights = copy.deepcopy(on_cpu)  # a GPU's memory is measured
        self.screen.line(self._status())
        for name, value in point.telemetry.items():
            self.screen.line(f"  {name} {value:.4g}")
        return point

    @torch.inference_mode()
    def _telemetry(self) -> dict[str, float]:
        """Ask each module that has a `telemetry` method about its inputs, in one pass on the first dev examples.

        Returns module name and quantity -> value. What is not finite is left out: JSON has no NaN.
        """
        found: dict[str, float] = {}
        names = {module: name for name, module in self.model.named_modules() if hasattr(module, "telemetry")}

        def ask(module: Any, args: Any, kwargs: Any) -> None:
            values = module.telemetry(*args, **kwargs).items()
            found.update({f"{names[module]}.{key}": value for key, value in values if math.isfinite(value)})

        hooks = [module.register_forward_pre_hook(ask, with_kwargs=True) for module in names]
        ids, _ = next(self._feed("dev", [self.dev_indices[: self.batch_size]]))
        self.model.eval()
        self.model(ids)
        self.model.train()
        for hook in hooks:
            hook.remove()
        self.result.note_peaks(devices.cuda_peaks(self.device), "evaluation_")
        return found

    def _test_last_and_best(self) -> None:
        """Test the last weights and, if they are not the same, the best ones, which the model has from then on."""
        result, best, every = self.result, self.result.best(), np.arange(len(self.splits["test"]))
        last, _ = self._evaluate("test", every)
        outcomes = last
        if best.step != self.total_steps:
            self.model.load_state_dict(result.best_weights)
            outcomes, _ = self._evaluate("test", every)
        result.quality = Quality(
            test_accuracy=float(outcomes.mean()),
            test_examples=len(every),
            correct=pack_bits(outcomes),
            dev_accuracy=best.dev_accuracy,
            dev_step=best.step,
            dev_examples=len(self.dev_indices),
            dev_subset=hashlib.sha256(self.dev_indices.tobytes()).hexdigest()[:8],
            last_dev_accuracy=result.history[-1].dev_accuracy,
            last_test_accuracy=float(last.mean()),
        )

    def _measure_memory(self) -> None:
        """After the first step, when the optimiser has its moments. Untimed; changes nothing.

        CPU: one extra pass of training and one of evaluation, each on the longest texts. CUDA's allocator counts by
        itself in every step; what the first one took is forgotten here.
        """
        devices.cuda_peaks(self.device)
        if devices.is_cuda(self.device) or "peak_bytes" in self.result.peaks:  # measured before this process
            return

        def longest(split: str) -> Indices:  # repeated where there are fewer than a batch
            return np.resize(np.argsort(-self.splits[split].lengths, kind="stable"), self.batch_size)

        before = copy.deepcopy(self.model.state_dict())  # running averages move with each pass
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        state = [*self.model.parameters(), *self.model.buffers(), *moments]
        batch = next(self._feed("train", [longest("train")]))
        train = devices.peak_bytes(self.device, state, lambda: self._gradient(*batch))
        self.optimizer.zero_grad()
        test = devices.peak_bytes(self.device, state, lambda: self._outcomes("dev", longest("dev")))
        self.result.note_peaks({"peak_bytes": train, "evaluation_peak_bytes": test})
        self.model.load_state_dict(before)

    def _seconds_left(self) -> tuple[float, float]:
        """Of training and of evaluation. Until one was timed, evaluating an example takes a third of training on it."""
        a_step, history = self.result.mean_step(), self.result.history
        an_example = self.example_seconds or a_step / self.batch_size / 3
        evaluations = -(-self.total_steps // self.evaluate_every) - len(history)
        examples = evaluations * len(self.dev_indices) + 2 * len(self.splits["test"])  # best weights and last ones
        return (self.total_steps - len(self.result.losses)) * a_step, examples * an_example

    def _status(self) -> str:
        """Step, loss (mean since the last evaluation), skipped steps, dev accuracy, steps/s, memory, time left."""
        result = self.result
        parts = [f"step {len(result.losses):>6,}/{self.total_steps:,}", f"loss {result.recent_loss():.4f}"]
        if skipped := result.skipped_steps:
            parts.append(f"{skipped:,} step{'s' * (skipped > 1)} skipped")
        if result.history:
            parts.append(f"dev accuracy {result.history[-1].dev_accuracy:6.2%}")
        rate = 1 / result.mean_step()
        parts.append(f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
        if peak := result.peaks.get("peak_bytes"):
            parts.append(mebibytes(peak))
        return "  ".join([*parts, f"{duration(sum(self._seconds_left()))} left"])

    def _state(self) -> State:
        """All that a later process needs. The sampler's state is the number of steps."""
        result = self.result
        result.note_peaks({"resident_peak_bytes": devices.resident_peak()})
        self.clock.book("pause")
        return {name: getattr(self, name).state_dict() for name in STATEFUL} | {
            "step": len(result.losses),
            "random": devices.random_state(self.device),
            "rate": self.rate,
            "losses": torch.tensor(result.losses, dtype=torch.float64),
            "step_seconds": torch.tensor(result.step_seconds, dtype=torch.float64),
            "seconds": dict(result.seconds),
            "skipped": (result.skipped_steps, result.skipped_in_a_row),
            "peaks": result.peaks,
            "history": [point.model_dump() for point in result.history],
            "best_weights": result.best_weights,
        }

    def _load(self, saved: State) -> None:
        """Go on from what `_state` returned."""
        for name in STATEFUL:
            getattr(self, name).load_state_dict(saved[name])
        devices.set_random_state(self.device, saved["random"])
        self.rate, self.scale = saved["rate"], self.scaler.get_scale()
        result = self.result
        result.skipped_steps, result.skipped_in_a_row = saved.get("skipped", (0, 0))  # older checkpoints do not say
        result.losses, result.step_seconds = saved["losses"].tolist(), saved["step_seconds"].tolist()
        result.seconds.update(saved["seconds"])
        result.peaks, result.best_weights = saved["peaks"], saved["best_weights"]
        result.history = [Point(**point) for point in saved["history"]]
