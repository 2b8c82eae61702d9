"""Linear attention with a folded feature map: the core of RMFA and RFA, and the plain definition that it is held to.

    out_i = (c0 sum_j v_j + q_i A (K^T V) + s F(q_i) (F(K)^T V)) / (c0 n_eff + q_i A (K^T 1) + s F(q_i) (F(K)^T 1))

Sums run over the keys that the mask keeps, n_eff of them. All features of degree 0 of a random Maclaurin map are one
number, c0, all features of degree 1 one symmetric d x d matrix, A: only the others, F, are computed for each token.

Shapes: B batch, H heads, n queries, m keys, d width of a head, e width of a value, D features of a plain map.
Inside, the work is cut into pieces: g examples of one head, c of their tokens, W projections and f features of each.
Features lie one after the other, (g, f, c): a product of two of them runs over one stretch of memory.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from macformer.features import products
from macformer.ppsbn import unit_rows, unit_rows_backward, unit_rows_forward

FLOOR = 0.1  # of what the denominator would be if every kept key had K = a_0
# How many numbers a piece may hold: a core's cache is small, a GPU wants few and large launches (docs/log.md).
PIECE = {"cpu": 2**19, "cuda": 2**25}
CAUSAL_CHUNK = 128
APART = 16  # numbers between the rows of what lies as (f, c)


@dataclass(frozen=True)
class Form:
    """A feature map in folded form, and what is done to the rows of q and k before it."""

    constant: float  # c0
    linear: Tensor | None  # A (d, d)
    widths: tuple[int, ...] | None  # F = products of projections, see _Products; None: sines and cosines of them
    scale: float  # s
    floor: float  # of the denominator, a kept key
    normalise: Literal["no", "centred", "unit"]  # x | (x - mean) / |x - mean| | x / |x|
    eps: float  # guards a norm of zero


# torch.compile leaves it as it is: nothing is left to fuse, and it would unroll the pieces.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rows: Tensor, form: Form
) -> Tensor:
    """The formula above, its denominator floored. F is made of the projections x rows^T; rows are (H or 1, W, d).

    Time O((n + m) d (d + W + f)). Kept for the backward pass: q, k, v, out and about (d + f) e numbers a head.
    Causal (j <= i): time O(n (d + f) (d + CAUSAL_CHUNK)), memory O(n (d + f)); kept are q, k and v.
    """
    B, H, _, d = q.shape
    m = k.shape[2]
    if k.shape != (B, H, m, d) or v.shape[:3] != (B, H, m) or not (mask is None or mask.shape in ((B, m), (1, m))):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, mask) if x is not None)
        raise ValueError(f"q, k, v, mask should be (B, H, n, d), (B, H, m, d), (B, H, m, e), (B, m), got {shapes}")
    mask = None if mask is None else mask.expand(B, m)
    if form.widths is not None:
        rows = rows.detach()  # their gradient is not computed
    if not causal:
        return _LinearAttention.apply(q, k, v, mask, rows, form)
    check_square(q, k)
    return checkpoint(_causal, q, k, v, mask, rows, form, use_reentrant=False)


def check_square(q: Tensor, k: Tensor) -> None:
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal attention needs as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}")


def _in_full_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast is off inside: sums over thousands of keys want float32."""

    @wraps(method)
    def run(ctx: Any, x: Tensor, *args: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return method(ctx, x, *args)

    return run


class _LinearAttention(torch.autograd.Function):
    """Features are computed again in the backward pass. There is no second derivative (of the causal form there is).

    T = [A K^T V'; s F(K)^T V'; c0 1^T V'] with V' = [V, 1], so that for a query x = [q, F(q), 1] the product x T is
    [numerator, denominator]. U is the gradient of T, folded alike: it gives the gradients of keys and values.
    """

    @staticmethod
    @_in_full_precision
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, form: Form) -> Tensor:
        work = _Work(q, k, v, mask, rows, form)
        out = work.empty_like(q, v.shape[-1])
        denominators = torch.empty(*q.shape[:-1], 1, **work.new)
        sums = torch.zeros(*q.shape[:-2], work.width, v.shape[-1] + 1, **work.new)
        for at in work.groups():
            T = _Sums(sums[at], work)
            for keys, values, keep in work.pieces(k[at], v[at], work.keep[at]):
                piece = work.piece(keys)
                piece.read_tokens(keys, work.rows[at], keep)
                piece.read_value(values, keep)
                piece.add_product(T)
            T.fold(form)
            for queries, denominator, result in work.pieces(q[at], denominators[at], out[at]):
                piece = work.piece(queries)
                piece.read_tokens(queries, work.rows[at])
                product = piece.product(T)
                torch.maximum(product[..., -1:], work.floor[at], out=denominator)
                torch.div(product[..., :-1], denominator, out=result)
        ctx.save_for_backward(q, k, v, mask, rows, out, denominators, sums)
        ctx.form = form
        return out

    @staticmethod
    @once_differentiable
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, rows, out, denominators, sums = ctx.saved_tensors
        work = _Work(q, k, v, mask, rows, ctx.form)
        grad_q, grad_k, grad_v = (work.empty_like(x) for x in (q, k, v))
        grad_rows = torch.zeros(work.rows.shape, **work.new) if ctx.needs_input_grad[4] else None
        for at in work.groups():
            T, U = _Sums(sums[at], work), _Sums(torch.zeros_like(sums[at]), work)
            of_queries = q[at], grad[at], out[at], denominators[at], grad_q[at]
            for queries, pulled, result, denominator, grad_queries in work.pieces(*of_queries):
                piece = work.piece(queries)
                piece.read_tokens(queries, work.rows[at], backward=True)
                piece.read_gradient(pulled, result, denominator, work.floor[at])
                piece.add_product(U)
                piece.backward(T, work.back_rows[at], grad_queries, grad_rows if grad_rows is None else grad_rows[at])
            U.fold(ctx.form)
            of_keys = k[at], v[at], work.keep[at], grad_k[at], grad_v[at]
            for keys, values, keep, grad_keys, grad_values in work.pieces(*of_keys):
                piece = work.piece(keys)
                piece.read_tokens(keys, work.rows[at], keep, backward=True)
                torch.mul(piece.product(U)[..., :-1], keep, out=grad_values)
                piece.read_value(values, keep)
                piece.backward(U, work.back_rows[at], grad_keys, grad_rows if grad_rows is None else grad_rows[at])
        if grad_rows is not None:
            grad_rows = grad_rows.sum_to_size(rows.shape).to(rows.dtype)
        return grad_q, grad_k, grad_v, None, grad_rows, None


