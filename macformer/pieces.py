"""The parts of a layer that take each token by itself, on the CPU: some tokens at a time, so that all that is made of
them stays in a core's cache. macformer/model.py has the same in plain torch, for every other case and as reference.

Kept for the backward pass are the inputs, the sum in the middle, the hidden layer before its gelu, and a byte for each
number that may be dropped. Norms and gelu are computed again: cheaper in the cache than to fetch them from memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from macformer.dropout import Dropout

TOKENS = 2048  # of one piece: arrays of 0.5 and 1 MiB; fewer, and the calls of torch show (docs/log.md)


def usable(x: Tensor) -> bool:
    """Autocast and torch.compile work on single operations, and a GPU wants large ones."""
    return x.is_cpu and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def norm_project(x: Tensor, norm: nn.LayerNorm, maps: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Each of the maps of norm(x)."""
    parameters = [p for linear in maps for p in (linear.weight, linear.bias)]
    found = _NormProject.apply(x.flatten(0, -2), norm.eps, norm.weight, norm.bias, *parameters)
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


class _NormProject(torch.autograd.Function):
    """The maps are one product forward. Backward, one whose result was not used costs nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gamma: Tensor, beta: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, gamma, beta, *maps)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        weight, bias = torch.cat(maps[::2]), torch.cat(maps[1::2])
        out = x.new_empty(len(x), len(bias))
        for at in _pieces(x):
            torch.addmm(bias, F.layer_norm(x[at], gamma.shape, gamma, beta, eps), weight.mT, out=out[at])
        return out.split([len(bias) for bias in maps[1::2]], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gamma, beta, *maps = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        to_gamma, to_beta, *to_maps = (torch.zeros_like(p) for p in (gamma, beta, *maps))
        every = zip(grads, maps[::2], to_maps[::2], to_maps[1::2], strict=True)
        used = [(grad, *others) for grad, *others in every if grad is not None]
        for at in _pieces(x):
            norm = _Norm(x[at], gamma, beta, ctx.eps)
            pulled = torch.zeros_like(norm.out)
            for grad, weight, to_weight, to_bias in used:
                pulled.addmm_(grad[at], weight)
                _add_linear(to_weight, to_bias, grad[at], norm.out)
            grad_x[at] = norm.backward(pulled, to_gamma, to_beta)
        return grad_x, None, to_gamma, to_beta, *to_maps


class _AddAndFeed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, keep: list[Tensor | None], scale: float, eps: float, *parameters: Tensor
    ) -> Tensor:
        W_out, b_out, gamma, beta, W_first, b_first, W_second, b_second = parameters
        middle, result, before = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), len(b_first))
        for at in _pieces(x):
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        attended, middle, before, *keep = ctx.saved_tensors[:6]
        parameters = ctx.saved_tensors[6:]
        W_out, _, gamma, beta, W_first, _, W_second, _ = parameters
        grad_x, grad_attended = torch.empty_like(middle), torch.empty_like(attended)
        sums = [torch.zeros_like(p) for p in parameters]
        to_W_out, to_b_out, to_gamma, to_beta, to_W_first, to_b_first, to_W_second, to_b_second = sums
        for at in _pieces(middle):
            drop_out, drop_hidden, drop_last = (_Drop(kept, ctx.scale, at, grad.dtype) for kept in keep)
            norm = _Norm(middle[at], gamma, beta, ctx.eps)
            pulled = drop_last(grad[at].clone())
            _add_linear(to_W_second, to_b_second, pulled, drop_hidden(F.gelu(before[at])))
            pulled = torch.ops.aten.gelu_backward(drop_hidden(pulled @ W_second), before[at])
            _add_linear(to_W_first, to_b_first, pulled, norm.out)
            torch.add(norm.backward(pulled @ W_first, to_gamma, to_beta), grad[at], out=grad_x[at])
            pulled = drop_out(grad_x[at].clone())
            _add_linear(to_W_out, to_b_out, pulled, attended[at])
            torch.mm(pulled, W_out, out=grad_attended[at])
        return grad_x, grad_attended, None, None, None, *sums


class _Norm:
    """Layer norm of one piece, computed again for its backward pass."""

    def __init__(self, x: Tensor, gamma: Tensor, beta: Tensor, eps: float):
        self.x, self.gamma, self.beta = x, gamma, beta
        self.out, *self.statistics = torch.native_layer_norm(x, gamma.shape, gamma, beta, eps)

    def backward(self, grad: Tensor, to_gamma: Tensor, to_beta: Tensor) -> Tensor:
        grad_x, grad_gamma, grad_beta = torch.ops.aten.native_layer_norm_backward(
            grad, self.x, self.gamma.shape, *self.statistics, self.gamma, self.beta, (True, True, True)
        )
        to_gamma += grad_gamma
        to_beta += grad_beta
        return grad_x


class _Drop:
    """Dropout of one piece, in place; the same forward and backward."""

    def __init__(self, keep: Tensor | None, scale: float, at: slice, dtype: torch.dtype):
        self.factor = None if keep is None else keep[at].to(dtype).mul_(scale)

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x.mul_(self.factor)


def _add_linear(to_weight: Tensor, to_bias: Tensor, grad: Tensor, x: Tensor) -> None:
    """The gradient of a linear map's weight and bias, from one piece."""
    to_weight.addmm_(grad.mT, x)
    to_bias += grad.sum(0)


def _pieces(x: Tensor) -> Iterator[slice]:
    return (slice(start, start + TOKENS) for start in range(0, len(x), TOKENS))
