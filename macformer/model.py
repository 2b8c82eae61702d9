"""The LRA classifier: embeddings, multi-head attention, pre-LN layers, heads for one text or two. Knows no data.

Shapes: B batch, n length, H heads, d head width. Token id 0 is padding.
"""

import inspect
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from macformer import cache_blocks
from macformer.check import require_int
from macformer.dropout import Dropout
from macformer.ppsbn import PreSBN

Direction = Literal["both", "causal", "backward"]  # a token sees all | itself and earlier ones | itself and later ones


class MultiHead(nn.Module):
    """Project, split into heads, [pre-SBN,] attend, [post-SBN,] join. `Layer` applies the last projection, `out`."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        attention: Callable[[], nn.Module],
        pre_sbn: Callable[..., PreSBN] | None,
        post_sbn: Callable[..., nn.Module] | None,
        direction: Direction = "both",
    ):
        super().__init__()
        self.heads, self.direction = heads, direction
        self.to_q = nn.Linear(width, heads * head_dim)
        self.to_k = nn.Linear(width, heads * head_dim)
        self.to_v = nn.Linear(width, heads * head_dim)
        self.attention = attention()
        if direction not in get_args(Direction):
            raise ValueError(f"direction={direction!r} is not known; choose one of {', '.join(get_args(Direction))}")
        if direction != "both" and "causal" not in inspect.signature(self.attention.forward).parameters:
            name = type(self.attention).__name__
            raise ValueError(
                f"direction={direction} needs an argument `causal`, which the forward of {name} does not have"
            )
        self.pre_q = pre_sbn(heads=heads, head_dim=head_dim) if pre_sbn else None
        self.pre_k = pre_sbn(heads=heads, head_dim=head_dim) if pre_sbn else None
        absorb = getattr(self.attention, "absorb", None)
        if self.pre_q and absorb and absorb(self.pre_q):
            self.pre_q = self.pre_k = None
        self.post = post_sbn(heads=heads, head_dim=head_dim) if post_sbn else None
        self.out = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        """Queries of x (B, n, width), keys and values of y (B, m, width), mask (B, m) -> (B, n, heads * head_dim)."""
        if x is y and not x.is_cpu:  # one product: fewer launches, and x is cast to half precision once
            maps = self.to_q, self.to_k, self.to_v
            weight, bias = torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps])
            q, k, v = F.linear(x, weight, bias).chunk(3, -1)
            return self.attend_heads(q, k, v, mask)
        return self.attend_heads(self.to_q(x), self.to_k(y), self.to_v(y), mask)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """All between the projections: q (B, n, heads * head_dim), k and v (B, m, ...)."""
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        if self.pre_q and self.pre_k:
            q, k = self.pre_q(q, mask), self.pre_k(k, mask)
        if self.direction == "both":
            attended = self.attention(q, k, v, mask)
        elif self.direction == "causal":
            attended = self.attention(q, k, v, mask, causal=True)
        else:  # padding comes first then: masked, so that each text is read from its own end
            q, k, v = (x.flip(2) for x in (q, k, v))
            attended = self.attention(q, k, v, None if mask is None else mask.flip(1), causal=True).flip(2)
        if self.post:
            attended = self.post(attended)
        return attended.transpose(1, 2).flatten(-2)


class Layer(nn.Module):
    """Pre-LN: x + drop(out(attend(norm(x)))), then x + drop(second(drop(gelu(first(norm(x))))))."""

    def __init__(self, attend: MultiHead, width: int, feedforward: int, dropout: float):
        super().__init__()
        self.norm_attend = nn.LayerNorm(width)
        self.attend = attend
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, feedforward)
        self.second = nn.Linear(feedforward, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attend, drop = self.attend, self.drop
        if cache_blocks.usable(x):  # the same with less memory
            q, k, v = cache_blocks.norm_and_project(x, self.norm_attend, (attend.to_q, attend.to_k, attend.to_v))
            attended = attend.attend_heads(q, k, v, mask)
            return cache_blocks.add_and_feed(x, attended, attend.out, drop, self.norm, self.first, self.second)
        normed = self.norm_attend(x)
        x = x + drop(attend.out(attend(normed, normed, mask)))
        return x + drop(self.second(drop(F.gelu(self.first(self.norm(x))))))


class Classifier(nn.Module):
    """Token ids -> class logits. Sizes of vocabulary, length and classes come from the task.

    One text: head on the pooled encoding. Two texts (`paired`): one encoder for both, head on
    [a, b, a*b, a-b].
    pooling="padded" divides the sum over real tokens by the padded length, as the base code does, so that the
    length leaks into the encoding; "masked" divides by the number of real tokens.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        classes: int,
        paired: bool,
        width: int,
        heads: int,
        head_dim: int,
        layers: int,
        feedforward: int,
        head_width: int,
        dropout: float,
        pooling: Literal["padded", "masked"],
        direction: Direction,
        attention: Callable[[], nn.Module],
        pre_sbn: Callable[..., PreSBN] | None,
        post_sbn: Callable[..., nn.Module] | None,
    ):
        super().__init__()
        require_int(width=width, heads=heads, head_dim=head_dim, layers=layers)
        require_int(feedforward=feedforward, head_width=head_width)
        self.paired = paired
        self.pooling = pooling
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.drop = Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(
                MultiHead(width, heads, head_dim, attention, pre_sbn, post_sbn, direction), width, feedforward, dropout
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(
            nn.Linear(4 * width if paired else width, head_width),
            nn.ReLU(),
            nn.Linear(head_width, classes),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, n), or (B, 2, n) for pairs -> logits (B, classes)."""
        pooled = self.encode(ids if not self.paired else ids.flatten(0, 1))
        if self.paired:
            a, b = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([a, b, a * b, a - b], -1)
        # Pooled vectors differ by little, and half precision would put units of the head on the wrong side of zero.
        with torch.autocast(ids.device.type, enabled=False):
            return self.head(pooled)

    def encode(self, ids: Tensor) -> Tensor:
        """ids (B, n) -> one vector a text (B, width)."""
        mask = ids > 0
        x = self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        with torch.autocast(x.device.type, enabled=False):  # half precision is too coarse for thousands of tokens
            total = (mask.unsqueeze(1).to(x.dtype) @ x).squeeze(1)  # the real tokens' sum
        if self.pooling == "padded":
            return total / self.positions.num_embeddings  # the padded length, however short the batch is
        return total / mask.sum(1, keepdim=True).clamp(min=1)
