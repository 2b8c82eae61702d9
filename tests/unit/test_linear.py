"""The fast linear core against the plain definition: values, gradients, blocks, masks, what it keeps."""

import copy
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from macformer import linear, linear_causal
from macformer.attention import RFAttention, RMFAttention, SoftmaxAttention
from macformer.folded import FLOOR, plain_attention
from macformer.harness.device import peak_bytes
from macformer.kernels import KERNELS
from macformer.ppsbn import PostSBN, PreSBN

SAMPLINGS = ("paper", "release", "exact01", "order1")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(attention: nn.Module, causal: bool = False) -> Callable[..., Tensor]:
    """The same attention as it is written: the map of every feature, then all weights."""
    if isinstance(attention, RFAttention):
        return lambda q, k, v, mask=None: plain_attention(
            *(attention.feature_map(F.normalize(x, dim=-1)) for x in (q, k)), v, mask, FLOOR, causal
        )
    floor = attention.floor, causal, attention.clamp is None
    return lambda q, k, v, mask=None: plain_attention(
        *(attention.feature_map(x * x.shape[-1] ** -0.25) for x in (q, k)), v, mask, *floor
    )


def qkv(
    B: int = 3, H: int = 2, n: int = 40, m: int = 40, d: int = 16, dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[Tensor]:
    rng = seeded(seed)
    q, k, v = (torch.randn(B, H, length, d, generator=rng, dtype=torch.float64) for length in (n, m, m))
    return [x.to(dtype).requires_grad_() for x in (PreSBN()(q), PreSBN()(k), v)]


def some_mask(B: int, m: int) -> Tensor:
    return torch.rand(B, m, generator=seeded(2)) < 0.7


def both(
    attention: Callable[..., Tensor], inputs: list[Tensor], *args: object, **kwargs: object
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the inputs for one fixed gradient of the output."""
    out = attention(*inputs, *args, **kwargs)
    grad_out = torch.randn(out.shape, generator=seeded(3), dtype=torch.float64).to(out)
    return out.detach(), list(torch.autograd.grad(out, inputs, grad_out, materialize_grads=True))


@pytest.fixture(params=[None, 200, 3000, "gpu"], ids=["one block", "tiny blocks", "small blocks", "as on a GPU"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work in one piece, or cut through tokens, or with several examples a piece, or the CPU in a GPU's place."""
    if request.param == "gpu":
        monkeypatch.setattr(Tensor, "is_cpu", False)
    elif request.param:
        monkeypatch.setattr(linear, "BLOCK", request.param)
        monkeypatch.setattr(linear_causal, "PIECE", request.param // 10)
        monkeypatch.setattr(linear_causal, "CHUNK", 8)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_rmfa_is_the_plain_map_with_the_same_draw(kernel: str, sampling: str, masked: bool) -> None:
    """As the issue asks: float32, output to 1e-5, gradients to 1e-4. Queries and keys differ in number."""
    attention = RMFAttention(16, 64, kernel, sampling, generator=seeded())
    mask = some_mask(3, 31) if masked else None
    out, grads = both(attention, qkv(m=31, dtype=torch.float32), mask)
    exact, exact_grads = both(plain(attention.double()), qkv(m=31), mask)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("heads", [1, 2])
def test_rfa_is_the_plain_map_and_trains_sigma(heads: int) -> None:
    attention = RFAttention(16, 32, heads, generator=seeded()).double()
    with torch.no_grad():
        attention.feature_map.sigma.uniform_(0.5, 2, generator=seeded(4))
    inputs, mask = qkv(m=31), some_mask(3, 31)
    sigma = attention.feature_map.sigma
    ours = both(lambda *x: attention(*x[:3], mask), [*inputs, sigma])
    theirs = both(lambda *x: plain(attention)(*x[:3], mask), [*inputs, sigma])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", [lambda: RMFAttention(16, 64, generator=seeded()), lambda: RFAttention(16, 32, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_torch_compile_takes_the_whole_attention(
    make: Callable[[], nn.Module], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU in its place: one graph, with the output and the gradients of the plain map."""
    attention, inputs, mask = make().double(), qkv(m=40 if causal else 31), some_mask(3, 40 if causal else 31)
    exact = both(plain(attention, causal), inputs, mask)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(both(compiled, inputs, mask, causal), exact)


def test_a_redraw_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = RMFAttention(16, 64, redraw=1, generator=seeded()).double()
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    compiled, inputs = torch.compile(attention, backend="aot_eager"), qkv()
    both(compiled, inputs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            attention.feature_map.step()
            torch.testing.assert_close(both(compiled, inputs), both(plain(attention), inputs))


@pytest.mark.parametrize("features", [1, 2, 3, 7, 300, 4096])
@pytest.mark.usefixtures("blocks")
def test_any_number_of_features(features: int) -> None:
    """From a map that may be one constant to one that is wider than a piece."""
    for seed in range(4):
        attention = RMFAttention(16, features, generator=seeded(seed)).double()
        torch.testing.assert_close(both(attention, qkv(n=9, m=11)), both(plain(attention), qkv(n=9, m=11)))


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    **{sampling: partial(RMFAttention, 16, 64, "inv", sampling) for sampling in SAMPLINGS},
    "one constant": lambda: RMFAttention(16, 1, generator=seeded(1)),
    "a deep one": lambda: RMFAttention(16, 512, generator=seeded()),
    "clamped": lambda: RMFAttention(16, 64, clamp=1.0, generator=seeded()),
    "rfa": lambda: RFAttention(16, 32, generator=seeded()),
    "rfa, a sigma a head": lambda: RFAttention(16, 32, 2, generator=seeded()),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("masked", [False, True])
def test_causal_chunks_are_the_plain_definition(name: str, masked: bool) -> None:
    """Shorter than a chunk, a chunk and more, several pieces; queries that see no key yet, an example without a key.

    The gradient of the frequencies, too.
    """
    attention = CAUSAL[name]().double()
    for n in (1, 2, 31, 32, 33, 300):
        inputs, mask = qkv(B=3, n=n, m=n), some_mask(3, n) if masked else None
        if mask is not None:
            mask[0, : n // 2], mask[2] = False, False
        trained = [*inputs, *attention.parameters()]
        ours = both(lambda *x, mask=mask: attention(*x[:3], mask, causal=True), trained)
        exact = both(lambda *x, mask=mask: plain(attention, True)(*x[:3], mask), trained)
        torch.testing.assert_close(ours, exact)
        if mask is not None:
            assert not ours[0][0, :, : n // 2].any()


@pytest.mark.usefixtures("blocks")
def test_what_comes_later_has_no_influence() -> None:
    """Not even if later weights are infinite, beyond the same chunk."""
    attention, (q, k, v) = RMFAttention(16, 512, generator=seeded()), qkv(n=100, m=100, dtype=torch.float32)
    expected = attention(q, k, v, causal=True)[:, :, :32]
    for size, start in ((100, 32), (100, 60), (1e20, 32)):
        later = [torch.cat([x[:, :, :start], size * x[:, :, start:]], 2) for x in (k, v)]
        assert torch.equal(attention(q, *later, causal=True)[:, :, :32], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("blocks")
def test_absorbed_pre_sbn_is_pre_sbn_followed_by_attention(causal: bool) -> None:
    attention = RMFAttention(16, 64, "inv", generator=seeded()).double()
    absorbing = copy.deepcopy(attention)
    assert absorbing.absorb(PreSBN())
    raw = [(5 * x.detach() + 1).requires_grad_() for x in qkv()]
    mask = some_mask(3, 40)
    ours = both(lambda q, k, v: absorbing(q, k, v, mask, causal), raw)
    theirs = both(lambda q, k, v: attention(PreSBN()(q), PreSBN()(k), v, mask, causal), raw)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("make", [lambda: RMFAttention(4, 12, "log", generator=seeded()), lambda: RFAttention(4, 6, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(make: Callable[[], nn.Module], causal: bool) -> None:
    attention = make().double()
    mask = torch.tensor([[True, True, False, True, True], [True, False, False, True, False]])
    inputs = qkv(B=2, n=5, m=5, d=4)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask, causal), inputs)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_and_values_may_be_huge(causal: bool) -> None:
    """The ninth power of 1e20 is infinite, and would be NaN if it were multiplied by 0 afterwards."""
    attention, (q, k, v), mask = RMFAttention(16, 512, generator=seeded()), qkv(dtype=torch.float32), some_mask(3, 40)
    assert attention.feature_map.degrees.max() > 4
    hidden = ~mask[:, None, :, None]
    zero, huge = ([q, *(x.detach().masked_fill(hidden, value).requires_grad_() for x in (k, v))] for value in (0, 1e20))
    torch.testing.assert_close(both(attention, huge, mask, causal), both(attention, zero, mask, causal))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [False, True])
def test_layouts_of_the_inputs_do_not_matter(causal: bool) -> None:
    """Heads split off a joined projection, as in a model, or tensors of their own."""
    attention = RMFAttention(16, 64, generator=seeded()).double()
    own = qkv()
    split = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in own]
    assert not split[0].is_contiguous()
    torch.testing.assert_close(both(attention, split, None, causal), both(attention, own, None, causal))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [False, True])
def test_values_may_have_another_width(causal: bool) -> None:
    attention = RMFAttention(16, 64, generator=seeded()).double()
    q, k, v = qkv()
    wide = torch.cat([v, v, v[..., :3]], -1).detach().requires_grad_()
    exact = both(plain(attention, causal), [q, k, wide])
    torch.testing.assert_close(both(attention, [q, k, wide], None, causal), exact)


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_pass_keeps_inputs_output_and_small_sums(causal: bool) -> None:
    """No features (n x D), no weights (n x n): a tensor that is kept is no larger than the output."""
    attention = RMFAttention(16, 128, generator=seeded())
    inputs = qkv(B=2, n=512, m=512, dtype=torch.float32)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(*inputs, some_mask(2, 512), causal)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if x.numel()}
    big = [size for size in storages.values() if size >= out.untyped_storage().nbytes()]
    assert len(big) == 4  # q, k, v, out
    assert max(big) == out.untyped_storage().nbytes()
    assert sum(storages.values()) < 4.7 * max(big)


def test_memory_at_the_size_of_the_claims() -> None:
    """B, H, n, d, D = 4, 2, 4096, 32, 128, with a mask, forward and backward: at most 1.2 times what SDPA takes, and an
    eighth of two n x n tensors, which checkpointed softmax cannot do without."""
    inputs = qkv(4, 2, 4096, 4096, 32, torch.float32)
    mask = some_mask(4, 4096)

    def peak(attention: nn.Module) -> int:
        return peak_bytes(torch.device("cpu"), [], lambda: both(attention, inputs, mask))

    sdpa = peak(SoftmaxAttention(implementation="sdpa"))
    for sampling in SAMPLINGS:
        for seed in range(3):
            ours = peak(RMFAttention(32, 128, sampling=sampling, generator=seeded(seed)))
            assert ours < 1.2 * sdpa
            assert ours < 2 * 4 * 2 * 4096**2 * 4 / 8


def test_causal_memory_is_linear_in_the_length() -> None:
    """Twice the tokens take at most twice the memory; beyond the gradients, as little as the sum both ways."""

    def peak(n: int, causal: bool) -> int:
        attention, inputs = RMFAttention(32, 128, generator=seeded()), qkv(2, 2, n, n, 32, torch.float32)
        return peak_bytes(torch.device("cpu"), [], lambda: both(attention, inputs, some_mask(2, n), causal))

    assert peak(8192, True) < 2.01 * peak(4096, True)
    assert peak(8192, True) < 1.1 * peak(8192, False)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_left_behind_without_the_garbage_collector(causal: bool) -> None:
    """Room for the work goes when the call ends: no cycle of references holds it."""
    attention, inputs = RMFAttention(16, 128, generator=seeded()), qkv(dtype=torch.float32)
    gc.collect()
    gc.disable()
    try:
        both(attention, inputs, None, causal)  # makes the folded form of the draw, which is kept
        before = sum(type(x) is Tensor for x in gc.get_objects())
        both(attention, inputs, None, causal)
        assert sum(type(x) is Tensor for x in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_second_derivative_is_refused_in_words() -> None:
    attention = RMFAttention(16, 64, generator=seeded())
    q, k, v = qkv(dtype=torch.float32)
    (grad,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("make", [lambda: RMFAttention(16, 64, generator=seeded()), lambda: RFAttention(16, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_autocast_does_not_reach_inside(make: Callable[[], nn.Module], causal: bool) -> None:
    attention = make()
    inputs = qkv(dtype=torch.float32)
    expected = attention(*inputs, None, causal)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*inputs, None, causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), grads, rtol=0, atol=0)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [False, True])
def test_autocast_does_not_reach_the_backward_pass(causal: bool) -> None:
    """Even where someone calls backward inside the context."""
    attention = RMFAttention(16, 64, generator=seeded())
    inputs = qkv(dtype=torch.float32)
    expected = both(attention, inputs, None, causal)
    with torch.autocast("cpu", torch.bfloat16):
        ours = both(attention, inputs, None, causal)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def assert_finite(attention: RMFAttention, inputs: list[Tensor], mask: Tensor | None = None) -> None:
    """Through pre-SBN, attention and post-SBN with beta = 1/2, pre-SBN on its own and absorbed."""
    post = PostSBN(inputs[0].shape[1], inputs[0].shape[-1])
    nn.init.constant_(post.log_beta, -0.7)
    q, k, v = inputs
    absorbing = copy.deepcopy(attention)
    assert absorbing.absorb(PreSBN())
    for attended in (absorbing(q, k, v, mask), attention(PreSBN()(q), PreSBN()(k), v, mask)):
        out = post(attended)
        assert out.isfinite().all()
        for grad in torch.autograd.grad(out.sum(), [*inputs, *post.parameters()], materialize_grads=True):
            assert grad.isfinite().all()


CASES: dict[str, Callable[[list[Tensor]], object]] = {
    "zero rows": lambda x: [t[:, :, ::2].zero_() for t in x],
    "all zero": lambda x: [t.zero_() for t in x],
    "constant rows": lambda x: [t[:, :, 1::2].fill_(0.1) for t in x],
    "scaled by 1e4": lambda x: [t.mul_(1e4) for t in x],
    "scaled by 1e-20": lambda x: [t.mul_(1e-20) for t in x],
    "negative values": lambda x: x[2].abs_().neg_(),
    "zero values": lambda x: x[2].zero_(),
}


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "as on a GPU"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_nan_and_no_inf(case: str, kernel: str, sampling: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cpu", not gpu)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1] = False  # an example without a key
    for width, dtype in ((16, torch.float32), (24, torch.bfloat16), (24, torch.float16)):
        inputs = [torch.randn(2, 2, 12, width, generator=seeded(i)) for i in range(3)]
        CASES[case](inputs)
        inputs = [x.to(dtype).requires_grad_() for x in inputs]
        assert_finite(RMFAttention(width, 64, kernel, sampling, generator=seeded()), inputs, mask)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rfa_of_zero_rows_is_finite(dtype: torch.dtype) -> None:
    inputs = [x.detach().clone() for x in qkv(dtype=dtype)]
    inputs[0][:, :, ::2] = inputs[1][:, :, ::2] = 0
    out, grads = both(RFAttention(16, 32, generator=seeded()), [x.requires_grad_() for x in inputs])
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("width", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("features", [1, 2, 130, 4096])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 1), (1, 7)])
def test_no_nan_at_the_edges_of_the_sizes(width: int, features: int, n: int, m: int) -> None:
    q, k, v = (torch.randn(2, 2, length, width, generator=seeded(length)).requires_grad_() for length in (n, m, m))
    assert_finite(RMFAttention(width, features, "inv", generator=seeded()), [q, k, v])


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 3),
    H=st.integers(1, 3),
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    width=st.integers(1, 12),
    features=st.integers(1, 40),
    sampling=st.sampled_from(SAMPLINGS),
    kernel=st.sampled_from(sorted(KERNELS)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    size=st.sampled_from([1, 100, 1000, 2**20, None]),
    causal=st.booleans(),
    data=st.data(),
)
def test_any_shape_mask_and_dtype(
    B: int,
    H: int,
    n: int,
    m: int,
    width: int,
    features: int,
    sampling: str,
    kernel: str,
    dtype: torch.dtype,
    size: int | None,
    causal: bool,
    data: st.DataObject,
) -> None:
    """The plain definition, computed in float64 from the same (rounded) inputs, within the rounding of the dtype."""
    if sampling == "exact01":
        features += width + 2
    m = n if causal else m
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=m, max_size=m), min_size=B, max_size=B)))
    attention = RMFAttention(width, features, kernel, sampling, generator=seeded(n))
    inputs = qkv(B, H, n, m, width, dtype, seed=m)
    with pytest.MonkeyPatch.context() as patch:
        if size is None:  # the CPU in a GPU's place
            patch.setattr(Tensor, "is_cpu", False)
        else:
            patch.setattr(linear, "BLOCK", size)
            patch.setattr(linear_causal, "CHUNK", min(size, 4))
            patch.setattr(linear_causal, "PIECE", size)
        out, grads = both(attention, inputs, mask, causal)
    exact, _ = both(plain(attention.double(), causal), [x.detach().double().requires_grad_() for x in inputs], mask)
    assert out.dtype == dtype
    close = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=close, atol=close * max(1.0, float(exact.abs().max())))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("n", [5, 5000], ids=["short", "long"])
@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, mask: (q[:1], k, v, mask),
        lambda q, k, v, mask: (q[:, :1], k, v, mask),
        lambda q, k, v, mask: (q, k, v[:, :, :1], mask),
        lambda q, k, v, mask: (q, k, v, mask[:, :3]),
        lambda q, k, v, mask: (q, k, v, mask.expand(4, -1)),
    ],
)
def test_shapes_that_do_not_fit_are_named(n: int, change: Callable[..., tuple[Tensor, ...]]) -> None:
    q, k, v = (torch.randn(2, 2, n, 8) for _ in range(3))
    with pytest.raises(ValueError, match=r"q, k, v, mask should be \(B, H, n, d\), .*, got \("):
        RMFAttention(8, 16)(*change(q, k, v, torch.ones(1, n, dtype=torch.bool)))


@pytest.mark.usefixtures("blocks")
def test_one_mask_may_serve_all_examples() -> None:
    attention = RMFAttention(16, 64, generator=seeded())
    inputs, mask = qkv(dtype=torch.float32), some_mask(1, 40)
    assert torch.equal(attention(*inputs, mask), attention(*inputs, mask.expand(3, -1)))


@pytest.mark.usefixtures("blocks")
def test_no_tokens_and_no_examples() -> None:
    attention = RMFAttention(16, 64, generator=seeded())
    for B, n in ((0, 5), (2, 0)):
        for causal in (False, True):
            assert attention(*(torch.randn(B, 2, n, 16) for _ in range(3)), causal=causal).shape == (B, 2, n, 16)
        assert PostSBN(2, 16)(torch.randn(B, 2, n, 16)).shape == (B, 2, n, 16)


def test_long_sequences_are_the_plain_map_without_help() -> None:
    """The way that a benchmark and a model of n = 4,096 take: heads where they lie, two blocks a head."""
    attention = RMFAttention(16, 128, generator=seeded())
    inputs = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(B=2, n=4097, m=4001, dtype=torch.float32)
    ]
    inputs, mask = [x.requires_grad_() for x in inputs], some_mask(2, 4001)
    out, grads = both(attention, inputs, mask)
    exact, exact_grads = both(plain(attention), inputs, mask)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    joined = out.transpose(1, 2).flatten(-2)
    assert joined.data_ptr() == out.data_ptr()  # a view


@pytest.mark.parametrize("sampling", ["paper", "exact01"])
def test_checkpointing_and_redraws_do_not_meet(sampling: str) -> None:
    """A checkpointed layer computes its forward pass twice; the draw is that of the step, and the count as well."""
    plain_one, wrapped = (RMFAttention(16, 64, sampling=sampling, redraw=2, generator=seeded()) for _ in range(2))
    for _ in range(5):
        inputs = qkv(dtype=torch.float32)
        expected = both(plain_one, inputs)
        ours = both(lambda *x: checkpoint(wrapped, *x, use_reentrant=False), inputs)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        plain_one.feature_map.step()
        wrapped.feature_map.step()
