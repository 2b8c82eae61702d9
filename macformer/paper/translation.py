"""Training for translation: batches of equal numbers of tokens, cross-entropy, BLEU; and decoding, greedy or by beams.

The loop itself is in macformer/harness/loop.py. Knows no model and no data by name.

Shapes: B texts, K beams, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from macformer.harness import device as devices
from macformer.harness.device import Precision
from macformer.harness.loop import Arrays, Look, Loop, Rate, Tensors, WarmUp
from macformer.harness.record import Epoch, Translated, Translation

BEGIN, END = 1, 2  # ids that frame a target; 0 is padding
EVALUATED = 128  # texts that are translated together
FEW = 4  # tokens of a greedy translation when memory is measured: the pass for the loss takes most of it
HIGHEST = 700.0  # loss whose exponential is still a number
ROOM = 2, 10  # a translation has at most so many tokens for each of its source, and so many more
Indices = NDArray[np.int64]


class Pairs(Protocol):
    @property
    def references(self) -> Sequence[str]: ...
    @property
    def lengths(self) -> Indices: ...  # (pairs, 2)
    def __len__(self) -> int: ...
    def batch(self, indices: Indices) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...


class Order(Protocol):
    def indices(self, step: int) -> Indices: ...


class Vocabulary(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Corpus(Protocol):
    @property
    def splits(self) -> Mapping[str, Pairs]: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    def order(self, steps_per_epoch: int, seed: int) -> Order: ...


class Translator(Loop):
    """The loop (its docstring has the keys that are not here) over `epochs` of `steps_per_epoch` batches.

    After every epoch: loss and BLEU on the dev split. Texts are translated by `beam` beams; 1 is greedy.
    """

    record = Translation

    def __init__(
        self,
        epochs: PositiveInt,
        steps_per_epoch: PositiveInt,
        warmup_steps: WarmUp,
        learning_rate: Rate,
        beam: PositiveInt = 1,
        accumulate: PositiveInt = 1,
        precision: Precision = "float32",
        tf32: bool = False,
        compile: bool = False,
        checkpoint_every: PositiveInt = 200,
        telemetry: bool = False,
    ):
        if not warmup_steps < epochs * steps_per_epoch:
            raise ValueError(
                f"warmup_steps={warmup_steps} must be below the {epochs * steps_per_epoch} steps of all epochs"
            )
        if find_sacrebleu() is None:
            raise ValueError("sacrebleu is not there: pip install 'macformer[translate]' (make setup does)")
        super().__init__(
            warmup_steps=warmup_steps,
            total_steps=epochs * steps_per_epoch,
            learning_rate=learning_rate,
            evaluate_every=steps_per_epoch,
            cycle_momentum=False,
            accumulate=accumulate,
            precision=precision,
            tf32=tf32,
            compile=compile,
            checkpoint_every=checkpoint_every,
            telemetry=telemetry,
        )
        self.steps_per_epoch = steps_per_epoch
        self.beam = beam

    def goal(self, task: Corpus, seed: int) -> "Bleu":
        return Bleu(self, task, seed)

    @property
    def smaller(self) -> str:
        fewer = f" or, in evaluation, lower trainer.beam={self.beam}" if self.beam > 1 else ""
        return f"raise trainer.steps_per_epoch={self.steps_per_epoch} (smaller batches){fewer}"


@dataclass(frozen=True)
class Outcome:
    bleu: float
    signature: str
    loss: float  # of a token
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, HIGHEST))


class Bleu:
    """Translations like the references."""

    point = Epoch

    def __init__(self, settings: Translator, corpus: Corpus, seed: int):
        self.corpus, self.splits, self.beam = corpus, corpus.splits, settings.beam
        self.order = corpus.order(settings.steps_per_epoch, seed)
        self.batch_examples = -(-len(self.splits["train"]) // settings.steps_per_epoch)
        self.dev_examples, self.test_examples = len(self.splits["dev"]), len(self.splits["test"])

    def batch(self, step: int) -> Arrays:
        return self.splits["train"].batch(self.order.indices(step))

    def longest(self) -> Arrays:
        """As many of the longest pairs as have the tokens of a batch."""
        train = self.splits["train"]
        by_length = np.argsort(-train.lengths.sum(1), kind="stable")
        tokens = train.lengths.sum() / (len(train) / self.batch_examples)
        count = int(np.searchsorted(train.lengths[by_length].sum(1).cumsum(), tokens)) + 1
        return train.batch(by_length[:count])

    def glimpse(self) -> Arrays:
        """Of the commonest lengths: nothing is padding."""
        dev = self.splits["dev"]
        _, kind, counts = np.unique(dev.lengths, axis=0, return_inverse=True, return_counts=True)
        return dev.batch(np.flatnonzero(kind.reshape(-1) == counts.argmax())[:EVALUATED])

    def loss(self, model: nn.Module, part: Tensors, whole: Tensors) -> Tensor:
        return _loss(model, *part) / (whole[1][:, 1:] > 0).sum()

    def dev(self, look: Look) -> dict[str, Any]:
        outcome = self._evaluate(look, "dev", np.arange(self.dev_examples))
        return {"dev_loss": outcome.loss, "dev_perplexity": outcome.perplexity, "dev_bleu": outcome.bleu}

    def rehearse(self, look: Look, longest: bool) -> int:
        by_length = np.argsort(-self.splits["dev"].lengths[:, 0], kind="stable")
        some = by_length[:EVALUATED] if longest else by_length[:: -(-self.dev_examples // EVALUATED)]
        self._evaluate(look, "dev", some, FEW if longest and self.beam == 1 else None)
        return len(some)

    def test(self, look: Look) -> Outcome:
        return self._evaluate(look, "test", np.arange(self.test_examples))

    @torch.inference_mode()
    def _evaluate(self, look: Look, split: str, indices: Indices, most: int | None = None) -> Outcome:
        """`most`: translations of so many tokens at most."""
        pairs, model = self.splits[split], look.model
        by_length = indices[np.argsort(pairs.lengths[indices, 0], kind="stable")]
        batches = [by_length[start : start + EVALUATED] for start in range(0, len(indices), EVALUATED)]
        model.eval()
        losses: list[Tensor] = []
        translations: list[str] = []
        for source, target in devices.feed(look.device, (pairs.batch(batch) for batch in batches)):
            look.tick(len(translations))
            with devices.autocast(look.device, look.precision):
                losses.append(_loss(model, source, target))
                found = search(model, source, self.beam, most)
            translations += map(self.corpus.vocabulary.decode, found)
        model.train()
        bleu = find_sacrebleu().BLEU()
        score = bleu.corpus_score(translations, [[pairs.references[i] for i in by_length]])
        tokens = int(pairs.lengths[indices, 1].sum()) - len(indices)  # BEGIN is given
        loss = float(torch.stack(losses).double().sum()) / tokens
        return Outcome(score.score, str(bleu.get_signature()), loss, tokens)

    def told(self, outcome: Outcome) -> str:
        return (
            f"test BLEU {outcome.bleu:.2f} of {self.test_examples:,} texts ({outcome.signature}), loss "
            f"{outcome.loss:.4f}, perplexity {outcome.perplexity:.2f}"
        )

    def quality(self, history: list[Epoch], best: Epoch, outcome: Outcome, last: Outcome) -> Translated:
        return Translated(
            test_bleu=outcome.bleu,
            test_loss=outcome.loss,
            test_perplexity=outcome.perplexity,
            test_examples=self.test_examples,
            test_tokens=outcome.tokens,
            dev_bleu=best.dev_bleu,
            dev_step=best.step,
            dev_examples=self.dev_examples,
            last_test_bleu=last.bleu,
            last_test_loss=last.loss,
            signature=outcome.signature,
            beam=self.beam,
        )


def find_sacrebleu() -> Any:
    """Of an extra; None if it is not there."""
    try:
        import sacrebleu
    except ModuleNotFoundError:
        return None
    return sacrebleu


def _loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, summed over the tokens that follow BEGIN; padding is none."""
    following = target[:, 1:]
    logits = model(source, target[:, :-1] * (following > 0))  # END is followed by nothing
    return F.cross_entropy(logits.float(), following[following > 0].long(), reduction="sum")


