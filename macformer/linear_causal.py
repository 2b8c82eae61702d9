"""The causal sum: linear attention in which a token sees the keys up to its own, j <= i.

With the features x of a query and y of a key, both [F, sqrt(c0), L .] where A = L^T L, and v' = [v, 1]:

    [numerator, denominator]_i = x_i T + sum_(j <= i in its chunk) (x_i . y_j) v'_j,    T = sum_(j before it) y_j v'_j^T

Tokens are cut into chunks. What lies before a chunk is seen through T, the running sum; the chunk itself through
explicit weights, a small triangle. The backward pass goes from the last chunk to the first with U, the gradient of T.

One head at a time; on a CPU some of its tokens at a time, so that what is made of them stays in the cache.
Shapes: B batch, H heads, n tokens, d width of a head, e width of a value, f features. A piece is t = g c tokens: c of
each of g examples, in G chunks of s.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from macformer.features import FoldedMap
from macformer.folded import ROW_PADDING, Products, Tokens, Waves, empty_heads, without_autocast

CHUNK = 32  # a longer one wastes more on the upper triangle, a shorter one on many small products (docs/log.md)
PIECE = 1024  # tokens, on a CPU

Head = tuple[slice, int]  # some examples, one head


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, folded: FoldedMap) -> Tensor:
    n = q.shape[2]
    if more := -n % min(CHUNK, max(n, 1)):  # behind the last token, which does not see it
        q, k, v = (F.pad(x, (0, 0, 0, more)) for x in (q, k, v))
        mask = None if mask is None else F.pad(mask, (0, more))
    if q.is_cpu or len(rows) > 1:
        return _CausalAttention.apply(q, k, v, mask, rows, folded)[:, :, :n]
    # On a GPU all heads at once, as if they were examples: copies of q, k and v, but half as many launches.
    B, H = q.shape[:2]
    q, k, v = (x.flatten(0, 1).unsqueeze(1) for x in (q, k, v))
    mask = None if mask is None else mask.repeat_interleave(H, 0)
    out = _CausalAttention.apply(q, k, v, mask, rows, folded)
    return out.view(B, H, *out.shape[2:])[:, :, :n]


class _CausalAttention(torch.autograd.Function):
    """Features are computed again in the backward pass. It has no second derivative."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, folded: FoldedMap
    ) -> Tensor:
        work = _Work(q, k, v, mask, rows, folded)
        out = empty_heads(q, work.new["dtype"], v.shape[-1])
        denominators = torch.empty(*q.shape[:-1], 1, **work.new)
        starts: list[Tensor] = []  # T before each piece
        for head, pieces in work.heads():
            T = work.no_sum(head)
            for at in pieces:
                piece = work.read(head, at)
                starts.append(T)
                before, T = piece.running_sums(piece.y, piece.values, T)
                product = torch.bmm(piece.x.mT, before, out=piece.product)
                product.baddbmm_(piece.triangle(piece.x, piece.y, piece.weights), piece.values)
                product = product.view(*out[head][:, at].shape[:2], -1)
                denominator = torch.maximum(product[..., -1:], work.floor[head[0], at], out=denominators[head][:, at])
                torch.div(product[..., :-1], denominator, out=out[head][:, at])
        ctx.save_for_backward(q, k, v, mask, rows, out, denominators, *starts)
        ctx.folded = folded
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, rows, out, denominators, *starts = ctx.saved_tensors
        work = _Work(q, k, v, mask, rows, ctx.folded, backward=True)
        grad_q, grad_k, grad_v = (empty_heads(x, x.dtype) for x in (q, k, v))
        grad_rows = torch.zeros(work.rows.shape, **work.new) if ctx.needs_input_grad[4] else None
        for head, pieces in reversed(work.heads()):
            U = work.no_sum(head)
            for at in reversed(pieces):
                piece, T = work.read(head, at), starts.pop()
                of_queries = (x[head][:, at] for x in (grad, out, denominators))
                G = piece.read_gradient(work.floor[head[0], at], *of_queries)
                before, _ = piece.running_sums(piece.y, piece.values, T)
                after, U = piece.running_sums(piece.x, G, U, from_the_end=True)
                weights = piece.triangle(piece.x, piece.y, piece.weights)
                grad_weights = piece.triangle(G.mT, piece.values.mT, piece.grad_weights)

                grad_values = torch.bmm(piece.y.mT, after, out=piece.product).baddbmm_(weights.mT, G)
                of_v = grad_v[head][:, at]
                torch.mul(grad_values[..., :-1].reshape(of_v.shape), work.keep[head[0], at], out=of_v)
                grad_x = torch.bmm(before, G.mT, out=piece.grad_x).baddbmm_(piece.y, grad_weights.mT)
                grad_y = torch.bmm(after, piece.values.mT, out=piece.grad_y).baddbmm_(piece.x, grad_weights)
                maps = work.back_rows[head[1]], None if grad_rows is None else grad_rows[head[1]]
                for side, grad_side, of_tokens in ((piece.queries, grad_x, grad_q), (piece.keys, grad_y, grad_k)):
                    of_tokens[head][:, at] = side.backward(grad_side, *maps)
        if grad_rows is not None:
            grad_rows = grad_rows.sum_to_size(rows.shape).to(rows.dtype)
        return grad_q, grad_k, grad_v, None, grad_rows, None


