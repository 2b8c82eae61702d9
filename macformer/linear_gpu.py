"""The core of linear.py for a GPU, which wants few and large launches where a CPU wants blocks that fit its cache.

It is plain torch and runs on every device. The rows of all queries and keys of all heads stand in one matrix, x: one
normalisation, one projection and one product of features serve them all. T and U are as in linear.py, but the features
of degree 0 and 1 stand in one matrix with the others: sqrt(c0) and L x, where A = L^T L.

Shapes: B batch, H heads, n queries, m keys, d width of a head, e width of a value, W projections, t = B H (n + m)
tokens, f features, c = e + 1 rounded up to a multiple of ALIGNED.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from macformer.features import FoldedMap
from macformer.folded import empty_heads, inverse_norm, tangent, without_autocast
from macformer.ppsbn import unit_rows_forward, without_noise

ALIGNED = 4  # float32 numbers that a GPU reads at once, if the rows begin at a multiple of so many
MATRICES = 256  # to add up over tokens at the same time, so that every processor of a GPU has one
Side = Callable[[Tensor], Tensor]  # the queries or the keys of a matrix of tokens


class LinearAttentionGPU(torch.autograd.Function):
    """Features are computed again in the backward pass. It has no second derivative."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, folded: FoldedMap
    ) -> Tensor:
        e, dtype = v.shape[-1], torch.promote_types(q.dtype, torch.float32)
        keep = torch.ones_like(k[:, :1, :, :1], dtype=dtype) if mask is None else mask[:, None, :, None].to(dtype)
        floor = folded.floors(keep.sum(2, keepdim=True))
        values = keep.new_empty(*v.shape[:-1], e + 1 + -(e + 1) % ALIGNED)  # V' = [V, 1, 0 ..], of kept keys alone
        torch.mul(v, keep, out=values[..., :e])
        values[..., e:] = F.pad(keep, (0, -(e + 1) % ALIGNED))
        x, scale = _read(q, k, keep, folded)
        tokens = _Tokens(x, q.shape[:3], k.shape[:3], rows, folded)
        T = tokens.sums(tokens.keys, values)
        product = tokens.product(tokens.queries, T)
        denominators = torch.maximum(product[..., e : e + 1], floor)
        ctx.save_for_backward(x, scale, values, keep, floor, rows, product, denominators, T)
        ctx.folded, ctx.shapes, ctx.dtypes = folded, (q.shape[:3], k.shape[:3]), (q.dtype, k.dtype, v.dtype)
        return torch.div(product[..., :e], denominators, out=empty_heads(q, q.dtype, e))

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, scale, values, keep, floor, rows, product, denominators, T = ctx.saved_tensors
        e, (queries, keys), (q_dtype, k_dtype, v_dtype) = grad.shape[-1], ctx.shapes, ctx.dtypes
        tokens = _Tokens(x, queries, keys, rows, ctx.folded)
        # The gradient of [numerator, denominator]; a floored denominator has none. The two nearly cancel, and nothing
        # here was rounded to q's dtype. What stands in the columns behind it will be multiplied by zeros.
        G = torch.empty_like(product)
        torch.div(grad, denominators, out=G[..., :e])
        grad_denominator = (G[..., :e] * product[..., :e]).sum(-1, keepdim=True).div_(denominators)
        G[..., e:] = grad_denominator.mul_(denominators > floor).neg_()
        U = tokens.sums(tokens.queries, G)
        grad_v = torch.mul(tokens.product(tokens.keys, U)[..., :e], keep, out=empty_heads(values, v_dtype, e))
        grad_x, grad_rows = tokens.backward((tokens.queries, G, T), (tokens.keys, values, U))
        grad_x = _read_backward(grad_x, x, ctx.folded)
        grad_q, grad_k = (
            torch.mul(side(grad_x), side(scale), out=empty_heads(side(x), dtype))
            for side, dtype in ((tokens.queries, q_dtype), (tokens.keys, k_dtype))
        )
        if grad_rows is not None:
            grad_rows = grad_rows.sum_to_size(rows.shape).to(rows.dtype)
        return grad_q, grad_k, grad_v, None, grad_rows, None


