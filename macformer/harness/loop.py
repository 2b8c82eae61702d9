"""The training loop: step, schedule, evaluation, best-by-dev, resume. Returns a plain result; knows no file.

What is learned, from which data, and what counts as good is a `Goal`: macformer/harness/trainer.py has that of LRA,
macformer/paper/translation.py that of translation. Knows no model, task or logger by name.
"""

import copy
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Protocol, Self, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from macformer.harness import device as devices
from macformer.harness.device import Account, Array, Precision
from macformer.harness.progress import Screen, duration, mebibytes
from macformer.harness.record import Evaluation, Memory, Part, Run, Status, Time

CLIP = 1.0  # gradients are clipped by value
EPS = 1e-6  # of AdamW
FORECAST = 20  # steps after which the end can be foretold
PATIENCE = 5.0  # seconds that a checkpoint may take, in which a second SIGINT does no harm
DRY_SECONDS = 60.0  # a dry run takes FORECAST steps, or fewer if they take longer than this
# What the configuration is checked for.
WarmUp = Annotated[int, Field(ge=2)]  # the schedule counts the steps between its first and its peak
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Arrays = tuple[Array, ...]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Look:
    """What an evaluation needs besides its data. `tick` is told now and then how many examples are done."""

    model: nn.Module
    device: torch.device
    precision: Precision
    tick: Callable[[int], None] = lambda done: None


class Goal(Protocol):
    """What is learned and how it is judged, with the data that belong to it."""

    batch_examples: int  # of a training step, about
    dev_examples: int
    test_examples: int

    @property
    def point(self) -> type[Evaluation]:
        """What an evaluation on dev becomes."""

    def batch(self, step: int) -> Arrays:
        """Of training, at step 0, 1, ..."""

    def longest(self) -> Arrays:
        """The batch of training that takes most memory."""

    def glimpse(self) -> Arrays:
        """A batch of dev examples, for telemetry."""

    def loss(self, model: nn.Module, part: Tensors, whole: Tensors) -> Tensor:
        """What `part` of the batch `whole` adds to its mean loss."""

    def dev(self, look: Look) -> dict[str, Any]:
        """The fields of `point` that say how well the model does."""

    def rehearse(self, look: Look, longest: bool) -> int:
        """Evaluate a batch of the longest dev examples, or some of all lengths; returns how many."""

    def test(self, look: Look) -> Any:
        """How well the model does on the whole test split."""

    def told(self, outcome: Any) -> str:
        """What `test` found, for a person."""

    def quality(self, history: list[Any], best: Any, outcome: Any, last: Any) -> Part:
        """Of the record: the test's outcome with the weights of the `best` point, and with the last ones."""


@dataclass
class Result:
    """What a run has so far; down to the best weights, it goes into the checkpoint."""

    losses: list[float] = field(default_factory=list)  # one a step
    step_seconds: list[float] = field(default_factory=list)  # waiting for data included
    seconds: dict[Account, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)  # bytes, by the fields of Memory
    history: list[Any] = field(default_factory=list)  # points of the goal's kind
    best_weights: dict[str, Any] | None = None
    quality: Any = None  # of the goal's kind
    time: Time | None = None
    memory: Memory | None = None
    status: Status = "ok"
    message: str = ""
    signal: int = 0  # that came, perhaps too late to interrupt it

    def best(self) -> Any:
        """The point that is best on dev; the earliest of equals."""
        return max(self.history, key=lambda point: point.merit)


@dataclass
class Forecast:
    """What a run would cost, from a few steps of it."""

    measured_steps: int
    step_seconds: float
    train_seconds: float
    evaluation_seconds: float
    memory: Memory


class Diverged(Exception):
    """A loss is not finite."""


class CannotRun(Exception):
    """torch.compile does not work here, or saved weights do not fit the code: one sentence."""


class OutOfMemory(Exception):
    """One sentence on what to lower."""

    status: Status = "oom"


class Stopped(Exception):
    """SIGINT or SIGTERM came, and the loop is between two steps or in an evaluation, where nothing is half done."""


