"""docs/math.md: the code that it names is there, and its formulas are what the code computes. docs/errata.md: likewise.

Shapes: d head width, D features, n keys, N degree of one feature. Random tests have fixed seeds, and each says how far
chance could take it: a failure is a change of the code.
"""

import importlib
import itertools
import json
import math
import re
from operator import attrgetter
from statistics import mean, stdev

import pytest
import torch
from torch import Generator, Tensor

from macformer.attention import KernelAttention, RMFAttention
from macformer.features import RandomMaclaurin
from macformer.folded import FLOOR
from macformer.kernels import KERNELS
from macformer.ppsbn import BEND, PostSBN, PreSBN
from tests.conftest import ROOT

TEXT, ERRATA = ((ROOT / "docs" / name).read_text() for name in ("math.md", "errata.md"))
TERMS = 60  # of a series at arguments below 1/2


def a(kernel: str, N: int) -> float:
    return KERNELS[kernel].coefficient(N)


def unit(*shape: int, rng: Generator) -> Tensor:
    """Isotropic rows of length one."""
    return torch.nn.functional.normalize(torch.randn(*shape, generator=rng, dtype=torch.float64), dim=-1)


def kappa(x: Tensor, y: Tensor) -> Tensor:
    """E[<w,x>^2 <w,y_j> <w,y_l>] for x (d,), y (n, d) -> (n, n), as section 2 has it."""
    return x @ x * (y @ y.mT) + 2 * torch.outer(y @ x, y @ x) - 2 * (y * x.square()) @ y.mT


def second_moment(kernel: str, p: float, x: Tensor, y: Tensor, degrees: int) -> Tensor:
    """Of one feature's estimates of K(x.y_j), j = 1 .. n (n, n): the sum of section 2 over so many degrees."""
    return sum(a(kernel, N) ** 2 * p ** (N + 1) / (p - 1) * kappa(x, y) ** N for N in range(degrees))


def test_the_code_that_is_named_is_there_and_every_section_names_some() -> None:
    for names, module in re.findall(r"\[(`[\w.`, ]+`)\]\(\.\./([\w/]+)\.py\)", TEXT + ERRATA):
        for name in re.findall(r"[\w.]+", names):
            attrgetter(name)(importlib.import_module(module.replace("/", ".")))
    files = re.findall(r"\]\(([^)#]+)", TEXT + ERRATA)
    assert all((ROOT / "docs" / file).exists() for file in files)
    sections = TEXT.split("\n## ")[1:]
    assert len(sections) == 9
    assert all(re.search(r"\[`[\w.]+`\]\(\.\./macformer/", section) for section in sections)


def test_the_errata_that_the_code_names_are_listed() -> None:
    listed = [int(number) for number in re.findall(r"^(\d+)\. \*\*", ERRATA, re.MULTILINE)]
    assert listed == list(range(1, 13))
    code = "".join(file.read_text() for file in (ROOT / "macformer").rglob("*.py"))
    named = " ".join(re.findall(r"errat(?:um|a) ([\d, and]+)", code))
    assert {1, 5} < {int(number) for number in re.findall(r"\d+", named)} <= set(listed)
    claims = (ROOT / "results" / "claims.md").read_text()
    assert all(f"| {id}" in claims for id in re.findall(r"\b(?:T\d|K|M) [a-z][\w -]*\w", ERRATA.replace("\n   ", " ")))


def test_the_measured_errors_are_those_of_the_figure() -> None:
    cells = json.loads((ROOT / "results" / "figures" / "rmfa.json").read_text())["samplings"]
    for sampling, D in {"paper": 128, "release": 128, "exact01": 128, "order1": 65}.items():
        (each,) = (cell["deviation"] for cell in cells if (cell["sampling"], cell["D"]) == (sampling, D))
        measured = f"{mean(each):.2g} ± {stdev(each):.1g}"
        assert re.search(rf"^\| `{sampling}` \|.*\| {re.escape(measured)} \|$", TEXT, re.MULTILINE), sampling


