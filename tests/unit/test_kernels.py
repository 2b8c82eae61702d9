"""A kernel is its Maclaurin series. Every test picks up a new entry of KERNELS by itself."""

import math

import pytest
import torch

from macformer.kernels import KERNELS, find

T = torch.tensor([-0.7, -0.3, -0.05, 0.0, 0.1, 0.4, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("name", KERNELS)
def test_series_is_the_closed_form(name: str) -> None:
    kernel = KERNELS[name]
    series = sum(kernel.coefficient(n) * T**n for n in range(120))
    torch.testing.assert_close(series, kernel.value(T), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_coefficients_are_not_negative_and_never_overflow(name: str) -> None:
    for n in (0, 1, 2, 20, 171, 500):
        assert 0 <= KERNELS[name].coefficient(n) <= 1


@pytest.mark.parametrize("name", KERNELS)
def test_radius_is_where_the_ratio_of_coefficients_tends(name: str) -> None:
    kernel = KERNELS[name]
    ratio = kernel.coefficient(100) / kernel.coefficient(101)
    assert ratio > 100 if math.isinf(kernel.radius) else ratio == pytest.approx(kernel.radius, rel=0.02)


def test_printed_coefficients_of_the_paper_part_where_we_say() -> None:
    assert [KERNELS["log"].coefficient(n) for n in (0, 1, 4)] == [1, 1, 0.25]
    printed = [max(1, 2 * n - 3) / (2**n * math.factorial(n)) for n in range(6)]
    parts = [n for n in range(6) if not math.isclose(KERNELS["sqrt"].coefficient(n), printed[n])]
    assert parts == [4, 5]


def test_unknown_kernel_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'cos' is not known; choose one of exp, inv, log, trigh, sqrt"):
        find("cos")
