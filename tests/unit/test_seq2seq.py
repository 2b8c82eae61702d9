"""The translator: what no position may see, padding, greedy search, and that the arms differ in ppSBN alone.

In float64, so that rounding leaves tight tolerances.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from macformer import RMFAttention, SoftmaxAttention
from macformer.paper import translation
from macformer.paper.multi30k import BEGIN, END
from macformer.paper.translation import LONGEST, Seq2Seq, Settings, translate

VOCABULARY = 12
ATTENTIONS = {"softmax": SoftmaxAttention, "rmfa_exp": partial(RMFAttention, head_dim=8, features=16)}
CLOSE = {"rtol": 1e-8, "atol": 1e-8}
every_attention = pytest.mark.parametrize("name", ATTENTIONS)
both_arms = pytest.mark.parametrize("ppsbn", [True, False])


def plain(name: str, ppsbn: bool, seed: int = 0, **more: int) -> Seq2Seq:
    sizes = {"width": 16, "heads": 2, "head_dim": 8, "layers": 2, "feedforward": 32} | more
    torch.manual_seed(seed)
    return Seq2Seq(Settings(pre_sbn=ppsbn, post_sbn=ppsbn, **sizes), VOCABULARY, ATTENTIONS[name])


@torch.no_grad()
def make(name: str, ppsbn: bool, seed: int = 0, **more: int) -> Seq2Seq:
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
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(3, VOCABULARY, (length,), generator=rng)
    return ids


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
def test_no_position_sees_a_later_one(name: str, ppsbn: bool) -> None:
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
def test_padding_has_no_influence(name: str, ppsbn: bool) -> None:
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
    name: str, ppsbn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources of different lengths in a batch, translations that end at different steps."""
    monkeypatch.setattr(translation, "ROOM", (1, 5))
    source = torch.nn.functional.pad(some_ids(6, 3, 5, 1, 2), (0, 2))

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
    model = make("softmax", False)
    model.tokens.weight[END] = 0
    model.norm_decoder.bias.copy_(100 * model.tokens.weight[token])
    return model


def test_a_translation_gives_up_after_twice_its_source_and_ten_or_at_the_last_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert translate(always(7), some_ids(8, 3, 1)) == [[7] * 26, [7] * 16, [7] * 12]
    monkeypatch.setattr(translation, "LONGEST", 20)
    assert translate(always(7), some_ids(8, 3, 1)) == [[7] * 20, [7] * 16, [7] * 12]
    monkeypatch.undo()
    model = make("softmax", False, layers=1)
    assert len(model(some_ids(LONGEST), some_ids(LONGEST))) == LONGEST == 1024


def test_padding_is_never_written() -> None:
    first, second = translate(always(0), some_ids(3, 2))
    assert 0 not in first + second
    assert (len(first) <= 16, len(second) <= 14) == (True, True)


# Two arms


@every_attention
def test_the_arms_differ_in_ppsbn_alone(name: str) -> None:
    """Every weight and every draw is the same; but for post-SBN's, one has no more than the other."""
    having, shared = (plain(name, ppsbn).state_dict() for ppsbn in (True, False))
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
