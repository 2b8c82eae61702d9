"""What was found of one claim, and the intervals that verdicts rest on. No torch."""

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special  # not scipy.stats, which takes a second to import

Array = NDArray[np.float64]
Verdict = Literal[  # the worst first
    "not reproduced", "inconclusive", "cannot be checked here", "reproduced with a correction", "reproduced"
]
UNCHECKED: Verdict = "cannot be checked here"
Finding = dict[str, Any]  # one row of results/claims.md, as results/claims.json has it; words.toml explains its texts
TEXTS = ("id", "where", "claim", "measured", "verdict", "command")
LEVEL = 0.001  # how often any interval of one finding may miss its true value
CONFIDENCE = f"{100 * (1 - LEVEL):g}%"
WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text())
MEANING: dict[Verdict, str] = WORDS["verdicts"]


def found(claim: str, verdict: Verdict, figures: dict[str, Any], /, **words: Any) -> Finding:
    """Fill in the texts of this claim in words.toml with `figures`, which the JSON holds as well, and `words`."""
    group = claim.split()[0]
    own = {"command": f"python -m scripts.claims {group}", "clock": False} | WORDS.get(group, {}) | WORDS[claim]
    own |= {"id": claim, "verdict": verdict, "measured": own["lacks" if verdict == UNCHECKED else "measured"]}
    texts = {key: own[key].format_map(figures | words) for key in TEXTS}
    return texts | {"figures": figures, "clock": own["clock"]}


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Format each number so. A + in the format is for the value alone; a % at its end turns all into percent."""
        bounds, unit = spec.lstrip("+").removesuffix("%"), "%" * spec.endswith("%")
        value, low, high = (100 * x if unit else x for x in self)
        return f"{value:{spec.removesuffix('%')}}{unit} ({low:{bounds}} to {high:{bounds}}{unit})"

    def figures(self, name: str) -> dict[str, float]:
        return {name: self.value, "low": self.low, "high": self.high}


def student(samples: ArrayLike, comparisons: int = 1) -> Interval:
    """The interval of the mean of independent samples by Student's t. All comparisons share LEVEL (Bonferroni)."""
    each = np.asarray(samples, float)
    half = special.stdtrit(len(each) - 1, 1 - LEVEL / comparisons / 2) * each.std(ddof=1) / len(each) ** 0.5
    return Interval(float(each.mean()), float(each.mean() - half), float(each.mean() + half))


def students(samples: Mapping[Any, ArrayLike]) -> dict[Any, Interval]:
    """The intervals of several means, which hold together."""
    return {key: student(each, len(samples)) for key, each in samples.items()}


def binomial(hits: int, trials: int, comparisons: int = 1) -> Interval:
    """The interval of a probability by Clopper and Pearson."""
    tail = LEVEL / comparisons / 2
    low = special.betaincinv(hits, trials - hits + 1, tail) if hits else 0.0
    high = special.betaincinv(hits + 1, trials - hits, 1 - tail) if hits < trials else 1.0
    return Interval(hits / trials, float(low), float(high))


def slopes(x: ArrayLike, y: ArrayLike) -> Array:
    """The exponent of each row of y as a power of x, by least squares in the logarithms: (..., x) -> (...)."""
    at = np.log(x) - np.mean(np.log(x))
    return np.log(y) @ at / (at @ at)


def judge(holds: bool, corrected: bool = False) -> Verdict:
    """The verdict where no interval is needed. `corrected`: something else than what is printed holds."""
    return "reproduced" if holds else "reproduced with a correction" if corrected else "not reproduced"


def all_between(intervals: Collection[Interval], low: float = -math.inf, high: float = math.inf) -> Verdict:
    """Judge the claim that each of the true values is between `low` and `high`."""
    if any(i.high < low or i.low > high for i in intervals):
        return "not reproduced"
    return "reproduced" if all(low < i.low and i.high < high for i in intervals) else "inconclusive"


def is_zero(interval: Interval, margin: float) -> Verdict:
    """Judge the claim that the true value is zero: an interval with zero in it must also stay within the margin."""
    if all(abs(x) <= 1e-6 * margin for x in interval):  # rounding
        return "reproduced"
    if not interval.low <= 0 <= interval.high:
        return "not reproduced"
    return "reproduced" if -margin <= interval.low and interval.high <= margin else "inconclusive"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a claim that is made of all these."""
    return min(verdicts, key=get_args(Verdict).index)


def rounded(value: Any) -> Any:
    """Round all numbers to six digits. More are not known, and the last ones differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value
