"""Dot-product kernels as values: K(t), its Maclaurin coefficients a_N, and where the series converges.

K(t) = sum_N a_N t^N with a_0 > 0, a_N >= 0. A new kernel is one entry in `KERNELS`, or a `Kernel` in a module of your
own (kernel: module.NAME), and one YAML that names it. The numbers of errata are those of docs/errata.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """K(t) = sum_N a_N t^N, for |t| below `radius`; a_0 > 0 and no a_N negative."""

    value: Callable[[Tensor], Tensor]
    coefficient: Callable[[int], float]
    radius: float


def _exp(n: int) -> float:
    return 1 / math.factorial(n)  # whole numbers until the division: no overflow at any degree


def _sqrt(n: int) -> float:
    # 1, 1/2, then (2n-3)!!/(2^n n!). The paper prints max(1, 2n-3) for the double factorial (erratum 2).
    if n < 2:
        return (1.0, 0.5)[n]
    return math.prod(range(1, 2 * n - 2, 2)) / (2**n * math.factorial(n))


KERNELS: dict[str, Kernel] = {
    "exp": Kernel(torch.exp, _exp, math.inf),
    "inv": Kernel(lambda t: 1 / (1 - t), lambda n: 1.0, 1.0),
    # The paper prints 1/min(1, n), which divides by zero at n = 0 (erratum 1).
    "log": Kernel(lambda t: 1 - torch.log1p(-t), lambda n: 1 / max(1, n), 1.0),
    # sinh t + cosh t is exp t, so the two are one model (erratum 3): same function, same bits.
    "trigh": Kernel(torch.exp, _exp, math.inf),
    "sqrt": Kernel(lambda t: 2 - torch.sqrt(1 - t), _sqrt, 1.0),
}


def find(name: str) -> Kernel:
    """The kernel of that name in KERNELS, or in the module before its last dot."""
    module, _, entry = name.rpartition(".")
    try:
        kernel = getattr(import_module(module), entry) if module else KERNELS[name]
    except (ImportError, AttributeError, KeyError, TypeError):
        kernel = None
    if not isinstance(kernel, Kernel):
        known = ", ".join(KERNELS)
        raise ValueError(f"kernel={name!r} is not known; choose one of {known}, or your own as module.NAME")
    return kernel
