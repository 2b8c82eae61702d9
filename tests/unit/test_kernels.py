"""A kernel is its Maclaurin series. Every test picks up a new entry of KERNELS by itself."""

import math

import pytest
import torch

from macformer.kernels import KERNELS, find

T = torch.tensor([-0.7, -0.3, -0.05, 0.0, 0.1, 0.4, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("name", KERNELS)
def test_series_is_the_closed_form(name: str) -> None:
    kernel = KERNELS[name]
    t = T * min(1.0, kernel.radius)
    series = sum(kernel.coefficient(n) * t**n for n in range(150))
    torch.testing.assert_close(series, kernel.value(t), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_coefficients_are_not_negative_and_never_overflow(name: str) -> None:
    assert KERNELS[name].coefficient(0) > 0  # the floor of the denominator hangs on it
    for n in (1, 2, 20, 171, 500):
        assert 0 <= KERNELS[name].coefficient(n) < math.inf


@pytest.mark.parametrize("name", KERNELS)
def test_the_series_converges_inside_the_radius_and_not_outside(name: str) -> None:
    kernel = KERNELS[name]

    def term(n: int, t: float) -> float:
        return kernel.coefficient(n) * t**n

    if math.isinf(kernel.radius):
        assert term(100, 10) < 1e-50
    else:
        assert term(400, 0.9 * kernel.radius) < term(100, 0.9 * kernel.radius) < 1
        assert term(400, 1.1 * kernel.radius) > term(100, 1.1 * kernel.radius)


def test_printed_coefficients_of_the_paper_part_where_we_say() -> None:
    assert [KERNELS["log"].coefficient(n) for n in (0, 1, 4)] == [1, 1, 0.25]
    printed = [max(1, 2 * n - 3) / (2**n * math.factorial(n)) for n in range(6)]
    parts = [n for n in range(6) if not math.isclose(KERNELS["sqrt"].coefficient(n), printed[n])]
    assert parts == [4, 5]


def test_unknown_kernel_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'cos' is not known; choose one of exp, inv, log, trigh, sqrt"):
        find("cos")
