"""Linear attention with a folded feature map: the core of RMFA and RFA.

This is the form for the CPU, and the choice among the forms: linear_gpu.py has the one for GPUs, linear_causal.py the
sum over j <= i for both, folded.py the same formulas in plain torch.

    out_i = (c0 sum_j v_j + q_i A (K^T V) + F(q_i) (F(K)^T V)) / (c0 n_eff + q_i A (K^T 1) + F(q_i) (F(K)^T 1))

Sums run over the keys that the mask keeps, n_eff of them. All features of degree 0 of a random Maclaurin map are one
number, c0, and all features of degree 1 are one symmetric d x d matrix, A: only the others, F, are computed per token.

Shapes: B batch, H heads, n queries, m keys, d width of a head, e width of a value, D features of a plain map.
Inside, the work is cut into cache blocks: g examples of one head, c of their tokens, W projections and f features each.
Features are stored one after the other, (g, f, c): the product of two of them runs over contiguous memory.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from macformer.features import FoldedMap
from macformer.folded import (
    ROW_PADDING,
    Products,
    Tokens,
    Waves,
    check_square,
    empty_heads,
    folded_attention,
    without_autocast,
)
from macformer.linear_causal import causal_attention
from macformer.linear_gpu import LinearAttentionGPU

BLOCK = 2**19  # numbers that a block may hold: a CPU core's cache is small (docs/log.md)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: Tensor, folded: FoldedMap
) -> Tensor:
    """The formula above with a floored denominator. F is made of the projections x rows^T; rows are (H or 1, W, d).

    Time O((n + m) d (d + W + f)). The backward pass needs q, k, v, out and about (d + f) e numbers per head.
    Causal (j <= i): linear_causal.py, in time O(n (d (d + W + f) + (d + f) CHUNK)); the backward pass needs as little.
    """
    B, H, _, d = q.shape
    m = k.shape[2]
    if k.shape != (B, H, m, d) or v.shape[:3] != (B, H, m) or not (mask is None or mask.shape in ((B, m), (1, m))):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, mask) if x is not None)
        raise ValueError(f"q, k, v, mask should be (B, H, n, d), (B, H, m, d), (B, H, m, e), (B, m), got {shapes}")
    mask = None if mask is None else mask.expand(B, m)
    if folded.widths is not None:
        rows = rows.detach()  # random signs are not trained
    if causal:
        check_square(q, k)
    if torch.compiler.is_compiling() and not q.is_cpu:
        return checkpoint(folded_attention, q, k, v, mask, rows, folded, causal, use_reentrant=False)
    if causal:
        return _causal(q, k, v, mask, rows, folded)
    return (_on_cpu if q.is_cpu else LinearAttentionGPU.apply)(q, k, v, mask, rows, folded)


def linear_backend(device: torch.device) -> str:
    """How `linear_attention` is computed there, in two words."""
    return "cache blocks" if device.type == "cpu" else "large launches"


class _LinearAttention(torch.autograd.Function):
    """Features are computed again in the backward pass. It has no second derivative.

    T = [A K^T V'; F(K)^T V'; c0 1^T V'] with V' = [V, 1], so that for a query x = [q, F(q), 1] the product x T is
    [numerator, denominator]. U is the gradient of T, folded in the same way: it gives the gradients of keys and values.
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, folded: FoldedMap
    ) -> Tensor:
        work = _Work(q, k, v, mask, rows, folded)
        # Numerator and denominator nearly cancel in the gradient: it needs `out` before it is rounded to q's dtype.
        out = empty_heads(q, work.new["dtype"], v.shape[-1])
        denominators = torch.empty(*q.shape[:-1], 1, **work.new)
        sums = torch.zeros(*q.shape[:-2], work.width, v.shape[-1] + 1, **work.new)
        for at in work.groups():
            T = _Sums(sums[at], work)
            for keys, values, keep in work.blocks(k[at], v[at], work.keep[at]):
                block = work.block(keys)
                block.read_tokens(keys, work.rows[at], keep)
                block.read_value(values, keep)
                block.add_product(T)
            T.fold(folded)
            for queries, denominator, result in work.blocks(q[at], denominators[at], out[at]):
                block = work.block(queries)
                block.read_tokens(queries, work.rows[at])
                product = block.product(T)
                torch.maximum(product[..., -1:], work.floor[at], out=denominator)
                torch.div(product[..., :-1], denominator, out=result)
        ctx.save_for_backward(q, k, v, mask, rows, out, denominators, sums)
        ctx.folded = folded
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, rows, out, denominators, sums = ctx.saved_tensors
        work = _Work(q, k, v, mask, rows, ctx.folded)
        grad_q, grad_k, grad_v = (empty_heads(x, x.dtype) for x in (q, k, v))
        grad_rows = torch.zeros(work.rows.shape, **work.new) if ctx.needs_input_grad[4] else None
        for at in work.groups():
            T, U = _Sums(sums[at], work), _Sums(torch.zeros_like(sums[at]), work)
            maps = work.back_rows[at], None if grad_rows is None else grad_rows[at]
            of_queries = q[at], grad[at], out[at], denominators[at], grad_q[at]
            for queries, grad_out, result, denominator, grad_queries in work.blocks(*of_queries):
                block = work.block(queries)
                block.read_tokens(queries, work.rows[at], backward=True)
                block.read_gradient(grad_out, result, denominator, work.floor[at])
                block.add_product(U)
                block.backward(T, *maps, grad_queries)
            U.fold(ctx.folded)
            of_keys = k[at], v[at], work.keep[at], grad_k[at], grad_v[at]
            for keys, values, keep, grad_keys, grad_values in work.blocks(*of_keys):
                block = work.block(keys)
                block.read_tokens(keys, work.rows[at], keep, backward=True)
                torch.mul(block.product(U)[..., :-1], keep, out=grad_values)
                block.read_value(values, keep)
                block.backward(U, *maps, grad_keys)
        if grad_rows is not None:
            grad_rows = grad_rows.sum_to_size(rows.shape).to(rows.dtype)
        return grad_q, grad_k, grad_v, None, grad_rows, None


