"""The layer by cache blocks against the same layer in plain torch, with the same dropout."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lra_data.base import TaskSpec
from macformer import cache_blocks
from macformer.dropout import Dropout
from tests.conftest import MODELS, Compose
from tests.unit.test_model import build, some_ids


def outcome(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Logits and gradients of one step; the dropout of seed 1."""
    torch.manual_seed(1)
    model.zero_grad()
    logits = model(ids)
    nn.functional.cross_entropy(logits, torch.arange(len(ids))).backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", ["macformer_exp", "rfa", "transformer"])
@pytest.mark.parametrize("tokens", [1, 50, 111, 4096])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_layer_by_blocks_is_the_plain_layer(
    name: str, tokens: int, dropout: float, composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 x 37 tokens in blocks of 1, of a length that leaves a rest, of all, and of more than there are."""
    model = build(composed(f"model={name}", f"model.dropout={dropout}")).double()
    ids = some_ids(37, 20, 3, padded=37)
    monkeypatch.setattr(cache_blocks, "TOKENS", tokens)
    fast = outcome(model, ids)
    monkeypatch.setattr(cache_blocks, "usable", lambda x: False)
    torch.testing.assert_close(fast, outcome(model, ids))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_in_the_form_for_a_gpu(
    name: str, paired: bool, composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(composed(f"model={name}"), TaskSpec(32, 64, 10, paired)).double().eval()
    ids = some_ids(37, 20, 3, 5, 64, 1)
    ids = ids.unflatten(0, (3, 2)) if paired else ids
    expected = outcome(model, ids)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    torch.testing.assert_close(outcome(model, ids), expected)


@pytest.mark.parametrize("name", ["macformer_exp", "rfa", "transformer"])
def test_autocast_takes_the_model(name: str, composed: Compose) -> None:
    """bfloat16 has 8 bits: logits and the gradient of the tokens to some percent of their size."""
    model, ids = build(composed(f"model={name}", "model.dropout=0")), some_ids(37, 20, 3)
    logits, grad = (outcome(model, ids)[i] for i in (0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        half_logits, half_grad = (outcome(model, ids)[i].float() for i in (0, 1))
    assert half_logits.dtype == torch.float32
    assert (half_logits - logits).norm() < 0.05 * logits.norm()
    assert (half_grad - grad).norm() < 0.1 * grad.norm()


def test_models_can_be_copied_and_pickled(composed: Compose) -> None:
    model, ids = build(composed("model=macformer_exp")), some_ids(37, 20, 3)
    expected = outcome(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, outcome(other, ids), expected))


def test_dropout_follows_from_the_seed_of_torch_alone_and_calls_are_independent() -> None:
    """1e6 elements dropped twice: a covariance off by more than 5.5 standard errors has probability 4e-8."""
    drop, x = Dropout(0.1), torch.ones(1_000_001)
    torch.manual_seed(0)
    first, second = drop(x), drop(x)
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        assert torch.equal(drop(x), first)
    assert torch.equal(drop(x), first)
    assert torch.equal(drop(x), second)
    one, other = ((dropped > 0).double() - 0.9 for dropped in (first, second))
    assert abs(float((one * other).mean())) < 5.5 * 0.09 / 1e3
