"""Packed splits, the cache, the order of the batches."""

import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lra_data import base
from lra_data.base import WINDOW, Batches, DataError, TaskSpec

SPEC = TaskSpec(vocabulary=512, length=6, classes=2, paired=False)
FORK = multiprocessing.get_context("fork")
Examples = dict[str, list[base.Example]] | Iterable[base.Example]
ALL: base.Caps = {"train": None, "dev": None, "test": None}


def cached(folder: Path, spec: TaskSpec, examples: Examples, origin: str = "", **keys: int) -> base.Task:
    """A task of these examples: of each split, or the same in all."""
    splits = examples if isinstance(examples, dict) else dict.fromkeys(base.SPLITS, examples)
    return base.cached(folder, "t", spec, keys, ALL, lambda: ("stand-in", splits), origin)


def packed(task: base.Task, split: base.SplitName) -> bytes:
    """The texts of the split, end to end."""
    data = task.splits[split]
    return b"".join(text.tobytes() for i in range(len(data)) for text in data.texts(i))


def left(folder: Path) -> list[Path]:
    """All that is there but empty lock files."""
    return [path for path in folder.rglob("*") if path.suffix != ".lock" or path.stat().st_size]


def in_processes(target: Callable[..., object], *arguments: tuple[object, ...]) -> None:
    """target(...) with each of the arguments, all at once, to the end and without an error."""
    processes = [FORK.Process(target=target, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert not any(process.exitcode for process in processes)


@settings(deadline=None)  # it writes files
@given(data=st.data(), paired=st.booleans(), trim=st.booleans())
def test_a_batch_is_the_texts_one_by_one(data: st.DataObject, paired: bool, trim: bool) -> None:
    """An id is the stored byte + 1, padding is 0; trimmed batches are as long as their longest, rounded up."""
    text = st.integers(1, 140).flatmap(lambda size: st.binary(min_size=size, max_size=size))
    examples = data.draw(st.lists(st.tuples(text, text) if paired else st.tuples(text), min_size=1, max_size=8))
    spec = TaskSpec(vocabulary=512, length=150, classes=2, paired=paired)
    with tempfile.TemporaryDirectory() as folder:
        train = cached(Path(folder), spec, [(texts, i % 2) for i, texts in enumerate(examples)]).splits["train"]
        indices = np.array(data.draw(st.lists(st.integers(0, len(examples) - 1), min_size=1, max_size=9)))
        ids, labels = train.batch(indices, trim)
        lengths = [max(map(len, texts)) for texts in examples]
        assert train.lengths.tolist() == lengths
        longest = max(lengths[i] for i in indices)
        length = next(length for length in (64, 128, 150) if longest <= length) if trim else 150
        rows = [[byte + 1 for byte in text] + [0] * (length - len(text)) for i in indices for text in examples[i]]
        assert ids.tolist() == (np.reshape(rows, (-1, 2, length)).tolist() if paired else rows)
        assert labels.tolist() == [i % 2 for i in indices]
        assert [text.tobytes() for text in train.texts(int(indices[0]))] == list(examples[indices[0]])


def test_the_cache_is_used_and_other_settings_are_another_cache(tmp_path: Path) -> None:
    first = cached(tmp_path, SPEC, [((b"a",), 1)], size=1)
    (lock,) = tmp_path.rglob("*.lock")
    lock.unlink()
    assert cached(tmp_path, SPEC, [((b"other",), 1)], size=1).fingerprint == first.fingerprint
    assert not list(tmp_path.rglob("*.lock"))  # what is there needs none: its folder may be read-only
    assert cached(tmp_path, SPEC, [((b"other",), 1)], size=2).fingerprint != first.fingerprint
    assert not [path for path in left(tmp_path) if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (DataError("the file ends early"), "the file ends early"),
        (OSError(28, "Full"), r"cannot be written .*Full.*: make room, or choose another paths.data"),
        (None, "train split has no examples"),
    ],
)
def test_a_build_that_fails_leaves_nothing(error: Exception | None, complaint: str, tmp_path: Path) -> None:
    def examples() -> Iterator[base.Example]:
        if error:
            yield (b"a",), 1
            raise error

    with pytest.raises(DataError, match=complaint):
        cached(tmp_path, SPEC, examples())
    assert left(tmp_path) == [tmp_path / "t"]


def slowly(folder: Path, letter: bytes) -> None:
    """Make data that consist of one letter, in half a second, and leave a note of having done so."""

    def build() -> tuple[base.Source, dict]:
        def examples() -> Iterator[base.Example]:
            for _ in range(50):
                time.sleep(0.01)
                yield (letter,), 1

        (folder / f"built-{letter.decode()}").touch()
        return "stand-in", {split: examples() for split in base.SPLITS}

    task = base.cached(folder, "t", SPEC, {}, ALL, build)
    assert len(set(packed(task, "train"))) == 1


def test_of_several_processes_that_want_the_same_data_one_builds(tmp_path: Path) -> None:
    in_processes(slowly, (tmp_path, b"a"), (tmp_path, b"b"), (tmp_path, b"c"))
    (built,) = tmp_path.glob("built-*")
    assert packed(cached(tmp_path, SPEC, []), "test") == 50 * built.name[-1].encode()
    assert len([path for path in left(tmp_path / "t") if path.is_dir()]) == 1


def test_a_killed_build_leaves_no_data_and_no_closed_lock(tmp_path: Path) -> None:
    process = FORK.Process(target=slowly, args=(tmp_path, b"a"))
    process.start()
    while not (tmp_path / "built-a").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    process.kill()
    process.join(60)
    assert not list(tmp_path.rglob("manifest.json"))
    task = cached(tmp_path, SPEC, [((b"b",), 0)])
    assert packed(task, "train") == b"b"
    assert [path for path in left(tmp_path / "t") if path.is_dir()] == [task.home]  # what it left is gone


def test_data_of_another_version_are_made_anew_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached(tmp_path, SPEC, [((b"old",), 1)])
    monkeypatch.setattr(base, "DATA_VERSION", base.DATA_VERSION + 1)
    assert packed(cached(tmp_path, SPEC, [((b"new",), 1)]), "train") == b"new"
    said = capsys.readouterr().out
    assert f"is of data version {base.DATA_VERSION - 1}, this is {base.DATA_VERSION}: it is made anew" in said
    assert len(list(tmp_path.rglob("manifest.json"))) == 1


def switching(folder: Path, origin: str) -> None:
    """Want data of one's own again and again, while another process wants others under the same settings."""
    for _ in range(60):
        task = cached(folder, SPEC, [((origin.encode() * 5,), 1)] * 3, origin)
        assert packed(task, "test") == origin.encode() * 15
        assert task.manifest.origin == origin


def test_runs_that_want_other_data_in_the_same_place_each_get_theirs(tmp_path: Path) -> None:
    in_processes(switching, (tmp_path, "a"), (tmp_path, "b"))


def test_the_manifest_says_what_the_data_are(tmp_path: Path) -> None:
    examples = [((b"a" * (1 + i % 6),), int(i % 4 == 0)) for i in range(60)]
    task = cached(tmp_path, SPEC, {"train": examples, "dev": examples, "test": examples[:10]})
    manifest = json.loads((task.home / "manifest.json").read_text())
    assert manifest == task.manifest.model_dump()
    assert (manifest["data_version"], manifest["source"]) == (base.DATA_VERSION, "stand-in")
    told = manifest["splits"]["dev"]
    assert (told["examples"], told["labels"]) == (60, [45, 15])
    assert told["lengths"] == {"mean": 3.5, "min": 1, "p10": 1, "median": 3, "p90": 6, "max": 6}
    assert len(told["sha256"]) == len(task.fingerprint) == 64
    assert task.majority == 0.7  # of the test split


@given(examples=st.integers(1, 30), batch_size=st.integers(1, 70), seed=st.integers(0, 5), start=st.integers(0, 9))
def test_batches_go_through_every_epoch_once(examples: int, batch_size: int, seed: int, start: int) -> None:
    """And follow from the step alone."""
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


def test_epochs_and_windows_are_shuffled_by_the_seed() -> None:
    """Else short texts would come before long ones all the time."""
    one, other = (Batches(100, 100, seed) for seed in (0, 1))
    assert one.indices(0).tolist() != other.indices(0).tolist()
    assert one.indices(0).tolist() != one.indices(1).tolist()
    lengths = np.random.default_rng(0).integers(1, 10**6, 4 * WINDOW)
    one, other = (Batches(4 * WINDOW, 4, seed, lengths) for seed in (0, 1))
    orders = [np.argsort([lengths[each.indices(step)].mean() for step in range(WINDOW)]) for each in (one, other)]
    assert (orders[0] != orders[1]).any()
    assert all((order != np.arange(WINDOW)).any() for order in orders)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tokens": ("the sha256 of train is", lambda home: (home / "train.tokens.bin").write_bytes(b"abd" + bytes(2**16))),
    "labels": ("the sha256 of dev is", lambda home: np.save(home / "dev.labels.npy", np.array([0], np.uint8))),
    "offsets": ("the sha256 of test is", lambda home: (home / "test.offsets.npy").write_bytes(b"")),
    "pickle": ("the sha256 of test", lambda home: np.save(home / "test.labels.npy", np.array([{}]), allow_pickle=True)),
    "file": ("No such file", lambda home: (home / "test.tokens.bin").unlink()),
    "json": ("validation error.* for Manifest", lambda home: (home / "manifest.json").write_text("{")),
    "list": ("validation error.* for Manifest", lambda home: (home / "manifest.json").write_text("[]")),
    "splits": (
        "splits.dev Field required",
        lambda home: (home / "manifest.json").write_text('{"splits": {"train": 1}}'),
    ),
}


@pytest.mark.parametrize(("complaint", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_data_are_named(complaint: str, damage: Callable[[Path], object], tmp_path: Path) -> None:
    home = cached(tmp_path, SPEC, [((b"abc",), 1)]).home
    damage(home)
    with pytest.raises(DataError, match=rf"{home} are damaged \(.*{complaint}.*\): delete that folder"):
        cached(tmp_path, SPEC, [])


def test_a_text_longer_than_the_padded_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task.data.length=6 is too short for the longest text, 7 tokens"):
        cached(tmp_path, SPEC, [((b"abcdefg",), 1)])
    with pytest.raises(DataError, match=r"task.data.length=65537 is too long: at most 65536"):
        cached(tmp_path, TaskSpec(512, 65537, 2, False), [((b"a",), 1)], size=2)
