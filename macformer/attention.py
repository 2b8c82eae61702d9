"""Attentions: (q, k, v, mask) -> out. Each docstring is the equation and its cost.

Shapes: B batch, H heads, n queries, m keys, d head width, D random features.
q is (B, H, n, d); k and v are (B, H, m, d), with m = n where `causal`; mask is (B, m), True = keep;
out is (B, H, n, d). A query that sees no key at all gets zeros. Inside, everything is float32 or wider, even under
autocast.

An attention of your own is a module with `forward(q, k, v, mask)` of these shapes, with an argument `causal` if it can
be causal. Optional are the methods `absorb(pre_sbn)`, `telemetry` and `backend(device)`, as RMFAttention has them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from macformer import kernels
from macformer.dropout import Dropout
from macformer.features import FoldedMap, RandomFourier, RandomMaclaurin, Sampling
from macformer.folded import FLOOR, check_square
from macformer.linear import linear_attention, linear_backend
from macformer.ppsbn import PreSBN, unit_rows

Implementation = Literal["explicit", "checkpointed", "sdpa"]  # of softmax attention
TELEMETRY_ROWS = 64  # queries of an example that telemetry compares with exact attention


def _check_width(q: Tensor, head_dim: int) -> None:
    if q.shape[-1] != head_dim:
        raise ValueError(f"q has heads of width {q.shape[-1]}, but the attention was made with head_dim={head_dim}")


def _keep(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Which key each query sees, broadcastable to (B, H, n, m); None = all."""
    keep = None if mask is None else mask[:, None, None, :]
    if causal:
        check_square(q, k)
        before = torch.ones(1, 1, q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        keep = before if keep is None else keep & before
    return keep


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Half precision becomes float32; float32 and float64 stay."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def _full_precision(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a forward method float32 or wider, with autocast off, and return its result in q's dtype."""

    @wraps(forward)
    def run(
        self: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            return forward(self, *_wide(q, k, v), mask, causal).to(q.dtype)

    return run


class SoftmaxAttention(nn.Module):
    """out_i = sum_j softmax_j(q_i.k_j / sqrt(d)) v_j. Time O(n m d).

    explicit holds the B x H x n x m weights for the backward pass; checkpointed computes them again
    instead; sdpa is torch's fused kernel, which never holds them.
    """

    def __init__(self, dropout: float = 0.0, implementation: Implementation = "explicit"):
        super().__init__()
        if implementation not in get_args(Implementation):
            known = ", ".join(get_args(Implementation))
            raise ValueError(f"implementation={implementation!r} is not known; choose one of {known}")
        self.drop = Dropout(dropout)
        self.implementation = implementation

    def backend(self, device: torch.device) -> str:
        return f"{self.implementation} softmax"

    @_full_precision
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        keep = _keep(q, k, mask, causal)
        if self.implementation == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, keep, self.drop.p if self.training else 0.0)
        if self.implementation == "checkpointed":
            return checkpoint(self._explicit, q, k, v, keep, use_reentrant=False)
        return self._explicit(q, k, v, keep)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        if keep is not None:  # added in place: a filled copy would be two more passes over n x m
            logits += torch.zeros_like(keep, dtype=q.dtype).masked_fill_(~keep, torch.finfo(q.dtype).min)
        out = self.drop(logits.softmax(-1)) @ v
        if keep is not None:  # all logits of such a row are the smallest number: its softmax is no zero
            out = out.masked_fill(~keep.any(-1, keepdim=True), 0)
        return out


class KernelAttention(nn.Module):
    """out_i = sum_j K(q_i.k_j / sqrt(d)) v_j / sum_j K(q_i.k_j / sqrt(d)). Time and memory O(n m).

    The exact attention that RMFA estimates. kernel="exp" is softmax attention. Logits outside the
    kernel's domain are the caller's affair (pre-SBN keeps them inside).
    """

    def __init__(self, kernel: str = "exp"):
        super().__init__()
        kernels.find(kernel)
        self.kernel = kernel  # its name: functions cannot be pickled

    @_full_precision
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        keep = _keep(q, k, mask, causal)
        if keep is not None:  # before the kernel too: what is masked may lie outside its domain
            weights = kernels.find(self.kernel).value(logits.masked_fill(~keep, 0)).masked_fill(~keep, 0)
        else:
            weights = kernels.find(self.kernel).value(logits)
        total = weights.sum(-1, keepdim=True)
        return weights @ v / total.masked_fill(total == 0, 1)


class RMFAttention(nn.Module):
    """out_i = Phi(q_i/d^(1/4)) . sum_j Phi(k_j/d^(1/4)) v_j / (Phi(q_i/d^(1/4)) . sum_j Phi(k_j/d^(1/4))).

    Phi is a random Maclaurin map of D features for the kernel K, one draw for all heads of a layer; for `sampling`, `p`
    and `redraw` see RandomMaclaurin. Computed in folded form: macformer/linear.py has the formula.
    The denominator is floored at a tenth of a_0 times the number of keys: random features can make it negative; or at
    `clamp` whatever their number, 1 in the authors' release (docs/errata.md).

    Time O((n + m) d D'), where D' counts the projections of the features of degree 2 and more: about 3D/4 for p = 2.
    Memory O((n + m) d): features are computed again in the backward pass. Causal: by chunks, linear in n as well.
    There is no ppSBN inside, unless it is given a PreSBN to `absorb`.
    """

    def __init__(
        self,
        head_dim: int,
        features: int = 128,
        kernel: str = "exp",
        sampling: Sampling = "paper",
        p: float = 2.0,
        redraw: int | None = None,
        generator: Generator | None = None,
        clamp: float | None = None,
    ):
        super().__init__()
        if clamp is not None and not clamp > 0:
            raise ValueError(f"clamp={clamp!r} must be above 0: the output is divided by what is at least this")
        self.feature_map = RandomMaclaurin(head_dim, features, kernel, p, generator, sampling, redraw)
        self.kernel = kernel
        self.clamp = clamp
        self.floor = FLOOR * kernels.find(kernel).coefficient(0) if clamp is None else clamp
        self.pre_sbn_eps: float | None = None

    def absorb(self, pre_sbn: PreSBN) -> bool:
        """Normalise q and k here from now on, without ever holding all normalised rows. False: this one cannot be."""
        if pre_sbn.statistics != "token":
            return False
        self.pre_sbn_eps = pre_sbn.eps
        return True

    def backend(self, device: torch.device) -> str:
        """What computes it there, in a few words for the first lines of a run."""
        return f"RMFA in {linear_backend(device)}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        _check_width(q, self.feature_map.head_dim)
        # A compiled graph has the degrees of the draw in it, and would be compiled anew for each.
        attend = self._attend_uncompiled if self.feature_map.redraw else self._attend
        return attend(q, k, v, mask, causal)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        rows, folded = self.feature_map.folded(dtype)
        normalise: Literal["no", "centred"] = "no" if self.pre_sbn_eps is None else "centred"
        folded = replace(folded, normalise=normalise, eps=self.pre_sbn_eps or 0.0, **self._floor())
        return linear_attention(q, k, v, mask, causal, rows, folded)

    def _floor(self) -> dict[str, Any]:
        return {"floor": self.floor, "floor_per_key": self.clamp is None}

    _attend_uncompiled = torch.compiler.disable(_attend)

    @torch.no_grad()
    def telemetry(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> dict[str, float]:
        """What `forward` does with these inputs, by the plain definition, for a few queries of each example.

        logit_min, logit_max: of q.k/sqrt(d), over the keys that are seen. floored: share of denominators at the floor.
        error: |out - exact|^2 / |exact - mean v|^2, where exact has KernelAttention's weights: averaging v would get 1.
        first_key: the first key's weight, times the number of keys that the query sees (plain averaging: 1), over the
        queries that see two or more; first_key_exact: the same of the exact weights.
        Where there are as many queries as keys the mask is taken to be theirs too: padding is not looked at.
        """
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = _wide(q, k, v)
            if self.pre_sbn_eps is not None:
                q, k = unit_rows(q, self.pre_sbn_eps), unit_rows(k, self.pre_sbn_eps)
            B, H, n, d = q.shape
            keep = _keep(q, k, mask, causal)
            looked_at = slice(None, None, -(-n // TELEMETRY_ROWS))
            mask = q.new_ones(1, k.shape[2], dtype=torch.bool) if mask is None else mask
            real = mask if n == k.shape[2] else q.new_ones(1, n, dtype=torch.bool)
            q, real = q[:, :, looked_at], real[:, looked_at].unsqueeze(1).expand(B, H, -1)
            seen = q.new_ones(1, dtype=torch.bool) if keep is None else keep[:, :, looked_at if causal else slice(None)]
            seen = seen.expand(B, H, q.shape[2], k.shape[2])
            # The powers of a huge padded token would overflow, and inf times 0 is NaN.
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
            count = seen.sum(-1, keepdim=True).to(q.dtype)
            if not real.any() or not (real.unsqueeze(-1) & seen).any():
                return {}

            logits = q @ k.mT * d**-0.5
            exact = kernels.find(self.kernel).value(logits.masked_fill(~seen, 0)) * seen
            mean = seen / count.clamp(min=1)
            phi_q, phi_k = (self.feature_map(x * d**-0.25) for x in (q, k))
            weights = (phi_q @ phi_k.mT) * seen
            total, floor = weights.sum(-1, keepdim=True), FoldedMap(**self._floor()).floors(count)
            weights /= torch.maximum(total, floor)
            exact /= exact.sum(-1, keepdim=True).clamp(min=torch.finfo(exact.dtype).tiny)
            error, spread = (((x - exact) @ v)[real].square().sum() for x in (weights, mean))
            of_first = mask.int().argmax(1).view(-1, 1, 1, 1).expand(B, H, q.shape[2], 1)
            several = real & (count > 1).squeeze(-1)
            firsts = {"first_key": weights, "first_key_exact": exact} if several.any() else {}
            return {
                "logit_min": float(logits[seen & real.unsqueeze(-1)].min()),
                "logit_max": float(logits[seen & real.unsqueeze(-1)].max()),
                "floored": float((total < floor)[..., 0][real].double().mean()),
                "error": float(error / spread),
                **{name: float((x.gather(-1, of_first) * count)[several].mean()) for name, x in firsts.items()},
            }


class RFAttention(nn.Module):
    """RMFA's formula with Fourier features of q/|q| and k/|k| (Peng et al. 2021); sigma is the temperature.

    On the unit sphere exp(-|sigma(q-k)|^2/2) is exp(sigma^2 q.k) up to a factor that cancels.
    Time O((n + m) d D), memory O((n + m) d); see RMFAttention.
    """

    def __init__(self, head_dim: int, features: int = 128, heads: int = 1, generator: Generator | None = None):
        super().__init__()
        self.feature_map = RandomFourier(head_dim, features, heads, generator)

    def backend(self, device: torch.device) -> str:
        return f"RFA in {linear_backend(device)}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        frequencies = self.feature_map.frequencies()
        _check_width(q, frequencies.shape[-1])
        # The features' scale 1/F cancels in the ratio: only the floor has to know it.
        floor = FLOOR * frequencies.shape[1]
        folded = FoldedMap(floor=floor, normalise="unit", eps=1e-12)
        return linear_attention(q, k, v, mask, causal, frequencies, folded)