def _read(q: Tensor, k: Tensor, keep: Tensor, folded: FoldedMap) -> tuple[Tensor, Tensor]:
    """x (t, d), the rows of q and then those of k, normalised; and the factor of each row's gradient (t, 1)."""
    middle = q.shape[:3].numel()
    x = keep.new_empty(middle + k.shape[:3].numel(), q.shape[-1])
    x[:middle].view(q.shape).copy_(q)
    if folded.normalise == "no":  # masking the values is not enough: the powers of a huge key overflow
        torch.mul(k, keep, out=x[middle:].view(k.shape))
        return x, torch.ones_like(x[:, :1])
    x[middle:].view(k.shape).copy_(k)
    if folded.normalise == "centred":
        x, mean, rstd = unit_rows_forward(x, folded.eps)
        return x, without_noise(rstd, mean, folded.eps) / x.shape[-1]
    scale = inverse_norm(x, folded.eps)
    return x.mul_(scale), scale


def _read_backward(grad: Tensor, x: Tensor, folded: FoldedMap) -> Tensor:
    """The gradient of the rows before they were normalised, still without the factor of each. It may overwrite grad."""
    if folded.normalise == "unit":
        return tangent(grad, x)
    if folded.normalise == "centred":  # x is what a layer norm makes of x, if it multiplies by sqrt(d)
        d = x.shape[-1]
        mean, rstd = torch.zeros_like(x[:, :1]), torch.full_like(x[:, :1], d**0.5)
        return torch.ops.aten.native_layer_norm_backward(grad, x, (d,), mean, rstd, None, None, (True, False, False))[0]
    return grad


