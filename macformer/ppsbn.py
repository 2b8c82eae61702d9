"""Pre- and post-Scaling Batch Normalisation, the paper's Algorithm 1. Knows no attention.

Line by line: 1. centre Q and K and divide by sqrt(variance + eps), 2. divide by the l2 norm: `PreSBN`. 3. attention:
not here. 4. att <- (gamma att)^beta: `PostSBN`.

Shapes: B batch, H heads, n length, d head width.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BEND = 1e-3  # below about this size post-SBN is a straight line: a finite slope at zero
MOMENTUM = 0.1  # of the running averages, torch's default
PIECE = 2**18  # numbers that post-SBN takes at a time on the CPU


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """(x - mean) / |x - mean| over the last axis, the norm kept above eps sqrt(d). The backward pass keeps x alone."""
    return _UnitRows.apply(x, eps)


def unit_rows_forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The rows, and mean and 1/deviation for `unit_rows_backward`, by one layer norm.

    CUDA's can give a constant row variance 0 and a mean that is rounded: without a limit its length would be 1e6.
    """
    d = x.shape[-1]
    weight = torch.full((d,), d**-0.5, dtype=x.dtype, device=x.device)
    rows, mean, rstd = torch.native_layer_norm(x, (d,), weight, None, eps**2)
    return rows.clamp_(-1, 1), mean, rstd


