"""Pre- and post-Scaling Batch Normalisation, the paper's Algorithm 1. Knows no attention.

Shapes: B batch, H heads, n length, d head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BEND = 1e-3  # below about this size post-SBN is a straight line: a finite slope at zero


class PreSBN(nn.Module):
    """Lines 1 and 2 of Algorithm 1: x <- (x - mean) / sqrt(variance + eps), then x <- x / |x|.

    Every row ends in the unit ball, so that the logit q.k/sqrt(d) is at most 1/sqrt(d) in size.
    The paper does not say over which axes the statistics run (erratum 9). Here they run over the d
    channels of each row, as in the authors' later release: no row sees another, so padding cannot leak
    and `mask` changes nothing.
    """

    def __init__(self, eps: float = 1e-13):
        super().__init__()
        if not eps > 0:
            raise ValueError(f"eps={eps!r} must be above 0: a constant row has variance 0")
        self.eps = eps

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, H, n, d), mask (B, n) with True = keep -> (B, H, n, d), in float32 or wider."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # 1e-13 is zero in half precision
        return F.normalize(F.layer_norm(x, x.shape[-1:], eps=self.eps), dim=-1)


class PostSBN(nn.Module):
    """Line 4 of Algorithm 1, att <- (gamma att)^beta, in a form without NaN (erratum 7).

    With y = gamma x: out = y (y^2 + BEND^2)^((beta-1)/2). It is odd, exactly gamma x at beta = 1, and
    |y|^beta with the sign of y for |y| well above BEND. gamma = exp(g) and beta = exp(b) stay positive; g and b
    start at zero. One pair a channel, shared by the heads, as in the release; or one a head and channel.
    """

    def __init__(self, heads: int, head_dim: int, per_head: bool = False):
        super().__init__()
        shape = (heads if per_head else 1, 1, head_dim)
        self.log_gamma = nn.Parameter(torch.zeros(shape))
        self.log_beta = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, n, d) -> (B, H, n, d), in float32 or wider."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        y = self.log_gamma.exp() * x
        power = (self.log_beta.exp() - 1) / 2
        return y * (power * (y.square() + BEND**2).log()).exp()  # pow, which is several times slower on the CPU
