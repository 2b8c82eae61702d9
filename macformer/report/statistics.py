"""What accuracies of a few seeds on one test set can carry. S seeds, N test examples; outcomes: S x N, true = right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, product

import numpy as np
from numpy.typing import NDArray
from scipy import special  # not scipy.stats, which takes a second to import

LEVEL = 0.05  # of a test; intervals hold 1 - LEVEL
REPLICATES = 9_999
TWINS = ("macformer_exp", "macformer_trigh")  # sinh + cosh is exp: one model under two names
Outcomes = NDArray[np.bool_]


def interval(outcomes: Outcomes) -> tuple[float, float]:
    """Of the mean accuracy. Several seeds: of seeds and examples, by Student's t. One: of the examples, Wilson's.

    The mean of S x N outcomes varies with the seeds, by s^2 / S (s^2: of the seeds' accuracies), and with the examples,
    by v / N (v: of the examples' shares of right seeds). What is left of both together is counted in each: the interval
    is a little wide. Degrees of freedom by Welch and Satterthwaite. Where neither varies (all wrong, all right, or two
    seeds with opposite constant answers) it is Wilson's, too.
    """
    (S, N), accuracy, scale = outcomes.shape, float(outcomes.mean()), 1.0
    of_seeds, of_examples = (outcomes.mean(1).var(ddof=1) / S, outcomes.mean(0).var(ddof=1) / N) if S > 1 else (0, 0)
    if variance := of_seeds + of_examples:
        degrees = variance**2 / (of_seeds**2 / (S - 1) + of_examples**2 / (N - 1))
        centre, half = accuracy, float(special.stdtrit(degrees, 1 - LEVEL / 2) * variance**0.5)
    else:
        z = float(special.ndtri(1 - LEVEL / 2))
        centre, half = accuracy + z**2 / (2 * N), z * (accuracy * (1 - accuracy) / N + (z / (2 * N)) ** 2) ** 0.5
        scale = 1 + z**2 / N
    low, high = max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    return min(accuracy, low), max(accuracy, high)  # rounding must not leave the accuracy outside


@dataclass(frozen=True)
class Comparison:
    """A difference of two mean accuracies on the same examples, its interval, and p of there being none."""

    difference: float
    low: float
    high: float
    p: float


def compare(ours: Outcomes, theirs: Outcomes, noise: "Noise | None") -> Comparison:
    """Paired bootstrap over examples, with the seeds' part added to each replicate.

    A replicate draws N examples, the same for both models. Two or three seeds are too few to be drawn from: their part
    is Student's t times the error of the two means, with the degrees of freedom of the spread pooled over all models,
    or a model's own spread if that is larger. Without noise (no model has two seeds) training is left out.
    """
    digest = sha256(ours.tobytes() + theirs.tobytes()).digest()  # so that the same outcomes give the same interval
    rng = np.random.default_rng(int.from_bytes(digest[:8]))
    N, seeds = ours.shape[1], len(ours) * len(theirs)
    differences = len(theirs) * ours.sum(0) - len(ours) * theirs.sum(0)
    # Examples with equal differences are alike: to draw N of them is to draw how many of each kind.
    kinds, counts = np.unique(differences, return_counts=True)
    replicates = rng.multinomial(N, counts / N, REPLICATES) @ kinds / (N * seeds)
    if noise:
        own = [each.mean(1).var(ddof=1) if len(each) > 1 else 0.0 for each in (ours, theirs)]
        error = sum(max(noise.variance, v) / len(each) for v, each in zip(own, (ours, theirs), strict=True)) ** 0.5
        replicates += error * rng.standard_t(noise.degrees, REPLICATES)
    low, high = np.quantile(replicates, [LEVEL / 2, 1 - LEVEL / 2])
    tail = min((replicates <= 0).sum(), (replicates >= 0).sum())
    p = min(1.0, 2 * (1 + tail) / (1 + REPLICATES))
    return Comparison(float(ours.mean() - theirs.mean()), float(low), float(high), float(p))


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values of several tests, corrected so that one false alarm among all has the level: Holm's step-down."""
    ranked = sorted(ps)
    stepped = accumulate((min(1.0, (len(ps) - rank) * p) for rank, p in enumerate(ranked)), max)
    corrected = dict(zip(ranked, stepped, strict=True))
    return [corrected[p] for p in ps]


@dataclass(frozen=True)
class Noise:
    """How much two runs of one and the same model differ by their seeds alone, as a root mean square."""

    floor: float  # the larger of `pooled` and `twins`
    pooled: float  # sqrt(2) times the seed spread, pooled over all models
    variance: float  # of that spread: of one run's accuracy
    degrees: int  # of freedom
    twins: float | None  # of exp at one seed minus trigh at another
    largest: float | None  # of these differences
    pairs: int


def noise(accuracies: Mapping[str, Mapping[int, float]]) -> Noise | None:
    """From model -> seed -> accuracy; None if no model has two seeds that differ: those that tie tell nothing."""
    first, second = (accuracies.get(name, {}) for name in TWINS)
    merged = {**accuracies, TWINS[0]: {**second, **first}, TWINS[1]: {}}  # equal seeds are equal runs: they count once
    of_models = [list(seeds.values()) for seeds in merged.values() if seeds]
    degrees, squares = sum(len(of) - 1 for of in of_models), sum(float(np.var(of)) * len(of) for of in of_models)
    if squares < 1e-12:  # zero, but for rounding
        return None
    variance = squares / degrees
    pooled = (2 * variance) ** 0.5
    apart = [abs(one - other) for (i, one), (j, other) in product(first.items(), second.items()) if i != j]
    twins = float(np.mean(np.square(apart)) ** 0.5) if apart else None
    return Noise(max(pooled, twins or 0.0), pooled, variance, degrees, twins, max(apart, default=None), len(apart))
