"""Training a translator: loss, BLEU, resume, record, what is refused, and that it learns."""

import io
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from macformer.harness.loop import Look, Result
from omegaconf import DictConfig
from torch import Tensor

from lra_data.base import DataError
from macformer.harness import config as configs
from macformer.harness import record as records
from macformer.harness.record import Translated, Translation
from macformer.harness.run import run
from macformer.paper.multi30k import Corpus, Pairs
from macformer.paper.seq2seq import Seq2Seq
from macformer.paper.translation import BEGIN, END, Bleu, Outcome, Translator
from macformer.report import cells
from tests.conftest import Compose, captions, write_multi30k

CPU = torch.device("cpu")
SMALL = ["model.width=16", "model.heads=2", "model.head_dim=8", "model.layers=1", "model.feedforward=32"]
SMALL += ["task.data.vocabulary=400", "task.data.examples={train: 60, dev: 9, test: 7}"]
SMALL += ["trainer.epochs=2", "trainer.steps_per_epoch=5", "trainer.warmup_steps=3"]
RMFA = ["attention=rmfa_exp", "ppsbn=with", "model.attention.features=16"]
RFA = ["attention=rfa", "ppsbn=with", "model.attention.features=16"]
SOFTMAX = ["attention=softmax", "ppsbn=without"]
# A hundred steps, after which translations differ and are sometimes right.
LONGER = ["model.width=32", "task.learning_rate=1e-2", "trainer.steps_per_epoch=50", "trainer.warmup_steps=10"]
Tiny = Compose


@pytest.fixture
def tiny(composed: Compose, multi30k: Path, tmp_path: Path) -> Tiny:
    """tiny("ppsbn=with", ...) -> a run of ten steps, its record under tmp_path."""
    paths = [f"paths.data={multi30k}", f"paths.results={tmp_path}", f"paths.outputs={tmp_path}/outputs"]
    return lambda *overrides: composed(*SMALL, *paths, *overrides, root="translate")


def begin(config: DictConfig) -> tuple[Translator, Seq2Seq, Corpus]:
    corpus = configs.build(config, "task.data", folder=config.paths.data)
    torch.manual_seed(config.seed)
    return configs.build(config, "trainer"), configs.build(config, "model", **asdict(corpus.spec)), corpus


def fit(config: DictConfig) -> tuple[Result, Seq2Seq, Corpus]:
    trainer, model, corpus = begin(config)
    return trainer.fit(model, corpus, CPU, config.seed), model, corpus


@torch.inference_mode()
def slow_loss(model: Seq2Seq, pairs: Pairs, indices: list[int]) -> float:
    """Mean over all tokens behind BEGIN, each from the whole model on what stands before it."""
    logs = []
    for i in indices:
        source, target = (torch.tensor(side[i]).unsqueeze(0).long() for side in (pairs.sources, pairs.targets))
        for place in range(1, target.shape[1]):
            logits = model(source, target[:, :place])[-1]
            logs.append(float(logits.double().log_softmax(-1)[target[0, place]]))
    return -sum(logs) / len(logs)


@torch.inference_mode()
def slow_translation(model: Seq2Seq, source: np.ndarray) -> list[int]:
    """Greedy, with the whole decoder for each token."""
    ids, written = torch.tensor(source).unsqueeze(0).long(), [BEGIN]
    while len(written) <= 2 * len(source) + 10:
        logits = model(ids, torch.tensor([written]))[-1]
        logits[0] = -math.inf
        written.append(int(logits.argmax()))
        if written[-1] == END:
            break
    return written


def tensors(*arrays: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in arrays)


# Loss and BLEU


