"""The classifier: the paper's sizes, padding, pooling, pairs, draws."""

import shutil
from dataclasses import asdict

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from lra_data.base import TaskSpec
from macformer.attention import SoftmaxAttention
from macformer.dropout import Dropout
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.model import MultiHead
from tests.conftest import MODELS, Compose

SPEC = TaskSpec(vocabulary=32, length=64, classes=10, paired=False)


def build(config: DictConfig, spec: TaskSpec = SPEC, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return configs.build(config, "model", **asdict(spec))


def some_ids(*lengths: int, padded: int = 64) -> torch.Tensor:
    ids = torch.zeros(len(lengths), padded, dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(1, 15, (length,))
    return ids


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count_is_that_of_the_paper(name: str, composed: Compose) -> None:
    """2 layers of width 64, 2 heads of 32, feed-forward 128, tables of 32 and 2048, head 64-128-10."""
    model = build(composed(f"model={name}"), TaskSpec(32, 2048, 10, False))
    norm, attend, feed = 2 * 64, 4 * (64 * 64 + 64), (64 * 128 + 128) + (128 * 64 + 64)
    extra = {"macformer": 2 * 32, "rfa": 2 * 32}.get(name.split("_")[0], 0)  # gamma and beta; sigma a head and channel
    extra -= 32 * name.endswith("_released")  # gamma alone
    layers = 2 * (norm + attend + norm + feed + extra)
    head = (64 * 128 + 128) + (128 * 10 + 10)
    assert sum(p.numel() for p in model.parameters()) == 32 * 64 + 2048 * 64 + layers + norm + head


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pooling", ["padded", "masked"])
def test_padding_has_no_influence(name: str, pooling: str, composed: Compose) -> None:
    """More padding, or another embedding of the padding id, changes nothing: both poolings."""
    model = build(composed(f"model={name}", f"model.pooling={pooling}")).eval()
    ids = some_ids(40, 3)
    expected = model(ids)
    torch.testing.assert_close(model(ids[:, :48]), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.tokens.weight[0] = 1e3
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["transformer", "transformer_sdpa", "rfa", "macformer_exp"])
def test_backward_reads_each_text_from_its_own_end(name: str, composed: Compose) -> None:
    """Layer by layer: causal attention to the text in reverse, whatever stands in the padding."""
    causal, backward = (build(composed(f"model={name}", f"model.direction={way}")) for way in ("causal", "backward"))
    for one, other in zip(causal.layers, backward.layers, strict=True):
        lengths, x = (40, 3), torch.randn(2, 64, 64)
        mask = torch.arange(64) < torch.tensor(lengths)[:, None]
        x[~mask] *= 1e6
        found = other.eval().attend(x, x, mask)
        for text, length, out in zip(x, lengths, found, strict=True):
            reverse = text[:length].flip(0)[None]
            expected = one.eval().attend(reverse, reverse, None)[0].flip(0)
            torch.testing.assert_close(out[:length], expected, rtol=1e-4, atol=1e-5)


def test_a_direction_that_is_not_there_is_named(composed: Compose) -> None:
    with pytest.raises(configs.ConfigError, match=r"^model\.direction=left does not fit Classifier"):
        configs.check(composed("model.direction=left"), "model")
    with pytest.raises(ValueError, match="choose one of both, causal, backward"):
        MultiHead(8, 2, 4, SoftmaxAttention, None, None, "left")


@pytest.mark.parametrize(("pooling", "ratio"), [("padded", 64 / 16), ("masked", 1.0)])
def test_pooling_divides_by_the_padded_or_the_real_length(pooling: str, ratio: float, composed: Compose) -> None:
    model = build(composed("model=transformer", f"model.pooling={pooling}")).eval()
    ids = some_ids(16)
    total = []
    model.norm.register_forward_hook(lambda module, args, out: total.append(out[0, :16].mean(0)))
    pooled = model.encode(ids)[0]
    torch.testing.assert_close(pooled * ratio, total[0])


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("macformer", "rfa"))])
def test_layers_have_different_draws(name: str, composed: Compose) -> None:
    first, second = (layer.attend.attention.feature_map for layer in build(composed(f"model={name}")).layers)
    draws = [dict(m.named_buffers()) for m in (first, second)]
    key = "noise" if name == "rfa" else "rows"
    assert draws[0][key].shape != draws[1][key].shape or not torch.equal(draws[0][key], draws[1][key])
    assert key in {name.rsplit(".", 1)[-1] for name in build(composed(f"model={name}")).state_dict()}