def test_the_fourth_moment_over_all_signs() -> None:
    d = 6
    rng = Generator().manual_seed(0)
    x, y = torch.randn(d, generator=rng, dtype=torch.float64), torch.randn(3, d, generator=rng, dtype=torch.float64)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d)), dtype=torch.float64)
    projected = signs @ y.mT
    truth = projected.mT @ ((signs @ x).square().unsqueeze(-1) * projected) / len(signs)
    torch.testing.assert_close(kappa(x, y), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("p", [2.0, 3.0])
def test_mean_and_second_moment_of_a_feature(kernel: str, p: float) -> None:
    """Degrees 0 to 4, each with every choice of signs in 3 dimensions, at the scales of a draw: exact, in float32."""
    d, degrees = 3, 5
    rng = Generator().manual_seed(1)
    x, y = 0.7 * unit(d, rng=rng), 0.7 * unit(2, d, rng=rng)
    drawn = RandomMaclaurin(d, 10_000, kernel, p, rng)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d)))
    mean, square = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for N in range(degrees):
        choices = torch.tensor(list(itertools.product(range(len(signs)), repeat=N)), dtype=torch.long)
        scale = drawn.scales[drawn.degrees == N][0] * math.sqrt(drawn.features)  # of a map of one feature
        every = RandomMaclaurin(d, len(choices), kernel, p)  # a feature for each choice of N vectors
        state = {"degrees": torch.full((len(choices),), N), "rows": signs[choices.mT.flatten()]}
        state |= {"scales": scale.expand(len(choices)), "_extra_state": every.get_extra_state()}
        every.load_state_dict(state)
        estimates = every(x) * every(y)
        probability = (p - 1) / p ** (N + 1)
        mean += probability * estimates.mean(-1)
        square += probability * (estimates @ estimates.mT) / len(choices)
    series = sum(a(kernel, N) * (y @ x) ** N for N in range(degrees))
    torch.testing.assert_close(mean, series, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(square, second_moment(kernel, p, x, y, degrees), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("D", [64, 128])
def test_the_bias_of_the_ratio(D: int) -> None:
    """Groups of D features of one large draw are as many draws of D.

    The first-order error, whose mean is 0, is taken off: what is left has a standard error below a tenth of the bias.
    Terms of order 1/D^2 are below a tenth of it, too.
    """
    d, n, groups = 8, 6, 400_000 // D
    rng = Generator().manual_seed(0)
    x, y, v = unit(d, rng=rng) * d**-0.25, unit(n, d, rng=rng) * d**-0.25, unit(n, rng=rng)
    k = KERNELS["exp"].value(y @ x)
    numerator, denominator = k @ v, k.sum()
    attn = numerator / denominator
    covariance = (second_moment("exp", 2.0, x, y, TERMS) - torch.outer(k, k)) / D
    bias = (attn * covariance.sum() - (v @ covariance).sum()) / denominator**2

    feature_map = RandomMaclaurin(d, D * groups, generator=rng).double()
    estimates = feature_map(x) * feature_map(y) * groups  # sorted by degree
    estimates = estimates[:, torch.randperm(D * groups, generator=rng)].view(n, groups, D).sum(-1)
    top, bottom = v @ estimates, estimates.sum(0)
    found = top / bottom - attn - (top - numerator - attn * (bottom - denominator)) / denominator
    error = found.std() / math.sqrt(groups)
    assert abs(bias) > 10 * error  # or the test could not fail
    assert abs(found.mean() - bias) < 5 * error + 0.1 * abs(bias)


@pytest.mark.parametrize("sampling", ["paper", "release", "exact01", "order1"])
def test_the_error_on_isotropic_rows(sampling: str) -> None:
    """Over 100 draws of map and data the standard error is 2% (paper) or less; terms that are left out, 1/d or 3%."""
    d, D, n = 32, 1024, 256
    rng = Generator().manual_seed(0)
    error = apart = 0.0
    for _ in range(100):
        q, k = unit(1, 1, n, d, rng=rng), unit(1, 1, n, d, rng=rng)
        v = torch.randn(1, 1, n, d, generator=rng, dtype=torch.float64)
        attention = RMFAttention(d, D, sampling=sampling, generator=rng).double()
        exact = KernelAttention("exp")(q, k, v)
        error += float((attention(q, k, v) - exact).square().sum())
        apart += float((exact - v.mean(2, keepdim=True)).square().sum())
    second = (a("exp", 2) / a("exp", 1)) ** 2
    dev = {
        "paper": (4 * d + 2 + 8 * second) / D,
        "release": (2 * d - 1 + 4 * second) / (D - 1),
        "exact01": second / max(1, int((attention.feature_map.degrees == 2).sum())),
        "order1": 2 * second * (d - 1) / (d**2 * (d + 2)),
    }
    assert error / apart == pytest.approx(dev[sampling], rel=0.09)  # three standard errors and what is left out


def test_the_kernels_hardly_differ_after_pre_sbn() -> None:
    """No coefficient of a difference is negative, so that it is largest at t = r."""
    differences = {
        ("inv", 1.0, 2, 1 / 2, 4): ("0.0214", "0.0097"),
        ("log", 1.0, 3, 1 / 6, 5): ("0.00116", "0.00038"),
        ("sqrt", 0.5, 3, 1 / 24, 5): ("0.00027", "0.00009"),
    }
    for (kernel, slope, first, leading, digits), printed in differences.items():
        terms = [a(kernel, N) - a("exp", N) * slope**N for N in range(TERMS)]
        assert min(terms) >= 0
        assert terms[:first] == [0.0] * first
        assert terms[first] == pytest.approx(leading)
        for d, figure in zip((32, 64), printed, strict=True):
            r = torch.tensor(d**-0.5, dtype=torch.float64)
            difference = KERNELS[kernel].value(r) - torch.exp(slope * r)
            assert f"{difference:.{digits}f}" == figure
        assert f"{printed[0]}{' for $d=32$' if kernel == 'inv' else ''}, {printed[1]}" in TEXT
    assert f"({math.exp(2 / math.sqrt(32)):.2f}, {math.exp(2 / math.sqrt(64)):.2f})" in TEXT


def test_the_floor_is_far_below_exact_denominators() -> None:
    for name, kernel in KERNELS.items():
        assert kernel.value(torch.tensor(-(32**-0.5))) > 0.83 * kernel.coefficient(0), name
        assert RMFAttention(32, kernel=name).floor == 0.1 * kernel.coefficient(0) == FLOOR * kernel.coefficient(0)


def test_pre_sbn_and_the_slope_of_post_sbn() -> None:
    rng = Generator().manual_seed(0)
    x = torch.randn(1, 1, 5, 16, generator=rng, dtype=torch.float64)
    eps = 0.5
    centred = x - x.mean(-1, keepdim=True)
    rows = centred / (16 * (centred.square().mean(-1, keepdim=True) + eps**2)).sqrt()
    torch.testing.assert_close(PreSBN(eps)(x), rows)

    post = PostSBN(1, 16).double()
    gamma, beta = 1.5, 0.5
    torch.nn.init.constant_(post.log_gamma, math.log(gamma))
    torch.nn.init.constant_(post.log_beta, math.log(beta))
    y = gamma * x
    torch.testing.assert_close(post(x), y * (y.square() + BEND**2) ** ((beta - 1) / 2))
    zero = torch.zeros_like(x, requires_grad=True)
    post(zero).sum().backward()
    torch.testing.assert_close(zero.grad, torch.full_like(x, gamma * BEND ** (beta - 1)))
