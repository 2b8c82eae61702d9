"""The translator, an encoder-decoder Transformer around any attention, and its training on Multi30K, on the CPU.

Shapes: B batch, n source length, m target length. Token id 0 is padding.
"""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import sacrebleu
import torch
from pydantic import ConfigDict, Field, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lra_data.base import DataError
from macformer.attention import SoftmaxAttention
from macformer.dropout import Dropout
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness import record as records
from macformer.harness.progress import duration
from macformer.model import Layer, MultiHead
from macformer.paper.multi30k import BEGIN, END, LONGEST, PAD, Corpus, batches
from macformer.ppsbn import PostSBN, PreSBN

CPU = torch.device("cpu")
EVALUATED = 128  # texts that are translated together
ROOM = 2, 10  # a translation has at most 2 tokens for each of its source, and 10 more
HIGHEST = 700.0  # loss whose exponential is still a number
STATEFUL = ("model", "optimizer", "schedule")  # their states go into the checkpoint


class Settings(records.Part):
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
        parts = "_pre_sbn" * self.pre_sbn + "_post_sbn" * self.post_sbn
        return f"seq2seq{parts.replace('_pre_sbn_post_sbn', '_ppsbn')}"


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
        x = x + drop(self.attend.out(self.attend(normed, normed, None)))
        x = x + drop(self.cross.out(self.cross(self.norm_cross(x), memory, mask)))
        return x + drop(self.second(drop(F.gelu(self.first(self.norm(x))))))


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
        attend = partial(MultiHead, width, settings.heads, settings.head_dim, attention, *sbn)
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
        angles = torch.arange(LONGEST).unsqueeze(1) * rates  # of wave lengths from 2 pi to 20,000 pi
        sines = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)  # (LONGEST, width)
        self.register_buffer("positions", sines, persistent=False)
        self.drop = Dropout(dropout)
        sizes = width, settings.feedforward, dropout
        self.encoder = nn.ModuleList(Layer(attend(), *sizes) for _ in layers)
        self.norm_encoder = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(attend(direction="causal"), attend(), *sizes) for _ in layers)
        self.norm_decoder = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source (B, n), target (B, m) -> logits (N, vocabulary) of what follows each of target's N real tokens."""
        return self.decode(target, *self.encode(source), target > 0)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """source (B, n) -> memory (B, n, width), mask (B, n)."""
        x, mask = self._embed(source), source > 0
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norm_encoder(x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor, where: Any) -> Tensor:
        """target (B, m) -> logits (N, vocabulary) of what follows the N tokens target[where]."""
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return F.linear(self.norm_decoder(x[where]), self.tokens.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids) * self.tokens.embedding_dim**0.5 + self.positions[: ids.shape[1]])


class Scores(records.Part):
    bleu: float  # corpus BLEU of plain text
    loss: float  # cross-entropy of a token, in nats
    perplexity: float


class Epoch(records.Part):
    step: int  # the last one of the epoch
    train_loss: float  # mean over its steps
    dev_loss: float
    dev_perplexity: float
    dev_bleu: float
    train_seconds: float  # since the run began


class Record(records.Part):
    """A run that came to its end. Any other leaves only its checkpoint."""

    kind: Literal["translation"] = "translation"
    schema_version: Literal[4] = 4
    run_id: str
    settings: Settings
    fingerprint: str  # of the data, as are source and examples
    source: Literal["multi30k", "stand-in"]
    examples: dict[str, int]
    code: records.Code
    environment: records.Environment
    parameters: int
    test: Scores  # of the weights with the best dev BLEU
    last_test: Scores  # of the last weights
    signature: str  # of sacrebleu: which BLEU
    seconds: dict[devices.Account, float]  # training, evaluation, and pause: all else
    resident_peak_bytes: int | None  # of the process that finished it
    history: list[Epoch]


def record_file(settings: Settings, fingerprint: str, results: Path) -> Path:
    """Where a record goes. Its name, the run's id, hashes the data and the settings that are not at their defaults."""
    decisive = json.dumps([fingerprint, settings.model_dump(exclude_defaults=True)], sort_keys=True)
    digest, model = hashlib.sha256(decisive.encode()).hexdigest(), settings.model
    return results / "runs" / "multi30k" / model / f"multi30k.{model}.{settings.seed}.{digest[:8]}.json"