class _Work:
    """What the pieces of one call share, and how the call is cut into them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        rows: Tensor,
        folded: FoldedMap,
        backward: bool = False,
    ):
        self.tokens, self.folded, self.masked, self.backward = (q, k, v), folded, mask is not None, backward
        B, H, n, _ = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.new: dict[str, Any] = {"dtype": dtype, "device": q.device}
        self.keep = torch.ones(B, n, 1, **self.new) if mask is None else mask.to(dtype).unsqueeze(-1)
        self.floor = folded.floors(self.keep.cumsum(1))
        self.chunk = max(1, min(CHUNK, n))
        rows = back = rows.to(dtype)
        self.features, self.linear = 2 * rows.shape[1], 0
        if folded.root is not None and folded.widths is not None:
            root, self.linear = folded.root.to(dtype).unsqueeze(0), len(folded.root)
            self.features = sum(folded.widths[:1]) + 1 + self.linear
            back = torch.cat([root, Products.exchanged(rows, folded.widths) if folded.widths else rows], 1)
            rows = torch.cat([root, rows], 1)
        self.rows, self.back_rows = rows.expand(H, -1, -1), back.expand(H, -1, -1)
        self.columns = v.shape[-1] + 1
        self.piece = max(1, B * n) if not q.is_cpu else max(PIECE // self.chunk * self.chunk, self.chunk)
        self.made: dict[tuple[int, int], _Piece] = {}

    def heads(self) -> list[tuple[Head, list[slice]]]:
        """Examples and head that are computed together, and the tokens that are."""
        B, H, n, _ = self.tokens[0].shape
        g = max(1, self.piece // max(1, n))
        c = math.ceil(n / max(1, math.ceil(n / self.piece)) / self.chunk) * self.chunk
        pieces = [slice(start, start + c) for start in range(0, n, c)] if n else []
        return [((slice(b, b + g), h), pieces) for b in range(0, B, g) for h in range(H)]

    def no_sum(self, head: Head) -> Tensor:
        return torch.zeros(len(self.keep[head[0]]), self.features, self.columns, **self.new)

    def read(self, head: Head, at: slice) -> "_Piece":
        q, k, v = (x[head][:, at] for x in self.tokens)
        keep, rows = self.keep[head[0], at], self.rows[head[1]]
        g, c = q.shape[:2]
        if (g, c) not in self.made:
            self.made[g, c] = _Piece(self, g, c)
        piece = self.made[g, c]
        piece.queries.read(q, rows, None, self.backward)
        piece.keys.read(k, rows, keep if self.masked else None, self.backward)
        values = piece.values.view(g, c, -1)
        torch.mul(v, keep, out=values[..., :-1])
        values[..., -1:] = keep
        return piece


class _Piece:
    """Memory for c tokens of each of g examples, made once and used again."""

    def __init__(self, work: _Work, g: int, c: int):
        self.examples, s = g, work.chunk
        self.queries, self.keys = _Side(work, g * c), _Side(work, g * c)
        self.x, self.y = self.queries.chunks, self.keys.chunks  # (G, f, s)
        G = g * c // s
        self.values, self.product = (torch.empty(G, s, work.columns, **work.new) for _ in range(2))
        self.weights = torch.empty(G, s, s, **work.new)
        if work.backward:
            self.gradient, self.grad_weights = torch.empty_like(self.values), torch.empty_like(self.weights)
            self.grad_x, self.grad_y = (torch.empty(G, work.features, s, **work.new) for _ in range(2))

    def running_sums(
        self, x: Tensor, columns: Tensor, start: Tensor, from_the_end: bool = False
    ) -> tuple[Tensor, Tensor]:
        """start + the sum of x columns over all earlier chunks (or later ones), for each chunk; and over all."""
        sums = torch.bmm(x, columns).unflatten(0, (self.examples, -1))
        running = torch.cat([start.unsqueeze(1), sums.flip(1) if from_the_end else sums], 1).cumsum(1)
        before = running[:, :-1].flip(1) if from_the_end else running[:, :-1]
        return before.flatten(0, 1), running[:, -1].clone()  # what is kept of a piece is to be small

    def triangle(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        """x^T y of each chunk, for j <= i."""
        return torch.bmm(x.mT, y, out=out).tril_()

    def read_gradient(self, floor: Tensor, grad_out: Tensor, out: Tensor, denominator: Tensor) -> Tensor:
        """The gradient of [numerator, denominator]; a floored denominator has none."""
        columns = self.gradient.view(*grad_out.shape[:2], -1)
        torch.div(grad_out, denominator, out=columns[..., :-1])
        total = (columns[..., :-1] * out).sum(-1, keepdim=True).neg_()
        torch.mul(total, denominator > floor, out=columns[..., -1:])
        return self.gradient


class _Side:
    """The features of the queries of a piece, or of its keys."""

    def __init__(self, work: _Work, tokens: int):
        self.folded, self.linear = work.folded, work.linear
        before = work.features - self.linear
        # The rows of the table: F, sqrt(c0), L x, P. The first of them are the features, the last are projected.
        table = torch.empty(before + work.rows.shape[1], tokens + ROW_PADDING, **work.new)[:, :tokens]
        self.features, self.projected, self.constant = table[: work.features], table[before:], table[before - 1]
        self.chunks = self.features.unflatten(1, (-1, work.chunk)).transpose(0, 1)  # (G, f, s)
        P, widths = self.projected[self.linear :].unsqueeze(0), work.folded.widths
        self.expand: Products | Waves | None = None
        if widths is None:
            self.expand = Waves(P, self.features.unsqueeze(0))
        elif widths:
            self.expand = Products(P, self.features[: widths[0]].unsqueeze(0), widths)
        self.scratch = self.expand.scratch[0] if isinstance(self.expand, Waves) else self.features

    def read(self, x: Tensor, rows: Tensor, keep: Tensor | None, backward: bool) -> None:
        self.tokens = Tokens(x.to(self.features.dtype), self.folded, keep)
        self.x = self.tokens.x.reshape(-1, x.shape[-1])
        torch.mm(rows, self.x.mT, out=self.projected)
        if self.expand:
            self.expand.forward(backward)
        if self.folded.widths is not None:
            self.constant.fill_(self.folded.constant**0.5)

    def backward(self, grad: Tensor, rows: Tensor, grad_rows: Tensor | None) -> Tensor:
        """The gradient of the tokens, (g, c, d), from that of their features, (G, f, s)."""
        self.scratch.unflatten(1, (len(grad), -1)).copy_(grad.transpose(0, 1))
        if self.expand:
            self.expand.backward()
        if grad_rows is not None:
            grad_rows.addmm_(self.projected, self.x)
        return self.tokens.backward((self.projected.mT @ rows).view(self.tokens.read.shape))
