"""Linear attention in plain torch: its definition, and the folded form; and what the cores share.

Shapes: B batch, H heads, n queries, m keys, d width of a head, e width of a value, f features of degree 2 and more.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from macformer.features import FoldedMap, products
from macformer.ppsbn import unit_rows, unit_rows_backward, unit_rows_in_cache

FLOOR = 0.1  # of what the denominator would be if every kept key had K = a_0
CAUSAL_CHUNK = 128
ROW_PADDING = 16  # numbers between the rows of an (f, c) matrix


def check_square(q: Tensor, k: Tensor) -> None:
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal attention needs as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}")


def plain_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    floor: float,
    causal: bool = False,
    per_key: bool = True,
) -> Tensor:
    """The definition: out_i = phi_q_i . sum_j phi_k_j v_j / max(phi_q_i . sum_j phi_k_j, floor n_i).

    n_i is the number of keys that i sees, or 1 if the floor is not per key. Time and memory O(n m): the reference of
    tests and benchmarks.
    """
    weights = phi_q @ phi_k.mT
    ones = torch.ones_like(weights) if mask is None else mask[:, None, None, :].to(v.dtype).expand_as(weights)
    if causal:
        weights, ones = weights.tril(), ones.tril()
    weights = weights * ones
    floors = floor * ones.sum(-1, keepdim=True).clamp(min=1) if per_key else torch.full_like(weights[..., :1], floor)
    return weights @ v / torch.maximum(weights.sum(-1, keepdim=True), floors)


def folded_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, folded: FoldedMap, causal: bool
) -> Tensor:
    """The formula of macformer/linear.py in plain torch: what torch.compile gets on a GPU, and what benchmarks race."""
    with torch.autocast(q.device.type, enabled=False):
        n, dtype = k.shape[2], torch.promote_types(q.dtype, torch.float32)
        keep = (q.new_ones(1, n) if mask is None else mask).to(dtype)[:, None, :, None]
        value = torch.cat([v.to(dtype), keep.expand(*v.shape[:3], 1)], -1) * keep
        tokens = _normalised(q.to(dtype), folded), _normalised(k.to(dtype) * keep, folded)
        query, key = ([x, _features(x, rows.to(dtype), folded)] for x in tokens)
        query = [query[0] @ folded.linear.to(dtype), query[1]] if folded.linear is not None else query[1:]
        joined = torch.cat(query, -1), torch.cat(key[-len(query) :], -1)
        if causal:
            product, seen = _by_chunks(*joined, value) + folded.constant * value.cumsum(2), keep.cumsum(2)
        else:
            product = joined[0] @ (joined[1].mT @ value) + folded.constant * value.sum(2, keepdim=True)
            seen = keep.sum(2, keepdim=True)
        denominator = torch.maximum(product[..., -1:], folded.floors(seen))
        return (product[..., :-1] / denominator).to(q.dtype)


def _by_chunks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Within a chunk the weights are explicit, all earlier chunks are one (d + f) x (e + 1) sum."""
    n = query.shape[2]
    chunk = min(n, CAUSAL_CHUNK)
    query, key, value = (F.pad(x, (0, 0, 0, -n % chunk)).unflatten(2, (-1, chunk)) for x in (query, key, value))
    sums = key.mT @ value
    before = F.pad(sums.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    product = query @ before + (query @ key.mT).tril() @ value
    return product.flatten(2, 3)[:, :, :n]


def without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Give a method of an autograd function autocast off, also where someone calls backward inside the context."""

    @wraps(method)
    def run(ctx: Any, x: Tensor, *args: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return method(ctx, x, *args)

    return run


def empty_heads(x: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """A new (B, H, n, width) like x, stored as (B, n, H, width), so that joining the heads is a view."""
    B, H, n, d = x.shape
    return x.new_empty(B, n, H, width or d, dtype=dtype).transpose(1, 2)


def inverse_norm(x: Tensor, eps: float) -> Tensor:
    """1 / |x| of each row; 0 where |x| is at most eps: such a row has no direction."""
    norm = torch.linalg.vecdot(x, x).sqrt_().unsqueeze(-1)
    return norm.clamp(min=eps).reciprocal_().mul_(norm > eps)


def tangent(grad: Tensor, unit: Tensor) -> Tensor:
    """What of grad is at right angles to the unit rows, in its place. The gradient of x is this / |x|."""
    return grad.addcmul_(unit, torch.linalg.vecdot(unit, grad).unsqueeze(-1), value=-1)


def _normalised(x: Tensor, folded: FoldedMap) -> Tensor:
    if folded.normalise == "centred":
        return unit_rows(x.contiguous(), folded.eps)
    return F.normalize(x, dim=-1, eps=folded.eps) if folded.normalise == "unit" else x


def _features(x: Tensor, rows: Tensor, folded: FoldedMap) -> Tensor:
    """F(x) (B, H, n, f)."""
    projected = x @ rows.mT
    if folded.widths is None:
        return torch.cat([projected.sin(), projected.cos()], -1)
    return products(projected, folded.widths)


class Tokens:
    """Tokens x (..., d) as the map takes them, some at a time on a CPU, and the way back for their gradient."""

    def __init__(self, x: Tensor, folded: FoldedMap, keep: Tensor | None):
        self.folded, self.read, self.x = folded, x, x
        if folded.normalise == "centred":
            self.x, *self.statistics = unit_rows_in_cache(x, folded.eps)
        elif folded.normalise == "unit":
            self.inverse = inverse_norm(x, folded.eps)
            self.x = x * self.inverse
        elif keep is not None:
            self.x = x * keep  # masking the values is not enough: the powers of a huge key overflow

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient of x as it was read; it may overwrite grad."""
        if self.folded.normalise == "centred":
            return unit_rows_backward(grad, self.read, self.folded.eps, *self.statistics)
        if self.folded.normalise == "unit":
            return tangent(grad, self.x).mul_(self.inverse)
        return grad


class Products:
    """F_i = prod_j P_ij in the given memory: P (g, W, c), F (g, f, c). The gradient of F is put into `scratch`.

    Features are sorted by falling degree: the first widths[j] have a factor j, all have two.
    """

    def __init__(self, projected: Tensor, product: Tensor, widths: tuple[int, ...]):
        self.projected, self.product = projected, product
        self.scratch = product
        self.first, self.second, *factors = projected.split(widths, 1)
        self.deep_projected = projected[:, 2 * widths[0] :]
        self.before = torch.empty_like(self.deep_projected)
        # For the third factor, the fourth, ...: the products that have it, the factor, those products before it.
        parts = (product[:, :width] for width in widths[2:])
        self.deep = list(zip(parts, factors, self.before.split(widths[2:], 1), strict=True))

    def forward(self, backward: bool) -> None:
        torch.mul(self.first, self.second, out=self.product)
        for part, factor, before in self.deep:
            if backward:
                before.copy_(part)
            part.mul_(factor)

    def backward(self) -> Tensor:
        """The gradient of the projections (g, W, c), in their place, with the first two factors exchanged."""
        for part, factor, before in reversed(self.deep):
            before.mul_(part)  # the gradient of the factor
            part.mul_(factor)
        self.first.mul_(self.product)
        self.second.mul_(self.product)
        self.deep_projected.copy_(self.before)
        return self.projected

    @staticmethod
    def exchanged(rows: Tensor, widths: tuple[int, ...]) -> Tensor:
        """The rows in the order of what `backward` returns."""
        first, second, deep = rows.split([widths[0], widths[0], rows.shape[1] - 2 * widths[0]], 1)
        return torch.cat([second, first, deep], 1)


class Waves:
    """F = [sin P, cos P] in the given memory, as `Products`."""

    def __init__(self, projected: Tensor, waves: Tensor):
        self.projected = projected
        self.sine, self.cosine = waves.chunk(2, 1)
        self.scratch = torch.empty(waves.shape, dtype=waves.dtype, device=waves.device)

    def forward(self, backward: bool) -> None:
        torch.sin(self.projected, out=self.sine)
        torch.cos(self.projected, out=self.cosine)

    def backward(self) -> Tensor:
        """The gradient of the projections (g, W, c)."""
        grad_sine, grad_cosine = self.scratch.chunk(2, 1)
        return torch.mul(grad_sine, self.cosine, out=self.projected).addcmul_(grad_cosine, self.sine, value=-1)