# Not for torch.compile: there is nothing left to fuse, and it would unroll the blocks.
_on_cpu, _causal = torch.compiler.disable(_LinearAttention.apply), torch.compiler.disable(causal_attention)


class _Work:
    """What the blocks of one call share, and how the call is cut into them.

    Long sequences: one head of one example at a time, or all its heads if they fit. Short ones: one head of several
    examples. Blocks are views: nothing is copied together.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, folded: FoldedMap):
        self.folded = folded
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.new: dict[str, Any] = {"dtype": dtype, "device": q.device}
        B, H = q.shape[:2]
        self.value_width, projections = v.shape[-1], rows.shape[1]
        self.features = 2 * projections if folded.widths is None else folded.widths[0] if folded.widths else 0
        self.linear = 0 if folded.linear is None else q.shape[-1]
        self.width = self.linear + self.features + 1
        tokens = BLOCK // max(2 * self.value_width, projections + self.features)
        self.tokens = max(1, tokens)  # of one head that fit into one block
        self.batch, self.heads = B, H
        self.fit = tokens // max(1, q.shape[2], k.shape[2])  # heads that fit into one block

        wide = rows.to(dtype)
        back = Products.exchanged(wide, folded.widths) if folded.widths else wide
        self.rows, self.back_rows = (x.expand(B, H, -1, -1) for x in (wide, back))
        self.masked = mask is not None
        keep = torch.ones(B, k.shape[2], 1, **self.new) if mask is None else mask.to(dtype).unsqueeze(-1)
        self.keep = keep.unsqueeze(1).expand(-1, H, -1, -1)
        self.floor = folded.floors(keep.sum(1, keepdim=True)).unsqueeze(1).expand(-1, H, -1, -1)
        self.made: dict[torch.Size, _Block] = {}

    def groups(self) -> Iterator[Any]:
        """Indices of the heads that are computed together: x[at] is (g, n, d)."""
        if self.fit > self.heads:
            starts = range(0, self.batch, self.fit)
            return ((slice(start, start + self.fit), h) for start in starts for h in range(self.heads))
        if self.fit >= self.heads:
            return iter(range(self.batch))
        return ((b, slice(h, h + 1)) for b in range(self.batch) for h in range(self.heads))

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split the tokens (axis 1) of all these into 1, 2, 4, ... parts, which tend to be equal."""
        n = tensors[0].shape[1]
        if n <= self.tokens:
            return iter([tensors])
        count = 2 ** math.ceil(math.log2(n / self.tokens))
        return zip(*(t.split(-(-n // count), 1) for t in tensors), strict=True)

    def block(self, x: Tensor) -> "_Block":
        """The memory for x (g, c, d)."""
        shape = x.shape[:2]
        if shape not in self.made:
            self.made[shape] = _Block(self, *shape)
        return self.made[shape]


class _Sums:
    """T (g, d + f + 1, e + 1) and views of its parts: the rows of x, of F, of 1, and of the last two."""

    def __init__(self, T: Tensor, work: _Work):
        self.x, self.features, self.constant = T.split([work.linear, work.features, 1], 1)
        self.x_T = self.x.mT
        self.rest = T[:, work.linear :]

    def fold(self, folded: FoldedMap) -> None:
        """[K^T V'; F(K)^T V'; 1^T V'] -> T. A is symmetric, so the backward pass folds in the same way."""
        if folded.linear is not None:
            self.x.copy_(folded.linear.to(self.x.dtype) @ self.x)
        self.constant *= folded.constant


class _Block:
    """Memory for g examples of c tokens, made once and used again: new memory can cost more than the work in it."""

    def __init__(self, work: _Work, g: int, c: int):
        self.folded, self.linear = work.folded, work.linear
        self.mask_tokens = work.masked and work.features > 0
        # V' = [values, 1] of keys, or the gradient of [numerator, denominator] of queries.
        self.columns = torch.empty(g, c, work.value_width + 1, **work.new)
        self.column_values, self.column_ones = self.columns[..., :-1], self.columns[..., -1:]
        self.columns_T = self.columns.mT
        self.scratch = torch.empty_like(self.columns)
        # F(x) and a row of ones. Rows at a distance of a power of two share few cache lines, which costs time.
        self.features = torch.ones(g, work.features + 1, c + ROW_PADDING, **work.new)[..., :c]
        self.features_T = self.features.mT
        self.expand: Products | Waves | None = None
        if work.features:
            projected = torch.empty(g, work.rows.shape[-2], c + ROW_PADDING, **work.new)[..., :c]
            self.made = self.features[:, :-1]
            if work.folded.widths is None:
                self.expand = Waves(projected, self.made)
            else:
                self.expand = Products(projected, self.made, work.folded.widths)

    def read_tokens(self, x: Tensor, rows: Tensor, keep: Tensor | None = None, backward: bool = False) -> None:
        """Normalise x (g, c, d) and compute its features."""
        self.tokens = Tokens(x.to(self.columns.dtype), self.folded, keep if self.mask_tokens else None)
        self.x = self.tokens.x
        self.x_T = self.x.mT
        if self.expand:
            torch.bmm(rows, self.x_T, out=self.expand.projected)
            self.expand.forward(backward)

    def read_value(self, v: Tensor, keep: Tensor) -> None:
        torch.mul(v, keep, out=self.column_values)
        self.column_ones.copy_(keep)

    def read_gradient(self, grad_out: Tensor, out: Tensor, denominator: Tensor, floor: Tensor) -> None:
        """Compute the gradient of [numerator, denominator]; a floored denominator has none."""
        torch.div(grad_out, denominator, out=self.column_values)
        product = torch.mul(self.column_values, out, out=self.scratch[..., :-1])
        torch.mul(product.sum(-1, keepdim=True).neg_(), denominator > floor, out=self.column_ones)

    def add_product(self, T: _Sums) -> None:
        """T += [x, F, 1]^T columns"""
        if self.linear:
            T.x.baddbmm_(self.x_T, self.columns)
        if self.expand:
            T.features.baddbmm_(self.made, self.columns)
        T.constant.add_(self.columns.sum(1, keepdim=True))

    def product(self, T: _Sums) -> Tensor:
        """[x, F, 1] T, (g, c, e + 1)"""
        if self.linear:
            torch.bmm(self.x, T.x, out=self.scratch)
        else:
            self.scratch.zero_()
        if self.expand:
            return self.scratch.baddbmm_(self.features_T, T.rest)
        return self.scratch.add_(T.constant)

    def backward(self, T: _Sums, rows: Tensor, grad_rows: Tensor | None, grad_x: Tensor) -> None:
        """From `columns`, the gradient of [x, F, 1] T, compute the gradient of x as it was before normalisation."""
        direct = self.folded.normalise == "no" and grad_x.dtype == self.columns.dtype
        grad = grad_x if direct else torch.empty(grad_x.shape, dtype=self.columns.dtype, device=grad_x.device)
        if self.linear:
            torch.bmm(self.columns, T.x_T, out=grad)
        else:
            grad.zero_()
        if self.expand:
            torch.bmm(T.features, self.columns_T, out=self.expand.scratch)
            back = self.expand.backward()
            grad.baddbmm_(back.mT, rows)
            if grad_rows is not None:
                grad_rows.baddbmm_(back, self.x)
        if not direct:
            grad_x.copy_(self.tokens.backward(grad))
