"""Feature maps: the written formula, unbiasedness (statistical), buffers."""

import math

import pytest
import torch

from macformer.features import RandomFourier, RandomMaclaurin
from macformer.kernels import KERNELS

D_MANY = 200_000
# |z| > 5.5 has probability 4e-8 for a normal z. The means below are of 200,000 independent terms; some 40 such tests
# would fail by chance less than once in 500,000 draws. The seed is fixed, so a failure is a change of the code.
Z = 5.5


def unit_pair(d: int, cosine: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y with |x| = |y| = d^(-1/4), as after pre-SBN, and that angle."""
    rng = torch.Generator().manual_seed(7)
    x, other = torch.linalg.qr(torch.randn(d, 2, generator=rng, dtype=torch.float64)).Q.T
    y = cosine * x + math.sqrt(1 - cosine**2) * other
    return x * d**-0.25, y * d**-0.25


def z_score(products: torch.Tensor, truth: float) -> float:
    """Of the mean of independent estimates."""
    return float((products.mean() - truth) / (products.std() / math.sqrt(len(products))))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("sampling", "p"), [("paper", 2.0), ("paper", 1.5), ("paper", 3.0), ("release", 2.0)])
def test_maclaurin_is_unbiased(kernel: str, sampling: str, p: float) -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = unit_pair(16, 0.8)
    features = RandomMaclaurin(16, D_MANY, kernel, p, rng, sampling).double()
    products = features(x) * features(y) * D_MANY  # independent estimates of K(x.y), but for `release`'s constant
    truth = float(KERNELS[kernel].value(x @ y))
    if sampling == "release":
        constant = features.degrees == 0
        a_0 = KERNELS[kernel].coefficient(0)
        assert float(products[constant].sum()) / D_MANY == pytest.approx(a_0)
        products, truth = products[~constant] * (D_MANY - 1) / D_MANY, truth - a_0
    assert abs(z_score(products, truth)) < Z


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_degrees_have_the_stated_law(p: float) -> None:
    degrees = RandomMaclaurin(1, D_MANY, p=p, generator=torch.Generator().manual_seed(1)).degrees
    for m in range(4):
        hits = (degrees == m).double()
        assert abs(z_score(hits, (p - 1) / p ** (m + 1))) < Z


def test_maclaurin_is_the_written_formula() -> None:
    features = RandomMaclaurin(5, 40, "inv", generator=torch.Generator().manual_seed(3)).double()
    x = torch.randn(5, dtype=torch.float64)
    out, row = [], 0
    by_factor: list[list[torch.Tensor]] = [[] for _ in features.degrees]
    for j in range(int(features.degrees.max())):
        for i, degree in enumerate(features.degrees.tolist()):
            if degree > j:
                by_factor[i].append(features.signs[row])
                row += 1
    assert row == len(features.signs)
    for degree, rows in zip(features.degrees.tolist(), by_factor, strict=True):
        scale = math.sqrt(KERNELS["inv"].coefficient(degree) * 2.0 ** (degree + 1) / 40)
        out.append(scale * math.prod(float(w @ x) for w in rows))
    assert set(features.signs.unique().tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(features(x), torch.tensor(out, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_a_map_of_constants_only_works() -> None:
    features = RandomMaclaurin(4, 1, p=1e9, generator=torch.Generator().manual_seed(0))
    assert features.degrees.tolist() == [0]
    torch.testing.assert_close(features(torch.randn(2, 3, 4)), torch.ones(2, 3, 1))


def test_fourier_is_unbiased() -> None:
    x, y = unit_pair(16, 0.3)
    features = RandomFourier(16, 2 * D_MANY, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        features.sigma.fill_(2.0)
        phi_x, phi_y = features(x), features(y)
    products = (phi_x * phi_y).view(2, D_MANY).sum(0) * D_MANY  # sine and cosine of one frequency belong together
    assert abs(z_score(products, math.exp(-float((2 * (x - y)).square().sum()) / 2))) < Z


def test_fourier_heads_have_their_own_sigma() -> None:
    features = RandomFourier(4, 8, heads=2)
    with torch.no_grad():
        features.sigma[1] = 0
    out = features(torch.randn(3, 2, 5, 4))
    torch.testing.assert_close(out[:, 1], torch.tensor([0.0] * 4 + [0.5] * 4).expand(3, 5, 8))
    assert out[:, 0].std() > 0.1


def test_a_draw_is_saved_and_loads_into_a_map_with_another_draw() -> None:
    saved = RandomMaclaurin(8, 64, generator=torch.Generator().manual_seed(1))
    other = RandomMaclaurin(8, 64, generator=torch.Generator().manual_seed(2))
    assert saved.signs.shape != other.signs.shape
    other.load_state_dict(saved.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(other(x), saved(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": "12x"}, "features='12x' must be a whole number"),
        ({"features": 0}, "features=0 must be a whole number"),
        ({"features": 8, "p": 1.0}, "p=1.0 must be above 1"),
        ({"features": 8, "sampling": "best"}, "choose one of paper, release"),
        ({"features": 8, "kernel": "cos"}, "choose one of exp"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomMaclaurin(4, **arguments)


def test_fourier_needs_an_even_width() -> None:
    with pytest.raises(ValueError, match="features=7 must be even"):
        RandomFourier(4, 7)
