"""What was found of one claim, and the intervals that verdicts rest on. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from scipy import special  # not scipy.stats, which takes a second to import

Verdict = Literal[
    "reproduced", "reproduced with a correction", "not reproduced", "inconclusive", "cannot be checked here"
]
MEANING: dict[Verdict, str] = {
    "reproduced": "what was measured is what the paper says",
    "reproduced with a correction": "not as it is printed; what the row says instead was measured to hold",
    "not reproduced": "what was measured contradicts it",
    "inconclusive": "the intervals allow both",
    "cannot be checked here": "what it takes is not there; the row says what",
}
LEVEL = 0.001  # of all intervals of one finding together: so often they miss a true value


@dataclass(frozen=True)
class Finding:
    """One row of results/claims.md. Its sentences are made of `figures`, which stand in the JSON."""

    id: str
    where: str  # in the paper
    claim: str  # in our words
    measured: str
    verdict: Verdict
    command: str
    figures: dict[str, Any] = field(default_factory=dict)
    clock: bool = False  # it rests on times, and can turn out otherwise another day

    def plain(self) -> dict[str, Any]:
        return _rounded(asdict(self))


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"

    def within(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high


def student(samples: Sequence[float], comparisons: int = 1) -> Interval:
    """Of the mean of independent samples: with Student's t, at LEVEL over all comparisons (Bonferroni)."""
    each = np.asarray(samples, float)
    half = special.stdtrit(len(each) - 1, 1 - LEVEL / comparisons / 2) * each.std(ddof=1) / len(each) ** 0.5
    return Interval(float(each.mean()), float(each.mean() - half), float(each.mean() + half))


def binomial(hits: int, trials: int, comparisons: int = 1) -> Interval:
    """Of a probability: Clopper and Pearson's."""
    tail = LEVEL / comparisons / 2
    low = special.betaincinv(hits, trials - hits + 1, tail) if hits else 0.0
    high = special.betaincinv(hits + 1, trials - hits, 1 - tail) if hits < trials else 1.0
    return Interval(hits / trials, float(low), float(high))


def slopes(x: Sequence[float], y: Sequence[Sequence[float]]) -> list[float]:
    """The exponent of y as a power of x, by least squares in the logarithms, for each row of y: a round."""
    at = np.log(np.asarray(x, float))
    at -= at.mean()
    return (np.log(np.asarray(y, float)) @ at / (at @ at)).tolist()


def is_nothing(interval: Interval, margin: float) -> Verdict:
    """Is it zero? Yes if the interval has zero and does not leave the margin; no if zero is not in it.

    A millionth of the margin is rounding.
    """
    if interval.within(-1e-6 * margin, 1e-6 * margin):
        return "reproduced"
    if not interval.low <= 0 <= interval.high:
        return "not reproduced"
    return "reproduced" if interval.within(-margin, margin) else "inconclusive"


def at_most(interval: Interval, bound: float) -> Verdict:
    if interval.high <= bound:
        return "reproduced"
    return "not reproduced" if interval.low > bound else "inconclusive"


def all_of(
    intervals: Sequence[Interval], holds: Callable[[Interval], bool], fails: Callable[[Interval], bool]
) -> Verdict:
    """Of a claim about every one of them."""
    if any(map(fails, intervals)):
        return "not reproduced"
    return "reproduced" if all(map(holds, intervals)) else "inconclusive"


def falls(interval: Interval) -> bool:
    return interval.high < 0


def rises(interval: Interval) -> bool:
    return interval.low > 0


def turned(interval: Interval) -> Interval:
    """A loss for a gain."""
    return Interval(-interval.value, -interval.high, -interval.low)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim that is made of all these."""
    order: list[Verdict] = ["not reproduced", "inconclusive", "cannot be checked here", "reproduced with a correction"]
    return next((verdict for verdict in order if verdict in verdicts), "reproduced")


def _rounded(value: Any) -> Any:
    """Six digits: more are not known, and of the last ones every machine has its own."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