@pytest.mark.parametrize("arm", [SOFTMAX, RMFA, RFA])
def test_the_loss_is_the_mean_over_the_tokens(arm: list[str], tiny: Tiny) -> None:
    trainer, model, corpus = begin(tiny(*arm))
    model.eval()
    goal = trainer.goal(corpus, 0)
    for step in (0, 3):
        batch = tensors(*goal.batch(step))
        assert (batch[1] == 0).any()  # there is padding
        indices = goal.order.indices(step).tolist()
        loss = float(goal.loss(model, batch, batch).detach())
        assert loss == pytest.approx(slow_loss(model, corpus.splits["train"], indices), rel=1e-5)


@pytest.mark.parametrize("parts", [2, 3, 100])
def test_a_batch_in_parts_has_the_same_gradient(parts: int, tiny: Tiny) -> None:
    """Parts of different numbers of tokens; 100 is more than a batch has pairs."""
    trainer, model, corpus = begin(tiny("ppsbn=with", "model.dropout=0.0", "model.attention.dropout=0.0"))
    model.double()
    goal = trainer.goal(corpus, 0)
    batch = tensors(*goal.batch(0))
    found: list[list[Tensor]] = []
    for count in (1, parts):
        model.zero_grad()
        losses = []
        for part in zip(*(ids.chunk(count) for ids in batch), strict=True):
            losses.append(goal.loss(model, part, batch))
            losses[-1].backward()
        found.append([torch.stack(losses).sum().detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == 1 + len(list(model.parameters()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_training_in_parts_is_the_same_training(tiny: Tiny) -> None:
    same = ["model.dropout=0.0", "model.attention.dropout=0.0", "task.learning_rate=1e-2"]
    whole, split = (fit(tiny(*same, f"trainer.accumulate={count}"))[0] for count in (1, 2))
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    assert split.losses != whole.losses
    assert split.peaks["peak_bytes"] < 0.9 * whole.peaks["peak_bytes"]


def test_what_is_reported_is_loss_and_bleu_of_the_best_weights(tiny: Tiny) -> None:
    """Loss against the slow one, BLEU against sacrebleu's own function on the text of the slow decoder."""
    result, model, corpus = fit(tiny(*RMFA, *LONGER))
    quality, test = result.quality, corpus.splits["test"]
    assert isinstance(quality, Translated)
    assert quality.test_loss == pytest.approx(slow_loss(model.eval(), test, list(range(7))), rel=1e-5)
    assert quality.test_perplexity == pytest.approx(math.exp(quality.test_loss))
    assert quality.test_tokens == sum(len(target) - 1 for target in test.targets)
    assert quality.test_examples == 7
    texts = [corpus.vocabulary.decode(slow_translation(model, source)) for source in test.sources]
    assert len(set(texts)) > 1
    assert quality.test_bleu == pytest.approx(sacrebleu.corpus_bleu(texts, [test.references]).score)
    assert 0 < quality.test_bleu < 100
    best = result.best()
    assert (quality.dev_bleu, quality.dev_step, quality.dev_examples) == (best.dev_bleu, best.step, 9)
    for point in result.history:
        assert point.dev_perplexity == pytest.approx(math.exp(point.dev_loss))
    assert [point.step for point in result.history] == [50, 100]


def test_the_evaluation_of_an_epoch_is_that_of_its_weights(tiny: Tiny) -> None:
    """Dev, at the end of a single epoch."""
    result, model, corpus = fit(tiny(*LONGER, "trainer.epochs=1"))
    (point,) = result.history
    dev = corpus.splits["dev"]
    assert point.dev_loss == pytest.approx(slow_loss(model.eval(), dev, list(range(9))), rel=1e-5)
    texts = [corpus.vocabulary.decode(slow_translation(model, source)) for source in dev.sources]
    assert point.dev_bleu == pytest.approx(sacrebleu.corpus_bleu(texts, [dev.references]).score)
    assert point.train_loss == pytest.approx(np.mean(result.losses))


def test_references_go_with_their_translations(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order and the batches in which texts are translated: a perfect search gets a BLEU of 100."""
    trainer, model, corpus = begin(tiny())
    test = corpus.splits["test"]
    targets = {tuple(s.tolist()): t[1:-1].tolist() for s, t in zip(test.sources, test.targets, strict=True)}

    def perfect(model: object, source: Tensor, *rest: object) -> list[list[int]]:
        return [targets[tuple(row[row > 0].tolist())] for row in source]

    monkeypatch.setattr("macformer.paper.translation.search", perfect)
    monkeypatch.setattr("macformer.paper.translation.EVALUATED", 3)
    outcome = trainer.goal(corpus, 0).test(Look(model, CPU, "float32"))
    assert outcome.bleu == pytest.approx(100)
    assert model.training


def test_evaluation_does_not_depend_on_its_batches(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, corpus = fit(tiny(*LONGER))
    outcomes = []
    for size in (128, 2):
        monkeypatch.setattr("macformer.paper.translation.EVALUATED", size)
        goal = Bleu(configs.build(tiny(), "trainer"), corpus, 0)
        outcomes.append(goal.test(Look(model, CPU, "float32")))
    assert outcomes[0].loss == pytest.approx(outcomes[1].loss, rel=1e-5)
    assert outcomes[0].bleu == outcomes[1].bleu
    assert outcomes[0].tokens == outcomes[1].tokens


def test_beams_are_used_in_evaluation(tiny: Tiny) -> None:
    """And change neither training nor loss."""
    one, four = (fit(tiny(*LONGER, f"trainer.beam={beam}"))[0] for beam in (1, 4))
    assert one.losses == four.losses
    assert one.quality.last_test_loss == four.quality.last_test_loss
    assert [point.dev_bleu for point in one.history] != [point.dev_bleu for point in four.history]
    assert (one.quality.beam, four.quality.beam) == (1, 4)


def test_the_longest_batch_has_the_tokens_of_a_batch(tiny: Tiny) -> None:
    trainer, _, corpus = begin(tiny())
    goal = trainer.goal(corpus, 0)
    source, target = goal.longest()
    lengths = corpus.splits["train"].lengths
    tokens = int((source > 0).sum() + (target > 0).sum())
    assert 0 <= tokens - lengths.sum() / 5 <= lengths.sum(1).max()
    by_length = sorted(lengths.sum(1).tolist(), reverse=True)
    assert sorted(((source > 0).sum(1) + (target > 0).sum(1)).tolist(), reverse=True) == by_length[: len(source)]


# The loop


@pytest.mark.parametrize("extra", [SOFTMAX, [*RMFA, "model.attention.redraw=3"]])
def test_same_seed_same_bits_and_another_seed_others(extra: list[str], tiny: Tiny) -> None:
    results = [fit(tiny(*extra, f"seed={seed}"))[0] for seed in (0, 0, 1)]
    assert results[0].losses == results[1].losses != results[2].losses
    assert results[0].quality == results[1].quality


def test_a_saved_state_goes_on_bit_for_bit(tiny: Tiny) -> None:
    """Every state that `save` gets, through weights_only: also from within an epoch, and with redrawn features."""
    config = tiny(*RMFA, "model.attention.redraw=4", "task.learning_rate=1e-2", "trainer.checkpoint_every=3")
    states: list[bytes] = []

    def save(state: dict) -> None:
        stream = io.BytesIO()
        torch.save(state, stream)
        states.append(stream.getvalue())

    trainer, model, corpus = begin(config)
    whole = trainer.fit(model, corpus, CPU, config.seed, save)
    loaded = [torch.load(io.BytesIO(state), weights_only=True) for state in states]
    assert [state["step"] for state in loaded] == [3, 5, 5, 6, 9, 10, 10]
    for state in loaded:
        trainer, model, corpus = begin(config)
        torch.manual_seed(99)
        resumed = trainer.fit(model, corpus, CPU, config.seed, saved=state)
        assert resumed.losses == whole.losses
        assert resumed.quality == whole.quality
        assert [point.model_dump(exclude={"train_seconds"}) for point in resumed.history] == [
            point.model_dump(exclude={"train_seconds"}) for point in whole.history
        ]


def test_the_best_epoch_is_tested_and_the_last_one_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where dev says that the second of three is the best."""
    evaluate, seen = Bleu._evaluate, []

    def watched(goal: Bleu, look: Look, split: str, indices: np.ndarray, *rest: object) -> Outcome:
        outcome = evaluate(goal, look, split, indices, *rest)
        if len(indices) == 9 and look.tick.__name__ == "tick":  # not to measure memory
            seen.append({name: value.clone() for name, value in look.model.named_parameters()})
            outcome = replace(outcome, bleu=[3.0, 5.0, 5.0][len(seen) - 1])
        return outcome

    monkeypatch.setattr(Bleu, "_evaluate", watched)
    result, model, _ = fit(tiny("task.learning_rate=1e-2", "trainer.epochs=3"))
    assert (result.quality.dev_bleu, result.quality.dev_step) == (5.0, 10)  # the earlier of equals
    assert all(torch.equal(value, seen[1][name]) for name, value in model.named_parameters())
    assert result.quality.last_test_loss != result.quality.test_loss


def test_a_glimpse_has_no_padding(tiny: Tiny) -> None:
    """Telemetry of a decoder cannot tell padding from real rows."""
    trainer, _, corpus = begin(tiny())
    source, target = trainer.goal(corpus, 0).glimpse()
    assert source.all()
    assert target.all()
    assert len(source) == np.unique(corpus.splits["dev"].lengths, axis=0, return_counts=True)[1].max()


def test_settings_that_do_not_fit_the_data_leave_nothing_behind(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^trainer\.steps_per_epoch=9999 is too many for"):
        run(tiny("trainer.steps_per_epoch=9999"), [])
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and "vocabulary" not in file.name]


def test_memory_is_measured_without_a_whole_search(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler would hold every operation of it."""
    trainer, model, corpus = begin(tiny())
    steps, step = [], type(model).step
    monkeypatch.setattr(type(model), "step", lambda *args: steps.append(args[-1]) or step(*args))
    trainer.goal(corpus, 0).rehearse(Look(model, CPU, "float32"), longest=True)
    assert max(steps) < 4


def test_telemetry_tells_of_every_attention_and_changes_nothing(tiny: Tiny) -> None:
    plain, watched = (fit(tiny(*RMFA, *more))[0] for more in ([], ["trainer.telemetry=true"]))
    assert watched.losses == plain.losses
    assert watched.quality == plain.quality
    attentions = "encoder.0.attend", "decoder.0.attend", "decoder.0.cross"
    whats = "logit_min", "logit_max", "floored", "error"
    assert not any(point.telemetry for point in plain.history)
    for point in watched.history:
        assert point.telemetry.keys() == {f"{name}.attention.{what}" for name in attentions for what in whats}
        for name in attentions:
            assert point.telemetry[f"{name}.attention.logit_min"] >= -(8**-0.5)
            assert point.telemetry[f"{name}.attention.logit_max"] <= 8**-0.5 + 1e-6  # pre-SBN's promise
            assert point.telemetry[f"{name}.attention.error"] > 0


@pytest.mark.parametrize(("arm", "precision"), [(SOFTMAX, "float16"), (RMFA, "bfloat16")])
def test_mixed_precision_learns_about_the_same(arm: list[str], precision: str, tiny: Tiny) -> None:
    exact, mixed = (fit(tiny(*arm, f"trainer.precision={p}"))[0] for p in ("float32", precision))
    assert mixed.status == "ok"
    assert mixed.losses == pytest.approx(exact.losses, rel=0.02)
    assert mixed.losses != exact.losses
    assert mixed.quality.last_test_loss == pytest.approx(exact.quality.last_test_loss, rel=0.02)


@pytest.mark.parametrize("rate", ["1e1", "1e3", "1e30"])
@pytest.mark.parametrize("ppsbn", ["with", "without"])
def test_a_rate_that_is_far_too_high_is_a_result(rate: str, ppsbn: str, tiny: Tiny) -> None:
    """Diverged, or a loss so high that its exponential is no number any more: never a traceback."""
    result = fit(tiny(f"ppsbn={ppsbn}", f"task.learning_rate={rate}"))[0]
    if result.status == "ok":
        assert result.history[-1].dev_loss > math.log(400)
        assert math.isfinite(result.history[-1].dev_perplexity)
        assert json.loads(result.quality.model_dump_json())["test_perplexity"] > 400
    else:
        assert result.status == "diverged"
        assert re.match(r"the (dev )?loss is (nan|inf) at step \d+: lower task.learning_rate$", result.message)


# train.py


def test_a_run_and_its_record(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = run(tiny("ppsbn=with"), ["ppsbn=with"])
    assert isinstance(record, Translation)
    assert (record.status, record.task, record.model) == ("ok", "multi30k", "seq2seq_ppsbn")
    assert (record.steps_done, len(record.history)) == (10, 2)
    assert (record.data.source, record.data.majority) == ("stand-in", None)
    assert record.data.examples == {"train": 60, "dev": 9, "test": 7}
    assert record.quality is not None
    assert record.quality.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    (file,) = (tmp_path / "runs").rglob("*.json")
    assert file == records.path(tmp_path, record.config, record.run_id)
    read = records.read(file)
    assert isinstance(read, Translation)
    assert read == record
    shown = records.show(read)
    assert f"test BLEU {record.quality.test_bleu:.2f}, loss " in shown
    assert record.quality.signature in shown
    assert "python train.py -cn translate ppsbn=with" in shown
    assert "dev BLEU" in shown
    assert "majority" not in shown
    capsys.readouterr()
    assert run(tiny("ppsbn=with"), []) == record
    assert f"{record.run_id} is finished" in capsys.readouterr().out


def test_table_2_leaves_translations_out(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(), [])
    assert list((tmp_path / "runs").rglob("*.json"))
    assert cells.load(tmp_path) == ([], [])


def test_a_record_of_a_translation_must_be_whole(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(), [])
    (file,) = (tmp_path / "runs").rglob("*.json")
    told = json.loads(file.read_text())
    del told["quality"]["test_bleu"]
    file.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=rf"{file} is not a run record of schema 3: quality.test_bleu Field required"):
        records.read(file)
    found, problems = cells.load(tmp_path)
    assert (found, len(problems)) == ([], 1)


def test_a_dry_run_records_nothing(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny("dry_run=true"), []) is None
    printed = capsys.readouterr().out
    assert "10 steps on " in printed
    assert re.search(r"a step takes .* ms \(mean of 9\)", printed)
    assert "expected: " in printed
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_evaluated(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    record = run(tiny("task.learning_rate=1e-2"), [])
    assert record is not None
    capsys.readouterr()
    assert run(tiny("task.learning_rate=1e-2", f"evaluate={record.run_id}"), []) is None
    printed = capsys.readouterr().out
    quality = record.quality
    best, last = (line for line in printed.splitlines() if line.startswith(record.run_id))
    assert f"best on dev of 10 steps: test BLEU {quality.test_bleu:.2f} of 7 texts ({quality.signature})" in best
    assert f"loss {quality.test_loss:.4f}, perplexity {quality.test_perplexity:.2f}" in best
    assert f"last of 10 steps: test BLEU {quality.last_test_bleu:.2f}" in last
    assert f"loss {quality.last_test_loss:.4f}" in last


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.warmup_steps=10", "trainer: warmup_steps=10 must be below the 10 steps of all epochs"),
        (
            "trainer.warmup_steps=1",
            r"trainer\.warmup_steps=1 .* it should be greater than or equal to 2",
        ),
        ("trainer.epochs=0", r"trainer\.epochs=0 does not fit Translator: it should be greater than 0"),
        (
            "trainer.steps_per_epoch=0",
            r"trainer\.steps_per_epoch=0 does not fit Translator: it should be greater than 0",
        ),
        ("trainer.beam=0", r"trainer\.beam=0 does not fit Translator: it should be greater than 0"),
        ("trainer.beam=2.5", r"trainer\.beam=2\.5 does not fit Translator: it should be a valid integer"),
        ("task.learning_rate=0.0", r"trainer\.learning_rate=0\.0 does not fit Translator: it should be greater than 0"),
        ("+trainer.batch_size=3", r"trainer\.batch_size is not known: Translator takes epochs, .*"),
        ("+model.pooling=masked", r"model\.pooling is not known: Seq2Seq takes vocabulary, .*"),
        ("+task.data.length=64", r"task\.data\.length is not known: load takes folder, .*"),
        ("+bucket=true", "bucket is not known; the keys there are seed, .*"),
        ("model.width=15", "model: width=15 must be even: .*"),
        ("task.data.examples.dev=0", r"task\.data\.examples\.dev=0 does not fit load: it should be greater than 0"),
    ],
)
def test_bad_keys_are_one_sentence(override: str, sentence: str, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(configs.ConfigError, match=f"^{sentence}$") as error:
        run(tiny(override), [])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_batch_statistics_are_one_sentence(tiny: Tiny) -> None:
    with pytest.raises(configs.ConfigError, match=r"^model: pre_sbn.statistics='batch' is refused in a decoder: .*$"):
        run(tiny("ppsbn=with", "model.pre_sbn.statistics=batch"), [])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.steps_per_epoch=61", r"trainer\.steps_per_epoch=61 is too many for 60 pairs: a batch has one"),
        ("task.data.vocabulary=258", r"task\.data\.vocabulary=258 is too small: at least 259, one id a byte"),
        ("paths.multi30k=nowhere", r"Multi30K needs the file nowhere/train\.de .*"),
    ],
)
def test_what_does_not_fit_the_data_is_one_sentence(override: str, sentence: str, tiny: Tiny) -> None:
    with pytest.raises(DataError, match=f"^{sentence}$"):
        run(tiny(override), [])


# It learns


@pytest.mark.parametrize("arm", [SOFTMAX, RMFA])
def test_the_loss_falls(arm: list[str], tiny: Tiny) -> None:
    sizes = ["model.width=32", "task.data.examples={train: 300, dev: 24, test: 16}", "task.learning_rate=1e-2"]
    schedule = ["trainer.epochs=3", "trainer.steps_per_epoch=20", "trainer.warmup_steps=10"]
    result = fit(tiny(*arm, *sizes, *schedule))[0]
    train_losses, dev_losses = ([getattr(p, name) for p in result.history] for name in ("train_loss", "dev_loss"))
    for losses in (train_losses, dev_losses):
        assert losses == sorted(losses, reverse=True)
    assert result.losses[0] > math.log(400) - 0.5  # nothing is known in the beginning
    assert dev_losses[-1] < 0.4 * result.losses[0]


@pytest.mark.parametrize("arm", [SOFTMAX, RMFA])
def test_sixteen_pairs_are_learned_by_heart(arm: list[str], tiny: Tiny, tmp_path: Path) -> None:
    """300 steps, in each of which they all come about once."""
    pairs: Any = captions()[:16]
    write_multi30k(tmp_path / "multi30k", {"train": 100 * pairs, "dev": pairs, "test": pairs})
    sizes = ["model.width=32", "model.head_dim=16", "model.feedforward=64"]
    sizes += ["model.dropout=0.0", "task.learning_rate=1e-2", "task.data.examples={train: null, dev: null, test: null}"]
    schedule = ["trainer.epochs=2", "trainer.steps_per_epoch=150", "trainer.warmup_steps=10"]
    result = fit(tiny(*arm, *sizes, *schedule, f"paths.data={tmp_path}"))[0]
    assert result.quality.test_bleu > 90
    assert result.quality.test_loss < 0.3