@torch.inference_mode()
def search(model: Any, source: Tensor, beam: int = 1, most: int | None = None) -> list[list[int]]:
    """Translations of source (B, n), as ids without BEGIN, END and padding; with one beam, greedy.

    At each step the K best continuations of a text's K beginnings stay. In the end, the one whose tokens have the
    highest mean log-probability is taken. A text's own length decides when to give up, not that of its batch; at the
    latest after `most` tokens.
    """
    B, rows = len(source), torch.arange(len(source), device=source.device).unsqueeze(1)
    state = model.begin(source).choose(rows.expand(B, beam).flatten())
    factor, more = ROOM
    room = factor * (source > 0).sum(1, keepdim=True) + more
    total = torch.full((B, beam), -math.inf, device=source.device)
    total[:, 0] = 0  # all beginnings are the same: one of them counts
    token = torch.full((B, beam), BEGIN, device=source.device)
    done = torch.zeros(B, beam, dtype=torch.bool, device=source.device)
    written = token.unsqueeze(-1)[..., :0]
    for position in range(min(int(room.max()), most or model.longest)):
        gain = model.step(state, token.flatten(), position).float().log_softmax(-1).unflatten(0, (B, beam))
        gain.masked_fill_(done.unsqueeze(-1), -math.inf)
        gain[..., 0] = torch.where(done, 0.0, -math.inf)  # what is done goes on with padding, for nothing
        total, place = (total.unsqueeze(-1) + gain).flatten(1).topk(beam)
        parent, token = place // gain.shape[-1], place % gain.shape[-1]
        if beam > 1:
            state.go_on_from((rows * beam + parent).flatten())
        written = torch.cat([written.gather(1, parent.unsqueeze(-1).expand_as(written)), token.unsqueeze(-1)], -1)
        done = done.gather(1, parent) | (token == END) | (position + 1 >= room)
        if done.all():
            break
    best = (total / (written > 0).sum(-1)).argmax(1)
    return [[id for id in text if id > END] for text in written[rows[:, 0], best].tolist()]