@pytest.mark.parametrize("sampling", ["paper", "exact01"])
def test_macformer_takes_hardly_more_memory_than_fused_softmax(sampling: str, composed: Compose) -> None:
    """Peak of a training step at n = 1024, the room of one piece of RMFA apart: bytes, the same in every run."""
    ids, labels = torch.randint(1, 32, (4, 1024)), torch.zeros(4, dtype=torch.long)

    def peak(*overrides: str) -> int:
        model = build(composed(*overrides), TaskSpec(32, 1024, 10, False))
        step = lambda: nn.functional.cross_entropy(model(ids), labels).backward()  # noqa: E731
        return devices.peak_bytes(torch.device("cpu"), model.parameters(), step)

    macformer = peak("model=macformer_exp", f"model.attention.sampling={sampling}")
    assert macformer < 1.15 * peak("model=transformer_sdpa") + 4 * 2**20


def test_absorbed_pre_sbn_is_pre_sbn(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient, against pre-SBN and attention one after the other."""
    ids, labels = some_ids(40, 3), torch.tensor([1, 2])
    results = []
    for absorbed in (True, False):
        if not absorbed:
            monkeypatch.setattr("macformer.attention.RMFAttention.absorb", lambda self, pre_sbn: False)
        model = build(composed("model=macformer_inv")).eval().double()
        assert all((layer.attend.pre_q is None) == absorbed for layer in model.layers)
        logits = model(ids)
        nn.functional.cross_entropy(logits, labels).backward()
        results.append([logits, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results)


def test_batch_statistics_are_an_option_of_the_model(composed: Compose) -> None:
    model = build(composed("model=macformer_exp", "model.pre_sbn.statistics=batch"))
    ids = some_ids(40, 3)
    model(ids)
    assert all(layer.attend.pre_q.mean.abs().sum() > 0 for layer in model.layers)
    model.eval()
    torch.testing.assert_close(model(ids)[:1], model(ids[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["macformer_exp", "rfa"])
def test_torch_compile_takes_the_model(name: str, backend: str, composed: Compose) -> None:
    """The same logits and gradients, and no compilation after the second step."""
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    model = build(composed(f"model={name}", "model.dropout=0"))
    ids = some_ids(40, 3)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(ids).sum().backward()
    model.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        logits = compiled(ids)
        logits.square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = model(ids)
    expected.square().sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-4)


def test_a_pair_is_encoded_side_by_side(composed: Compose) -> None:
    model = build(composed("model=rfa"), TaskSpec(32, 64, 2, paired=True)).eval()
    a, b = some_ids(40, 3), some_ids(5, 64)
    encoded_a, encoded_b = model.encode(a), model.encode(b)
    joined = torch.cat([encoded_a, encoded_b, encoded_a * encoded_b, encoded_a - encoded_b], -1)
    torch.testing.assert_close(model(torch.stack([a, b], 1)), model.head(joined))


@pytest.mark.parametrize("name", MODELS)
def test_state_moves_between_models_of_other_seeds(name: str, composed: Compose) -> None:
    one, other = (build(composed(f"model={name}"), seed=seed).eval() for seed in (0, 1))
    other.load_state_dict(one.state_dict())
    ids = some_ids(40, 3)
    assert torch.equal(one(ids), other(ids))


def test_dropout_keeps_the_mean_and_drops_the_stated_share() -> None:
    """1e6 elements: a share off by more than 5.5 standard errors has probability 4e-8."""
    torch.manual_seed(0)
    x = torch.ones(1_000_003, requires_grad=True)
    out = Dropout(0.1)(x)
    (out * 3).sum().backward()
    share = float((out == 0).double().mean())
    assert abs(share - 0.1) < 5.5 * (0.1 * 0.9 / 1e6) ** 0.5
    assert float(out.detach().max()) == pytest.approx(1 / 0.9, rel=1e-4)
    assert x.grad is not None
    assert torch.equal(x.grad, 3 * out.detach())
    kept = (out > 0).double() - (1 - share)  # neighbours share a draw of 64 bits, and yet are independent
    assert abs(float((kept[:-1] * kept[1:]).mean())) < 5.5 * 0.09 / 1e3


def test_dropout_is_off_in_evaluation_and_at_zero() -> None:
    x = torch.randn(5)
    assert Dropout(0.0)(x) is x
    assert Dropout(0.5).eval()(x) is x
    with pytest.raises(ValueError, match=r"dropout=1\.0 must be"):
        Dropout(1.0)
