"""The translator: what no position may see, padding, decoding step by step, search, and that the arms differ in ppSBN.

In float64, so that rounding leaves tight tolerances.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from macformer.harness import config as configs
from macformer.paper import translation
from macformer.paper.seq2seq import LONGEST, Seq2Seq
from macformer.paper.translation import BEGIN, END, search
from tests.conftest import ROOT, Compose

Make = Callable[..., Seq2Seq]
ATTENTIONS = sorted(file.stem for file in (ROOT / "configs" / "attention").glob("*.yaml"))
RANDOM = [name for name in ATTENTIONS if name.startswith(("rfa", "rmfa"))]
SMALL = ["model.width=16", "model.heads=2", "model.head_dim=8", "model.layers=2", "model.feedforward=32"]
VOCABULARY = 12
CLOSE = {"rtol": 1e-8, "atol": 1e-8}

every_attention = pytest.mark.parametrize("name", ATTENTIONS)
both_arms = pytest.mark.parametrize("ppsbn", ["with", "without"])


def small(name: str, ppsbn: str, *more: str) -> list[str]:
    features = ["model.attention.features=16"] if name in RANDOM else []
    return [f"attention={name}", f"ppsbn={ppsbn}", *SMALL, *features, *more]


@pytest.fixture
def make(composed: Compose) -> Make:
    """make("rfa", "with", ...) -> a small model for evaluation, in float64; keyword arguments: vocabulary, seed."""

    @cache
    def config(*overrides: str) -> DictConfig:
        return composed(*overrides, root="translate")

    def build(name: str, ppsbn: str, *more: str, vocabulary: int = VOCABULARY, seed: int = 0) -> Seq2Seq:
        torch.manual_seed(seed)
        model = configs.build(config(*small(name, ppsbn, *more)), "model", vocabulary=vocabulary)
        return lively(model).double().eval()

    return build


@torch.no_grad()
def lively(model: Seq2Seq) -> Seq2Seq:
    """With such weights that attention matters, post-SBN is no identity, and texts end at different steps."""
    for name, p in model.named_parameters():
        if ".post." in name:
            p.normal_(std=0.3)
        elif p.dim() == 2:
            p.normal_(std=(1.0 if name == "tokens.weight" else 2.0) * p.shape[1] ** -0.5)
    model.tokens.weight[END] *= 1.5
    model.tokens.weight[BEGIN] *= 0.1
    return model


def some_ids(*lengths: int, padded: int = 0, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(*lengths, padded), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(3, VOCABULARY, (length,), generator=rng)
    return ids


def framed(ids: Tensor) -> Tensor:
    return torch.cat([torch.full((len(ids), 1), BEGIN), ids], 1)


# What no position may see


@every_attention
@both_arms
def test_no_position_sees_a_later_one(name: str, ppsbn: str, make: Make) -> None:
    """Not even if its embedding is huge; but its own and the later ones do."""
    model = make(name, ppsbn)
    source, target = some_ids(6), framed(some_ids(9, seed=1))
    expected = model(source, target)
    for j in (1, 4, 9):
        changed = target.clone()
        changed[0, j] = 3 + (changed[0, j] - 2) % (VOCABULARY - 3)  # another one
        logits = model(source, changed)
        torch.testing.assert_close(logits[:j], expected[:j], **CLOSE)
        assert (logits[j:] - expected[j:]).abs().amax(1).min() > 1e-6
    with torch.no_grad():
        model.tokens.weight[11] = 1e6 * torch.randn(16)
    before, after = target.clone().clamp(max=10), target.clone().clamp(max=10)
    after[0, 5] = 11
    torch.testing.assert_close(model(source, after)[:5], model(source, before)[:5], **CLOSE)


@pytest.mark.parametrize("name", ["rfa", "rmfa_exp", "softmax"])
@both_arms
def test_no_position_sees_a_later_one_in_long_texts(name: str, ppsbn: str, make: Make) -> None:
    """Linear attention is causal chunk by chunk, of 128 positions each."""
    model = make(name, ppsbn)
    source, target = some_ids(6), framed(some_ids(269, seed=1))
    expected = model(source, target)
    for j in (127, 128, 200):
        changed = target.clone()
        changed[0, j:] = some_ids(270 - j, seed=j)[0]
        logits = model(source, changed)
        torch.testing.assert_close(logits[:j], expected[:j], **CLOSE)
        assert not torch.allclose(logits[j:], expected[j:], **CLOSE)


@every_attention
@both_arms
def test_padding_has_no_influence(name: str, ppsbn: str, make: Make) -> None:
    """More of it, or another embedding of it, on either side. Its own logit is left out, which its embedding gives."""
    model = make(name, ppsbn)
    source, target = some_ids(7, 2, 4), framed(some_ids(3, 8, 1, seed=1))
    expected = model(source, target)
    assert len(expected) == 4 + 9 + 2
    alone = [model(source[i : i + 1, :n], target[i : i + 1, :m]) for i, (n, m) in enumerate([(7, 4), (2, 9), (4, 2)])]
    torch.testing.assert_close(torch.cat(alone), expected, **CLOSE)
    more = [torch.nn.functional.pad(ids, (0, 5)) for ids in (source, target)]
    torch.testing.assert_close(model(*more), expected, **CLOSE)
    with torch.no_grad():
        model.tokens.weight[0] = 1e3
    torch.testing.assert_close(model(*more)[:, 1:], expected[:, 1:], **CLOSE)


@every_attention
def test_the_source_has_an_influence(name: str, make: Make) -> None:
    """Every one of its tokens, on every position; and their order."""
    model = make(name, "with")
    source, target = some_ids(6), framed(some_ids(5, seed=1))
    expected = model(source, target)
    for j in range(6):
        changed = source.clone()
        changed[0, j] = 3 + (changed[0, j] - 2) % (VOCABULARY - 3)
        assert (model(changed, target) - expected).abs().amax(1).min() > 1e-6
    assert (model(source.flip(1), target) - expected).abs().amax(1).min() > 1e-6


# Decoding step by step


@every_attention
@both_arms
def test_a_step_gives_the_logits_of_the_whole(name: str, ppsbn: str, make: Make) -> None:
    model = make(name, ppsbn)
    source, target = some_ids(7, 2, 4), framed(some_ids(11, 11, 11, seed=1))
    expected = model(source, target).unflatten(0, (3, 12))
    with torch.inference_mode():
        state = model.begin(source)
        steps = [model.step(state, target[:, position], position) for position in range(12)]
    torch.testing.assert_close(torch.stack(steps, 1), expected, **CLOSE)


@pytest.mark.parametrize("name", ["rfa", "rmfa_exp"])
def test_a_step_beyond_a_chunk_gives_the_logits_of_the_whole(name: str, make: Make) -> None:
    model = make(name, "with")
    source, target = some_ids(7, 2), framed(some_ids(139, 139, seed=1))
    expected = model(source, target).unflatten(0, (2, 140))
    with torch.inference_mode():
        state = model.begin(source)
        steps = [model.step(state, target[:, position], position) for position in range(140)]
    torch.testing.assert_close(torch.stack(steps, 1), expected, **CLOSE)


def test_choosing_rows_repeats_and_reorders_them(make: Make) -> None:
    model = make("rmfa_exp", "with")
    source, target = some_ids(7, 2, 4), framed(some_ids(3, 3, 3, seed=1))
    rows = torch.tensor([2, 0, 0, 1, 2])
    expected = model(source[rows], target[rows]).unflatten(0, (5, 4))[:, -1]
    state = model.begin(source)
    for position in range(3):
        model.step(state, target[:, position], position)
    chosen = state.choose(rows)
    torch.testing.assert_close(model.step(chosen, target[rows, 3], 3), expected, **CLOSE)
    assert [len(k) for k, _ in chosen.pasts] == [5, 5]
    ours = model.step(state, target[:, 3], 3)  # the state that rows were chosen from is as it was
    torch.testing.assert_close(ours, model(source, target).unflatten(0, (3, 4))[:, -1], **CLOSE)


# Search


def distribution(model: Seq2Seq, source: Tensor, written: list[int]) -> Tensor:
    """Log-probabilities of what follows, from the whole decoder; padding is never written."""
    logs = model(source.unsqueeze(0), torch.tensor([[BEGIN, *written]]))[-1].log_softmax(-1)
    logs[0] = -math.inf
    return logs


def most(source: Tensor) -> int:
    factor, more = translation.ROOM
    return factor * len(source) + more


def greedy(model: Seq2Seq, source: Tensor) -> list[int]:
    """One text without padding -> the likeliest token again and again, END included if it was reached."""
    written: list[int] = []
    while len(written) < most(source) and END not in written:
        written.append(int(distribution(model, source, written).argmax()))
    return written


def beams(model: Seq2Seq, source: Tensor, beam: int) -> list[int]:
    """One text without padding: the `beam` likeliest beginnings, grown by all tokens; the best mean in the end."""

    def finished(written: list[int]) -> bool:
        return END in written or len(written) == most(source)

    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    while not all(finished(written) for _, written in kept):
        grown = [(total, written) for total, written in kept if finished(written)]
        for total, written in kept:
            if not finished(written):
                logs = distribution(model, source, written)
                grown += [(total + float(logs[id]), [*written, id]) for id in range(1, len(logs))]
        kept = sorted(grown, key=lambda pair: -pair[0])[:beam]
    return max(kept, key=lambda pair: pair[0] / len(pair[1]))[1]


def every_text(model: Seq2Seq, source: Tensor, written: list[int], total: float) -> Iterator[tuple[float, list[int]]]:
    """All texts there are, with the mean log-probability of their tokens."""
    if END in written or len(written) == most(source):
        yield total / len(written), written
        return
    logs = distribution(model, source, written)
    for id in range(1, len(logs)):
        yield from every_text(model, source, [*written, id], total + float(logs[id]))


def plain(written: list[int]) -> list[int]:
    return [id for id in written if id > END]


def texts(source: Tensor) -> list[Tensor]:
    return [row[row > 0] for row in source]


def first(make: Make, name: str, ppsbn: str, wanted: Callable[[Seq2Seq], bool]) -> Seq2Seq:
    """The first model whose translations are worth a look."""
    return next(model for seed in range(100) if wanted(model := make(name, ppsbn, seed=seed)))


@every_attention
@both_arms
@torch.inference_mode()
def test_greedy_search_writes_what_the_whole_decoder_would(
    name: str, ppsbn: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources of different lengths in a batch, translations that end at different steps."""
    monkeypatch.setattr(translation, "ROOM", (1, 5))
    source = some_ids(6, 3, 5, 1, 2, padded=8)

    def ends(texts: list[list[int]]) -> int:
        return len(
            {len(written) for written, own in zip(texts, source, strict=True) if len(written) < most(own[own > 0])}
        )

    model = first(make, name, ppsbn, lambda model: ends(search(model, source)) >= 2)
    expected = [greedy(model, text) for text in texts(source)]
    assert len({len(written) for written in expected if END in written}) >= 2
    assert search(model, source) == [plain(written) for written in expected]


