"""Attentions: (q, k, v, mask) -> out. The slow, obvious references; each docstring is the equation and its cost.

Shapes: B batch, H heads, n queries, m keys, d head width, D random features.
q is (B, H, n, d); k and v are (B, H, m, d), with m = n where `causal`; mask is (B, m), True = keep;
out is (B, H, n, d). A query that sees no key at all gets zeros. Inside, everything is float32 or wider.
"""

from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from macformer import kernels
from macformer.dropout import Dropout
from macformer.features import RandomFourier, RandomMaclaurin

FLOOR = 0.1  # of what the denominator would be if every kept key had K = a_0


def _square(q: Tensor, k: Tensor) -> None:
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal attention needs as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}")


def _keep(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Which key each query sees, broadcastable to (B, H, n, m); None = all."""
    keep = None if mask is None else mask[:, None, None, :]
    if causal:
        _square(q, k)
        before = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        keep = before if keep is None else keep & before
    return keep


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Half precision becomes float32; float32 and float64 stay."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


class SoftmaxAttention(nn.Module):
    """out_i = sum_j softmax_j(q_i.k_j / sqrt(d)) v_j. Time O(n m d).

    explicit holds the B x H x n x m weights for the backward pass; checkpointed computes them again
    instead; sdpa is torch's fused kernel, which never holds them.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        implementation: Literal["explicit", "checkpointed", "sdpa"] = "explicit",
    ):
        super().__init__()
        if implementation not in ("explicit", "checkpointed", "sdpa"):
            raise ValueError(
                f"implementation={implementation!r} is not known; choose one of explicit, checkpointed, sdpa"
            )
        self.drop = Dropout(dropout)
        self.implementation = implementation

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        dtype = q.dtype
        q, k, v = _wide(q, k, v)
        keep = _keep(q, k, mask, causal)
        if self.implementation == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, keep, self.drop.p if self.training else 0.0)
        elif self.implementation == "checkpointed":
            out = checkpoint(self._explicit, q, k, v, keep, use_reentrant=False)
        else:
            out = self._explicit(q, k, v, keep)
        return out.to(dtype)

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
        self.kernel = kernels.find(kernel)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        dtype = q.dtype
        q, k, v = _wide(q, k, v)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        keep = _keep(q, k, mask, causal)
        if keep is not None:  # before the kernel too: what is masked may lie outside its domain
            weights = self.kernel.value(logits.masked_fill(~keep, 0)).masked_fill(~keep, 0)
        else:
            weights = self.kernel.value(logits)
        total = weights.sum(-1, keepdim=True)
        return (weights @ v / total.masked_fill(total == 0, 1)).to(dtype)


class RMFAttention(nn.Module):
    """out_i = Phi(q_i/d^(1/4)) . sum_j Phi(k_j/d^(1/4)) v_j / (Phi(q_i/d^(1/4)) . sum_j Phi(k_j/d^(1/4))).

    Phi is a random Maclaurin map of D features for the kernel K, one draw for all heads of a layer.
    Time O((n + m) d D), memory O((n + m) D). No ppSBN inside.
    """

    def __init__(
        self,
        head_dim: int,
        features: int = 128,
        kernel: str = "exp",
        sampling: Literal["paper", "release"] = "paper",
        p: float = 2.0,
        generator: Generator | None = None,
    ):
        super().__init__()
        self.feature_map = RandomMaclaurin(head_dim, features, kernel, p, generator, sampling)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        dtype = q.dtype
        q, k, v = _wide(q, k, v)
        scale = q.shape[-1] ** -0.25
        if mask is not None:  # a huge padded key must not overflow in the map: inf times 0 is NaN
            k = k.masked_fill(~mask[:, None, :, None], 0)
        floor = FLOOR * self.feature_map.kernel.coefficient(0)
        features = self.feature_map(q * scale), self.feature_map(k * scale)
        return _linear_attention(*features, v, mask, floor, causal).to(dtype)


class RFAttention(nn.Module):
    """RMFA's formula with Fourier features of q/|q| and k/|k| (Peng et al. 2021); sigma is the temperature.

    On the unit sphere exp(-|sigma(q-k)|^2/2) is exp(sigma^2 q.k) up to a factor that cancels.
    Time O((n + m) d D), memory O((n + m) D).
    """

    def __init__(self, head_dim: int, features: int = 128, heads: int = 1, generator: Generator | None = None):
        super().__init__()
        self.feature_map = RandomFourier(head_dim, features, heads, generator)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        dtype = q.dtype
        q, k, v = _wide(q, k, v)
        features = self.feature_map(F.normalize(q, dim=-1)), self.feature_map(F.normalize(k, dim=-1))
        return _linear_attention(*features, v, mask, FLOOR, causal).to(dtype)


def _linear_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, mask: Tensor | None, floor: float, causal: bool
) -> Tensor:
    """out_i = phi_q_i . sum_j phi_k_j v_j / max(phi_q_i . sum_j phi_k_j, floor * n_i), n_i the keys that i sees.

    Random features can be negative, and so can the denominator (erratum 6): hence the floor.
    """
    # Masking v and counting with `ones` masks the keys too, without another pass over phi_k, the widest tensor here.
    ones = v.new_ones(1, 1, v.shape[-2], 1) if mask is None else mask[:, None, :, None].to(v.dtype)
    if mask is not None:
        v = v.masked_fill(~mask[:, None, :, None], 0)
    if causal:  # the reference form: quadratic, but plainly right
        _square(phi_q, phi_k)
        weights = (phi_q @ phi_k.mT).tril()
        numerator, denominator, seen = weights @ v, weights @ ones, ones.cumsum(-2)
    else:
        numerator = phi_q @ (phi_k.mT @ v)
        denominator = phi_q @ (phi_k.mT @ ones)
        seen = ones.sum(-2, keepdim=True)
    return numerator / torch.maximum(denominator, floor * seen.clamp(min=1))
