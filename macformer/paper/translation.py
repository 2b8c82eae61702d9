"""Training a translator on Multi30K, on the CPU: epochs, evaluation, checkpoint and record."""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sacrebleu
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from lra_data.base import DataError
from macformer.harness import device as devices
from macformer.harness import files
from macformer.harness import record as records
from macformer.harness.progress import duration
from macformer.paper.multi30k import BEGIN, END, PAD, Corpus, batches
from macformer.paper.seq2seq import LONGEST, Seq2Seq, Settings

CPU = torch.device("cpu")
CLIP = 1.0  # gradients are clipped by value
EPS = 1e-6  # of AdamW
EVALUATED = 128  # texts that are translated together
ROOM = 2, 10  # a translation has at most 2 tokens for each of its source, and 10 more
HIGHEST = 700.0  # loss whose exponential is still a number
STATEFUL = ("model", "optimizer", "schedule")  # their states go into the checkpoint


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


def identify(settings: Settings, fingerprint: str, results: Path) -> tuple[str, Path]:
    """A run's id and the file of its record. The id hashes the data and the settings that are not at their defaults."""
    changed = settings.model_dump(exclude_defaults=True)
    digest = hashlib.sha256(json.dumps([fingerprint, changed], sort_keys=True).encode()).hexdigest()
    run_id = f"multi30k.{settings.model}.{settings.seed}.{digest[:8]}"
    return run_id, results / "runs" / "multi30k" / settings.model / f"{run_id}.json"


def finished(file: Path) -> Record | None:
    """The record of a run that need not be repeated: one that is there and whole."""
    try:
        return Record.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, eps=EPS, weight_decay=0, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rate, steps, pct_start=warmup, anneal_strategy="linear", cycle_momentum=False
        )
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
        settings, train, losses = self.settings, self.corpus.splits["train"], list[float]()
        for indices in batches(train.lengths, settings.steps_per_epoch, settings.seed, len(self.history)):
            source, target = train.batch(indices)
            loss = summed_loss(self.model, source, target) / (target[:, 1:] > 0).sum()
            loss.backward()
            nn.utils.clip_grad_value_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(self.finite("loss", loss.item()))
        return losses

    def finite(self, name: str, loss: float) -> float:
        """The loss, if it is a number: else the training has diverged."""
        if not math.isfinite(loss):
            step, rate = self.schedule.last_epoch, self.settings.learning_rate
            raise FloatingPointError(f"the {name} is {loss} at step {step}: lower --learning-rate {rate}")
        return loss

    @torch.inference_mode()
    def evaluate(self, split: str) -> Scores:
        pairs, losses, texts = self.corpus.splits[split], 0.0, list[str]()
        by_length = np.argsort(pairs.lengths[:, 0], kind="stable")
        self.model.eval()
        for start in range(0, len(pairs), EVALUATED):
            source, target = pairs.batch(by_length[start : start + EVALUATED])
            losses += float(summed_loss(self.model, source, target))
            texts += map(self.corpus.vocabulary.decode, translate(self.model, source))
        self.model.train()
        score = self.bleu.corpus_score(texts, [[pairs.references[i] for i in by_length]]).score
        tokens = int(pairs.lengths[:, 1].sum()) - len(pairs)  # BEGIN is given
        loss = self.finite(f"loss on {split}", losses / tokens)
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


def summed_loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, summed over the tokens that follow BEGIN and are not padding."""
    following = target[:, 1:]
    logits = model(source, target[:, :-1] * (following > 0))  # END is followed by nothing
    return F.cross_entropy(logits, following[following > 0].long(), reduction="sum")


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
        logits = model.logits(model.decode(written, memory, mask)[:, -1])
        logits[:, PAD] = -math.inf
        token = logits.argmax(-1, keepdim=True)
        written = torch.cat([written, token], 1)
        done = (token[:, 0] == END) | (written.shape[1] > room)
        found |= zip(texts[done].tolist(), written[done, 1:].tolist(), strict=True)
        texts, written, memory, mask, room = (x[~done] for x in (texts, written, memory, mask, room))
    return [found[text] for text in range(len(source))]


def run(settings: Settings, corpus: Corpus, results: Path, outputs: Path) -> None:
    """Train, or go on after the last whole epoch, and write the record."""
    run_id, file = identify(settings, corpus.fingerprint, results)
    checkpoint, code = outputs / run_id / "checkpoint.pt", records.code()
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
