"""The translator: what its positions may see, greedy search, ppSBN; its training: loss, BLEU, resume, record.

The model alone is tested in float64, so that rounding leaves tight tolerances.
"""

import contextlib
import itertools
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lra_data.base import DataError
from macformer import RMFAttention, SoftmaxAttention
from macformer.harness import record as records
from macformer.paper import translation
from macformer.paper.multi30k import BEGIN, END, LONGEST, Corpus, Pairs, load
from macformer.paper.translation import Record, Seq2Seq, Settings, Training, finished, record_file, translate
from macformer.report import cells
from tests.conftest import ROOT, captions, committed, write_multi30k
from tests.data.test_multi30k import FINGERPRINT

SMALL = {"width": 16, "heads": 2, "head_dim": 8, "layers": 1, "feedforward": 32, "vocabulary": 400}
TEN_STEPS = {"epochs": 2, "steps_per_epoch": 5, "warmup_steps": 3}
VOCABULARY = 12
WITH, WITHOUT = {"pre_sbn": True, "post_sbn": True}, dict[str, bool]()
ATTENTIONS = {"softmax": SoftmaxAttention, "rmfa_exp": partial(RMFAttention, head_dim=8, features=16)}
CLOSE = {"rtol": 1e-8, "atol": 1e-8}
every_attention = pytest.mark.parametrize("name", ATTENTIONS)
both_arms = pytest.mark.parametrize("ppsbn", [WITH, WITHOUT], ids=["with", "without"])


def small(**more: Any) -> Settings:
    return Settings(**SMALL | TEN_STEPS | more)


def plain(name: str, ppsbn: dict[str, bool], seed: int = 0, **more: Any) -> Seq2Seq:
    torch.manual_seed(seed)
    return Seq2Seq(small(**{"layers": 2} | ppsbn | more), VOCABULARY, ATTENTIONS[name])


@torch.no_grad()
def make(name: str, ppsbn: dict[str, bool], seed: int = 0, **more: Any) -> Seq2Seq:
    """With such weights that attention matters, post-SBN is no identity, and texts end at different steps."""
    model = plain(name, ppsbn, seed, **more)
    for key, p in model.named_parameters():
        if ".post." in key:
            p.normal_(std=0.3)
        elif p.dim() == 2:
            p.normal_(std=(1.0 if key == "tokens.weight" else 2.0) * p.shape[1] ** -0.5)
    model.tokens.weight[END] *= 1.5
    model.tokens.weight[BEGIN] *= 0.1
    return model.double().eval()


def some_ids(*lengths: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=rng) for length in lengths]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True)


def framed(ids: Tensor) -> Tensor:
    return torch.cat([torch.full((len(ids), 1), BEGIN), ids], 1)


def changed(ids: Tensor, j: int) -> Tensor:
    """With another token there."""
    ids = ids.clone()
    ids[0, j] = 3 + (ids[0, j] - 2) % (VOCABULARY - 3)
    return ids


# What no position may see


@every_attention
@both_arms
def test_no_position_sees_a_later_one(name: str, ppsbn: dict[str, bool]) -> None:
    """Not even if its embedding is huge; but its own and the later ones do, and all see the source and its order."""
    model = make(name, ppsbn)
    source, target = some_ids(6), framed(some_ids(9, seed=1))
    expected = model(source, target)
    for j in (1, 4, 9):
        logits = model(source, changed(target, j))
        torch.testing.assert_close(logits[:j], expected[:j], **CLOSE)
        assert (logits[j:] - expected[j:]).abs().amax(1).min() > 1e-6
    for other in (*(changed(source, j) for j in range(6)), source.flip(1)):
        assert (model(other, target) - expected).abs().amax(1).min() > 1e-6
    with torch.no_grad():
        model.tokens.weight[11] = 1e6 * torch.randn(16)
    before, after = target.clone().clamp(max=10), target.clone().clamp(max=10)
    after[0, 5] = 11
    torch.testing.assert_close(model(source, after)[:5], model(source, before)[:5], **CLOSE)


