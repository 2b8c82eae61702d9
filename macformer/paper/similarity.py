"""The paper's five kernels: the printed series, trigh, what logits pre-SBN leaves, how far the kernels differ there.

Shapes: H heads, n length, d width, D features, N degree.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations

import numpy as np
import torch
from torch import Generator, Tensor

from macformer.attention import KernelAttention, RMFAttention
from macformer.features import RandomMaclaurin, Sampling
from macformer.kernels import KERNELS
from macformer.paper.finding import Finding, found, judge, students
from macformer.ppsbn import PreSBN

DEGREES = 12  # of the series that are compared
POINTS = 128  # on the circle of Cauchy's integral
PRE_SBN = PreSBN(1e-13)
FORMULAS: dict[str, tuple[str, Callable[[int], float | None]]] = {  # the paper's table of kernels, as it is printed
    "exp": ("1/N!", lambda N: 1 / math.factorial(N)),
    "inv": ("1", lambda N: 1.0),
    "log": ("1/min(1, N)", lambda N: 1 / min(1, N) if N else None),  # a division by zero
    "trigh": ("1/N!", lambda N: 1 / math.factorial(N)),
    "sqrt": ("max(1, 2N-3) / (2^N N!)", lambda N: max(1, 2 * N - 3) / (2**N * math.factorial(N))),
}
CORRECTED = {"log": "1/max(1, N)", "sqrt": "the double factorial (2N-3)!! for 2N-3"}  # errata 1 and 2
HEAD_DIM, FEATURES = 32, 128  # on LRA


def similarity(effort: int) -> list[Finding]:
    series = [coefficients(name, *printed) for name, printed in FORMULAS.items()]
    return [*series, duplicate_kernels(), domain(), apart(repeats=10 * effort)]


def coefficients(name: str, formula: str, printed: Callable[[int], float | None]) -> Finding:
    """Judge the printed formula of a_N, which is None where it divides by zero.

    From K itself a_N is the mean of K(z) / z^N over a circle around 0.
    """
    kernel, degrees = KERNELS[name], range(DEGREES)
    z = min(0.5 * kernel.radius, 4.0) * torch.exp(2j * math.pi * torch.arange(POINTS, dtype=torch.float64) / POINTS)
    truth = [float((kernel.value(z) / z**N).mean().real) for N in degrees]
    given = [printed(N) for N in degrees]
    wrong = np.flatnonzero(~np.isclose(np.array(given, float), truth, 1e-9, 0)).tolist()  # None is not close
    ours = np.allclose([kernel.coefficient(N) for N in degrees], truth, 1e-9, 0)
    says, shown = "it is the series", ["a division by zero" if value is None else f"{value:.4g}" for value in given]
    if wrong:
        says = f"wrong at degrees {', '.join(map(str, wrong[:4]))}{', ...' * (len(wrong) > 4)}: "
        says += ", ".join(f"{shown[N]} for {truth[N]:.4g}" for N in wrong[:2])
        if name in CORRECTED and ours:
            says += f". The series needs {CORRECTED[name]}"
    figures = {"printed": given, "series": truth, "parted_at": wrong}
    words = {"kernel": name, "formula": formula, "comparison": says, "last": DEGREES - 1}
    return found("K series of {kernel}", judge(ours and not wrong, ours), figures, **words)


def duplicate_kernels(one: str = "exp", other: str = "trigh") -> Finding:
    """Are two of the five kernels one and the same (erratum 3)?"""
    t = torch.linspace(-0.99, 0.99, 199, dtype=torch.float64)
    difference = float((KERNELS[one].value(t) - KERNELS[other].value(t)).abs().max())
    maps = (RandomMaclaurin(HEAD_DIM, FEATURES, name, generator=Generator().manual_seed(0)) for name in (one, other))
    equal = torch.equal(*(feature_map(torch.eye(HEAD_DIM)) for feature_map in maps))
    same = difference == 0 and equal
    figures = {"largest_difference": difference, "features_equal": equal}
    comparison = "equal, bit by bit: one model under two names" if same else "different"
    return found("K five different kernels", judge(not same), figures, one=one, other=other, comparison=comparison)


def domain(normalise: Callable[[Tensor], Tensor] = PRE_SBN) -> Finding:
    """Inputs are as bad as can be: huge, tiny, and every key one of the queries or its opposite (erratum 8)."""
    largest = {}
    for d in (HEAD_DIM, 64):
        rows = torch.randn(1, 1, 512, d, generator=Generator().manual_seed(0)) * torch.logspace(-6, 6, 512).unsqueeze(1)
        q, k = normalise(rows), normalise(torch.cat([rows, -rows], 2))
        largest[d] = float((q @ k.mT).abs().max() * d**-0.5)
    radius = min(kernel.radius for kernel in KERNELS.values())
    inside = all(size < radius and size <= d**-0.5 * (1 + 1e-5) for d, size in largest.items())
    sizes = ", ".join(f"{size:.3f} at d = {d} (1/sqrt(d) = {d**-0.5:.3f})" for d, size in largest.items())
    close = ": the kernels are only ever asked close to 0" * inside
    return found("K arguments below 1", judge(inside), {"largest_logit": largest}, sizes=sizes, inside=close)


def apart(
    repeats: int, size: float = 1.0, d: int = HEAD_DIM, D: int = FEATURES, sampling: Sampling = "paper"
) -> Finding:
    """Exact attentions of each two kernels against each other, and RMFA's error: all relative to |exp - mean(V)|^2."""
    names = [name for name in FORMULAS if name != "trigh"]
    pairs = {f"{a} and {b}": (a, b) for a, b in combinations(names, 2)}
    samples: dict[str, list[float]] = defaultdict(list)
    for seed in range(repeats):
        rng = Generator().manual_seed(seed)
        q, k = (PRE_SBN(torch.randn(1, 2, 1024, d, generator=rng)) * size for _ in range(2))
        v = torch.randn(1, 2, 1024, d, generator=rng)
        exact = {name: KernelAttention(name)(q, k, v).double() for name in names}
        unit = (exact["exp"] - v.mean(2, keepdim=True)).square().sum()
        compared = {pair: exact[a] - exact[b] for pair, (a, b) in pairs.items()}
        compared["RMFA"] = RMFAttention(d, D, "exp", sampling, generator=rng)(q, k, v) - exact["exp"]
        for name, difference in compared.items():
            samples[name].append(float(difference.square().sum() / unit))
    each = students(samples)
    error = each.pop("RMFA")
    largest = size**2 * d**-0.5
    t = torch.linspace(-largest, largest, 201, dtype=torch.float64)
    values = {name: KERNELS[name].value(t) for name in names}
    sup = {pair: float((values[a] - values[b]).abs().max()) for pair, (a, b) in pairs.items()}
    lost = sum(difference.high < error.low for difference in each.values())
    clear = sum(difference.low > error.high for difference in each.values())
    verdict = judge(not lost) if lost or clear == len(pairs) else "inconclusive"
    closest, furthest = (choose(each, key=lambda pair: each[pair].value) for choose in (min, max))
    figures = {"error": error, "differences": each, "largest_difference_of_values": sup}
    words = {"lra": FEATURES, "largest": largest, "d": d, "D": D, "lost": lost, "pairs": len(pairs)}
    words |= {"closest": closest, "low": each[closest].value, "furthest": furthest, "high": each[furthest].value}
    words["sup"] = ", ".join(f"|{pair.replace('and', '-')}| <= {x:.2g}" for pair, x in sup.items())
    return found("K kernels differ", verdict, figures, **words)
