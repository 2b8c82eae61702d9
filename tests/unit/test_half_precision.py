"""Half precision against float64 of the same numbers: attentions and whole models, on each device. `-rP` shows errors.

Errors are norms: |ours - exact| / |exact|. What inputs lose when they are rounded is not looked at: the exact result is
that of the rounded inputs. Numerator and denominator of a linear attention nearly cancel in the gradient, all the more
the longer a text is and the further the means of q, k and v are from zero.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra_data.base import TaskSpec
from macformer.attention import KernelAttention, RFAttention, RMFAttention, SoftmaxAttention
from macformer.harness import config as configs
from macformer.ppsbn import PreSBN
from tests.conftest import Compose

LIMIT = {torch.float16: 0.005, torch.bfloat16: 0.03, torch.float32: 5e-5}
PLACES = ["cpu", "as on a GPU", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where half precision is computed: on the CPU, on the CPU in a GPU's place, on a GPU."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(Tensor, "is_cpu", False)
    return "cuda" if request.param == "cuda" else "cpu"


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().cpu().double() - exact).norm() / exact.norm())


def absorbing(attention: RMFAttention) -> RMFAttention:
    assert attention.absorb(PreSBN())
    return attention


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "explicit": SoftmaxAttention,
    "checkpointed": lambda: SoftmaxAttention(implementation="checkpointed"),
    "sdpa": lambda: SoftmaxAttention(implementation="sdpa"),
    "kernel": lambda: KernelAttention("exp"),
    "rfa": lambda: RFAttention(32, 128, 2, generator=seeded(0)),
    "rmfa without pre-SBN": lambda: RMFAttention(32, 128, generator=seeded(0)),
    "rmfa paper": lambda: absorbing(RMFAttention(32, 128, generator=seeded(0))),
    "rmfa exact01": lambda: absorbing(RMFAttention(32, 128, sampling="exact01", generator=seeded(0))),
}


def hold_to_float64(name: str, n: int, causal: bool, device: str, compiled: bool = False) -> None:
    """Output and the gradients of q, k and v, whose means are about as large as their deviations; a fifth is masked."""
    rng, attention = seeded(1), ATTENTIONS[name]()
    heads = 1 if n > 1000 and name != "rfa" else 2
    wide = [torch.randn(1, heads, n, 32, generator=rng) + torch.randn(1, heads, 1, 32, generator=rng) for _ in "qkv"]
    if "without" in name:
        wide[:2] = (F.normalize(x, dim=-1) for x in wide[:2])
    mask, grad = torch.rand(1, n, generator=rng) < 0.8, torch.randn(1, heads, n, 32, generator=rng) + 0.5
    for dtype, limit in LIMIT.items():
        half = [x.to(device, dtype).requires_grad_() for x in wide]
        exact = [x.detach().cpu().double().requires_grad_() for x in half]
        ours_attention = copy.deepcopy(attention).to(device)
        if compiled:
            ours_attention.compile(backend="aot_eager")
        with torch.autocast(device, torch.bfloat16, enabled=compiled):
            out = ours_attention(*half, mask.to(device), causal)
        exact_out = copy.deepcopy(attention).double()(*exact, mask, causal)
        assert out.dtype == dtype
        ours = torch.autograd.grad(out, half, grad.to(out))
        exact_grads = torch.autograd.grad(exact_out, exact, grad.to(dtype).double())
        found = [error(*pair) for pair in zip((out, *ours), (exact_out.detach(), *exact_grads), strict=True)]
        print(f"{name}, n = {n}, causal={causal}, {dtype}: {max(found):.3%}")
        assert max(found) < limit, (dtype, found)


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("n", [64, 1000, 4096])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str, n: int, causal: bool, device: str) -> None:
    hold_to_float64(name, n, causal, device)


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name.startswith("r")])
def test_compiled_attention_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's setting that the trainer makes (tests/unit/test_trainer.py); without it the errors are 1 and 10%."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    torch._dynamo.reset()
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        hold_to_float64(name, 1000, False, "cpu", compiled=True)


STEPS = 40
SPEC = TaskSpec(vocabulary=32, length=256, classes=10, paired=False)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Texts in which one of ten tokens is more frequent than the others: which one is to be learned."""
    rng = seeded(seed)
    labels, ids = torch.randint(10, (16,), generator=rng), torch.randint(1, 15, (16, 256), generator=rng)
    ids = ids.where(torch.rand(16, 256, generator=rng) < 0.8, labels[:, None] + 1)
    lengths = torch.randint(128, 257, (16, 1), generator=rng)
    return ids.masked_fill(torch.arange(256) >= lengths, 0), labels


def gradients(model: nn.Module, data: tuple[Tensor, Tensor], dtype: torch.dtype | None) -> tuple[list[Tensor], Tensor]:
    """Of each parameter, and which units of the head are above zero. float16 is scaled, as the trainer does."""
    ids, labels = (x.to(next(model.parameters()).device) for x in data)
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    seen: list[Tensor] = []
    handle = model.head[0].register_forward_hook(lambda module, args, out: seen.append(out.cpu() > 0))
    with torch.autocast(ids.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = F.cross_entropy(model(ids).float() if dtype else model(ids), labels)
    handle.remove()
    grads = torch.autograd.grad(loss * scale, list(model.parameters()))
    return [grad.cpu().double() / scale for grad in grads], seen[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["macformer_exp", "rfa"])
def test_every_parameter_of_a_model(name: str, dtype: torch.dtype, device: str, composed: Compose) -> None:
    """Under autocast, at initialisation and after some training.

    Half precision may put a unit of the head on the other side of ReLU's zero, in any model, whatever its attention:
    the gradient jumps there. The batch is the first in which that happens to none.
    """
    torch.manual_seed(0)
    model = configs.build(composed(f"model={name}", "model.dropout=0"), "model", **asdict(SPEC))
    limits = {"at initialisation": LIMIT[dtype] * (1 if dtype == torch.float16 else 2), "trained": LIMIT[dtype]}
    for when, limit in limits.items():
        if when == "trained":
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            for step in range(STEPS):
                ids, labels = batch(step)
                optimizer.zero_grad()
                F.cross_entropy(model(ids), labels).backward()
                optimizer.step()
        exact_model, half_model = copy.deepcopy(model).double(), copy.deepcopy(model).to(device)
        for seed in range(1000, 1030):
            (exact, gates), (ours, half_gates) = (
                gradients(*each) for each in ((exact_model, batch(seed), None), (half_model, batch(seed), dtype))
            )
            if torch.equal(gates, half_gates):
                break
        assert torch.equal(gates, half_gates)
        names = [name for name, _ in model.named_parameters()]
        found = {name: error(*pair) for name, *pair in zip(names, ours, exact, strict=True)}
        print(f"{name}, {when}, {dtype}: {max(found.values()):.3%}")
        assert max(found.values()) < limit, (when, found)