def finished(file: Path) -> Record | None:
    """The record of a run that need not be repeated: one that is there and whole."""
    try:
        return Record.model_validate_json(file.read_bytes()) if file.exists() else None
    except ValidationError as error:
        print(f"warning: {file} is no record of a translation: {records.complaint(error)}; it is made again")
        return None


class Training:
    """One training, epoch by epoch."""

    def __init__(self, settings: Settings, corpus: Corpus, attention: Callable[[], nn.Module] | None = None):
        self.settings, self.corpus = settings, corpus
        torch.manual_seed(settings.seed)
        self.model = Seq2Seq(settings, len(corpus.vocabulary), attention)
        rate, steps, warmup = settings.learning_rate, settings.steps, settings.warmup_steps / settings.steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, eps=1e-6, weight_decay=0, fused=True)
        form: dict[str, Any] = {"pct_start": warmup, "anneal_strategy": "linear", "cycle_momentum": False}
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, steps, **form)
        self.bleu = sacrebleu.BLEU()
        self.history: list[Epoch] = []
        self.best_weights: dict[str, Any] = {}
        self.seconds: dict[devices.Account, float] = {}
        self.clock = devices.Clock(CPU, self.seconds)

    def run_epoch(self) -> None:
        """Train for one epoch, evaluate on dev, and keep the weights if they are the best so far."""
        self.clock.book("pause")
        train_loss = float(np.mean(self.train_epoch()))
        self.clock.book("training")
        dev = {f"dev_{name}": value for name, value in self.evaluate("dev")}
        self.clock.book("evaluation")
        step, seconds = self.schedule.last_epoch, self.seconds["training"]
        self.history.append(Epoch(step=step, train_loss=train_loss, train_seconds=seconds, **dev))
        if max(self.history, key=lambda epoch: epoch.dev_bleu) is self.history[-1]:  # of equals, the earliest is best
            self.best_weights = copy.deepcopy(self.model.state_dict())

    def train_epoch(self) -> list[float]:
        """Train for one epoch; returns the loss of each step."""
        train, losses = self.corpus.splits["train"], list[float]()
        for indices in batches(train.lengths, self.settings.steps_per_epoch, self.settings.seed, len(self.history)):
            source, target = train.batch(indices)
            loss = self.summed_loss(source, target) / (target[:, 1:] > 0).sum()
            loss.backward()
            nn.utils.clip_grad_value_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def summed_loss(self, source: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, summed over the tokens that follow BEGIN and are not padding."""
        following = target[:, 1:]
        logits = self.model(source, target[:, :-1] * (following > 0))  # END is followed by nothing
        loss = F.cross_entropy(logits, following[following > 0].long(), reduction="sum")
        if not loss.isfinite():
            place = f"after step {self.schedule.last_epoch}: lower --learning-rate {self.settings.learning_rate}"
            raise FloatingPointError(f"the loss is {loss.item()} {place}")
        return loss

    @torch.inference_mode()
    def evaluate(self, split: str) -> Scores:
        pairs, losses, texts = self.corpus.splits[split], 0.0, list[str]()
        by_length = np.argsort(pairs.lengths[:, 0], kind="stable")
        self.model.eval()
        for start in range(0, len(pairs), EVALUATED):
            source, target = pairs.batch(by_length[start : start + EVALUATED])
            losses += float(self.summed_loss(source, target))
            texts += map(self.corpus.vocabulary.decode, translate(self.model, source))
        self.model.train()
        score = self.bleu.corpus_score(texts, [[pairs.references[i] for i in by_length]]).score
        tokens = int(pairs.lengths[:, 1].sum()) - len(pairs)  # BEGIN is given
        loss = losses / tokens
        return Scores(bleu=score, loss=loss, perplexity=math.exp(min(loss, HIGHEST)))

    def save(self, file: Path) -> None:
        """Save, between two epochs, all that another process needs to go on."""
        state: dict[str, Any] = {name: getattr(self, name).state_dict() for name in STATEFUL}
        state |= {"random": torch.get_rng_state(), "best_weights": self.best_weights, "seconds": self.seconds}
        state["history"] = [epoch.model_dump() for epoch in self.history]
        with files.replacing(file) as temporary:
            torch.save(state, temporary)

    def load(self, file: Path) -> None:
        try:
            state = torch.load(file, weights_only=True)
            for name in STATEFUL:
                getattr(self, name).load_state_dict(state[name])
            self.history = [Epoch(**epoch) for epoch in state["history"]]
            self.best_weights = state["best_weights"]
            self.seconds.update(state["seconds"])
            torch.set_rng_state(state["random"])
        except Exception as error:  # what is no checkpoint can raise anything
            raise DataError(f"{file} is no checkpoint of this run: delete it, and the run starts anew") from error


@torch.inference_mode()
def translate(model: Seq2Seq, source: Tensor) -> list[list[int]]:
    """Greedy translations of source (B, n), as ids: the likeliest token again and again, up to END.

    A text's own length decides when to give up. Each step decodes all that is written again: of texts this short, that
    takes 6% of an epoch, as it does with keys and values kept from step to step.
    """
    memory, mask = model.encode(source)
    room = (ROOM[0] * mask.sum(1) + ROOM[1]).clamp(max=LONGEST)
    written = torch.full((len(source), 1), BEGIN)
    texts = torch.arange(len(source))  # those that go on
    found: dict[int, list[int]] = {}
    while len(texts):
        logits = model.decode(written, memory, mask, (slice(None), -1))
        logits[:, PAD] = -math.inf
        token = logits.argmax(-1, keepdim=True)
        written = torch.cat([written, token], 1)
        done = (token[:, 0] == END) | (written.shape[1] > room)
        found |= zip(texts[done].tolist(), written[done, 1:].tolist(), strict=True)
        texts, written, memory, mask, room = (x[~done] for x in (texts, written, memory, mask, room))
    return [found[text] for text in range(len(source))]


def run(settings: Settings, corpus: Corpus, results: Path, outputs: Path) -> None:
    """Train, or go on after the last whole epoch, and write the record."""
    file, code = record_file(settings, corpus.fingerprint, results), records.code()
    run_id, checkpoint = file.stem, outputs / file.stem / "checkpoint.pt"
    devices.prepare(CPU, threads=1)
    training = Training(settings, corpus)
    if checkpoint.exists():
        training.load(checkpoint)
        print(f"{run_id} goes on after epoch {len(training.history)} ({checkpoint})", flush=True)
    for number in range(len(training.history) + 1, settings.epochs + 1):
        training.run_epoch()
        training.save(checkpoint)
        last, left = training.history[-1], sum(training.seconds.values()) * (settings.epochs / number - 1)
        losses = f"loss {last.train_loss:.4f}  dev loss {last.dev_loss:.4f}  dev BLEU {last.dev_bleu:.2f}"
        print(f"{run_id}  epoch {number}/{settings.epochs}  {losses}  {duration(left)} left", flush=True)
    training.clock.book("pause")
    last_test = training.evaluate("test")
    training.model.load_state_dict(training.best_weights)
    test = training.evaluate("test")
    training.clock.book("evaluation")
    record = Record(
        run_id=run_id,
        settings=settings,
        fingerprint=corpus.fingerprint,
        source=corpus.source,
        examples={split: len(pairs) for split, pairs in corpus.splits.items()},
        code=code,
        environment=records.environment("cpu", devices.describe(CPU), threads=1),
        parameters=sum(p.numel() for p in training.model.parameters()),
        test=test,
        last_test=last_test,
        signature=str(training.bleu.get_signature()),
        seconds=training.seconds,
        resident_peak_bytes=devices.resident_peak(),
        history=training.history,
    )
    files.write(file, record.model_dump_json(indent=2) + "\n")
    shutil.rmtree(checkpoint.parent)
    print(f"{run_id}  test BLEU {test.bleu:.2f}  loss {test.loss:.4f}  {file}", flush=True)
