"""ppSBN: the unit ball, no NaN, the safe power."""

import pytest
import torch

from macformer import ppsbn
from macformer.ppsbn import BEND, PostSBN, PreSBN


def test_pre_sbn_is_centred_rows_of_length_one() -> None:
    x = 1e4 * torch.randn(2, 3, 5, 8) + 7
    out = PreSBN()(x)
    torch.testing.assert_close(out.norm(dim=-1), torch.ones(2, 3, 5))
    torch.testing.assert_close(out.sum(-1), torch.zeros(2, 3, 5), atol=1e-4, rtol=0)
    centred = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(out, centred / centred.norm(dim=-1, keepdim=True), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_pre_sbn_of_constant_rows_is_zero_with_finite_gradients(value: float) -> None:
    x = torch.full((1, 1, 2, 8), value, requires_grad=True)
    out = PreSBN()(x)
    out.sum().backward()
    assert not out.any()
    assert x.grad is not None
    assert not x.grad.any()  # it has no direction


@pytest.mark.parametrize("width", [12, 13, 100])
def test_a_row_that_is_constant_but_for_rounding_has_no_gradient(width: int) -> None:
    x = torch.full((1, 1, 2, width), 0.1, requires_grad=True)
    (PreSBN()(x) * torch.randn(width)).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_a_constant_row_stays_in_the_unit_ball_where_its_mean_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by CUDA's layer norm: variance 0, so that what the mean is off by is multiplied by 1e13."""

    def layer_norm(x: torch.Tensor, shape: tuple, weight: torch.Tensor, bias: None, eps: float) -> tuple:
        mean, rstd = x.mean(-1, keepdim=True) * (1 + 1e-7), torch.full_like(x[..., :1], eps**-0.5)
        return (x - mean) * rstd * weight, mean, rstd

    monkeypatch.setattr(torch, "native_layer_norm", layer_norm)
    x = torch.full((1, 1, 2, 24), 0.1, requires_grad=True)
    out = PreSBN()(x)
    assert out.abs().max() <= 1
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_unit_rows_have_the_gradient_of_their_formula() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PreSBN(), x)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_token_statistics_are_algorithm_1_where_that_is_defined(scale: float) -> None:
    """Lines 1 and 2, written out in float64."""
    x = scale * torch.randn(2, 3, 5, 8, dtype=torch.float64)
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    line1 = (x - mean) / (variance + 1e-13).sqrt()
    line2 = line1 / line1.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(PreSBN()(x), line2, rtol=1e-6, atol=0)
    torch.testing.assert_close(PreSBN()(x.float()).double(), line2, rtol=0, atol=1e-5)


def batch_sbn(**kwargs: float) -> PreSBN:
    return PreSBN(statistics="batch", heads=3, head_dim=8, **kwargs)


def test_batch_statistics_are_algorithm_1_read_literally() -> None:
    x = torch.randn(4, 3, 5, 8, dtype=torch.float64) * 3 + 1
    mean, variance = x.mean((0, 2), keepdim=True), x.var((0, 2), correction=0, keepdim=True)
    line1 = (x - mean) / (variance + 1e-13).sqrt()
    torch.testing.assert_close(batch_sbn().double()(x), line1 / line1.norm(dim=-1, keepdim=True))


def test_batch_statistics_leave_padding_out() -> None:
    """In values and gradients: 1e9 in padded places changes nothing of the others, nor the running averages."""
    kept = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    full = torch.cat([kept, torch.full((2, 3, 3, 8), 1e9, dtype=torch.float64)], 2).requires_grad_()
    mask = torch.tensor([[True] * 4 + [False] * 3] * 2)
    plain, masked = batch_sbn().double(), batch_sbn().double()
    short = kept.clone().requires_grad_()
    expected, out = plain(short), masked(full, mask)
    torch.testing.assert_close(out[:, :, :4], expected)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    (out[:, :, :4] * weight).sum().backward()
    (expected * weight).sum().backward()
    assert full.grad is not None
    assert short.grad is not None
    torch.testing.assert_close(full.grad[:, :, :4], short.grad)
    torch.testing.assert_close(masked.mean, plain.mean)
    torch.testing.assert_close(masked.variance, plain.variance)


