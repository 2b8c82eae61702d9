"""Intervals, the paired bootstrap, Holm's correction and the noise floor: against scipy, and by their error rates."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from macformer.report import statistics

Outcomes = NDArray[np.bool_]


def runs(rng: np.random.Generator, seeds: int, examples: int = 2000, spread: float = 0, shift: float = 0) -> Outcomes:
    """Outcomes of `seeds` runs on examples of different difficulty, the seeds' accuracies `spread` apart."""
    chances = np.random.default_rng(7).beta(0.6, 1.0, examples) + shift + rng.normal(0, spread, (seeds, 1))
    return rng.random((seeds, examples)) < chances


def test_the_interval_is_wilsons_of_one_seed_and_else_students() -> None:
    """Of equal runs, that of the examples; of seeds that differ a lot, with many examples, that of the seeds."""
    once, apart = runs(np.random.default_rng(0), 1), runs(np.random.default_rng(1), 4, 200_000, spread=0.03)
    wilson = stats.binomtest(int(once.sum()), once.size).proportion_ci(method="wilson")
    assert statistics.interval(once) == pytest.approx((wilson.low, wilson.high))
    of_examples = stats.t.interval(0.95, once.size - 1, once.mean(), stats.sem(once[0]))
    assert statistics.interval(np.repeat(once, 3, axis=0)) == pytest.approx(of_examples)
    of_seeds = stats.t.interval(0.95, 3, apart.mean(), stats.sem(apart.mean(1)))
    assert statistics.interval(apart) == pytest.approx(of_seeds, rel=2e-3)


@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("N", [7, 21, 50, 1000, 2000, 12500])
@pytest.mark.parametrize("S", [1, 3])
def test_all_right_or_all_wrong_is_not_certain_and_inside(S: int, N: int, outcome: bool) -> None:
    """At some of these N rounding left the accuracy outside of the interval, or the interval outside of 0 to 1."""
    low, high = statistics.interval(np.full((S, N), outcome))
    assert 0 <= low <= outcome <= high <= 1
    assert high - low > 3 / (N + 4)


def test_opposite_constant_answers_are_not_certain() -> None:
    """Half of two classes right with either seed, and every example with one of them: nothing varies."""
    answers = np.arange(100) % 2 == 0
    expected = statistics.interval(answers[None])
    assert expected[1] - expected[0] > 0.15
    assert statistics.interval(np.stack([answers, ~answers])) == pytest.approx(expected)


@pytest.mark.parametrize(("seeds", "spread"), [(1, 0.0), (3, 0.008), (5, 0.02)])
def test_the_interval_holds_the_truth_as_often_as_it_says(seeds: int, spread: float) -> None:
    """Of 400 intervals so many may miss it that more have probability 1e-4 if the chance is 0.05."""
    rng = np.random.default_rng(seeds)
    chances = rng.beta(0.6, 1.0, (400, 2000))  # other examples each time
    missed = 0
    for each in chances:
        outcomes = rng.random((seeds, 2000)) < each + rng.normal(0, spread, (seeds, 1))
        low, high = statistics.interval(outcomes)
        missed += not low <= 0.6 / 1.6 <= high
    assert missed <= stats.binom.ppf(1 - 1e-4, 400, 0.05)


def test_the_bootstrap_over_examples_is_scipys() -> None:
    rng = np.random.default_rng(3)
    ours, theirs = runs(rng, 1, shift=0.01), runs(rng, 1)
    found = statistics.compare(ours, theirs, None)
    difference = ours[0].astype(float) - theirs[0]  # of each example
    options: dict[str, Any] = {"vectorized": True, "method": "percentile", "n_resamples": 9999}
    low, high = stats.bootstrap([difference], np.mean, **options, rng=np.random.default_rng(0)).confidence_interval
    assert found.difference == pytest.approx(difference.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02 * (high - low))
    assert found.p == pytest.approx(stats.ttest_1samp(difference, 0).pvalue, rel=0.15)


def pooled(*models: Outcomes) -> statistics.Noise | None:
    return statistics.noise({str(i): dict(enumerate(model.mean(1).tolist())) for i, model in enumerate(models)})


def test_the_seeds_part_is_students_for_two_means() -> None:
    """So many examples that the seeds alone matter; their differences are of 145 kinds."""
    rng = np.random.default_rng(4)
    ours, theirs = runs(rng, 9, 200_000, spread=0.03), runs(rng, 8, 200_000, spread=0.03)
    found = statistics.compare(ours, theirs, pooled(ours, theirs))
    expected = stats.ttest_ind(ours.mean(1), theirs.mean(1))
    low, high = expected.confidence_interval()
    # A model's own spread counts if it is larger than the pooled one, so that ours is a little wider.
    assert (high - low) < (found.high - found.low) < 1.1 * (high - low)
    assert expected.pvalue < found.p + 0.01 < expected.pvalue + 0.06


def test_a_spread_of_other_models_counts_for_one_with_a_single_seed() -> None:
    rng = np.random.default_rng(9)
    ours, theirs, other = runs(rng, 1), runs(rng, 1), runs(rng, 4, spread=0.05)
    alone, together = (statistics.compare(ours, theirs, pooled(*each)) for each in ((ours, theirs), (theirs, other)))
    assert together.high - together.low > 2 * (alone.high - alone.low)


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.02), (3, 0.008), (3, 0.02)])
def test_equal_models_rarely_differ(seeds: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of seven equal models, two of whose seeds vary less or more than the test set does.

    Of 100 of them so many may have a p below 0.05 after Holm's correction that more have probability 1e-4 at 0.05.
    """
    monkeypatch.setattr(statistics, "REPLICATES", 999)
    rng, false = np.random.default_rng(seeds), 0
    for _ in range(100):
        models = [runs(rng, seeds, spread=spread) for _ in range(7)]
        noise = pooled(*models)
        false += min(statistics.holm([statistics.compare(m, models[0], noise).p for m in models[1:]])) < 0.05
    assert false <= stats.binom.ppf(1 - 1e-4, 100, 0.05)


def test_holm() -> None:
    """Holm's own recipe by hand: sorted 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1, never falling."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_the_noise_floor_by_hand() -> None:
    """It is the twins' difference or, if that is smaller or not known, the difference of two runs of any model."""
    rfa, exp = {0: 0.30, 1: 0.34}, {0: 0.40, 2: 0.46}
    noise = statistics.noise({"rfa": rfa, "macformer_exp": exp, "macformer_trigh": {0: 0.40, 1: 0.44}})
    assert noise
    assert (noise.degrees, noise.pairs) == (3, 3)  # the twins' equal runs at 0 count once
    assert noise.variance == pytest.approx((2 * 0.02**2 + 3 * np.var([0.40, 0.44, 0.46])) / 3)
    apart = (0.04, 0.06, 0.02)  # 0 and 1, 2 and 0, 2 and 1
    assert (noise.twins, noise.largest) == pytest.approx((np.mean(np.square(apart)) ** 0.5, 0.06))
    assert noise.pooled == pytest.approx((2 * noise.variance) ** 0.5)
    assert noise.floor == max(noise.pooled, noise.twins)
    alone = statistics.noise({"rfa": rfa})
    assert alone
    assert (alone.floor, alone.twins) == (pytest.approx(0.04), None)
    assert statistics.noise({"rfa": {0: 0.3}, "macformer_exp": {0: 0.4}, "macformer_trigh": {0: 0.4}}) is None
    assert statistics.noise({}) is None
