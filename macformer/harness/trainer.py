"""Training for LRA: batches of one size, texts with one label, accuracy. The loop itself is in loop.py.

Knows no model and no task by name.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from macformer.harness import device as devices
from macformer.harness.device import Precision
from macformer.harness.loop import Arrays, Look, Loop, Rate, Tensors, WarmUp
from macformer.harness.record import Point, Quality, Record, pack_bits

Indices = NDArray[np.int64]
Outcome = tuple[NDArray[np.bool_], float]  # which examples are right, and the mean loss


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
    @property
    def majority(self) -> float: ...
    def order(self, batch_size: int, seed: int, bucket: bool) -> Order: ...


class Trainer(Loop):
    """The loop (its docstring has the keys that are not here) over `warmup_steps` and `steps` batches.

    pad="full" pads every batch to the task's length, as the base code does; "trim" to its longest text (rounded up),
    which changes no output. `bucket` puts texts of like length into one batch.
    Dev accuracy is taken on the same `dev_examples` examples always.
    """

    record = Record

    def __init__(
        self,
        warmup_steps: WarmUp,
        steps: PositiveInt,
        batch_size: PositiveInt,
        learning_rate: Rate,
        evaluate_every: PositiveInt,
        dev_examples: PositiveInt | Literal["all"],
        cycle_momentum: bool,
        pad: Literal["full", "trim"],
        bucket: bool,
        accumulate: PositiveInt = 1,
        precision: Precision = "float32",
        tf32: bool = False,
        compile: bool = False,
        checkpoint_every: PositiveInt = 200,
        telemetry: bool = False,
    ):
        super().__init__(
            warmup_steps=warmup_steps,
            total_steps=warmup_steps + steps,
            learning_rate=learning_rate,
            evaluate_every=evaluate_every,
            cycle_momentum=cycle_momentum,
            accumulate=accumulate,
            precision=precision,
            tf32=tf32,
            compile=compile,
            checkpoint_every=checkpoint_every,
            telemetry=telemetry,
        )
        if accumulate > batch_size:
            raise ValueError(f"accumulate={accumulate} must be at most batch_size={batch_size}: a part has an example")
        self.batch_size = batch_size
        self.dev_examples = dev_examples
        self.trim = pad == "trim"
        self.bucket = bucket

    def goal(self, task: Task, seed: int) -> "Accuracy":
        return Accuracy(self, task, seed)

    @property
    def smaller(self) -> str:
        return f"lower trainer.batch_size={self.batch_size}"


class Accuracy:
    """The right label for as many texts as possible."""

    point = Point

    def __init__(self, settings: Trainer, task: Task, seed: int):
        self.splits, self.majority = task.splits, task.majority
        self.order = task.order(settings.batch_size, seed, settings.bucket)
        self.trim, self.batch_examples = settings.trim, settings.batch_size
        # The same dev examples in every run, whatever its seed.
        dev = len(task.splits["dev"])
        wanted = dev if settings.dev_examples == "all" else settings.dev_examples
        self.dev_indices = np.sort(np.random.default_rng(0).permutation(dev)[:wanted])
        self.dev_examples, self.test_examples = len(self.dev_indices), len(task.splits["test"])

    def batch(self, step: int) -> Arrays:
        return self.splits["train"].batch(self.order.indices(step), self.trim)

    def longest(self) -> Arrays:
        train = self.splits["train"]
        return train.batch(self._longest_of(train), self.trim)

    def _longest_of(self, split: Split) -> Indices:
        return np.resize(np.argsort(-split.lengths, kind="stable"), self.batch_examples)

    def glimpse(self) -> Arrays:
        return self.splits["dev"].batch(self.dev_indices[: self.batch_examples], self.trim)

    def loss(self, model: nn.Module, part: Tensors, whole: Tensors) -> Tensor:
        ids, labels = part
        return F.cross_entropy(model(ids).float(), labels) * (len(labels) / len(whole[1]))

    def dev(self, look: Look) -> dict[str, Any]:
        outcomes, loss = self._evaluate(look, "dev", self.dev_indices)
        return {"dev_loss": loss, "dev_accuracy": float(outcomes.mean())}

    def rehearse(self, look: Look, longest: bool) -> int:
        dev = self.splits["dev"]
        by_length = self.dev_indices[np.argsort(dev.lengths[self.dev_indices], kind="stable")]
        about_four_batches = by_length[:: -(-len(by_length) // (4 * self.batch_examples))]
        some = self._longest_of(dev) if longest else about_four_batches
        self._evaluate(look, "dev", some)
        return len(some)

    def test(self, look: Look) -> Outcome:
        return self._evaluate(look, "test", np.arange(self.test_examples))

    def _evaluate(self, look: Look, split: str, indices: Indices) -> Outcome:
        return evaluate(
            look.model,
            self.splits[split],
            indices,
            self.batch_examples,
            look.device,
            self.trim,
            look.precision,
            look.tick,
        )

    def told(self, outcome: Outcome) -> str:
        outcomes, loss = outcome
        return (
            f"test accuracy {outcomes.mean():.2%} of {len(outcomes):,} (majority class {self.majority:.2%}), "
            f"loss {loss:.4f}"
        )

    def quality(self, history: list[Point], best: Point, outcome: Outcome, last: Outcome) -> Quality:
        return Quality(
            test_accuracy=float(outcome[0].mean()),
            test_examples=self.test_examples,
            correct=pack_bits(outcome[0]),
            dev_accuracy=best.dev_accuracy,
            dev_step=best.step,
            dev_examples=self.dev_examples,
            dev_subset=hashlib.sha256(self.dev_indices.tobytes()).hexdigest()[:8],
            last_dev_accuracy=history[-1].dev_accuracy,
            last_test_accuracy=float(last[0].mean()),
        )


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    split: Split,
    indices: Indices,
    batch_size: int,
    device: torch.device,
    trim: bool,
    precision: Precision = "float32",
    tick: Callable[[int], None] = lambda done: None,
) -> tuple[NDArray[np.bool_], float]:
    """Which of the examples the model gets right, in the order of `indices`, and the mean loss.

    `tick` is told before each batch how many examples are done.
    """
    model.eval()
    by_length = np.argsort(split.lengths[indices], kind="stable")  # so that trimming pays
    batches = [by_length[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    right: list[Tensor] = []
    losses: list[Tensor] = []
    for ids, labels in devices.feed(device, (split.batch(indices[places], trim) for places in batches)):
        tick(len(right) * batch_size)
        with devices.autocast(device, precision):
            logits = model(ids).float()
        right.append(logits.argmax(-1) == labels)
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
    model.train()
    outcomes = np.empty(len(indices), bool)
    outcomes[by_length] = torch.cat(right).cpu().numpy()
    return outcomes, float(torch.stack(losses).double().sum()) / len(indices)