class _Work:
    """What the pieces of one call share, and how it is cut into them.

    Long sequences: one head of one example at a time, or all its heads if they fit. Short ones: one head of several
    examples. They are read and written where they lie.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, form: Form):
        self.form = form
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.new: dict[str, Any] = {"dtype": dtype, "device": q.device}
        B, H = q.shape[:2]
        self.value_width, projections = v.shape[-1], rows.shape[1]
        self.features = 2 * projections if form.widths is None else form.widths[0] if form.widths else 0
        self.linear = 0 if form.linear is None else q.shape[-1]
        self.width = self.linear + self.features + 1
        size = PIECE.get(q.device.type, PIECE["cuda"])
        tokens = size // max(2 * self.value_width, projections + self.features)
        self.tokens = max(1, tokens)  # of one head in one piece
        self.batch, self.heads = B, H
        self.fit = tokens // max(1, q.shape[2], k.shape[2])  # heads that fit into one piece

        wide = rows.to(dtype)
        back = _Products.exchanged(wide, form.widths) if form.widths else wide
        self.rows, self.back_rows = (x.expand(B, H, -1, -1) for x in (wide, back))
        self.masked = mask is not None
        keep = torch.ones(B, k.shape[2], 1, **self.new) if mask is None else mask.to(dtype).unsqueeze(-1)
        self.keep = keep.unsqueeze(1).expand(-1, H, -1, -1)
        self.floor = (form.floor * keep.sum(1, keepdim=True).clamp(min=1)).unsqueeze(1).expand(-1, H, -1, -1)
        self.scratch: dict[torch.Size, _Piece] = {}

    def empty_like(self, x: Tensor, width: int | None = None) -> Tensor:
        """A new (B, H, n, width) that lies as (B, n, H, width), so that to join the heads is a view."""
        B, H, n, d = x.shape
        return torch.empty(B, n, H, width or d, dtype=x.dtype, device=x.device).transpose(1, 2)

    def groups(self) -> Iterator[Any]:
        """Where the heads are that go together: x[at] is (g, n, d)."""
        if self.fit > self.heads:
            starts = range(0, self.batch, self.fit)
            return ((slice(start, start + self.fit), h) for start in starts for h in range(self.heads))
        if self.fit >= self.heads:
            return iter(range(self.batch))
        return ((b, slice(h, h + 1)) for b in range(self.batch) for h in range(self.heads))

    def pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Stretches of the tokens (axis 1) of all of these; 1, 2, 4, ... of them, so that they tend to be equal."""
        n = tensors[0].shape[1]
        if n <= self.tokens:
            return iter([tensors])
        count = 2 ** math.ceil(math.log2(n / self.tokens))
        return zip(*(t.split(-(-n // count), 1) for t in tensors), strict=True)

    def piece(self, x: Tensor) -> "_Piece":
        """The room for x (g, c, d)."""
        shape = x.shape[:2]
        if shape not in self.scratch:
            self.scratch[shape] = _Piece(self, *shape)
        return self.scratch[shape]


class _Sums:
    """T (g, d + f + 1, e + 1) and views of its parts: rows of x, of F, of 1, of the last two."""

    def __init__(self, T: Tensor, work: _Work):
        self.x, self.features, self.constant = T.split([work.linear, work.features, 1], 1)
        self.x_T = self.x.mT
        self.rest = T[:, work.linear :]

    def fold(self, form: Form) -> None:
        """[K^T V'; F(K)^T V'; 1^T V'] -> T. A is symmetric: the same serves the backward pass."""
        if form.linear is not None:
            self.x.copy_(form.linear.to(self.x.dtype) @ self.x)
        if form.scale != 1:
            self.features *= form.scale
        self.constant *= form.constant


class _Piece:
    """Room for g examples of c tokens, made once and used again: fresh memory can cost more than the work in it."""

    def __init__(self, work: _Work, g: int, c: int):
        self.form, self.linear = work.form, work.linear
        self.mask_tokens = work.masked and work.features > 0
        self.pull = torch.empty(g, c, work.value_width + 1, **work.new)  # [values, 1] or a gradient of such
        self.pull_values, self.pull_ones = self.pull[..., :-1], self.pull[..., -1:]
        self.pull_T = self.pull.mT
        self.room = torch.empty_like(self.pull)
        # Rows a power of two apart would fall on the same few lines of the cache: some products took twice as long.
        self.features = torch.ones(g, work.features + 1, c + APART, **work.new)[..., :c]  # F(x), and a row of ones
        self.features_T = self.features.mT
        self.expand: _Products | _Waves | None = None
        if work.features:
            projected = torch.empty(g, work.rows.shape[-2], c + APART, **work.new)[..., :c]
            self.made = self.features[:, :-1]
            if work.form.widths is None:
                self.expand = _Waves(projected, self.made)
            else:
                self.expand = _Products(projected, self.made, work.form.widths)

    def read_tokens(self, x: Tensor, rows: Tensor, keep: Tensor | None = None, backward: bool = False) -> None:
        """x (g, c, d), normalised, and its features."""
        self.read = self.x = x.to(self.pull.dtype)
        if self.form.normalise == "centred":
            self.x, *self.statistics = unit_rows_forward(self.x, self.form.eps)
        elif self.form.normalise == "unit":
            norm = torch.linalg.vecdot(self.x, self.x).sqrt_().unsqueeze(-1)
            self.inverse = (
                norm.clamp(min=self.form.eps).reciprocal_().mul_(norm > self.form.eps)
            )  # zero has no direction
            self.x = self.x * self.inverse
        elif keep is not None and self.mask_tokens:
            self.x = self.x * keep  # masked values would do, but the powers of a huge key overflow
        self.x_T = self.x.mT
        if self.expand:
            torch.bmm(rows, self.x_T, out=self.expand.projected)
            self.expand.forward(backward)

    def read_value(self, v: Tensor, keep: Tensor) -> None:
        torch.mul(v, keep, out=self.pull_values)
        self.pull_ones.copy_(keep)

    def read_gradient(self, grad: Tensor, out: Tensor, denominator: Tensor, floor: Tensor) -> None:
        """The gradient of [numerator, denominator]; a floored denominator has none."""
        torch.div(grad, denominator, out=self.pull_values)
        product = torch.mul(self.pull_values, out, out=self.room[..., :-1])
        torch.mul(product.sum(-1, keepdim=True).neg_(), denominator > floor, out=self.pull_ones)

    def add_product(self, T: _Sums) -> None:
        """T += [x, F, 1]^T pull."""
        if self.linear:
            T.x.baddbmm_(self.x_T, self.pull)
        if self.expand:
            T.features.baddbmm_(self.made, self.pull)
        T.constant.add_(self.pull.sum(1, keepdim=True))

    def product(self, T: _Sums) -> Tensor:
        """[x, F, 1] T (g, c, e + 1)."""
        if self.linear:
            torch.bmm(self.x, T.x, out=self.room)
        else:
            self.room.zero_()
        if self.expand:
            self.room.baddbmm_(self.features_T, T.rest)
        else:
            self.room.add_(T.constant)
        return self.room

    def backward(self, T: _Sums, rows: Tensor, grad_x: Tensor, grad_rows: Tensor | None) -> None:
        """From `pull`, the gradient of [x, F, 1] T, to the gradient of x as it was read."""
        direct = self.form.normalise == "no" and grad_x.dtype == self.pull.dtype
        grad = grad_x if direct else torch.empty_like(self.read)
        if self.linear:
            torch.bmm(self.pull, T.x_T, out=grad)
        else:
            grad.zero_()
        if self.expand:
            back = self.expand.backward(T.features, self.pull_T)
            grad.baddbmm_(back.mT, rows)
            if grad_rows is not None:
                grad_rows.baddbmm_(back, self.x)
        if self.form.normalise == "centred":
            grad = unit_rows_backward(grad, self.read, self.form.eps, *self.statistics)
        elif self.form.normalise == "unit":
            grad.addcmul_(self.x, torch.linalg.vecdot(self.x, grad).unsqueeze(-1), value=-1).mul_(self.inverse)
        if not direct:
            grad_x.copy_(grad)


class _Products:
    """F_i = prod_j P_ij. Features fall in degree; widths[j] of them have a factor j, all have the first two."""

    def __init__(self, projected: Tensor, product: Tensor, widths: tuple[int, ...]):
        self.projected, self.product = projected, product
        self.first, self.second, *factors = projected.split(widths, 1)
        self.deep_projected = projected[:, 2 * widths[0] :]
        self.before = torch.empty_like(self.deep_projected)
        # Of the third factor, the fourth, ...: the products that have it, the factor, those products without it.
        parts = (product[:, :width] for width in widths[2:])
        self.deep = list(zip(parts, factors, self.before.split(widths[2:], 1), strict=True))

    def forward(self, backward: bool) -> None:
        torch.mul(self.first, self.second, out=self.product)
        for part, factor, before in self.deep:
            if backward:
                before.copy_(part)
            part.mul_(factor)

    def backward(self, T: Tensor, pull_T: Tensor) -> Tensor:
        """The gradient of the projections (g, W, c), in their place, but that the first two factors are exchanged."""
        torch.bmm(T, pull_T, out=self.product)  # from here on the gradient of the product
        for part, factor, before in reversed(self.deep):
            before.mul_(part)  # the gradient of the factor
            part.mul_(factor)
        self.first.mul_(self.product)
        self.second.mul_(self.product)
        self.deep_projected.copy_(self.before)
        return self.projected

    @staticmethod
    def exchanged(rows: Tensor, widths: tuple[int, ...]) -> Tensor:
        """The rows that belong to what `backward` returns."""
        first, second, deep = rows.split([widths[0], widths[0], rows.shape[1] - 2 * widths[0]], 1)
        return torch.cat([second, first, deep], 1)


class _Waves:
    """F = [sin P, cos P]."""

    def __init__(self, projected: Tensor, waves: Tensor):
        self.projected = projected
        self.waves = waves
        self.sine, self.cosine = waves.chunk(2, 1)

    def forward(self, backward: bool) -> None:
        torch.sin(self.projected, out=self.sine)
        torch.cos(self.projected, out=self.cosine)

    def backward(self, T: Tensor, pull_T: Tensor) -> Tensor:
        """The gradient of the projections (g, W, c)."""
        grad_sine, grad_cosine = torch.bmm(T, pull_T).chunk(2, 1)
        return torch.mul(grad_sine, self.cosine, out=self.projected).addcmul_(grad_cosine, self.sine, value=-1)


def plain_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, mask: Tensor | None, floor: float, causal: bool = False
) -> Tensor:
    """The definition: out_i = phi_q_i . sum_j phi_k_j v_j / max(phi_q_i . sum_j phi_k_j, floor n_i).

    n_i is the number of keys that i sees. Time and memory O(n m): for tests and the benchmark, which hold the fast
    versions to it.
    """
    weights = phi_q @ phi_k.mT
    ones = torch.ones_like(weights) if mask is None else mask[:, None, None, :].to(v.dtype).expand_as(weights)
    if causal:
        weights, ones = weights.tril(), ones.tril()
    weights = weights * ones
    return weights @ v / torch.maximum(weights.sum(-1, keepdim=True), floor * ones.sum(-1, keepdim=True).clamp(min=1))


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor, form: Form) -> Tensor:
    """Chunk by chunk: within a chunk the weights are written out; what came before it is one (d + f) x (e + 1) sum."""
    with torch.autocast(q.device.type, enabled=False):
        n, dtype = q.shape[2], torch.promote_types(q.dtype, torch.float32)
        keep = (
            torch.ones(1, 1, n, 1, dtype=dtype, device=q.device) if mask is None else mask[:, None, :, None].to(dtype)
        )
        value = torch.cat([v.to(dtype), keep.expand(*v.shape[:3], 1)], -1) * keep
        tokens = _normalised(q.to(dtype), form), _normalised(k.to(dtype) * keep, form)
        query, key = ([x, _features(x, rows.to(dtype), form)] for x in tokens)
        query = [query[0] @ form.linear.to(dtype), query[1]] if form.linear is not None else [form.scale * query[1]]
        chunk = min(n, CAUSAL_CHUNK)
        chunks = [
            F.pad(x, (0, 0, 0, -n % chunk)).unflatten(2, (-1, chunk))
            for x in (torch.cat(query, -1), torch.cat(key[-len(query) :], -1), value)
        ]
        sums = chunks[1].mT @ chunks[2]
        before = F.pad(sums.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
        product = chunks[0] @ before + (chunks[0] @ chunks[1].mT).tril() @ chunks[2]
        product = product.flatten(2, 3)[:, :, :n] + form.constant * value.cumsum(2)
        denominator = torch.maximum(product[..., -1:], form.floor * keep.cumsum(2).clamp(min=1))
        return (product[..., :-1] / denominator).to(q.dtype)


def _normalised(x: Tensor, form: Form) -> Tensor:
    if form.normalise == "centred":
        return unit_rows(x, form.eps)
    return F.normalize(x, dim=-1, eps=form.eps) if form.normalise == "unit" else x


def _features(x: Tensor, rows: Tensor, form: Form) -> Tensor:
    """F(x) (B, H, n, f)."""
    projected = x @ rows.mT
    if form.widths is None:
        return torch.cat([projected.sin(), projected.cos()], -1)
    return products(projected, form.widths)
