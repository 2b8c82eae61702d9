"""The paper's five kernels: the printed series, trigh, what logits pre-SBN leaves, how far the kernels differ there.

Shapes: H heads, n length, d width, D features, N degree.
"""

import cmath
import math
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Generator, Tensor

from macformer.attention import KernelAttention, RMFAttention
from macformer.features import RandomMaclaurin, Sampling
from macformer.kernels import KERNELS, Kernel
from macformer.paper.finding import Finding, found, judge, student
from macformer.ppsbn import PreSBN

DEGREES = 12  # of the series that are compared
POINTS = 128  # on the circle of Cauchy's integral
FORMULAS: dict[str, tuple[str, Callable[[int], float]]] = {  # the paper's table of kernels, as it is printed
    "exp": ("1/N!", lambda N: 1 / math.factorial(N)),
    "inv": ("1", lambda N: 1.0),
    "log": ("1/min(1, N)", lambda N: 1 / min(1, N)),
    "trigh": ("1/N!", lambda N: 1 / math.factorial(N)),
    "sqrt": ("max(1, 2N-3) / (2^N N!)", lambda N: max(1, 2 * N - 3) / (2**N * math.factorial(N))),
}
CORRECTED = {"log": "1/max(1, N)", "sqrt": "the double factorial (2N-3)!! for 2N-3"}  # errata 1 and 2
HEAD_DIM, FEATURES = 32, 128  # on LRA


def similarity(effort: int) -> list[Finding]:
    return [
        *(coefficients(name, *FORMULAS[name]) for name in FORMULAS),
        duplicate_kernels(),
        domain(),
        apart(repeats=10 * effort),
    ]


def series(kernel: Kernel, degrees: int) -> list[float]:
    """a_0, a_1, ... from K itself: a_N is the mean of K(z) / z^N over a circle around 0."""
    circle = torch.tensor([cmath.rect(1, 2 * math.pi * i / POINTS) for i in range(POINTS)], dtype=torch.complex128)

    def coefficient(N: int) -> float:
        z = (0.5 * kernel.radius if kernel.radius < math.inf else max(1.0, N)) * circle
        return float((kernel.value(z) / z**N).mean().real)

    return [coefficient(N) for N in range(degrees)]


def coefficients(name: str, formula: str, printed: Callable[[int], float]) -> Finding:
    kernel = KERNELS[name]
    truth = series(kernel, DEGREES)

    def at(N: int) -> float | None:
        try:
            return printed(N)
        except ZeroDivisionError:
            return None

    def equal(value: float | None, N: int) -> bool:
        return value is not None and math.isclose(value, truth[N], rel_tol=1e-9)

    parted = [N for N in range(DEGREES) if not equal(at(N), N)]
    ours = all(equal(kernel.coefficient(N), N) for N in range(DEGREES))
    says = "it is the series"
    if parted:
        values = ((at(N), truth[N]) for N in parted[:2])
        says = f"wrong at degrees {', '.join(map(str, parted[:4]))}{', ...' * (len(parted) > 4)}: " + ", ".join(
            f"{'a division by zero' if given is None else f'{given:.4g}'} for {right:.4g}" for given, right in values
        )
        if name in CORRECTED and ours:
            says += f". The series needs {CORRECTED[name]}"
    figures = {"printed": [at(N) for N in range(DEGREES)], "series": truth, "parted_at": parted}
    words = {"kernel": name, "formula": formula, "comparison": says, "last": DEGREES - 1}
    return found("K series of {kernel}", judge(ours and not parted, ours), figures, words)


def duplicate_kernels(one: str = "exp", other: str = "trigh") -> Finding:
    """Are two of the five kernels one and the same (erratum 3)?"""
    t = torch.linspace(-0.99, 0.99, 199, dtype=torch.float64)
    apart = float((KERNELS[one].value(t) - KERNELS[other].value(t)).abs().max())
    equal = torch.equal(
        *(
            RandomMaclaurin(HEAD_DIM, FEATURES, name, generator=Generator().manual_seed(0))(torch.eye(HEAD_DIM))
            for name in (one, other)
        )
    )
    same = apart == 0 and equal
    comparison = "equal, bit by bit: one model under two names" if same else "different"
    figures = {"largest_difference": apart, "features_equal": equal}
    words = {"one": one, "other": other, "comparison": comparison}
    return found("K five different kernels", judge(not same), figures, words)