def unit_rows_in_cache(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same for some tokens at a time, which are in the CPU's cache.

    There these passes take 28 ns for a row of a head, and torch's layer norm, which does it in one, 41.
    """
    d = x.shape[-1]
    mean = x.mean(-1, keepdim=True)
    rows = x - mean
    rstd = rows.square().mean(-1, keepdim=True).add_(eps**2).rsqrt_()
    return rows.mul_(rstd * d**-0.5), mean, rstd


def without_noise(rstd: Tensor, mean: Tensor, eps: float) -> Tensor:
    """A row that is constant, but for rounding, has no direction: its gradient is to be zero instead of 1e13."""
    noise = mean.abs().mul_(4 * torch.finfo(mean.dtype).eps).clamp_(min=2 * eps)
    return rstd * (rstd * noise < 1)


def unit_rows_backward(grad: Tensor, x: Tensor, eps: float, mean: Tensor, rstd: Tensor) -> Tensor:
    d, rstd = x.shape[-1], without_noise(rstd, mean, eps)
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, (d,), mean, rstd, torch.full((d,), d**-0.5, dtype=x.dtype, device=x.device), None, (True, False, False)
    )[0]


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        rows, mean, rstd = unit_rows_forward(x, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.eps = eps
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, mean, rstd = ctx.saved_tensors
        # torch.compile expects a layout of the result that follows that of grad, but it is always this one.
        return unit_rows_backward(grad.contiguous(), x, ctx.eps, mean, rstd), None


class PreSBN(nn.Module):
    """Lines 1 and 2 of Algorithm 1: x <- (x - mean) / sqrt(variance + eps), then x <- x / |x|.

    Every row ends in the unit ball, so that the logit q.k/sqrt(d) is at most 1/sqrt(d) in size.
    The paper does not say over which axes the statistics run (docs/errata.md, erratum 9):

    token     over the d channels of each row, as in the authors' later release. No row sees another, so padding cannot
              leak and `mask` changes nothing. Line 2 then cancels line 1's division: what is left of eps is a guard.
              The deviation of a row is kept above eps (not sqrt(eps)), so that all but constant rows have length one.
    batch     over examples and positions for each head and channel, Algorithm 1 read literally: the mask leaves padding
              out; in evaluation the running averages of training take the place of the batch's own. eps is added to
              the variance, as it is written. Needs `heads` and `head_dim`.
    """

    mean: Tensor  # (H, 1, d), running
    variance: Tensor

    def __init__(
        self,
        eps: float = 1e-13,
        statistics: Literal["token", "batch"] = "token",
        heads: int | None = None,
        head_dim: int | None = None,
    ):
        super().__init__()
        if not eps >= 1e-18:
            raise ValueError(
                f"eps={eps!r} must be at least 1e-18: a constant row has variance 0, and eps^2 is to count"
            )
        if statistics not in ("token", "batch"):
            raise ValueError(f"statistics={statistics!r} is not known; choose one of token, batch")
        self.eps = eps
        self.statistics = statistics
        if statistics == "batch":
            if heads is None or head_dim is None:
                raise ValueError("statistics='batch' needs heads and head_dim: a running average for each channel")
            self.register_buffer("mean", torch.zeros(heads, 1, head_dim))
            self.register_buffer("variance", torch.ones(heads, 1, head_dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, H, n, d), mask (B, n) with True = keep -> (B, H, n, d), in float32 or wider."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # 1e-13 is zero in half precision
        if self.statistics == "token":
            return unit_rows(x, self.eps)
        mean, variance = self._batch_statistics(x, mask) if self.training else (self.mean, self.variance)
        return F.normalize((x - mean.to(x.dtype)) * (variance.to(x.dtype) + self.eps).rsqrt(), dim=-1)

    def _batch_statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        keep = x.new_ones(x.shape[0], 1, x.shape[2], 1) if mask is None else mask[:, None, :, None].to(x.dtype)
        count = keep.sum().clamp(min=1)
        mean = (x * keep).sum((0, 2), keepdim=True)[0] / count
        variance = ((x - mean) * keep).square().sum((0, 2), keepdim=True)[0] / count
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            weight = (MOMENTUM * (keep.sum() > 0)).to(self.mean.dtype)  # a batch of nothing but padding tells nothing
            self.mean.lerp_(mean.to(self.mean.dtype), weight)
            self.variance.lerp_(unbiased.to(self.variance.dtype), weight)
        return mean, variance


class PostSBN(nn.Module):
    """Line 4 of Algorithm 1, att <- (gamma att)^beta, in a form without NaN (docs/errata.md, erratum 7).

    With y = gamma x: out = y (y^2 + BEND^2)^((beta-1)/2). It is odd, exactly gamma x at beta = 1, and
    |y|^beta with the sign of y for |y| well above BEND. gamma = exp(g) and beta = exp(b) stay positive; g and b
    start at zero. One pair a channel, shared by the heads, as in the release; or one a head and channel.
    power=False: out = gamma x, without beta, as in the one commit of the release that can be trained.
    For the backward pass it keeps x alone.
    """

    def __init__(self, heads: int, head_dim: int, per_head: bool = False, power: bool = True):
        super().__init__()
        shape = (heads if per_head else 1, 1, head_dim)
        self.log_gamma = nn.Parameter(torch.zeros(shape))
        self.power = power
        if power:
            self.log_beta = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, n, d) -> (B, H, n, d), in float32 or wider."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        log_gamma = self.log_gamma.to(dtype)
        if not self.power:
            return x * log_gamma.exp()
        log_beta = self.log_beta.to(dtype)
        if x.is_cpu and not torch.compiler.is_compiling():
            return _PowerCPU.apply(x, log_gamma, log_beta)
        gamma, exponent = log_gamma.exp(), (log_beta.exp() - 1) / 2
        if not torch.compiler.is_compiling():
            return _PowerGPU.apply(x, gamma, exponent)
        y = x * gamma
        return y * (exponent * (y.square() + BEND**2).log()).exp()


class _PowerGPU(torch.autograd.Function):
    """y s^exponent with s = y^2 + BEND^2, in few passes over the memory. It keeps x alone, in x's dtype.

    Not for torch.compile, which fuses the plain formula and refuses `out=` with strides.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, exponent: Tensor) -> Tensor:
        ctx.save_for_backward(x, gamma, exponent)
        y = x * gamma
        return _bent(y).pow_(exponent).mul_(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gamma, exponent = ctx.saved_tensors
        y = x * gamma
        s = _bent(y)
        grad_power = s.pow(exponent).mul_(grad)  # grad s^exponent
        # d out/d exponent = out log(s);  d out/dy = s^exponent (1 + 2 exponent y^2 / s), and y^2 = s - BEND^2
        grad_exponent = y.mul_(grad_power).xlogy_(s).sum_to_size(exponent.shape)
        grad_y = torch.addcdiv(1 + 2 * exponent, exponent, s, value=-2 * BEND**2).mul_(grad_power)
        grad_gamma = (grad_y * x).sum_to_size(gamma.shape)
        return torch.mul(grad_y, gamma, out=torch.empty_like(x)), grad_gamma, grad_exponent


def _bent(y: Tensor) -> Tensor:
    """y^2 + BEND^2"""
    return torch.addcmul(torch.full((1,), BEND**2, dtype=y.dtype, device=y.device), y, y)


class _PowerCPU(torch.autograd.Function):
    """The same with exp and log: pow is several times slower on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_gamma: Tensor, log_beta: Tensor) -> Tensor:
        ctx.save_for_backward(x, log_gamma, log_beta)
        out = torch.empty_like(x, dtype=log_gamma.dtype)
        for b in _examples(x):
            y = x[b] * log_gamma.exp()
            power = y.square().add_(BEND**2).log_().mul_((log_beta.exp() - 1) / 2).exp_()
            torch.mul(y, power, out=out[b])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, log_gamma, log_beta = ctx.saved_tensors
        gamma, beta = log_gamma.exp(), log_beta.exp()
        grad_x = torch.empty_like(x, dtype=gamma.dtype)
        grad_gamma, grad_beta = torch.zeros_like(gamma), torch.zeros_like(beta)
        for b in _examples(x):
            y = x[b] * gamma
            square = y.square()
            bent = square + BEND**2
            log = bent.log()
            pulled = grad[b] * torch.exp(log * ((beta - 1) / 2))  # grad E
            # d(y E)/dy = E (1 + (beta-1) y^2 / (y^2 + BEND^2));  d(y E)/d log beta = y E log(y^2 + BEND^2) beta / 2
            grad_beta += log.mul_(y).mul_(pulled).mul_(beta / 2).sum_to_size(beta.shape)
            torch.mul(square.div_(bent).mul_(beta - 1).add_(1).mul_(pulled), gamma, out=grad_x[b])
            grad_gamma += (grad_x[b] * x[b]).sum_to_size(gamma.shape)
        return grad_x.to(x.dtype), grad_gamma, grad_beta


def _examples(x: Tensor) -> Iterator[slice]:
    """Some examples at a time: passes over them find them in the cache, and what they hold in between stays small."""
    size = max(1, PIECE * len(x) // max(1, x.numel()))
    return (slice(start, start + size) for start in range(0, len(x), size))
