"""Dropout with cheap random numbers on the CPU, where drawing them is much of a training step (docs/log.md)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LEVELS = 2**16  # 16 random bits decide on an element; torch draws 64 at a time, and only one element from them


class Dropout(nn.Module):
    """While training, zero each element with probability p (rounded to 2^-16) and scale the others to keep the mean."""

    def __init__(self, p: float):
        super().__init__()
        self.dropped = round(p * LEVELS)
        if not 0 <= self.dropped < LEVELS:
            raise ValueError(f"dropout={p!r} must be at least 0 and below 1")
        self.p = p
        self.scale = LEVELS / (LEVELS - self.dropped)

    def forward(self, x: Tensor) -> Tensor:
        # Fused and fast on a GPU. In evaluation, too: torch.compile would give up on a forward that does nothing.
        if not x.is_cpu or torch.compiler.is_compiling():
            return F.dropout(x, self.p, self.training)
        if not self.p or not self.training:
            return x
        return _Scaled.apply(x, self.keep(x.shape), self.scale)

    def keep(self, shape: torch.Size) -> Tensor | None:
        """1 for each element that stays and 0 for the others, in bytes on the CPU; None: all stay.

        The seed comes from torch's own generator, which so remains the only state; the bits come from numpy's fastest.
        numpy compares ten times as fast as torch here, and torch reads bytes seven times as fast as booleans.
        """
        if not self.p or not self.training:
            return None
        seed, size = int(torch.randint(2**63 - 1, ())), shape.numel()
        bits = np.asarray(np.random.SFC64(seed).random_raw(-(-size // 4))).view(np.uint16)[:size]
        return torch.from_numpy((bits >= self.dropped).view(np.uint8)).view(shape)


class _Scaled(torch.autograd.Function):
    """x, scaled where `keep` is 1 and zero elsewhere. One byte an element is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return keep.to(x.dtype).mul_(scale).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return keep.to(grad.dtype).mul_(ctx.scale).mul_(grad), None, None
