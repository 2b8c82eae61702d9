"""The translator, an encoder-decoder Transformer around any attention, and the settings of its runs. Knows no data.

Shapes: B batch, n source length, m target length. Token id 0 is padding.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Self

import torch
from pydantic import ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from macformer.attention import SoftmaxAttention
from macformer.dropout import Dropout
from macformer.harness.record import Part
from macformer.model import Layer, MultiHead
from macformer.ppsbn import PostSBN, PreSBN

LONGEST = 1024  # tokens of a text


class Settings(Part):
    """All that decides the result of a run besides its data. The defaults are those of the committed figure."""

    model_config = ConfigDict(frozen=True)

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    pre_sbn: bool = False
    post_sbn: bool = False
    width: Annotated[int, Field(ge=2, multiple_of=2)] = 128  # even: positions are pairs of a sine and a cosine
    heads: PositiveInt = 4
    head_dim: PositiveInt = 32
    layers: PositiveInt = 3  # of the encoder, and of the decoder
    feedforward: PositiveInt = 256
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    vocabulary: PositiveInt = 4000  # ids, for both languages
    epochs: PositiveInt = 8
    steps_per_epoch: PositiveInt = 400  # batches of some 2,600 tokens
    warmup_steps: Annotated[int, Field(ge=2)] = 400
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-3

    @model_validator(mode="after")
    def _warms_up_in_time(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"--warmup-steps {self.warmup_steps} must be below the {self.steps} steps of all epochs")
        return self

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def model(self) -> str:
        both = self.pre_sbn and self.post_sbn
        return "seq2seq" + ("_ppsbn" if both else "_pre_sbn" * self.pre_sbn + "_post_sbn" * self.post_sbn)


class DecoderLayer(nn.Module):
    """Pre-LN: x + drop(attend(norm(x))), causal; then x + drop(cross(norm(x), memory)); then the feed-forward part."""

    def __init__(self, attend: MultiHead, cross: MultiHead, width: int, feedforward: int, dropout: float):
        super().__init__()
        self.norm_attend, self.norm_cross, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.attend, self.cross = attend, cross
        self.first, self.second = nn.Linear(width, feedforward), nn.Linear(feedforward, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """x (B, m, width), memory (B, n, width) and its mask (B, n) -> (B, m, width); no position sees a later one."""
        drop, normed = self.drop, self.norm_attend(x)
        x = x + drop(_attend(self.attend, normed, normed, None, causal=True))
        x = x + drop(_attend(self.cross, self.norm_cross(x), memory, mask))
        return x + drop(self.second(drop(F.gelu(self.first(self.norm(x))))))


def _attend(heads: MultiHead, x: Tensor, memory: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Queries from x, keys and values from memory."""
    return heads.out(heads.attend_heads(heads.to_q(x), heads.to_k(memory), heads.to_v(memory), mask, causal))


class Seq2Seq(nn.Module):
    """Source ids and target ids -> logits of the next target token.

    Pre-LN like the classifier, whose layers its encoder has. One table embeds source and target and gives the logits
    (the vocabulary is joint); positions are sines. Pre-SBN and post-SBN stand around every attention: that of the
    encoder and the two of the decoder. Pre-SBN's statistics are those of a token: over a batch, they would run over
    positions that the decoder must not see yet.
    """

    positions: Tensor

    def __init__(self, settings: Settings, vocabulary: int, attention: Callable[[], nn.Module] | None = None):
        super().__init__()
        width, layers, dropout = settings.width, range(settings.layers), settings.dropout
        attention = attention or partial(SoftmaxAttention, dropout)
        sbn = PreSBN if settings.pre_sbn else None, PostSBN if settings.post_sbn else None

        def attend() -> MultiHead:
            return MultiHead(width, settings.heads, settings.head_dim, attention, *sbn)

        self.width = width
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.register_buffer("positions", _sines(LONGEST, width), persistent=False)
        self.drop = Dropout(dropout)
        self.encoder = nn.ModuleList(Layer(attend(), width, settings.feedforward, dropout) for _ in layers)
        self.norm_encoder = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            DecoderLayer(attend(), attend(), width, settings.feedforward, dropout) for _ in layers
        )
        self.norm_decoder = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source (B, n), target (B, m) -> logits (N, vocabulary) of what follows each of target's N real tokens."""
        return self.logits(self.decode(target, *self.encode(source))[target > 0])

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """source (B, n) -> memory (B, n, width), mask (B, n)."""
        x, mask = self._embed(source), source > 0
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norm_encoder(x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """target (B, m) -> what `logits` takes (B, m, width)."""
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm_decoder(x), self.tokens.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids) * self.width**0.5 + self.positions[: ids.shape[1]])


def _sines(length: int, width: int) -> Tensor:
    """(length, width): sines and cosines of wave lengths from 2 pi to 20,000 pi."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