def test_batch_statistics_use_running_averages_in_evaluation() -> None:
    """Averages like those of torch's BatchNorm1d; an example then no longer depends on its neighbours."""
    pre, norm = batch_sbn(), torch.nn.BatchNorm1d(24)
    for _ in range(5):
        x = torch.randn(4, 3, 6, 8) * 2 + 1
        pre(x)
        norm(x.transpose(1, 2).flatten(-2).flatten(0, 1))
    torch.testing.assert_close(pre.mean.flatten(), norm.running_mean)
    torch.testing.assert_close(pre.variance.flatten(), norm.running_var)
    pre.eval()
    before = pre.mean.clone()
    torch.testing.assert_close(pre(x)[:1], pre(x[:1]))
    assert torch.equal(pre.mean, before)


def test_a_batch_without_a_token_is_finite() -> None:
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    pre = batch_sbn()
    out = pre(x, torch.zeros(2, 4, dtype=torch.bool))
    assert not pre.mean.any()
    assert (pre.variance == 1).all()
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistics": "layer"}, "choose one of token, batch"),
        ({"statistics": "batch"}, "needs heads and head_dim"),
        ({"eps": 0.0}, "eps=0.0 must be at least 1e-18"),
        ({"eps": 1e-25}, "eps=1e-25 must be at least 1e-18"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreSBN(**arguments)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("way", ["an example at a time", "all at once", "as on a GPU", "compiled"])
def test_post_sbn_has_the_gradients_of_its_formula(per_head: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppsbn, "PIECE", 1 if way == "an example at a time" else 10**9)
    monkeypatch.setattr(torch.Tensor, "is_cpu", way != "as on a GPU")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: way == "compiled")
    post = PostSBN(2, 4, per_head).double()
    with torch.no_grad():
        post.log_gamma.normal_()
        post.log_beta.normal_()
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True)

    def formula() -> torch.Tensor:
        y = post.log_gamma.exp() * x
        return y * (y.square() + BEND**2) ** ((post.log_beta.exp() - 1) / 2)

    weight = torch.randn(x.shape, dtype=torch.float64)
    inputs = [x, post.log_gamma, post.log_beta]
    torch.testing.assert_close(post(x), formula())
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (post(x), formula()))
    torch.testing.assert_close(ours, theirs)


def test_both_are_float32_inside() -> None:
    x = torch.randn(1, 1, 2, 8, dtype=torch.float16)
    assert PreSBN()(x).dtype == PostSBN(1, 8).half()(x).dtype == torch.float32
    wide = torch.randn(1, 1, 2, 8)
    for module in (PreSBN(), PostSBN(1, 8)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(module(wide), module(wide.clone()))
            out = module(wide)
        assert out.dtype == torch.float32
        assert torch.equal(out, module(wide))


def test_post_sbn_without_its_power_is_gamma_alone() -> None:
    post, x = PostSBN(2, 4, power=False), torch.randn(3, 2, 5, 4)
    assert [name for name, _ in post.named_parameters()] == ["log_gamma"]
    torch.nn.init.uniform_(post.log_gamma)
    torch.testing.assert_close(post(x), x * post.log_gamma.exp())
    assert post(x.half()).dtype == torch.float32


def test_post_sbn_starts_as_the_identity() -> None:
    x = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(PostSBN(3, 8)(x), x)


@pytest.mark.parametrize("beta", [0.5, 0.9, 2.0])
def test_post_sbn_is_the_papers_power_where_that_is_defined(beta: float) -> None:
    post = PostSBN(1, 4)
    with torch.no_grad():
        post.log_gamma.fill_(torch.tensor(2.0).log())
        post.log_beta.fill_(torch.tensor(beta).log())
    x = torch.linspace(1, 5, 4).expand(1, 1, 3, 4)
    torch.testing.assert_close(post(x), (2 * x) ** beta, rtol=1e-5, atol=0)
    torch.testing.assert_close(post(-x), -post(x))


@pytest.mark.parametrize("beta", [0.5, 0.9, 2.0])
def test_post_sbn_has_finite_values_and_gradients_everywhere(beta: float) -> None:
    post = PostSBN(2, 4, per_head=True)
    with torch.no_grad():
        post.log_beta.fill_(torch.tensor(beta).log())
    x = torch.tensor([-1e4, -1.0, -BEND, 0.0, 1e-20, BEND, 1.0, 1e4]).view(1, 2, 1, 4).requires_grad_()
    out = post(x)
    grads = torch.autograd.grad(out.sum(), [x, post.log_gamma, post.log_beta])
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


def test_parameters_are_shared_by_the_heads_unless_asked() -> None:
    assert PostSBN(2, 32).log_beta.numel() == 32
    assert PostSBN(2, 32, per_head=True).log_beta.numel() == 64
