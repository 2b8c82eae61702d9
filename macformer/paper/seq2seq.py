"""The translator: an encoder-decoder Transformer around any attention of the harness. Knows no data.

Shapes: B batch, n source length, m target length, H heads, d head width. Token id 0 is padding.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from macformer import pieces
from macformer.check import require_int
from macformer.dropout import Dropout
from macformer.model import Layer, MultiHead
from macformer.ppsbn import PreSBN

LONGEST = 1024  # tokens of a text


class DecoderLayer(nn.Module):
    """Pre-LN: x + drop(attend(norm(x))), causal; then x + drop(cross(norm(x), memory)); then the feed-forward part."""

    def __init__(self, attend: MultiHead, cross: MultiHead, width: int, feedforward: int, dropout: float):
        super().__init__()
        if any(pre and pre.statistics == "batch" for pre in (attend.pre_q, attend.pre_k)):
            raise ValueError(
                "pre_sbn.statistics='batch' is refused in a decoder: the statistics run over positions it must not "
                "look at; use pre_sbn.statistics=token"
            )
        self.norm_attend = nn.LayerNorm(width)
        self.attend = attend
        self.norm_cross = nn.LayerNorm(width)
        self.cross = cross
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, feedforward)
        self.second = nn.Linear(feedforward, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """x (B, m, width), memory (B, n, width) and its mask (B, n) -> (B, m, width); no position sees a later one."""
        q, k, v = self._project(x)
        return self._rest(x, self.attend.joined(q, k, v, None, causal=True), *self.remember(memory), mask)

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, for all positions of the target."""
        return self.cross.to_k(memory), self.cross.to_v(memory)

    def step(self, x: Tensor, past: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor], mask: Tensor) -> Any:
        """x (B, 1, width) at the next position, keys and values of those before it -> (B, 1, width), the new `past`.

        To see all keys up to one's own is what the last row of a causal attention does: so for every attention.
        """
        q, *fresh = self._project(x)
        k, v = (torch.cat(pair, 1) for pair in zip(past, fresh, strict=True))
        return self._rest(x, self.attend.joined(q, k, v, None), *source, mask), (k, v)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = self.attend.to_q, self.attend.to_k, self.attend.to_v
        if pieces.usable(x):
            return pieces.norm_project(x, self.norm_attend, maps)
        normed = self.norm_attend(x)
        return tuple(to(normed) for to in maps)

    def _rest(self, x: Tensor, attended: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """All behind the self-attention."""
        cross, drop = self.cross, self.drop
        x = x + drop(self.attend.out(attended))
        attended = cross.joined(cross.to_q(self.norm_cross(x)), k, v, mask)
        if pieces.usable(x):  # the same, faster
            return pieces.add_and_feed(x, attended, cross.out, drop, self.norm, self.first, self.second)
        x = x + drop(cross.out(attended))
        return x + drop(self.second(drop(F.gelu(self.first(self.norm(x))))))


@dataclass
class State:
    """What decoding knows of its texts, one row a text: keys and values of the source and of what is written so far."""

    mask: Tensor  # of the source (B, n)
    sources: list[tuple[Tensor, Tensor]]  # of each layer (B, n, H d)
    pasts: list[tuple[Tensor, Tensor]]  # of each layer (B, m, H d)

    def choose(self, rows: Tensor) -> "State":
        """Those rows, in that order; a row may come several times."""

        return State(self.mask[rows], _pick(self.sources, rows), _pick(self.pasts, rows))

    def go_on_from(self, rows: Tensor) -> None:
        """What is written so far becomes that of those rows; sources stay."""
        self.pasts = _pick(self.pasts, rows)


def _pick(pairs: list[tuple[Tensor, Tensor]], rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(k[rows], v[rows]) for k, v in pairs]


class Seq2Seq(nn.Module):
    """Source ids and target ids -> logits of the next target token.

    Pre-LN like the classifier, whose layers its encoder has. One table embeds source and target and gives the logits
    (the vocabulary is joint); positions are sines, so that no length is new to it.
    `pre_sbn` and `post_sbn` stand around every attention: in the encoder, and the two of the decoder.
    """

    longest = LONGEST
    positions: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        heads: int,
        head_dim: int,
        layers: int,
        feedforward: int,
        dropout: float,
        attention: Callable[[], nn.Module],
        pre_sbn: Callable[..., PreSBN] | None,
        post_sbn: Callable[..., nn.Module] | None,
    ):
        super().__init__()
        require_int(width=width, heads=heads, head_dim=head_dim, layers=layers, feedforward=feedforward)
        if width % 2:
            raise ValueError(f"width={width} must be even: a sine and a cosine for each wave length of the positions")

        def attend() -> MultiHead:
            return MultiHead(width, heads, head_dim, attention, pre_sbn, post_sbn)

        self.width = width
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.register_buffer("positions", _sines(LONGEST, width), persistent=False)
        self.drop = Dropout(dropout)
        self.encoder = nn.ModuleList(Layer(attend(), width, feedforward, dropout) for _ in range(layers))
        self.norm_encoder = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            DecoderLayer(attend(), attend(), width, feedforward, dropout) for _ in range(layers)
        )
        self.norm_decoder = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source (B, n), target (B, m) -> logits (N, vocabulary) of what follows each of target's N real tokens."""
        memory, mask = self.encode(source)
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return self._logits(x[target > 0])  # a product with padding would be for nothing

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """source (B, n) -> memory (B, n, width), mask (B, n)."""
        mask = source > 0
        x = self._embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norm_encoder(x), mask

    def begin(self, source: Tensor) -> State:
        """The state of decoding before its first token."""
        memory, mask = self.encode(source)
        sources = [layer.remember(memory) for layer in cast(Iterable[DecoderLayer], self.decoder)]
        return State(mask, sources, [(k[:, :0], v[:, :0]) for k, v in sources])

    def step(self, state: State, token: Tensor, position: int) -> Tensor:
        """token (B,), the one at that position -> logits of the next (B, vocabulary); the state moves on."""
        x = self._embed(token.unsqueeze(1), position)
        for number, layer in enumerate(cast(Iterable[DecoderLayer], self.decoder)):
            x, state.pasts[number] = layer.step(x, state.pasts[number], state.sources[number], state.mask)
        return self._logits(x[:, 0])

    def _embed(self, ids: Tensor, first: int = 0) -> Tensor:
        end = first + ids.shape[1]
        if end > LONGEST:
            raise ValueError(f"a text of {end:,} tokens is too long: at most {LONGEST:,}")
        return self.drop(self.tokens(ids) * self.width**0.5 + self.positions[first:end])

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm_decoder(x), self.tokens.weight)


def _sines(length: int, width: int) -> Tensor:
    """(length, width): sines and cosines of wave lengths from 2 pi to 20,000 pi."""
    rates = torch.exp(torch.arange(0, width, 2, device="cpu") * (-math.log(10_000.0) / width))
    angles = torch.arange(length, device="cpu").unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
