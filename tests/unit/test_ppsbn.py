"""ppSBN: the unit ball, no NaN, the safe power."""

import pytest
import torch

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
    assert x.grad.isfinite().all()


def test_both_are_float32_inside() -> None:
    x = torch.randn(1, 1, 2, 8, dtype=torch.float16)
    assert PreSBN()(x).dtype == PostSBN(1, 8).half()(x).dtype == torch.float32


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
