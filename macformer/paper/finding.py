"""What was found of one claim, and the intervals that verdicts rest on. No torch."""

import math
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
LEVEL = 0.001  # how often any interval of one finding may miss its true value
CONFIDENCE = f"{100 * (1 - LEVEL):g}%"


WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text())


@dataclass(frozen=True)
class Finding:
    """One row of results/claims.md; words.toml explains its texts."""

    id: str
    where: str
    claim: str
    measured: str
    verdict: Verdict
    command: str
    figures: dict[str, Any]
    clock: bool

    def plain(self) -> dict[str, Any]:
        return rounded(asdict(self))


UNCHECKED: Verdict = "cannot be checked here"


def found(claim: str, verdict: Verdict, figures: dict[str, Any], words: dict[str, Any] | None = None) -> Finding:
    """Fill in the texts of that claim in words.toml with figures, which go into the JSON as well, and words."""
    group, values = claim.split()[0], figures | (words or {})
    own = {"command": f"python -m scripts.claims {group}", "clock": False} | WORDS.get(group, {}) | WORDS[claim]
    texts = (claim, own["where"], own["claim"], own["lacks" if verdict == UNCHECKED else "measured"], own["command"])
    id, where, says, measured, command = (text.format_map(values) for text in texts)
    return Finding(id, where, says, measured, verdict, command, figures, own["clock"])


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Format each number so. A + in the format is for the value alone; a % at its end turns all into percent."""
        bounds, unit = spec.lstrip("+").removesuffix("%"), "%" * spec.endswith("%")
        value, low, high = (100 * x if unit else x for x in self)
        return f"{value:{spec.removesuffix('%')}}{unit} ({low:{bounds}} to {high:{bounds}}{unit})"


def student(samples: Sequence[float], comparisons: int = 1) -> Interval:
    """The interval of the mean of independent samples by Student's t. All comparisons share LEVEL (Bonferroni)."""
    each = np.asarray(samples, float)
    half = special.stdtrit(len(each) - 1, 1 - LEVEL / comparisons / 2) * each.std(ddof=1) / len(each) ** 0.5
    return Interval(float(each.mean()), float(each.mean() - half), float(each.mean() + half))


def binomial(hits: int, trials: int, comparisons: int = 1) -> Interval:
    """The interval of a probability by Clopper and Pearson."""
    tail = LEVEL / comparisons / 2
    low = special.betaincinv(hits, trials - hits + 1, tail) if hits else 0.0
    high = special.betaincinv(hits + 1, trials - hits, 1 - tail) if hits < trials else 1.0
    return Interval(hits / trials, float(low), float(high))


def over_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The median, lowest and highest of the ratios within each round."""
    ratios = np.divide(ours, theirs)
    return Interval(float(np.median(ratios)), float(ratios.min()), float(ratios.max()))


def slopes(x: Sequence[float], y: Sequence[Sequence[float]]) -> list[float]:
    """For each row of y (a round) its exponent as a power of x, by least squares in the logarithms."""
    at = np.log(np.asarray(x, float))
    at -= at.mean()
    return (np.log(np.asarray(y, float)) @ at / (at @ at)).tolist()


def judge(holds: bool, corrected: bool = False) -> Verdict:
    """The verdict where no interval is needed. `corrected`: something else than what is printed holds."""
    if not (holds or corrected):
        return "not reproduced"
    return "reproduced" if holds else "reproduced with a correction"


def all_between(intervals: Iterable[Interval], low: float = -math.inf, high: float = math.inf) -> Verdict:
    """Judge the claim that each of the true values is between `low` and `high`."""
    each = list(intervals)
    if any(i.high < low or i.low > high for i in each):
        return "not reproduced"
    return "reproduced" if all(low < i.low and i.high < high for i in each) else "inconclusive"


def is_zero(interval: Interval, margin: float) -> Verdict:
    """Judge the claim that the true value is zero. An interval with zero in it must also stay within the margin.

    A millionth of the margin counts as rounding.
    """
    if all(abs(x) <= 1e-6 * margin for x in interval):
        return "reproduced"
    if not interval.low <= 0 <= interval.high:
        return "not reproduced"
    return "reproduced" if -margin <= interval.low and interval.high <= margin else "inconclusive"


def worst(verdicts: Collection[Verdict]) -> Verdict:
    """The verdict of a claim that is made of all these."""
    order: list[Verdict] = ["not reproduced", "inconclusive", "cannot be checked here", "reproduced with a correction"]
    return next((verdict for verdict in order if verdict in verdicts), "reproduced")


def rounded(value: Any) -> Any:
    """Round all numbers to six digits. More are not known, and the last ones differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value