class Stop:
    """While entered, SIGINT and SIGTERM are but a request, which `check` raises; a later SIGINT acts at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.asked = math.inf

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()  # no other may set handlers
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if here}
        for number, handler in list(self.before.items()):
            if callable(handler) and handler is not signal.default_int_handler:
                del self.before[number]  # somebody else's: submitit's jobs go on after SIGTERM
        for number in self.before:
            signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and time.monotonic() - self.asked > PATIENCE:
            raise KeyboardInterrupt
        self.signal = self.signal or number
        self.asked = min(self.asked, time.monotonic())

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self.signal:
            raise Stopped


class Loop(ABC):
    """AdamW under a linear one-cycle schedule: `warmup_steps` up, the others down. Its children add the goal.

    accumulate=K takes a batch in K parts, one after the other: less memory, the same gradient.
    `precision`: float32, or mixed with bfloat16 or float16 (and a loss scaler); "auto": float16 on CUDA, else float32.
    Every `evaluate_every` steps and at the end the model is evaluated on dev. The weights that are best there (the
    earliest of equals) are tested on the whole test split; so are the last.
    Modules with a `redraw` are told of each step (`step()`): it is time for a new draw then, or not.
    `telemetry`: at each evaluation, every module that has a method of that name is asked about a batch of dev texts.
    """

    record: ClassVar[type[Run]]  # what a run becomes

    def __init__(
        self,
        warmup_steps: int,
        total_steps: int,
        learning_rate: float,
        evaluate_every: int,
        cycle_momentum: bool,
        accumulate: int,
        precision: Precision,
        tf32: bool,
        compile: bool,
        checkpoint_every: int,
        telemetry: bool,
    ):
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.learning_rate = learning_rate
        self.evaluate_every = evaluate_every
        self.cycle_momentum = cycle_momentum
        self.accumulate = accumulate
        self.precision = precision
        self.tf32 = tf32
        self.compile = compile
        self.checkpoint_every = checkpoint_every
        self.telemetry = telemetry

    @abstractmethod
    def goal(self, task: Any, seed: int) -> Goal:
        """What a run of that seed learns from these data."""

    @property
    @abstractmethod
    def smaller(self) -> str:
        """What to do for smaller batches, where memory is short."""

    def fit(
        self,
        model: nn.Module,
        task: Any,
        device: torch.device,
        seed: int,
        save: Callable[[dict[str, Any]], None] | None = None,
        saved: dict[str, Any] | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> Result:
        """Train `model` on `device` and test it. A failure is a result with its status, not an exception.

        `save` gets the state of the run every `checkpoint_every` steps, at evaluations and when it is asked to stop;
        `saved` is such a state, to go on from. `log` gets each point of the history.
        """
        result = Result()
        with Stop() as stop:
            try:
                with self.plainly():
                    run = _Training(self, model, self.goal(task, seed), device, result, stop, save, log)
                    if saved:
                        run.load(saved)
                    try:
                        run.train()
                        run.test()
                    finally:
                        run.close()
            except Diverged as error:
                result.status, result.message = "diverged", str(error)
            except OutOfMemory as error:
                result.status, result.message = "oom", f"after {len(result.losses):,} steps, {error}"
            except (Stopped, KeyboardInterrupt) as error:
                cause = stop.signal if isinstance(error, Stopped) else signal.SIGINT
                result.status = "interrupted"
                result.message = f"{signal.Signals(cause).name} after {len(result.losses):,} steps"
                stop.signal = cause
        result.signal = stop.signal
        return result

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """What goes wrong inside for a reason that one can do something about is said in one sentence."""
        try:
            yield
        except Exception as error:
            if self.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                reason = str(error).strip().partition("\n")[0]
                raise CannotRun(f"trainer.compile=true does not work here ({reason}): leave it out") from error
            if devices.is_out_of_memory(error):
                raise OutOfMemory(
                    f"out of memory: raise trainer.accumulate={self.accumulate} (the same batch in more parts) "
                    f"or {self.smaller}"
                ) from error
            raise

    def forecast(
        self, model: nn.Module, task: Any, device: torch.device, seed: int, patience: float = DRY_SECONDS
    ) -> Forecast:
        """Take a few steps from all over the schedule, and evaluate a few batches, to say what the whole would cost.

        After `patience` seconds of steps, but for the first, there are no more of them.
        """
        goal = self.goal(task, seed)
        run = _Training(self, model, goal, device, Result(), Stop())
        count = min(FORECAST + 1, self.total_steps)
        feed = run.feed(np.linspace(0, self.total_steps - 1, count).astype(int).tolist())
        while len(run.result.losses) < count and sum(run.result.step_seconds[1:]) < patience:
            run.step(feed)
        seconds = run.result.step_seconds[1:]  # the first one warms up
        run.note_cuda_peaks("peak_bytes", "reserved_bytes")
        run.clock.book("pause")
        evaluated = goal.rehearse(run.look(), longest=False)
        an_example = run.clock.book("evaluation") / evaluated
        run.close()
        assert run.result.memory
        return Forecast(
            measured_steps=len(seconds),
            step_seconds=float(np.mean(seconds)),
            train_seconds=float(np.mean(seconds)) * self.total_steps,
            evaluation_seconds=an_example * run.examples_to_evaluate(0),
            memory=run.result.memory,
        )

    def due(self, step: int) -> bool:
        """Is this a step after which there is an evaluation?"""
        return step == self.total_steps or (step > 0 and step % self.evaluate_every == 0)


class _Training:
    """One training, from its first step or from a saved state to its end."""

    def __init__(
        self,
        settings: Loop,
        model: nn.Module,
        goal: Goal,
        device: torch.device,
        result: Result,
        stop: Stop,
        save: Callable[[dict[str, Any]], None] | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.settings = settings
        self.device = device
        self.precision = devices.choose_precision(settings.precision, device)
        self.goal = goal
        self.stop, self.write, self.log = stop, save, log
        self.model = model.to(device)
        if settings.compile:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), settings.learning_rate, eps=EPS, weight_decay=0, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            settings.learning_rate,
            total_steps=settings.total_steps,
            pct_start=settings.warmup_steps / settings.total_steps,
            anneal_strategy="linear",
            cycle_momentum=settings.cycle_momentum,
        )
        self.scaler = devices.scaler(device, self.precision)
        self.redrawn: list[Any] = [module for module in model.modules() if getattr(module, "redraw", None)]
        self.rate = 0.0
        self.result = result
        self.screen = Screen()
        self.fresh = True  # this process has not taken a step yet
        self.clock = devices.Clock(device, self.result.seconds)

    def train(self) -> None:
        result, settings = self.result, self.settings
        feed = self.feed(range(len(result.losses), settings.total_steps))
        try:
            while True:
                step = len(result.losses)
                if settings.due(step) and self.evaluated() < step:
                    self.evaluate_dev()
                    self.save()
                if step == settings.total_steps:
                    return
                self.stop.check()
                self.step(feed)
                step += 1
                _check_finite("the loss", result.losses[-1], step)
                if step == FORECAST and step < settings.total_steps:
                    left = self.seconds_left()
                    end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
                    self.screen.line(f"expected end: {end}, in {duration(left)}")
                self.screen.live(self.line)
                if step % settings.checkpoint_every == 0 or settings.due(step):
                    self.note_cuda_peaks("peak_bytes", "reserved_bytes")
                    self.save()
        except Stopped:
            self.save()
            raise

    def feed(self, steps: Iterable[int]) -> Iterator[tuple[Tensor, ...]]:
        return devices.feed(self.device, (self.goal.batch(step) for step in steps))

    def step(self, feed: Iterator[tuple[Tensor, ...]]) -> None:
        """The next batch, its gradient, one step of the optimiser."""
        self.clock.book("pause")
        batch = next(feed)
        waited = self.clock.book("data_wait")
        loss = self.gradient(batch)
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
        if self.fresh:
            self.measure_memory()
            self.fresh = False

    def gradient(self, batch: Tensors) -> Tensor:
        """Of the mean loss, which is returned; part by part."""
        total = torch.zeros((), device=self.device)
        for part in zip(*(tensor.chunk(self.settings.accumulate) for tensor in batch), strict=True):
            with devices.autocast(self.device, self.precision):
                loss = self.goal.loss(self.model, part, batch)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def look(self, examples: int = 0) -> Look:
        """For an evaluation of that many examples, which shows its progress and can be stopped; 0: it cannot."""

        def tick(done: int) -> None:
            self.stop.check()
            self.screen.live(lambda: f"evaluating: {done:,} of {examples:,} examples")

        look = Look(self.model, self.device, self.precision)
        return replace(look, tick=tick) if examples else look

    def evaluate_dev(self) -> None:
        """A point of the history, and the best weights so far."""
        result, goal = self.result, self.goal
        step = len(result.losses)
        self.clock.book("pause")
        found = goal.dev(self.look(goal.dev_examples))
        self.clock.book("evaluation")
        self.note_cuda_peaks("evaluation_peak_bytes", "evaluation_reserved_bytes")
        _check_finite("the dev loss", found["dev_loss"], step)
        point = goal.point(
            step=step,
            train_loss=float(np.mean(result.losses[self.evaluated() :])),
            learning_rate=self.rate,
            train_seconds=sum(result.step_seconds),
            **found,
        )
        if self.settings.telemetry:
            batch = next(devices.feed(self.device, [goal.glimpse()]))
            point.telemetry = observe(self.model, lambda: goal.loss(self.model, batch, batch))
        result.history.append(point)
        if result.best() is point:
            result.best_weights = {  # not on a GPU, whose memory is measured
                name: value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in self.model.state_dict().items()
            }
        self.screen.line(self.line())
        for name, value in point.telemetry.items():
            self.screen.line(f"  {name} {value:.4g}")
        if self.log:
            self.log(point.model_dump(exclude={"telemetry"}) | point.telemetry)

    def evaluated(self) -> int:
        """The step of the last evaluation."""
        return self.result.history[-1].step if self.result.history else 0

    def test(self) -> None:
        """The last weights and, if they are not the same, the best ones, which the model has from then on."""
        result, goal = self.result, self.goal
        best = result.best()
        self.clock.book("pause")
        outcome = last = goal.test(self.look(goal.test_examples))
        if best.step != self.settings.total_steps:
            load_weights(self.model, cast(dict[str, Any], result.best_weights))
            outcome = goal.test(self.look(goal.test_examples))
        self.clock.book("evaluation")
        self.note_cuda_peaks("evaluation_peak_bytes", "evaluation_reserved_bytes")
        result.quality = goal.quality(result.history, best, outcome, last)

    def save(self) -> None:
        """Hand over all that a later process needs. The sampler's state is the number of steps."""
        if not self.write:
            return
        result = self.result
        self.note_resident_peak()
        self.clock.book("pause")
        self.write(
            {
                "step": len(result.losses),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "scaler": self.scaler.state_dict(),
                "random": devices.random_state(self.device),
                "rate": self.rate,
                "losses": torch.tensor(result.losses, dtype=torch.float64),
                "step_seconds": torch.tensor(result.step_seconds, dtype=torch.float64),
                "seconds": dict(result.seconds),
                "peaks": result.peaks,
                "history": [point.model_dump() for point in result.history],
                "best_weights": result.best_weights,
            }
        )

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what `save` handed over."""
        load_weights(self.model, saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.scaler.load_state_dict(saved["scaler"])
        devices.set_random_state(self.device, saved["random"])
        self.rate = saved["rate"]
        self.result.losses = saved["losses"].tolist()
        self.result.step_seconds = saved["step_seconds"].tolist()
        self.result.seconds.update(saved["seconds"])
        self.result.peaks = saved["peaks"]
        self.result.history = [self.goal.point(**point) for point in saved["history"]]
        self.result.best_weights = saved["best_weights"]

    def measure_memory(self) -> None:
        """After the first step, when the optimiser has its moments. Untimed; changes nothing.

        CPU: one extra pass of training and one of evaluation, each on the longest texts. CUDA's allocator counts by
        itself in every step; what the first one took is forgotten here.
        """
        if devices.is_cuda(self.device):
            devices.cuda_peaks(self.device)
            return
        if "peak_bytes" in self.result.peaks:  # measured before this process
            return
        before = copy.deepcopy(self.model.state_dict())  # running averages move with each pass
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        state = [*self.model.parameters(), *self.model.buffers(), *(t for t in moments if isinstance(t, Tensor))]

        def train() -> None:
            self.gradient(next(devices.feed(self.device, [self.goal.longest()])))
            self.optimizer.zero_grad()

        def evaluate() -> None:  # nothing may stop it: the weights are to be as they were
            self.goal.rehearse(self.look(), longest=True)

        for name, work in (("peak_bytes", train), ("evaluation_peak_bytes", evaluate)):
            self.result.peaks[name] = devices.peak_bytes(self.device, state, work)
        self.model.load_state_dict(before)

    def note_cuda_peaks(self, allocated: str, reserved: str) -> None:
        """The allocator's peaks since they were last noted, under these fields of Memory."""
        if devices.is_cuda(self.device):
            for name, value in zip((allocated, reserved), devices.cuda_peaks(self.device), strict=True):
                self.result.peaks[name] = max(value, self.result.peaks.get(name, 0))

    def note_resident_peak(self) -> None:
        if resident := devices.resident_peak():
            self.result.peaks["resident_peak_bytes"] = max(resident, self.result.peaks.get("resident_peak_bytes", 0))

    def seconds_left(self) -> float:
        """From the mean step and evaluation; before the first of these, a forward pass counts as a third of a step."""
        result = self.result
        evaluated = len(result.history) * self.goal.dev_examples
        an_example = self.a_step() / self.goal.batch_examples / 3
        if evaluated:
            an_example = result.seconds["evaluation"] / evaluated
        left = self.settings.total_steps - len(result.losses)
        return left * self.a_step() + self.examples_to_evaluate(len(result.losses)) * an_example

    def a_step(self) -> float:
        """Mean seconds of the last steps, the slow first one left out."""
        return float(np.mean(self.result.step_seconds[1:][-1000:] or self.result.step_seconds))

    def examples_to_evaluate(self, done: int) -> int:
        """After `done` steps: dev examples as often as they are due, and the test split for the best and the last."""
        steps = range(done + 1, self.settings.total_steps + 1)
        return sum(map(self.settings.due, steps)) * self.goal.dev_examples + 2 * self.goal.test_examples

    def line(self) -> str:
        """Step, loss (mean since the last evaluation), how well on dev, steps/s, memory, time left."""
        result, step = self.result, len(self.result.losses)
        loss = result.history[-1].train_loss if self.evaluated() == step else np.mean(result.losses[self.evaluated() :])
        parts = [f"step {step:>6,}/{self.settings.total_steps:,}", f"loss {loss:.4f}"]
        if result.history:
            parts.append(f"{self.goal.point.measure()} {result.history[-1].shown}")
        rate = 1 / self.a_step()
        parts.append(f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
        if peak := result.peaks.get("peak_bytes"):
            parts.append(mebibytes(peak))
        return "  ".join([*parts, f"{duration(self.seconds_left())} left"])

    def close(self) -> None:
        """Time and memory, of a failed run too."""
        result, seconds = self.result, self.result.step_seconds
        self.screen.close()
        self.clock.book("pause")
        if not seconds:
            return
        p10, p50, p90 = np.percentile(seconds, [10, 50, 90]).tolist()
        result.time = Time(
            train_seconds=sum(seconds),
            warmup_seconds=sum(seconds[: self.settings.warmup_steps]),
            data_wait_seconds=result.seconds["data_wait"],
            evaluation_seconds=result.seconds.get("evaluation", 0.0),
            pause_seconds=result.seconds["pause"],
            step_p10=p10,
            step_p50=p50,
            step_p90=p90,
        )
        self.note_resident_peak()
        if "peak_bytes" in result.peaks:
            how = (
                "CUDA allocator's peaks over all steps but the first of a process"
                if devices.is_cuda(self.device)
                else "peak of live tensor bytes (allocator events) in one extra pass on the longest batch"
            )
            result.memory = Memory(**result.peaks, method=how)


def load_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # the code has changed since
        raise CannotRun("the checkpoint's weights do not fit this code: train again without it") from error


@torch.inference_mode()
def observe(model: nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """What the modules with a `telemetry` method say about their inputs in one evaluation pass, by module name."""
    found: dict[str, float] = {}

    def ask(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            told = cast(Callable[..., dict[str, float]], module.telemetry)(*args, **kwargs)
            found.update(
                {f"{name}.{key}": value for key, value in told.items() if math.isfinite(value)}
            )  # JSON has no NaN

        return hook

    watched = [(name, module) for name, module in model.named_modules() if hasattr(module, "telemetry")]
    hooks = [module.register_forward_pre_hook(ask(name), with_kwargs=True) for name, module in watched]
    model.eval()
    forward()
    model.train()
    for hook in hooks:
        hook.remove()
    return found


def _check_finite(name: str, loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"{name} is {loss} at step {step}: lower task.learning_rate")