def domain(normalise: Callable[[Tensor], Tensor] = lambda x: PreSBN(1e-13)(x)) -> Finding:
    """Inputs are as bad as can be: huge, tiny, and every key one of the queries or its opposite (erratum 8)."""
    largest = {}
    for d in (HEAD_DIM, 64):
        rng = Generator().manual_seed(0)
        rows = torch.randn(1, 1, 512, d, generator=rng) * torch.logspace(-6, 6, 512).unsqueeze(1)
        q, k = normalise(rows), normalise(torch.cat([rows, -rows], 2))
        largest[d] = float((q @ k.mT).abs().max() * d**-0.5)
    radius = min(kernel.radius for kernel in KERNELS.values())
    inside = all(size < radius and size <= d**-0.5 * (1 + 1e-5) for d, size in largest.items())
    sizes = ", ".join(f"{size:.3f} at d = {d} (1/sqrt(d) = {d**-0.5:.3f})" for d, size in largest.items())
    words = {"sizes": sizes, "inside": ": the kernels are only ever asked close to 0" * inside}
    return found("K arguments below 1", judge(inside), {"largest_logit": largest}, words)


def apart(
    repeats: int, size: float = 1.0, d: int = HEAD_DIM, D: int = FEATURES, sampling: Sampling = "paper"
) -> Finding:
    """Exact attentions of each two kernels against each other, and RMFA's error: all relative to |exp - mean(V)|^2."""
    names = [name for name in FORMULAS if name != "trigh"]
    pairs = {f"{a} and {b}": (a, b) for a, b in combinations(names, 2)}
    differences: dict[str, list[float]] = {pair: [] for pair in pairs}
    errors = []
    for seed in range(repeats):
        rng = Generator().manual_seed(seed)
        q, k = (PreSBN(1e-13)(torch.randn(1, 2, 1024, d, generator=rng)) * size for _ in range(2))
        v = torch.randn(1, 2, 1024, d, generator=rng)
        exact = {name: KernelAttention(name)(q, k, v).double() for name in names}
        estimate = RMFAttention(d, D, "exp", sampling, generator=rng)(q, k, v)
        unit = (exact["exp"] - v.mean(2, keepdim=True)).square().sum()
        errors.append(float((estimate - exact["exp"]).square().sum() / unit))
        for pair, (a, b) in pairs.items():
            differences[pair].append(float((exact[a] - exact[b]).square().sum() / unit))
    error = student(errors, len(pairs) + 1)
    each = {pair: student(samples, len(pairs) + 1) for pair, samples in differences.items()}
    largest = size**2 * d**-0.5
    t = torch.linspace(-largest, largest, 201, dtype=torch.float64)
    values = {name: KERNELS[name].value(t) for name in names}
    sup = {pair: float((values[a] - values[b]).abs().max()) for pair, (a, b) in pairs.items()}
    lost = sum(difference.high < error.low for difference in each.values())
    clear = sum(difference.low > error.high for difference in each.values())
    closest, furthest = (choose(each, key=lambda pair: each[pair].value) for choose in (min, max))
    verdict = judge(not lost) if lost or clear == len(pairs) else "inconclusive"
    figures = {"error": error, "differences": each, "largest_difference_of_values": sup}
    words = {"lra": FEATURES, "largest": largest, "d": d, "D": D, "lost": lost, "pairs": len(pairs)}
    words |= {"closest": closest, "low": each[closest].value, "furthest": furthest, "high": each[furthest].value}
    words["sup"] = ", ".join(f"|{pair.replace('and', '-')}| <= {x:.2g}" for pair, x in sup.items())
    return found("K kernels differ", verdict, figures, words)