@torch.inference_mode()
def test_search_gives_up_after_its_own_source_has_room_no_more(make: Make) -> None:
    model = make("softmax", "without")
    with torch.no_grad():
        model.tokens.weight[END] = 0
        model.norm_decoder.bias.copy_(10 * model.tokens.weight[7])  # 7 is always the likeliest
    assert search(model, some_ids(8, 3, 1)) == [[7] * 26, [7] * 16, [7] * 12]


@pytest.mark.parametrize("name", ["kernel_exp", "rfa", "rmfa_exp", "softmax"])
@both_arms
@pytest.mark.parametrize("beam", [2, 3])
@torch.inference_mode()
def test_beam_search_is_beam_search(
    name: str, ppsbn: str, beam: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation, "ROOM", (1, 2))
    source = some_ids(4, 1, 3, 5, 2)
    model = first(make, name, ppsbn, lambda model: search(model, source, beam) != search(model, source))
    assert search(model, source, beam) == [plain(beams(model, text, beam)) for text in texts(source)]


@both_arms
@torch.inference_mode()
def test_a_beam_that_holds_every_beginning_finds_the_best_text_of_all(
    ppsbn: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 121: three tokens that go on and one that ends, four places."""
    monkeypatch.setattr(translation, "ROOM", (0, 4))
    source = some_ids(4, 1, 3, 2).clamp(max=4)
    found = set()
    for seed in range(3):
        model = make("rmfa_exp", ppsbn, vocabulary=5, seed=seed)
        all_texts = [list(every_text(model, text, [], 0.0)) for text in texts(source)]
        assert {len(them) for them in all_texts} == {121}
        best = [plain(max(them)[1]) for them in all_texts]
        assert search(model, source, 121) == best
        assert search(model, source, 200) == best  # more beams than there are beginnings
        found |= set(map(len, best))
    assert len(found) > 1


@pytest.mark.parametrize("name", ["rfa", "rmfa_inv", "softmax"])
@pytest.mark.parametrize("beam", [1, 4])
@torch.inference_mode()
def test_a_translation_does_not_depend_on_its_batch(name: str, beam: int, make: Make) -> None:
    source = some_ids(8, 3, 5, 1, 2)
    model = first(make, name, "with", lambda model: len(set(map(len, search(model, source, beam)))) == len(source))
    together = search(model, source, beam)
    assert [search(model, text.unsqueeze(0), beam)[0] for text in texts(source)] == together
    order = torch.tensor([3, 0, 4, 4, 1])
    assert search(model, torch.nn.functional.pad(source, (0, 4))[order], beam) == [together[i] for i in order]


def test_padding_is_never_written(make: Make) -> None:
    model = make("softmax", "without")
    with torch.no_grad():
        model.norm_decoder.bias.copy_(100 * model.tokens.weight[0])
    source = some_ids(3, 2)
    with torch.inference_mode():
        assert model.step(model.begin(source), torch.tensor([BEGIN] * 2), 0).argmax(-1).tolist() == [0, 0]
    for beam in (1, 3):
        for written, text in zip(search(model, source, beam), texts(source), strict=True):
            assert 0 not in written
            assert len(written) <= most(text)


# Two ways to compute the same


@every_attention
@both_arms
def test_the_plain_path_has_the_same_logits_and_gradients(
    name: str, ppsbn: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name, ppsbn)
    source, target = some_ids(7, 2, 4), framed(some_ids(3, 8, 1, seed=1))
    results = []
    for usable in (True, False):
        if not usable:
            monkeypatch.setattr("macformer.pieces.usable", lambda x: False)
            monkeypatch.setattr("macformer.pieces.add_and_feed", None)  # calling it would be an error
        model.zero_grad()
        logits = model(source, target)
        (logits * torch.linspace(-1, 1, logits.numel()).double().view_as(logits)).sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
        assert all(grad.abs().max() > 0 for grad in results[-1])
    torch.testing.assert_close(*results, **CLOSE)


# What is refused


def test_batch_statistics_are_refused(composed: Compose) -> None:
    config = composed(*small("softmax", "with", "model.pre_sbn.statistics=batch"), root="translate")
    with pytest.raises(configs.ConfigError, match=r"^model: pre_sbn\.statistics='batch' is refused .*=token$"):
        configs.build(config, "model", vocabulary=VOCABULARY)


def test_an_odd_width_is_refused(composed: Compose) -> None:
    config = composed(*small("softmax", "with", "model.width=15"), root="translate")
    with pytest.raises(configs.ConfigError, match=r"^model: width=15 must be even: .*$"):
        configs.build(config, "model", vocabulary=VOCABULARY)


def test_a_text_beyond_the_last_position_is_refused(make: Make) -> None:
    model = make("rfa", "without", "model.layers=1")
    longest, longer = some_ids(LONGEST), some_ids(LONGEST + 1)
    assert LONGEST == 1024 == model.longest
    assert len(model(longest, longest)) == LONGEST
    for source, target in ((longer, longest), (longest, longer)):
        with pytest.raises(ValueError, match=r"^a text of 1,025 tokens is too long: at most 1,024$"):
            model(source, target)
    with pytest.raises(ValueError, match=r"^a text of 1,025 tokens is too long: at most 1,024$"):
        model.step(model.begin(some_ids(3)), torch.tensor([BEGIN]), LONGEST)


@torch.inference_mode()
def test_search_stops_at_the_last_position(make: Make) -> None:
    model = make("softmax", "without", "model.layers=1")
    with torch.no_grad():
        model.tokens.weight[END] = 0
        model.norm_decoder.bias.copy_(10 * model.tokens.weight[7])
    assert search(model, some_ids(600)) == [[7] * LONGEST]


# Two arms, and draws


@every_attention
def test_the_arms_differ_in_ppsbn_alone(name: str, composed: Compose) -> None:
    """Every weight and every draw is the same; but for post-SBN's, one has no more than the other."""
    states: dict[str, dict[str, Any]] = {}
    for ppsbn in ("with", "without"):
        torch.manual_seed(0)
        config = composed(*small(name, ppsbn), root="translate")
        states[ppsbn] = configs.build(config, "model", vocabulary=VOCABULARY).state_dict()
    shared = states["without"]
    for key, value in shared.items():
        ours = states["with"][key]
        assert torch.equal(ours, value) if isinstance(value, Tensor) else ours == value
    own = states["with"].keys() - shared.keys()
    attentions = [f"encoder.{i}.attend" for i in (0, 1)] + [
        f"decoder.{i}.{a}" for i in (0, 1) for a in ("attend", "cross")
    ]
    assert own == {f"{attention}.post.log_{what}" for attention in attentions for what in ("gamma", "beta")}
    assert not any(states["with"][key].any() for key in own)  # where it is the identity


def test_the_arms_see_the_same_batches(composed: Compose, multi30k: Path) -> None:
    """Those that their trainers order, and those that their models get, from the first one on."""
    ordered, seen, losses = [], [], []
    sizes = ["task.data.vocabulary=300", "trainer.epochs=1", "trainer.steps_per_epoch=4", "trainer.warmup_steps=2"]
    sizes += ["task.data.examples={train: 60, dev: 2, test: 2}", "model.layers=1"]
    for ppsbn in ("with", "without"):
        config = composed(*small("rmfa_exp", ppsbn, *sizes), f"paths.data={multi30k}", root="translate")
        corpus = configs.build(config, "task.data", folder=config.paths.data)
        torch.manual_seed(config.seed)
        model = configs.build(config, "model", **asdict(corpus.spec))
        trainer = configs.build(config, "trainer")
        goal = trainer.goal(corpus, config.seed)
        ordered.append([ids.tolist() for step in range(9) for ids in goal.batch(step)])
        first: list[Any] = []
        model.register_forward_pre_hook(lambda module, args, first=first: first.append([x.tolist() for x in args]))
        losses.append(trainer.fit(model, corpus, torch.device("cpu"), config.seed).losses)
        seen.append(first)
    assert ordered[0] == ordered[1]
    assert seen[0][0] == seen[1][0]
    assert seen[0][0][0] == ordered[0][0]
    assert losses[0][0] != losses[1][0]


@pytest.mark.parametrize("name", RANDOM)
def test_every_attention_has_a_draw_of_its_own(name: str, composed: Compose) -> None:
    """The three of each layer: six in all."""
    torch.manual_seed(0)
    model = configs.build(composed(*small(name, "with"), root="translate"), "model", vocabulary=VOCABULARY)
    state = model.state_dict()
    draws = [value for key, value in state.items() if key.endswith(("feature_map.noise", "feature_map.rows"))]
    assert len(draws) == 6
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 6