@every_attention
@both_arms
def test_padding_has_no_influence(name: str, ppsbn: dict[str, bool]) -> None:
    """More of it, or another embedding of it, on either side. Its own logit is left out, which its embedding gives."""
    model = make(name, ppsbn)
    source, target = some_ids(7, 2, 4), framed(some_ids(3, 8, 1, seed=1))
    expected = model(source, target)
    assert len(expected) == 4 + 9 + 2
    alone = [model(source[i : i + 1, :n], target[i : i + 1, :m]) for i, (n, m) in enumerate([(7, 4), (2, 9), (4, 2)])]
    torch.testing.assert_close(torch.cat(alone), expected, **CLOSE)
    more = [nn.functional.pad(ids, (0, 5)) for ids in (source, target)]
    torch.testing.assert_close(model(*more), expected, **CLOSE)
    with torch.no_grad():
        model.tokens.weight[0] = 1e3
    torch.testing.assert_close(model(*more)[:, 1:], expected[:, 1:], **CLOSE)


# Greedy search


def greedy(model: Seq2Seq, source: Tensor, room: int) -> list[int]:
    """One text without padding, by the whole model for each token: the likeliest again and again, END included."""
    written: list[int] = []
    while len(written) < room and END not in written:
        logits = model(source.unsqueeze(0), torch.tensor([[BEGIN, *written]]))[-1]
        logits[0] = -math.inf
        written.append(int(logits.argmax()))
    return written


