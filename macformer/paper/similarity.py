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
from macformer.paper.finding import Finding, Verdict, student
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
CORRECTED = {"log": "1/max(1, N)", "sqrt": "the double factorial (2N-3)!! for 2N-3"}
HEAD_DIM, FEATURES = 32, 128  # on LRA


def similarity(effort: int) -> list[Finding]:
    return [*(coefficients(name, *FORMULAS[name]) for name in FORMULAS), twins(), domain(), apart(repeats=10 * effort)]


def series(kernel: Kernel, degrees: int) -> list[float]:
    """a_0, a_1, ... from K itself: a_N is the mean of K(z) / z^N over a circle around 0."""
    found = []
    for N in range(degrees):
        radius = 0.5 * kernel.radius if kernel.radius < math.inf else max(1.0, N)
        angles = [cmath.rect(1, 2 * math.pi * i / POINTS) for i in range(POINTS)]
        z = radius * torch.tensor(angles, dtype=torch.complex128)
        found.append(float((kernel.value(z) / z**N).mean().real))
    return found


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
    verdict: Verdict = "not reproduced"
    if ours:
        verdict = "reproduced with a correction" if parted else "reproduced"
    if parted:
        values = [(at(N), truth[N]) for N in parted[:2]]
        says = f"wrong at degrees {', '.join(map(str, parted[:4]))}{', ...' if len(parted) > 4 else ''}: " + ", ".join(
            f"{'a division by zero' if given is None else f'{given:.4g}'} for {right:.4g}" for given, right in values
        )
        says += f". The series needs {CORRECTED[name]}" if ours and name in CORRECTED else ""
    else:
        says = "it is the series"
    return Finding(
        f"K series of {name}",
        "Table 1",
        f"the Maclaurin coefficients of {name} are {formula}",
        f"{says} (degrees 0 to {DEGREES - 1}, by Cauchy's integral of K)",
        verdict,
        "python -m scripts.claims K",
        {"printed": [at(N) for N in range(DEGREES)], "series": truth, "parted_at": parted},
    )


def twins(one: str = "exp", other: str = "trigh") -> Finding:
    t = torch.linspace(-0.99, 0.99, 199, dtype=torch.float64)
    apart = float((KERNELS[one].value(t) - KERNELS[other].value(t)).abs().max())
    features = [
        RandomMaclaurin(HEAD_DIM, FEATURES, name, generator=torch.Generator().manual_seed(0))(torch.eye(HEAD_DIM))
        for name in (one, other)
    ]
    same = apart == 0 and torch.equal(*features)
    return Finding(
        "K five different kernels",
        "Table 1",
        f"{other} is a kernel other than {one}",
        f"largest difference of the two functions on (-1, 1): {apart:.2g}; features of one seed are "
        f"{'equal, bit by bit: one model under two names' if same else 'different'}",
        "not reproduced" if same else "reproduced",
        "python -m scripts.claims K",
        {"largest_difference": apart, "features_equal": torch.equal(*features)},
    )


def domain(normalise: Callable[[Tensor], Tensor] = lambda x: PreSBN(1e-13)(x)) -> Finding:
    """Inputs are as bad as can be: huge, tiny, and every key one of the queries or its opposite."""
    largest = {}
    for d in (HEAD_DIM, 64):
        rng = torch.Generator().manual_seed(0)
        rows = torch.randn(1, 1, 512, d, generator=rng) * torch.logspace(-6, 6, 512).unsqueeze(1)
        q, k = normalise(rows), normalise(torch.cat([rows, -rows], 2))
        largest[d] = float((q @ k.mT).abs().max() * d**-0.5)
    radius = min(kernel.radius for kernel in KERNELS.values())
    inside = all(size < radius and size <= d**-0.5 * (1 + 1e-5) for d, size in largest.items())
    return Finding(
        "K arguments below 1",
        "after Table 1; Algorithm 1",
        "pre-SBN keeps the arguments of inv, log and sqrt below 1",
        "largest |q.k|/sqrt(d), with every key a query or its opposite: "
        + ", ".join(f"{size:.3f} at d = {d} (1/sqrt(d) = {d**-0.5:.3f})" for d, size in largest.items())
        + ": the kernels are only ever asked close to 0" * inside,
        "reproduced" if inside else "not reproduced",
        "python -m scripts.claims K",
        {"largest_logit": {str(d): size for d, size in largest.items()}},
    )


def apart(
    repeats: int, size: float = 1.0, d: int = HEAD_DIM, D: int = FEATURES, sampling: Sampling = "paper"
) -> Finding:
    """Exact attentions of each two kernels against each other, and RMFA's error: all relative to |exp - mean(V)|^2."""
    names = [name for name in FORMULAS if name != "trigh"]
    pairs = list(combinations(names, 2))
    differences: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    errors = []
    for seed in range(repeats):
        rng = torch.Generator().manual_seed(seed)
        q, k = (_rows(d, rng) * size for _ in range(2))
        v = torch.randn(1, 2, 1024, d, generator=rng)
        exact = {name: KernelAttention(name)(q, k, v).double() for name in names}
        estimate = RMFAttention(d, D, "exp", sampling, generator=rng)(q, k, v)
        unit = (exact["exp"] - v.mean(2, keepdim=True)).square().sum()
        errors.append(float((estimate - exact["exp"]).square().sum() / unit))
        for pair in pairs:
            differences[pair].append(float((exact[pair[0]] - exact[pair[1]]).square().sum() / unit))
    error = student(errors, len(pairs) + 1)
    each = {pair: student(samples, len(pairs) + 1) for pair, samples in differences.items()}
    largest = size**2 * d**-0.5
    t = torch.linspace(-largest, largest, 201, dtype=torch.float64)
    values = {name: KERNELS[name].value(t) for name in names}
    sup = {(a, b): float((values[a] - values[b]).abs().max()) for a, b in pairs}
    lost = sum(difference.high < error.low for difference in each.values())
    clear = sum(difference.low > error.high for difference in each.values())
    closest, furthest = (choose(each, key=lambda pair: each[pair].value) for choose in (min, max))
    verdict: Verdict = "reproduced" if clear == len(pairs) else "not reproduced" if lost else "inconclusive"
    return Finding(
        "K kernels differ",
        "Experiment, last part",
        "the kernels are different similarity functions for a task to choose from (here: they differ by more than "
        f"RMFA's error at LRA's D = {FEATURES})",
        f"on logits up to {largest:.3g}: {', '.join(f'|{a} - {b}| <= {x:.2g}' for (a, b), x in sup.items())}. Exact "
        f"attention of random rows (d = {d}, n = 1,024) differs by {each[closest].value:.2g} ({' and '.join(closest)}) "
        f"to {each[furthest].value:.2g} ({' and '.join(furthest)}) of |exp's - mean(V)|^2; RMFA with D = {D} is off by "
        f"{error:.2g}: {lost} of {len(pairs)} differences are smaller",
        verdict,
        "python -m scripts.claims K",
        {"error": [error.value, error.low, error.high]}
        | {"differences": {" and ".join(pair): [i.value, i.low, i.high] for pair, i in each.items()}}
        | {"largest_difference_of_values": {" and ".join(pair): x for pair, x in sup.items()}},
    )


def _rows(d: int, rng: Generator) -> Tensor:
    return PreSBN(1e-13)(torch.randn(1, 2, 1024, d, generator=rng))
