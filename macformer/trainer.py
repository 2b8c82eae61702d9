"""The training loop: step, schedule, evaluation, best-by-dev. Returns a plain result; writes nothing.

Knows no model, task or logger by name.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from macformer import device as devices
from macformer.check import whole
from macformer.record import Memory, Point, Quality, Status, Time, pack_bits

CLIP = 1.0  # gradients are clipped by value
EPS = 1e-6  # of AdamW
Indices = NDArray[np.int64]


class Split(Protocol):
    def __len__(self) -> int: ...
    @property
    def lengths(self) -> Indices: ...
    def batch(self, indices: Indices, trim: bool) -> tuple[NDArray[np.int32], Indices]: ...


class Order(Protocol):
    def indices(self, step: int) -> Indices: ...


class Task(Protocol):
    @property
    def splits(self) -> Mapping[str, Split]: ...
    def order(self, batch_size: int, seed: int, bucket: bool) -> Order: ...


@dataclass
class Result:
    status: Status = "ok"
    message: str = ""
    losses: list[float] = field(default_factory=list)  # one a step
    history: list[Point] = field(default_factory=list)
    quality: Quality | None = None
    time: Time | None = None
    memory: Memory | None = None


class Diverged(Exception):
    pass


class Trainer:
    """AdamW under a linear one-cycle schedule: `warmup_steps` up, `steps` down.

    pad="full" pads every batch to the task's length, as the base code does; "trim" to its longest text (rounded up),
    which changes no output. `bucket` puts texts of like length into one batch.
    Dev accuracy is taken every `evaluate_every` steps and at the end, always on the same `dev_examples` examples.
    The weights with the best dev accuracy (the earliest of equals) are tested on the whole test split.
    Modules with a `redraw` are told of each step (`step()`): it is time for a new draw then, or not.
    `telemetry`: at each evaluation, every module that has a method of that name is asked about a batch of dev texts.
    """

    def __init__(
        self,
        warmup_steps: int,
        steps: int,
        batch_size: int,
        learning_rate: float,
        evaluate_every: int,
        dev_examples: int,
        cycle_momentum: bool,
        pad: Literal["full", "trim"],
        bucket: bool,
        telemetry: bool = False,
    ):
        whole(steps=steps, batch_size=batch_size, evaluate_every=evaluate_every, dev_examples=dev_examples)
        whole(at_least=2, warmup_steps=warmup_steps)  # the schedule counts the steps between its first and its peak
        if not 0 < learning_rate < math.inf:
            raise ValueError(f"learning_rate={learning_rate!r} must be above 0 and finite")
        self.warmup_steps = warmup_steps
        self.total_steps = warmup_steps + steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.evaluate_every = evaluate_every
        self.dev_examples = dev_examples
        self.cycle_momentum = cycle_momentum
        self.trim = pad == "trim"
        self.bucket = bucket
        self.telemetry = telemetry

    def fit(
        self,
        model: nn.Module,
        task: Task,
        device: torch.device,
        seed: int,
        log: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Result:
        """Train `model` on `device` and test it. A failure is a result with its status, not an exception."""
        result = Result()
        try:
            self._fit(model.to(device), task, device, seed, log, result)
        except Diverged as error:
            result.status, result.message = "diverged", str(error)
        except KeyboardInterrupt:
            result.status, result.message = "interrupted", f"stopped after {len(result.losses)} steps"
        except Exception as error:
            if not devices.is_out_of_memory(error):
                raise
            result.status = "oom"
            result.message = f"out of memory after {len(result.losses)} steps: lower trainer.batch_size"
        return result

    def _fit(
        self,
        model: nn.Module,
        task: Task,
        device: torch.device,
        seed: int,
        log: Callable[[dict[str, Any]], Any] | None,
        result: Result,
    ) -> None:
        train, dev, test = (task.splits[name] for name in ("train", "dev", "test"))
        optimizer, schedule = self._optimizer(model)
        order = task.order(self.batch_size, seed, self.bucket)
        batches = (train.batch(order.indices(step), self.trim) for step in range(self.total_steps))
        feed = devices.feed(device, batches)
        # The same dev examples in every run, whatever its seed.
        dev_indices = np.sort(np.random.default_rng(0).permutation(len(dev))[: self.dev_examples])
        redrawn: list[Any] = [module for module in model.modules() if getattr(module, "redraw", None)]
        step_seconds: list[float] = []
        data_wait = evaluation_seconds = 0.0
        best_accuracy, best_step, best_weights, best = -1.0, 0, model.state_dict(), ""

        model.train()
        with tqdm(total=self.total_steps, unit="step", disable=None, mininterval=0.5) as bar:
            for step in range(1, self.total_steps + 1):
                begin = devices.now(device)
                ids, labels = next(feed)
                ready = devices.now(device)
                loss = F.cross_entropy(model(ids), labels)
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                for feature_map in redrawn:
                    feature_map.step()
                rate = float(schedule.get_last_lr()[0])
                schedule.step()
                result.losses.append(loss.item())
                step_seconds.append(devices.now(device) - begin)
                data_wait += ready - begin
                bar.update()
                _check_finite("the loss", result.losses[-1], step)
                if step == 1:
                    longest = np.resize(np.argsort(-train.lengths, kind="stable"), self.batch_size)
                    ids, labels = next(devices.feed(device, [train.batch(longest, self.trim)]))
                    result.memory = _measure_memory(model, optimizer, device, ids, labels)
                if step % self.evaluate_every and step != self.total_steps:
                    bar.set_postfix_str(f"loss {result.losses[-1]:.3f}{best}", refresh=False)
                    continue

                begin = devices.now(device)
                outcomes, dev_loss = evaluate(model, dev, dev_indices, self.batch_size, device, self.trim)
                evaluation_seconds += devices.now(device) - begin
                _check_finite("the dev loss", dev_loss, step)
                since = result.history[-1].step if result.history else 0
                point = Point(
                    step=step,
                    train_loss=float(np.mean(result.losses[since:])),
                    dev_loss=dev_loss,
                    dev_accuracy=float(outcomes.mean()),
                    learning_rate=rate,
                    train_seconds=sum(step_seconds),
                )
                if self.telemetry:
                    ids, _ = next(devices.feed(device, [dev.batch(dev_indices[: self.batch_size], self.trim)]))
                    point.telemetry = observe(model, ids)
                result.history.append(point)
                if point.dev_accuracy > best_accuracy:
                    best_accuracy, best_step = point.dev_accuracy, step
                    best_weights = copy.deepcopy(model.state_dict())
                    best = f", best dev accuracy {best_accuracy:.2%}"
                bar.write(self._line(point, (point.train_seconds + evaluation_seconds) / step))
                for name, value in point.telemetry.items():
                    bar.write(f"  {name} {value:.4g}")
                if log:
                    log(point.model_dump(exclude={"telemetry"}) | point.telemetry)

        begin = devices.now(device)
        everything = np.arange(len(test))
        last, _ = evaluate(model, test, everything, self.batch_size, device, self.trim)
        outcomes = last
        if best_step != self.total_steps:
            model.load_state_dict(best_weights)
            outcomes, _ = evaluate(model, test, everything, self.batch_size, device, self.trim)
        evaluation_seconds += devices.now(device) - begin
        result.quality = Quality(
            test_accuracy=float(outcomes.mean()),
            test_examples=len(outcomes),
            correct=pack_bits(outcomes),
            dev_accuracy=best_accuracy,
            dev_step=best_step,
            dev_examples=len(dev_indices),
            last_dev_accuracy=result.history[-1].dev_accuracy,
            last_test_accuracy=float(last.mean()),
        )
        p10, p50, p90 = np.percentile(step_seconds, [10, 50, 90]).tolist()
        result.time = Time(
            train_seconds=sum(step_seconds),
            warmup_seconds=sum(step_seconds[: self.warmup_steps]),
            data_wait_seconds=data_wait,
            evaluation_seconds=evaluation_seconds,
            step_p10=p10,
            step_p50=p50,
            step_p90=p90,
        )

    def _optimizer(self, model: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.OneCycleLR]:
        optimizer = torch.optim.AdamW(model.parameters(), self.learning_rate, eps=EPS, weight_decay=0)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            self.learning_rate,
            total_steps=self.total_steps,
            pct_start=self.warmup_steps / self.total_steps,
            anneal_strategy="linear",
            cycle_momentum=self.cycle_momentum,
        )

    def _line(self, point: Point, seconds_a_step: float) -> str:
        minutes, seconds = divmod(round((self.total_steps - point.step) * seconds_a_step), 60)
        return (
            f"step {point.step:>6,}/{self.total_steps:,}  loss {point.train_loss:.4f}  dev accuracy "
            f"{point.dev_accuracy:6.2%}  {1 / seconds_a_step:.1f} steps/s  {minutes}:{seconds:02} left"
        )


@torch.inference_mode()
def evaluate(
    model: nn.Module, split: Split, indices: Indices, batch_size: int, device: torch.device, trim: bool
) -> tuple[NDArray[np.bool_], float]:
    """Which of the examples the model gets right, in the order of `indices`, and the mean loss."""
    model.eval()
    outcomes = np.empty(len(indices), bool)
    loss = 0.0
    by_length = np.argsort(split.lengths[indices], kind="stable")  # so that trimming pays
    batches = [by_length[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    feed = devices.feed(device, (split.batch(indices[places], trim) for places in batches))
    for places, (ids, labels) in zip(batches, feed, strict=True):
        logits = model(ids)
        outcomes[places] = (logits.argmax(-1) == labels).cpu().numpy()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
    model.train()
    return outcomes, loss / len(indices)


@torch.inference_mode()
def observe(model: nn.Module, ids: Tensor) -> dict[str, float]:
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
    model(ids)
    model.train()
    for hook in hooks:
        hook.remove()
    return found


def _check_finite(name: str, loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"{name} is {loss} at step {step}: lower task.learning_rate")


def _measure_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, ids: Tensor, labels: Tensor
) -> Memory:
    """Peak of one forward and backward pass, parameters and optimiser included. Untimed; changes nothing."""
    before = copy.deepcopy(model).cpu().state_dict()  # running averages move with each pass

    def step() -> None:
        F.cross_entropy(model(ids), labels).backward()
        optimizer.zero_grad()

    moments = [value for state in optimizer.state.values() for value in state.values()]
    state = [*model.parameters(), *model.buffers(), *(t for t in moments if isinstance(t, Tensor)), ids]
    peak, method = devices.peak_bytes(device, state, step)
    model.load_state_dict(before)
    return Memory(peak_bytes=peak, method=method)
