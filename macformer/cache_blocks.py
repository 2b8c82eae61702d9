"""What a layer does to each token, on the CPU: some tokens at a time, so that what is made of them stays in the cache.

`Layer` in macformer/model.py has the same in plain torch, for all other cases and as the reference. Saved for the
backward pass are the inputs, the sum in the middle, the hidden layer before its gelu, and one byte for each number that
may be dropped; norms and gelu are computed again. A training step of macformer_exp needs 29% less memory and 5% less
time for it (docs/log.md, 2026-11-19).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from macformer.dropout import Dropout

TOKENS = 2048  # in one block: arrays of 0.5 and 1 MiB. With fewer, the overhead of torch's calls shows (docs/log.md)


def usable(x: Tensor) -> bool:
    """Autocast and torch.compile work on single operations, and a GPU wants large ones."""
    return x.is_cpu and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def norm_and_project(x: Tensor, norm: nn.LayerNorm, maps: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Each of the maps of norm(x)."""
    parameters = [p for linear in maps for p in (linear.weight, linear.bias)]
    found = _NormAndProject.apply(x.flatten(0, -2), norm.eps, norm.weight, norm.bias, *parameters)
    return tuple(y.unflatten(0, x.shape[:-1]) for y in found)


def add_and_feed(
    x: Tensor, attended: Tensor, out: nn.Linear, drop: Dropout, norm: nn.LayerNorm, first: nn.Linear, second: nn.Linear
) -> Tensor:
    """y = x + drop(out(attended)), then y + drop(second(drop(gelu(first(norm(y)))))): `drop` has the same p in all."""
    hidden = torch.Size([*x.shape[:-1], first.out_features])
    keep = [kept if kept is None else kept.flatten(0, -2) for kept in map(drop.keep, (x.shape, hidden, x.shape))]
    parameters = [p for m in (out, norm, first, second) for p in (m.weight, m.bias)]
    flat = _AddAndFeed.apply(x.flatten(0, -2), attended.flatten(0, -2), keep, drop.scale, norm.eps, *parameters)
    return flat.view(x.shape)


class _NormAndProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gamma: Tensor, beta: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, gamma, beta, *maps)
        ctx.eps = eps
        weight, bias = torch.cat(maps[::2]), torch.cat(maps[1::2])
        out = x.new_empty(len(x), len(bias))
        for at in _blocks(x):
            torch.addmm(bias, F.layer_norm(x[at], gamma.shape, gamma, beta, eps), weight.mT, out=out[at])
        return out.split([len(bias) for bias in maps[1::2]], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, *maps = ctx.saved_tensors
        grad_x, sums = torch.empty_like(x), [torch.zeros_like(p) for p in (gamma, beta, *maps)]
        for at in _blocks(x):
            normed, *statistics = torch.native_layer_norm(x[at], gamma.shape, gamma, beta, ctx.eps)
            grad_normed = torch.zeros_like(normed)
            for grad, weight, *to_map in zip(grads, maps[::2], sums[2::2], sums[3::2], strict=True):
                grad_normed.addmm_(grad[at], weight)
                _add_linear(to_map, grad[at], normed)
            grad_x[at] = _norm_backward(grad_normed, x[at], statistics, [gamma, beta], sums)
        return grad_x, None, *sums


class _AddAndFeed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, keep: list[Tensor | None], scale: float, eps: float, *parameters: Tensor
    ) -> Tensor:
        W_out, b_out, gamma, beta, W_first, b_first, W_second, b_second = parameters
        middle, result, before = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), len(b_first))
        for at in _blocks(x):
            drop_out, drop_hidden, drop_last = (_Drop(kept, scale, at, x.dtype) for kept in keep)
            torch.add(x[at], drop_out(torch.addmm(b_out, attended[at], W_out.mT)), out=middle[at])
            normed = F.layer_norm(middle[at], gamma.shape, gamma, beta, eps)
            hidden = drop_hidden(F.gelu(torch.addmm(b_first, normed, W_first.mT, out=before[at])))
            torch.add(middle[at], drop_last(torch.addmm(b_second, hidden, W_second.mT)), out=result[at])
        ctx.save_for_backward(attended, middle, before, *keep, *parameters)
        ctx.scale, ctx.eps = scale, eps
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        attended, middle, before, *keep = ctx.saved_tensors[:6]
        parameters = ctx.saved_tensors[6:]
        W_out, _, gamma, beta, W_first, _, W_second, _ = parameters
        grad_x, grad_attended = torch.empty_like(middle), torch.empty_like(attended)
        sums = [torch.zeros_like(p) for p in parameters]
        to_out, to_norm, to_first, to_second = (sums[i : i + 2] for i in range(0, len(sums), 2))
        for at in _blocks(middle):
            drop_out, drop_hidden, drop_last = (_Drop(kept, ctx.scale, at, grad_out.dtype) for kept in keep)
            normed, *statistics = torch.native_layer_norm(middle[at], gamma.shape, gamma, beta, ctx.eps)
            grad = drop_last(grad_out[at], own=False)
            _add_linear(to_second, grad, drop_hidden(F.gelu(before[at])))
            grad = torch.ops.aten.gelu_backward(drop_hidden(grad @ W_second), before[at])
            _add_linear(to_first, grad, normed)
            grad = _norm_backward(grad @ W_first, middle[at], statistics, [gamma, beta], to_norm)
            torch.add(grad, grad_out[at], out=grad_x[at])
            grad = drop_out(grad_x[at], own=False)
            _add_linear(to_out, grad, attended[at])
            torch.mm(grad, W_out, out=grad_attended[at])
        return grad_x, grad_attended, None, None, None, *sums


class _Drop:
    """Dropout of one block, in place of a tensor of our `own`; the same forward and backward."""

    def __init__(self, keep: Tensor | None, scale: float, at: slice, dtype: torch.dtype):
        self.factor = None if keep is None else keep[at].to(dtype).mul_(scale)

    def __call__(self, x: Tensor, own: bool = True) -> Tensor:
        return x if self.factor is None else x.mul_(self.factor) if own else x * self.factor


def _norm_backward(grad: Tensor, x: Tensor, statistics: Any, norm: list[Tensor], sums: list[Tensor]) -> Tensor:
    """The gradient of a layer norm's input, `norm` its parameters; their gradients are added to the first two sums."""
    args = x, norm[0].shape, *statistics, *norm, (True, True, True)
    grad_x, grad_gamma, grad_beta = torch.ops.aten.native_layer_norm_backward(grad, *args)
    sums[0] += grad_gamma
    sums[1] += grad_beta
    return grad_x


def _add_linear(sums: list[Tensor], grad: Tensor, x: Tensor) -> None:
    """Add the gradient of a linear map's weight and bias, from one block, to these two sums."""
    sums[0].addmm_(grad.mT, x)
    sums[1] += grad.sum(0)


def _blocks(x: Tensor) -> Iterator[slice]:
    return (slice(start, start + TOKENS) for start in range(0, len(x), TOKENS))
