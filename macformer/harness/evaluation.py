"""Accuracy and loss of a model on examples of a split, and telemetry. Knows no model and no task by name."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from macformer.harness import device as devices

Indices = NDArray[np.int64]
Outcomes = tuple[NDArray[np.bool_], float]  # which examples are right, and the mean loss


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    split: Any,
    indices: Indices,
    batch_size: int,
    device: torch.device,
    trim: bool,
    precision: devices.Precision = "float32",
    tick: Callable[[int], None] = lambda done: None,
) -> Outcomes:
    """Which of the examples the model gets right, in the order of `indices`, and the mean loss.

    `split` is like lra_data.base.Split. `tick` is called before each batch with the number of examples that are done.
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


@torch.inference_mode()
def observe(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Telemetry: ask each module that has a `telemetry` method about its inputs, in one evaluation pass.

    Returns module name and quantity -> value. What is not finite is left out: JSON has no NaN.
    """
    found: dict[str, float] = {}
    names = {module: name for name, module in model.named_modules() if hasattr(module, "telemetry")}

    def ask(module: nn.Module, args: Any, kwargs: Any) -> None:
        values = cast(Any, module).telemetry(*args, **kwargs).items()
        found.update({f"{names[module]}.{key}": value for key, value in values if math.isfinite(value)})

    hooks = [module.register_forward_pre_hook(ask, with_kwargs=True) for module in names]
    model.eval()
    model(ids)
    model.train()
    for hook in hooks:
        hook.remove()
    return found
