"""ListOps: the value, the official text, the generator's law, the same data for any number of workers."""

import gzip
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp, ttest_ind

from lra_data import listops
from lra_data.base import DataError
from tests.data.test_base import left


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("7", 7),
        ("[MIN 4 2 9 ]", 2),
        ("[MAX 4 2 [SM 5 6 7 ] ]", 8),
        ("[MED 1 2 3 8 ]", 2),  # int(2.5)
        ("[MED 9 1 5 ]", 5),
        ("[SM 9 9 9 ]", 7),
        ("( ( ( [MAX 1 ) ( ( ( [MIN 3 ) 2 ) ] ) ) ] )", 2),
    ],
)
def test_evaluate(source: str, value: int) -> None:
    assert listops.evaluate(source) == value


@pytest.mark.parametrize(
    ("source", "complaint"),
    [(source, "not one whole expression") for source in ("", "[MAX 1", "1 2", "[MAX 1 ] [MIN 2 ]")]
    + [(source, r"unexpected '\]'") for source in ("[MAX ]", "]", "] 1 2 [MAX", "[MAX 1 ] ]")]
    + [("[AVG 1 2 ]", r"unexpected '\[AVG'"), ("[MAX 1 12 ]", "unexpected '12'")],
)
def test_what_is_no_expression_is_refused(source: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        listops.evaluate(source)


@pytest.mark.parametrize(
    ("shortest", "longest", "depth", "shape"), [(500, 2000, 9, {}), (10, 30, 2, {"max_depth": 3, "max_args": 4})]
)
def test_generated_examples_are_distinct_official_and_right(
    shortest: int, longest: int, depth: int, shape: dict[str, int]
) -> None:
    examples = list(itertools.islice(listops.generate(5, shortest, longest, **shape), 300))
    assert len({source for source, _ in examples}) == 300
    for source, target in examples:
        assert listops.evaluate(source) == target
        tokens = source.split()
        plain = [token for token in tokens if token not in "()"]
        assert shortest < len(plain) < longest
        assert len(tokens) == 3 * len(plain) - 2
        assert set(plain) <= set(listops.TOKENS)
        assert deepest(source) <= depth  # max_depth counts the digits' level


def test_a_seed_is_a_data_set() -> None:
    first, same, other = (list(itertools.islice(listops.generate(seed), 20)) for seed in (1, 1, 2))
    assert first == same
    assert first != other


@pytest.mark.parametrize("closing", ["]", ""])
def test_the_packed_data_are_what_the_generator_gives(closing: str, tmp_path: Path) -> None:
    sizes = {"train": 1500, "dev": 5, "test": 5}  # more than two chunks
    task = listops.load(str(tmp_path), 64, 60, 10, bool(closing), sizes, seed=3)
    expected = itertools.islice(listops.generate(3, 10, 60), 1510)
    for split in task.splits.values():
        for i, (source, target) in zip(range(len(split)), expected, strict=False):
            kept = source.replace("(", "").replace(")", "").replace("]", closing).split()
            assert (task.decode(split.texts(i)[0]).split(), split.labels[i]) == (kept, target)


@pytest.mark.parametrize(
    ("lengths", "complaint"),
    [
        ((64, 100, 10, True), "length=64 is too short for the longest text, 99 tokens"),
        ((64, 100, 10, False), "length=64 is too short for the longest text, 90 tokens"),
        ((99, 100, 99, True), "only 0 distinct ListOps expressions .*: ask for fewer examples or widen min_length"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths: tuple, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=complaint):
        listops.load(str(tmp_path), *lengths, {"train": 20, "dev": 2, "test": 2}, seed=0)


def test_more_examples_than_there_are_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listops, "DRY_CHUNKS", 5)
    with pytest.raises(DataError, match="distinct ListOps expressions"):
        listops.load(str(tmp_path), 64, 5, 3, True, {"train": 10**6, "dev": 1, "test": 1}, seed=0)
    assert not left(tmp_path / "listops")


@pytest.mark.data
def test_the_official_examples_are_read_and_written_alike(shared_data: Path) -> None:
    for source, target in official(shared_data):
        assert listops.evaluate(source) == target
        (tokens,), label = listops._parse(b"", source.encode(), str(target).encode())
        assert (listops.to_source(tokens), label) == (source, target)


def exact_lengths() -> np.ndarray:
    """The probability of each kept length by LRA's rules, from the leaves up: a list is 2 + its 2 to 10 arguments."""

    def operator(child: np.ndarray) -> np.ndarray:
        total, sum_of = np.zeros(2000), child
        for _ in range(2, 11):
            # Zero-padded to 4096, the cyclic convolution is the plain one.
            sum_of = np.fft.irfft(np.fft.rfft(sum_of, 4096) * np.fft.rfft(child, 4096), 4096)[:2000]
            total[2:] += sum_of[:-2] / 9
        return total

    digit = np.zeros(2000)
    digit[1] = 1
    node = digit  # at the last level
    for _ in range(8):
        node = 0.25 * operator(node) + 0.75 * digit
    kept = operator(node) * (np.arange(2000) > 500)
    return kept / kept.sum()


def test_the_lengths_have_their_exact_law() -> None:
    """p < 2e-5 (Kolmogorov-Smirnov) that it fails by chance."""
    drawn = itertools.islice(listops._distinct(17, 500, 2000), 25_000)
    lengths = np.sort([len(tokens) for tokens, _ in drawn])
    exact = np.cumsum(exact_lengths())
    ours = np.searchsorted(lengths, np.arange(2000), "right") / len(lengths)
    assert np.abs(ours - exact).max() * np.sqrt(len(lengths)) < 2.4


@pytest.mark.data
def test_the_generator_has_the_official_law(shared_data: Path) -> None:
    """Means of length and label frequencies of 4,000 of ours and 2,000 official ones; |z| < 5 each, p < 4e-5 in all."""
    ours = list(itertools.islice(listops.generate(seed=11), 4000))
    theirs = official(shared_data)

    def z(*values: list[float]) -> float:
        return abs(ttest_ind(*values, equal_var=False).statistic)

    lengths = [[(len(source.split()) + 2) / 3 for source, _ in examples] for examples in (ours, theirs)]
    assert z(*lengths) < 5
    assert ks_2samp(*lengths).pvalue > 2e-5
    for examples in (ours, theirs):
        assert np.mean([deepest(source) == 9 for source, _ in examples]) > 0.98
    for label in range(10):
        assert z(*([float(target == label) for _, target in examples] for examples in (ours, theirs))) < 5
    counts = [[Counter(source.split()) for source, _ in examples[:1000]] for examples in (ours, theirs)]
    for token in listops.TOKENS:
        assert z(*([count[token] / count.total() for count in counted] for counted in counts)) < 5


def deepest(source: str) -> int:
    words = source.split()
    return max(itertools.accumulate((word in listops.TOKENS[:4]) - (word == "]") for word in words))


def official(folder: Path) -> list[tuple[str, int]]:
    with gzip.open(folder / "listops_reference.tsv.gz", "rt", newline="") as file:
        lines = file.read().split("\r\n")[1:-1]
    return [(source, int(target)) for source, target in (line.split("\t") for line in lines)]
