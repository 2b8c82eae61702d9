"""Feature maps: the written formula, unbiasedness (statistical), buffers."""

import math
from collections.abc import Callable

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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("features", [18, 24, 40])
def test_exact01_is_unbiased_over_draws(kernel: str, features: int) -> None:
    """1,000 draws, each one estimate: features of one draw depend on each other. 18 is the least for d = 16.

    For more features than that the tail is too small to be seen here: that is the next test's.
    """
    x, y = unit_pair(16, 0.8)
    rng = torch.Generator().manual_seed(5)
    maps = (RandomMaclaurin(16, features, kernel, generator=rng, sampling="exact01").double() for _ in range(1000))
    estimates = torch.stack([feature_map(x) @ feature_map(y) for feature_map in maps])
    assert abs(z_score(estimates, float(KERNELS[kernel].value(x @ y)))) < Z


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("features", [18, 19, 24, 40])
def test_exact01_has_its_tail(kernel: str, features: int) -> None:
    """The signs integrated out: sum_i s_i^2 t^N_i, where only the degrees of the tail are drawn (500 times).

    Without its last feature, the tail's (degrees fall: the first), a map would be off by far more than the test allows.
    """
    rng, t = torch.Generator().manual_seed(6), 0.2
    maps = [RandomMaclaurin(16, features, kernel, generator=rng, sampling="exact01") for _ in range(500)]
    terms = [
        m.scales.double().square() * torch.where(m.degrees == 1, t / 16, t ** m.degrees.double())  # 16 coordinates
        for m in maps
    ]
    estimates, without = (torch.stack([x[first:].sum() for x in terms]) for first in (0, 1))
    truth = float(KERNELS[kernel].value(torch.tensor(t, dtype=torch.float64)))
    assert abs(z_score(estimates, truth)) < Z
    assert abs(float(without.mean()) - truth) > 2 * Z * float(estimates.std()) / math.sqrt(len(maps))


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
                by_factor[i].append(features.rows[row])
                row += 1
    assert row == len(features.rows)
    for degree, rows in zip(features.degrees.tolist(), by_factor, strict=True):
        scale = math.sqrt(KERNELS["inv"].coefficient(degree) * 2.0 ** (degree + 1) / 40)
        out.append(scale * math.prod(float(w @ x) for w in rows))
    assert set(features.rows.unique().tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(features(x), torch.tensor(out, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sampling", ["exact01", "order1"])
def test_degrees_0_and_1_are_exact(kernel: str, sampling: str) -> None:
    features = RandomMaclaurin(16, 40, kernel, sampling=sampling).double()
    x, y = unit_pair(16, 0.8)
    low = features.degrees < 2
    a_0, a_1 = (KERNELS[kernel].coefficient(N) for N in (0, 1))
    assert float(features(x)[low] @ features(y)[low]) == pytest.approx(a_0 + a_1 * float(x @ y))
    assert len(features(x)) == (40 if sampling == "exact01" else 17)
    assert low.sum() == 17


def test_exact01_gives_each_degree_its_share() -> None:
    """Of 60, in proportion to a_N 16^(-N/2), for inv: 3/4, 3/16, 3/64; 0.7 rounds to none; one samples the rest."""
    degrees = RandomMaclaurin(16, 16 + 2 + 60, "inv", sampling="exact01").degrees
    counts = degrees.bincount()
    assert counts[:5].tolist() == [1, 16, 45 + 2, 11, 2]  # what rounding left goes to degree 2
    assert counts[5:].sum() == 1


def test_exact01_needs_room_for_one_random_feature() -> None:
    message = "features=33 is too few for sampling='exact01' with head_dim=32: it needs 34 or more"
    with pytest.raises(ValueError, match=message):
        RandomMaclaurin(32, 33, sampling="exact01")


@pytest.mark.parametrize("d", [16, 12])
def test_exact01_has_orthogonal_rows_of_signs(d: int) -> None:
    features = RandomMaclaurin(d, d + 2 + d, "exp", sampling="exact01", generator=torch.Generator().manual_seed(0))
    many = int((features.degrees >= 2).sum())
    rows = features.rows[:d]  # of the first factor; many >= d
    assert many >= d
    assert set(rows.unique().tolist()) == {-1.0, 1.0}
    products = rows @ rows.T - d * torch.eye(d)
    assert products.abs().max() == 0 if d == 16 else products.abs().max() < d


def test_a_new_draw_comes_every_n_training_steps_and_only_then() -> None:
    features = RandomMaclaurin(8, 32, generator=torch.Generator().manual_seed(0), redraw=3)
    draws = []
    for _ in range(7):
        draws.append(features.rows.clone())
        features.step()
    changes = [step for step in range(1, 7) if not torch.equal(draws[step], draws[step - 1])]
    assert changes == [3, 6]
    fixed = RandomMaclaurin(8, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(7):
        fixed.step()
    assert torch.equal(fixed.rows, draws[0])  # redraw or not, the first draw is the seed's


def test_redraws_go_on_where_a_saved_map_stopped() -> None:
    one, other = (RandomMaclaurin(8, 32, generator=torch.Generator().manual_seed(s), redraw=2) for s in (1, 2))
    for _ in range(3):
        one.step()
    other.load_state_dict(one.state_dict())
    for _ in range(5):
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(one.scales, other.scales)
        one.step()
        other.step()


def test_a_redraw_keeps_the_dtype() -> None:
    features = RandomMaclaurin(8, 32, redraw=1).double()
    features.step()
    assert features.rows.dtype == features.scales.dtype == torch.float64
    assert features(torch.ones(8, dtype=torch.float64)).dtype == torch.float64


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    """A layer has a seed of its own: a wider layer below changes the seeds' source by one number, not by its width."""
    rows = []
    for width in (16, 128):
        rng = torch.Generator().manual_seed(3)
        RandomMaclaurin(8, width, generator=rng)
        rows.append(RandomMaclaurin(8, 16, generator=rng).rows)
    assert torch.equal(*rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sampling", ["paper", "release", "exact01", "order1"])
@pytest.mark.parametrize("width", [1, 3, 40])
def test_the_folded_form_is_the_map(kernel: str, sampling: str, width: int) -> None:
    width = max(width, 10) if sampling == "exact01" else width
    features = RandomMaclaurin(8, width, kernel, sampling=sampling, generator=torch.Generator().manual_seed(1)).double()
    x, y = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, folded_map = features.folded(torch.float64)
    constant, linear, root, widths = (getattr(folded_map, key) for key in ("constant", "linear", "root", "widths"))

    def deep(x: torch.Tensor) -> torch.Tensor:
        factors = (x @ rows[0].T).split(widths, -1) if widths else (x.new_ones(5, 0),)
        product = factors[0]
        for factor in factors[1:]:
            product = torch.cat([product[:, : factor.shape[1]] * factor, product[:, factor.shape[1] :]], 1)
        return product

    folded = constant + (x @ linear @ y.T if linear is not None else 0) + deep(x) @ deep(y).T
    exact = features(x * 8**-0.25) @ features(y * 8**-0.25).T
    torch.testing.assert_close(folded, exact, rtol=1e-6, atol=1e-9)
    assert len(root) <= 8
    torch.testing.assert_close(root.T @ root, torch.zeros(8, 8).double() if linear is None else linear)


def test_the_folded_form_is_kept_until_the_draw_changes() -> None:
    """Also where an evaluation asks first: what it keeps can be trained with."""
    features = RandomMaclaurin(8, 32, redraw=1, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        first = features.folded(torch.float32)
    assert features.folded(torch.float32) is first
    assert not first[0].is_inference()
    changes: list[Callable[[], object]] = [
        features.step,
        lambda: features.load_state_dict(features.state_dict()),
        lambda: features.to("meta").to_empty(device="cpu"),
        features.double,
    ]
    for change in changes:
        before = features.folded(torch.float32)
        change()
        assert features.folded(torch.float32) is not before


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
    assert saved.rows.shape != other.rows.shape
    other.load_state_dict(saved.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(other(x), saved(x), rtol=0, atol=0)


def test_a_draw_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    features, other = RandomMaclaurin(8, 32), RandomMaclaurin(8, 64)
    x = torch.randn(3, 8)
    before = features(x)
    with pytest.raises(RuntimeError, match="size mismatch"):
        features.load_state_dict(other.state_dict())
    assert torch.equal(features(x), before)


@pytest.mark.parametrize("sampling", ["paper", "release", "exact01", "order1"])
def test_draws_do_not_ask_for_the_default_device(sampling: str) -> None:
    """Under `with torch.device(...)`, here one without numbers: the draw is made on the CPU and then moved."""
    with torch.device("meta"):
        features = RandomMaclaurin(8, 32, sampling=sampling, generator=torch.Generator("cpu").manual_seed(0))
    assert features.rows.device.type == "meta"
    here = RandomMaclaurin(8, 32, sampling=sampling, generator=torch.Generator("cpu").manual_seed(0))
    assert features.rows.shape == here.rows.shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": "12x"}, "features='12x' must be a whole number"),
        ({"features": 0}, "features=0 must be a whole number"),
        ({"features": 8, "p": 1.0}, "p=1.0 must be above 1"),
        ({"features": 8, "sampling": "best"}, "choose one of paper, release, exact01, order1"),
        ({"features": 8, "kernel": "cos"}, "choose one of exp"),
        ({"features": 8, "redraw": 0}, "redraw=0 must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomMaclaurin(4, **arguments)


def test_fourier_needs_an_even_width() -> None:
    with pytest.raises(ValueError, match="features=7 must be even"):
        RandomFourier(4, 7)
