"""What attentions say about their inputs: each module that has a `telemetry` method is asked in one evaluation pass."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn


@torch.inference_mode()
def observe(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Module name and quantity -> value. What is not finite is left out: JSON has no NaN."""
    found: dict[str, float] = {}
    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "telemetry"):

            def ask(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                values = cast(Any, module).telemetry(*args, **kwargs).items()
                found.update({f"{name}.{key}": value for key, value in values if math.isfinite(value)})

            hooks.append(module.register_forward_pre_hook(ask, with_kwargs=True))
    model.eval()
    model(ids)
    model.train()
    for hook in hooks:
        hook.remove()
    return found
