"""Packed splits, the cache, the order of the batches."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lra_data import base
from lra_data.base import WINDOW, Batches, DataError, TaskSpec

SPEC = TaskSpec(vocabulary=512, length=6, classes=2, paired=False)
PAIRS = TaskSpec(vocabulary=512, length=6, classes=2, paired=True)


def cached(folder: Path, spec: TaskSpec, examples: list[base.Example], **settings: object) -> base.Task:
    return base.cached(folder, "t", spec, settings, lambda: ("stand-in", dict.fromkeys(base.SPLITS, examples)))


def test_ids_are_the_stored_bytes_plus_one_and_zero_is_padding(tmp_path: Path) -> None:
    task = cached(tmp_path, SPEC, [((b"\x00\xff",), 1), ((b"abcdef",), 0)])
    ids, labels = task.splits["dev"].batch(np.array([1, 0]), trim=False)
    assert ids.tolist() == [[98, 99, 100, 101, 102, 103], [1, 256, 0, 0, 0, 0]]
    assert labels.tolist() == [0, 1]


def test_a_pair_is_two_rows(tmp_path: Path) -> None:
    task = cached(tmp_path, PAIRS, [((b"a", b"bc"), 1), ((b"d", b"e"), 0)])
    ids, labels = task.splits["test"].batch(np.array([1, 0]), trim=False)
    assert ids.shape == (2, 2, 6)
    assert ids[:, :, :2].tolist() == [[[101, 0], [102, 0]], [[98, 0], [99, 100]]]
    assert labels.tolist() == [0, 1]


def test_the_cache_is_used_and_other_settings_are_another_cache(tmp_path: Path) -> None:
    first = cached(tmp_path, SPEC, [((b"a",), 1)], size=1)
    again = cached(tmp_path, SPEC, [((b"other",), 1)], size=1)
    assert again.fingerprint == first.fingerprint
    other = cached(tmp_path, SPEC, [((b"other",), 1)], size=2)
    assert other.fingerprint != first.fingerprint
    assert not list(tmp_path.glob("t/.*"))


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build() -> tuple[base.Source, dict]:
        def examples():
            yield (b"a",), 1
            raise DataError("the file ends early")

        return "lra", dict.fromkeys(base.SPLITS, examples())

    with pytest.raises(DataError, match="ends early"):
        base.cached(tmp_path, "t", SPEC, {}, build)
    assert not list((tmp_path / "t").iterdir())


def test_the_first_of_two_that_build_at_once_wins(tmp_path: Path) -> None:
    """While one build is under way, another finishes."""

    def build() -> tuple[base.Source, dict]:
        cached(tmp_path, SPEC, [((b"first",), 1)], size=1)
        return "stand-in", {split: [((b"second",), 1)] for split in base.SPLITS}

    task = base.cached(tmp_path, "t", SPEC, {"size": 1}, build)
    assert bytes(task.splits["train"].tokens) == b"first"
    assert len(list((tmp_path / "t").iterdir())) == 1


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train split has no examples"):
        cached(tmp_path, SPEC, [])


def test_majority_is_the_best_constant_answer(tmp_path: Path) -> None:
    splits = {"train": [((b"a",), 1)] * 3, "dev": [((b"a",), 0)], "test": [((b"a",), 0)] * 3 + [((b"a",), 1)]}
    task = base.cached(tmp_path, "t", SPEC, {}, lambda: ("stand-in", splits))
    assert task.majority == 0.75


@given(examples=st.integers(1, 30), batch_size=st.integers(1, 70), seed=st.integers(0, 5), start=st.integers(0, 9))
def test_batches_go_through_every_epoch_once_and_follow_from_the_step_alone(
    examples: int, batch_size: int, seed: int, start: int
) -> None:
    batches = Batches(examples, batch_size, seed)
    stream = np.concatenate([batches.indices(step) for step in range(start + 5)])
    for epoch in range(len(stream) // examples):
        assert sorted(stream[epoch * examples : (epoch + 1) * examples]) == list(range(examples))
    fresh = Batches(examples, batch_size, seed).indices(start)
    assert fresh.tolist() == stream[start * batch_size : (start + 1) * batch_size].tolist()


@given(batch_size=st.integers(1, 9), start=st.integers(0, 70))
def test_buckets_hold_texts_of_like_length_and_follow_from_the_step_alone(batch_size: int, start: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 50)
    plain, sorted_ = Batches(50, batch_size, 0), Batches(50, batch_size, 0, lengths)
    window = start // WINDOW * WINDOW
    steps = range(window, window + WINDOW)
    batches = [sorted_.indices(step) for step in steps]
    assert sorted(np.concatenate(batches)) == sorted(np.concatenate([plain.indices(step) for step in steps]))
    spans = sorted((lengths[batch].min(), lengths[batch].max()) for batch in batches)
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(spans))
    assert sorted_.indices(start).tolist() == Batches(50, batch_size, 0, lengths).indices(start).tolist()


def test_trimmed_batches_are_as_long_as_their_longest_rounded_up(tmp_path: Path) -> None:
    spec = TaskSpec(512, 150, 2, paired=True)
    task = cached(tmp_path, spec, [((b"a" * 3, b"b" * 65), 1), ((b"c" * 64, b"d"), 0), ((b"e" * 140, b"f"), 0)])
    train = task.splits["train"]
    assert train.lengths.tolist() == [65, 64, 140]
    for index, length in ((0, 128), (1, 64), (2, 150)):
        ids, _ = train.batch(np.array([index]), trim=True)
        assert ids.shape == (1, 2, length)
        assert np.array_equal(ids, train.batch(np.array([index]), trim=False)[0][:, :, :length])


def test_damaged_data_are_named(tmp_path: Path) -> None:
    cached(tmp_path, SPEC, [((b"abc",), 1)])
    (tokens,) = tmp_path.rglob("train.tokens.bin")
    for damage in (lambda: tokens.write_bytes(b"ab"), tokens.unlink):
        damage()
        with pytest.raises(DataError, match=f"{tokens.parent} are damaged: delete that folder"):
            cached(tmp_path, SPEC, [])
    (tokens.parent / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="are damaged"):
        cached(tmp_path, SPEC, [])


def test_a_text_longer_than_the_padded_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task.data.length=6 is too short for the longest text, 7 tokens"):
        cached(tmp_path, SPEC, [((b"abcdefg",), 1)])


def test_seeds_and_epochs_are_shuffled_differently() -> None:
    one, other = (Batches(100, 100, seed) for seed in (0, 1))
    assert one.indices(0).tolist() != other.indices(0).tolist()
    assert one.indices(0).tolist() != one.indices(1).tolist()