def _sum_over_tokens(x: Tensor, columns: Tensor) -> Tensor:
    """x^T columns of each head: (B, H, n, w), (B, H, n, c) -> (B H, w, c), in equal parts that are added afterwards.

    An odd n has none: our batches have lengths that are multiples of 64.
    """
    x, columns = x.flatten(0, 1), columns.flatten(0, 1)
    heads, n = x.shape[:2]
    parts = 1
    while heads * parts < MATRICES and n % (2 * parts) == 0 and n:
        parts *= 2
    x, columns = (y.unflatten(1, (parts, n // parts)).flatten(0, 1) for y in (x, columns))
    sums = torch.bmm(x.mT, columns)
    return sums.unflatten(0, (heads, parts)).sum(1) if parts > 1 else sums


class _Tokens:
    """The features (t, f) of all queries and keys."""

    def __init__(self, x: Tensor, queries: torch.Size, keys: torch.Size, rows: Tensor, folded: FoldedMap):
        self.shapes, self.middle, rows = (queries, keys), queries.numel(), rows.to(x.dtype)
        self.feature_map: _Products | _Waves
        if folded.root is not None and folded.widths is not None:
            self.feature_map = _Products(x, rows, folded.constant, folded.root.to(x.dtype), folded.widths)
        else:
            self.feature_map = _Waves(x, rows, self)

    def queries(self, matrix: Tensor) -> Tensor:
        """(t, w) -> (B, H, n, w), a view."""
        return matrix[: self.middle].unflatten(0, self.shapes[0])

    def keys(self, matrix: Tensor) -> Tensor:
        """(t, w) -> (B, H, m, w), a view."""
        return matrix[self.middle :].unflatten(0, self.shapes[1])

    def sums(self, side: Side, columns: Tensor) -> Tensor:
        """The features of this side, transposed, times the columns, for each head: T or U, (B H, f, c)."""
        return _sum_over_tokens(side(self.feature_map.features), columns)

    def product(self, side: Side, sums: Tensor) -> Tensor:
        """The features of this side times the sums: (B, H, n, c)."""
        return torch.bmm(side(self.feature_map.features).flatten(0, 1), sums).unflatten(0, self.shapes[0][:2])

    def backward(self, *sides: tuple[Side, Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The gradients of x and of the rows. The columns are the gradient of `product(side, sums)`, for each side.

        The features are overwritten.
        """

        def fill(grad_features: Tensor) -> None:
            for side, columns, sums in sides:
                torch.bmm(columns.flatten(0, 1), sums.mT, out=side(grad_features).flatten(0, 1))

        return self.feature_map.backward(fill, self)


class _Products:
    """F_i = prod_j P_ij, sorted as in linear.py. The rows of the table: F, the root of c0, L x, P, for all tokens."""

    def __init__(self, x: Tensor, rows: Tensor, constant: float, root: Tensor, widths: tuple[int, ...]):
        self.rows, self.linear, self.deep = torch.cat([root, rows[0]]), len(root), sum(widths[:1])
        self.table = x.new_empty(self.deep + 1 + len(self.rows), len(x))
        self.table[self.deep].fill_(constant**0.5)
        torch.mm(self.rows, x.mT, out=self.table[self.deep + 1 :])
        end = self.deep + 1 + self.linear
        self.features, factors = self.table[:end].mT, self.table[end:].split(list(widths))
        # For the third factor, the fourth, ...: the product of those before it, and the factor.
        self.prefixes = x.new_empty(sum(widths[2:]), len(x))
        self.later = list(zip(self.prefixes.split(list(widths[2:])), factors[2:], strict=True))
        prefix = self.table[end : end + self.deep]
        for factor, next_prefix in zip(factors[1:], [*(each for each, _ in self.later), self.table[:0]], strict=False):
            longer = len(next_prefix)  # features that have another factor
            torch.mul(prefix[longer:], factor[longer:], out=self.table[longer : len(factor)])
            prefix = torch.mul(prefix[:longer], factor[:longer], out=next_prefix)

    def backward(self, fill: Callable[[Tensor], None], tokens: _Tokens) -> tuple[Tensor, None]:
        """The gradient of x, where `fill` writes that of the features. Everything is overwritten by its gradient."""
        fill(self.features)
        grad_product, end = self.table[: self.deep], self.deep + 1 + self.linear
        for prefix, factor in reversed(self.later):
            part = grad_product[: len(factor)]
            prefix *= part  # the gradient of this factor
            part *= factor
        first_two = self.table[end : end + 2 * self.deep]
        first_two.unflatten(0, (2, self.deep)).mul_(grad_product)  # the gradients of the second and of the first factor
        L, first, second, later = self.rows.split([self.linear, self.deep, self.deep, len(self.prefixes)])
        grad = self.table[self.deep + 1 : end + 2 * self.deep].mT @ torch.cat([L, second, first])
        return grad.addmm_(self.prefixes.mT, later), None


class _Waves:
    """F = [sin P, cos P]. Each head may have rows of its own."""

    def __init__(self, x: Tensor, rows: Tensor, tokens: _Tokens):
        self.x, self.rows = x, rows
        projected = x.new_empty(len(x), rows.shape[1])
        for side in (tokens.queries, tokens.keys):
            torch.matmul(side(x), rows.mT, out=side(projected))
        self.features = x.new_empty(len(x), 2 * rows.shape[1])
        self.sine, self.cosine = self.features.chunk(2, 1)
        torch.sin(projected, out=self.sine)
        torch.cos(projected, out=self.cosine)

    def backward(self, fill: Callable[[Tensor], None], tokens: _Tokens) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the rows, where `fill` writes that of the features."""
        grad_features, grad, grad_rows = torch.empty_like(self.features), torch.empty_like(self.x), []
        fill(grad_features)
        grad_sine, grad_cosine = grad_features.chunk(2, 1)
        grad_projected = grad_sine.mul_(self.cosine).addcmul_(grad_cosine, self.sine, value=-1)
        for side in (tokens.queries, tokens.keys):
            torch.matmul(side(grad_projected), self.rows, out=side(grad))
            grad_rows.append(_sum_over_tokens(side(grad_projected), side(self.x)))
        return grad, (grad_rows[0] + grad_rows[1]).unflatten(0, tokens.shapes[0][:2]).sum(0)
