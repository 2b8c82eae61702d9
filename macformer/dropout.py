"""Dropout with cheap random numbers on the CPU, where drawing them is much of a training step (docs/log.md)."""

from torch import Tensor, empty, int16, int64, nn
from torch.nn import functional as F

LEVELS = 2**16  # 16 random bits decide on an element; torch draws 64 at a time, and only one element from them


class Dropout(nn.Module):
    """While training, zero each element with probability p (rounded to 2^-16) and scale the others to keep the mean."""

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout={p!r} must be at least 0 and below 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.p or not self.training:
            return x
        if x.is_cuda:  # fused and fast there
            return F.dropout(x, self.p)
        dropped = round(self.p * LEVELS)
        bits = empty(-(-x.numel() // 4), dtype=int64, device=x.device).random_(-(2**63), None)
        keep = bits.view(int16)[: x.numel()].view(x.shape) >= dropped - LEVELS // 2
        return x * keep.to(x.dtype).mul_(LEVELS / (LEVELS - dropped))