@every_attention
@both_arms
@torch.inference_mode()
def test_a_translation_is_greedy_and_does_not_depend_on_its_batch(
    name: str, ppsbn: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources of different lengths in a batch, translations that end at different steps."""
    monkeypatch.setattr(translation, "ROOM", (1, 5))
    source = nn.functional.pad(some_ids(6, 3, 5, 1, 2), (0, 2))

    def ends(found: list[list[int]]) -> int:
        return len({len(written) for written in found if END in written})

    model = next(model for seed in range(100) if ends(translate(model := make(name, ppsbn, seed), source)) >= 2)
    expected = [greedy(model, row[row > 0], room=int((row > 0).sum()) + 5) for row in source]
    assert translate(model, source) == expected
    order = torch.tensor([3, 0, 4, 4, 1])
    assert translate(model, source[order]) == [expected[i] for i in order]


@torch.no_grad()
def always(token: int) -> Seq2Seq:
    """A model to which that token is always the likeliest."""
    model = make("softmax", WITHOUT)
    model.tokens.weight[END] = 0
    model.norm_decoder.bias.copy_(100 * model.tokens.weight[token])
    return model


def test_a_translation_gives_up_after_twice_its_source_and_ten_or_at_the_last_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert translate(always(7), some_ids(8, 3, 1)) == [[7] * 26, [7] * 16, [7] * 12]
    assert all(0 not in written for written in translate(always(0), some_ids(3, 2)))  # padding is never written
    monkeypatch.setattr(translation, "LONGEST", 20)
    assert translate(always(7), some_ids(8, 3, 1)) == [[7] * 20, [7] * 16, [7] * 12]
    monkeypatch.undo()
    model = make("softmax", WITHOUT, layers=1)
    assert len(model(some_ids(LONGEST), some_ids(LONGEST))) == LONGEST == 1024


# Two arms


@every_attention
def test_the_arms_differ_in_ppsbn_alone(name: str) -> None:
    """Every weight and every draw is the same; but for post-SBN's, one has no more than the other."""
    having, shared = (plain(name, ppsbn).state_dict() for ppsbn in (WITH, WITHOUT))
    for key, value in shared.items():
        assert torch.equal(having[key], value) if isinstance(value, Tensor) else having[key] == value
    own = having.keys() - shared.keys()
    layers = [f"encoder.{i}.attend" for i in (0, 1)] + [f"decoder.{i}.{a}" for i in (0, 1) for a in ("attend", "cross")]
    assert own == {f"{attention}.post.log_{what}" for attention in layers for what in ("gamma", "beta")}
    assert not any(having[key].any() for key in own)  # where it is the identity


def test_pre_sbn_and_post_sbn_can_stand_alone() -> None:
    for pre, post, name in ((True, False, "seq2seq_pre_sbn"), (False, True, "seq2seq_post_sbn")):
        settings = Settings(pre_sbn=pre, post_sbn=post)
        attend = Seq2Seq(settings, VOCABULARY).decoder[0].cross
        assert (attend.pre_q is not None, attend.post is not None, settings.model) == (pre, post, name)


# Training

# After these hundred steps translations differ and are sometimes right.
HUNDRED_STEPS = {"width": 32, "learning_rate": 1e-2, "steps_per_epoch": 50, "warmup_steps": 10}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder, pairs = tmp_path_factory.mktemp("corpus"), captions()
    write_multi30k(folder, {"train": pairs[:60], "dev": pairs[60:69], "test": pairs[69:76]})
    return load(folder, SMALL["vocabulary"])


@pytest.fixture
def run(corpus: Corpus, tmp_path: Path) -> Any:
    """run(learning_rate=1e-2, ...) -> the record of a run of ten steps, made or gone on with."""

    def train(**more: Any) -> Record:
        settings = small(**more)
        translation.run(settings, corpus, tmp_path / "results", tmp_path / "outputs")
        record = finished(record_file(settings, corpus.fingerprint, tmp_path / "results"))
        assert record
        return record

    return train


@torch.inference_mode()
def slow_loss(model: Seq2Seq, pairs: Pairs, indices: list[int]) -> float:
    """Mean over all tokens behind BEGIN, each from the whole model on what stands before it."""
    logs = []
    for i in indices:
        source, target = (side[i].unsqueeze(0).long() for side in (pairs.sources, pairs.targets))
        for place in range(1, target.shape[1]):
            logits = model(source, target[:, :place])[-1]
            logs.append(float(logits.double().log_softmax(-1)[target[0, place]]))
    return -sum(logs) / len(logs)


@torch.inference_mode()
def slow_bleu(model: Seq2Seq, corpus: Corpus, split: str) -> float:
    """Greedy, with the whole model for each token; by sacrebleu's own function."""
    pairs = corpus.splits[split]
    written = [greedy(model, source.long(), room=2 * len(source) + 10) for source in pairs.sources]
    texts = [corpus.vocabulary.decode(ids) for ids in written]
    assert len(set(texts)) > 1
    return sacrebleu.corpus_bleu(texts, [pairs.references]).score


def what_was_learned(record: Record) -> object:
    clock = {"history": {"__all__": {"train_seconds"}}}
    return record.model_dump(include={"test", "last_test", "history"}, exclude=clock)


@both_arms
def test_scores_are_those_of_slow_definitions(
    ppsbn: dict[str, bool], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of an epoch on dev, and on the test split, in batches of two; the training loss is the steps' mean."""
    monkeypatch.setattr(translation, "EVALUATED", 2)
    training = Training(small(**HUNDRED_STEPS, **ppsbn), corpus)
    train_epoch, losses = training.train_epoch, list[list[float]]()
    training.train_epoch = lambda: losses.append(train_epoch()) or losses[-1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(2):
        training.run_epoch()
    epoch = training.history[-1]
    assert (epoch.step, epoch.train_loss) == (100, pytest.approx(np.mean(losses[-1])))
    scores = training.evaluate("test")
    assert training.model.training
    training.model.eval()
    for split, loss, perplexity, bleu in (
        ("dev", epoch.dev_loss, epoch.dev_perplexity, epoch.dev_bleu),
        ("test", scores.loss, scores.perplexity, scores.bleu),
    ):
        pairs = corpus.splits[split]
        assert loss == pytest.approx(slow_loss(training.model, pairs, list(range(len(pairs)))), rel=1e-5)
        assert perplexity == pytest.approx(math.exp(loss))
        assert bleu == pytest.approx(slow_bleu(training.model, corpus, split))
    assert str(training.bleu.get_signature()).startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_the_loss_of_a_step_is_the_mean_over_the_tokens_of_its_batch(corpus: Corpus) -> None:
    training = Training(small(dropout=0.0), corpus)
    batch = translation.batches(corpus.splits["train"].lengths, 5, 0, 0)[0]
    expected = slow_loss(training.model, corpus.splits["train"], batch.tolist())
    assert training.train_epoch()[0] == pytest.approx(expected, rel=1e-5)


def test_references_go_with_their_translations(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order and the batches in which texts are translated: a perfect translator gets a BLEU of 100."""
    test = corpus.splits["test"]
    targets = {tuple(s.tolist()): t.tolist() for s, t in zip(test.sources, test.targets, strict=True)}
    monkeypatch.setattr(
        translation, "translate", lambda model, source: [targets[tuple(row[row > 0].tolist())] for row in source]
    )
    for size in (3, 128):
        monkeypatch.setattr(translation, "EVALUATED", size)
        assert Training(small(), corpus).evaluate("test").bleu == pytest.approx(100)


def test_the_best_epoch_is_tested_and_the_last_one_too(
    run: Any, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where dev says that the second of three is the best: the earlier of equals."""
    evaluate, bleu, weights = Training.evaluate, iter([3.0, 5.0, 5.0]), list[tuple[str, Any]]()

    def watched(training: Training, split: str) -> Any:
        scores = evaluate(training, split)
        weights.append((split, training.model.tokens.weight.tolist()))
        return scores.model_copy(update={"bleu": next(bleu)} if split == "dev" else {})

    monkeypatch.setattr(Training, "evaluate", watched)
    record = run(epochs=3, learning_rate=1e-2)
    assert [split for split, _ in weights] == ["dev"] * 3 + ["test"] * 2
    assert weights[3][1] == weights[2][1]
    assert weights[4][1] == weights[1][1] != weights[2][1]
    assert record.test.loss != record.last_test.loss


# Seeds, checkpoints and records


def test_the_seed_alone_decides(corpus: Corpus) -> None:
    """And both arms see the same batches, from the first one on."""
    for attention in (None, ATTENTIONS["rmfa_exp"]):
        losses = [Training(small(seed=seed), corpus, attention).train_epoch() for seed in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]
    seen = []
    for ppsbn in (WITH, WITHOUT):
        training = Training(small(**ppsbn), corpus)
        batches: list[Any] = []
        training.model.register_forward_pre_hook(lambda _, args, batches=batches: batches.append([*args]))
        training.train_epoch()
        seen.append([[ids.tolist() for ids in batch] for batch in batches])
    assert seen[0] == seen[1]


@both_arms
@pytest.mark.parametrize("at", ["train_epoch", "save", "evaluate"])
def test_a_killed_run_goes_on_bit_for_bit(
    at: str, ppsbn: dict[str, bool], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before every third such call. An epoch that was saved is not trained again."""
    settings = {"learning_rate": 1e-2, "epochs": 3, **ppsbn}
    whole = run(**settings)
    assert not any((tmp_path / "outputs").iterdir())
    shutil.rmtree(tmp_path / "results")
    trained: list[int] = []
    call, calls = getattr(Training, at), itertools.count(1)

    def killed(training: Training, *rest: Any) -> Any:
        if next(calls) % 3 == 1:
            torch.manual_seed(99)
            raise KeyboardInterrupt
        if at == "train_epoch":
            trained.append(len(training.history))
        return call(training, *rest)

    monkeypatch.setattr(Training, at, killed)
    resumed = None
    while not resumed:
        with contextlib.suppress(KeyboardInterrupt):
            resumed = run(**settings)
    assert what_was_learned(resumed) == what_was_learned(whole)
    assert trained == [0, 1, 2] * (at == "train_epoch")


def test_what_is_no_checkpoint_of_the_run_is_named(run: Any, corpus: Corpus, tmp_path: Path) -> None:
    file = tmp_path / "outputs" / record_file(small(), corpus.fingerprint, tmp_path).stem / "checkpoint.pt"
    Training(small(width=32), corpus).save(file)
    for content in (file.read_bytes(), b"", b"no checkpoint"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=f"^{file} is no checkpoint of this run: delete it, and the run starts"):
            run()


def test_a_record_says_what_ran_and_table_2_leaves_it_out(
    run: Any, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(**WITH)
    file = tmp_path / "results" / "runs" / "multi30k" / "seq2seq_ppsbn" / f"{record.run_id}.json"
    assert finished(file) == record
    assert re.fullmatch(r"multi30k\.seq2seq_ppsbn\.0\.[0-9a-f]{8}", record.run_id)
    assert (record.settings, record.fingerprint, record.source) == (small(**WITH), corpus.fingerprint, "stand-in")
    assert record.examples == {"train": 60, "dev": 9, "test": 7}
    assert [epoch.step for epoch in record.history] == [5, 10]
    assert 0 < record.history[0].train_seconds < record.history[1].train_seconds == record.seconds["training"]
    assert min(record.seconds.values()) > 0
    assert record.parameters == sum(p.numel() for p in Training(small(**WITH), corpus).model.parameters())
    assert f"test BLEU {record.test.bleu:.2f}" in capsys.readouterr().out
    assert cells.load(tmp_path / "results") == ([], [])
    with pytest.raises(records.OtherKind, match="is a record of kind 'translation', not of a run on LRA"):
        records.read(file)
    parsed = json.loads(file.read_text())
    for broken in (parsed | {"surprise": 1}, parsed | {"test": {"bleu": 1.0}}, parsed | {"schema_version": 3}):
        file.write_text(json.dumps(broken))
        assert finished(file) is None
        assert f"warning: {file} is no record of a translation: " in capsys.readouterr().out


def test_the_id_is_that_of_settings_and_data() -> None:
    ids = {record_file(settings, data, Path()) for settings in (Settings(), Settings(width=64)) for data in ("a", "b")}
    assert len(ids) == 4
    assert record_file(Settings(width=128), "a", Path()) in ids  # at its default


@pytest.mark.parametrize("file", committed("results/runs/multi30k"), ids=lambda file: file.stem)
def test_a_committed_run_counts_as_finished(file: Path) -> None:
    record = finished(file)
    assert record
    assert record_file(record.settings, FINGERPRINT, ROOT / "results") == file
    assert (record.run_id, record.fingerprint) == (file.stem, FINGERPRINT)


# What is refused, and what is learned


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("warmup_steps", 1, "greater than or equal to 2"),
        ("learning_rate", math.inf, "a finite number"),
        ("seed", -1, "greater than or equal to 0"),
        ("heads", 2.5, "a valid integer"),
        ("beam", 2, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting: str, value: float, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        small(**{setting: value})


@pytest.mark.parametrize(("ppsbn", "attention"), [(WITHOUT, None), (WITH, partial(RMFAttention, head_dim=16))])
def test_sixteen_pairs_are_learned_by_heart(ppsbn: dict[str, bool], attention: Any, tmp_path: Path) -> None:
    """300 steps, in each of which they all come about once; and the loss falls."""
    pairs = captions()[:16]
    write_multi30k(tmp_path, {"train": 100 * pairs, "dev": pairs, "test": pairs})
    sizes = {"width": 32, "head_dim": 16, "feedforward": 64, "dropout": 0.0, "learning_rate": 1e-2}
    settings = small(**sizes, steps_per_epoch=150, warmup_steps=10, **ppsbn)
    training = Training(settings, load(tmp_path, 400), attention)
    for _ in range(2):
        training.run_epoch()
    first, second = training.history
    assert math.log(400) > first.train_loss > 2 * second.train_loss
    assert second.dev_bleu > 90
    assert second.dev_loss < 0.3
