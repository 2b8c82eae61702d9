"""Text and Retrieval from their files: what is read, and what is refused."""

import gzip
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lra_data import retrieval, text
from lra_data.base import DataError, Task
from tests.conftest import ROOT, write_archive, write_pairs

ALL = {"train": None, "dev": None, "test": None}


def words(task: Task, split: str, index: int) -> list[bytes]:
    ids, _ = task.splits[split].batch(np.array([index]), trim=False)
    return [bytes((row[row > 0] - 1).astype(np.uint8)) for row in ids.reshape(-1, task.spec.length)]


def test_text_is_read_negative_and_positive_in_turn(sources: Path) -> None:
    task = text.load(str(sources), 64, 60, "test", ALL, 0)
    assert {name: len(split) for name, split in task.splits.items()} == {"train": 40, "dev": 40, "test": 40}
    assert task.splits["train"].labels.tolist() == [0, 1] * 20
    assert words(task, "train", 0)[0].startswith(b"train 0: a dull film")
    assert words(task, "test", 3)[0].startswith(b"test 1: a fine film")
    assert max(len(words(task, "test", i)[0]) for i in range(40)) == 60
    assert task.source == "stand-in"


def test_text_holds_out_a_balanced_tenth_of_train(sources: Path) -> None:
    task = text.load(str(sources), 64, 60, "held-out", ALL, 0)
    assert {name: len(split) for name, split in task.splits.items()} == {"train": 36, "dev": 4, "test": 40}
    assert sorted(task.splits["dev"].labels) == [0, 0, 1, 1]
    dev, train = ({words(task, name, i)[0] for i in range(len(task.splits[name]))} for name in ("dev", "train"))
    assert not dev & train
    assert all(review.startswith(b"train") for review in dev)


def test_retrieval_is_pairs(sources: Path) -> None:
    task = retrieval.load(str(sources), 64, 60, {"train": 6, "dev": None, "test": None})
    assert {name: len(split) for name, split in task.splits.items()} == {"train": 6, "dev": 20, "test": 20}
    line = (sources / "new_aan_pairs.train.tsv").read_bytes().splitlines()[3]
    assert words(task, "train", 3) == [field[:60] for field in line.split(b"\t")[3:]]
    assert task.splits["train"].labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert task.source == "stand-in"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1.0\ta\tb\tonly four", "line 21: 4 fields, not 5"),
        ("2.0\ta\tb\tone\ttwo", "line 21: the label '2.0' is not 0 or 1"),
        ("1.0\ta\tb\t\ttwo", "line 21: an empty text"),
    ],
)
def test_a_bad_pair_is_named_by_file_and_line_and_leaves_nothing(line: str, complaint: str, tmp_path: Path) -> None:
    write_pairs(tmp_path, lines=20)
    with open(tmp_path / "new_aan_pairs.eval.tsv", "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=f"new_aan_pairs.eval.tsv, {complaint}"):
        retrieval.load(str(tmp_path), 64, 60, ALL)
    assert not list((tmp_path / "retrieval").iterdir())


def test_a_truncated_archive_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    archive = tmp_path / text.ARCHIVE
    write_archive(archive, reviews=200)
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(DataError, match=f"{text.ARCHIVE} cannot be read"):
        text.load(str(tmp_path), 64, 60, "test", ALL, 0)
    assert not list((tmp_path / "text").iterdir())


def test_what_is_no_archive_or_another_one_is_named(tmp_path: Path) -> None:
    archive = tmp_path / text.ARCHIVE
    archive.write_bytes(gzip.compress(b"nothing"))
    with pytest.raises(DataError, match="cannot be read"):
        text.load(str(tmp_path), 64, 60, "test", ALL, 0)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(__file__, "aclImdb/train/pos/0_9.txt")
    with pytest.raises(DataError, match="0 negative of 1 train reviews"):
        text.load(str(tmp_path), 64, 60, "test", ALL, 0)


def test_another_source_file_is_read_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for reviews in (10, 30):
        write_archive(tmp_path / text.ARCHIVE, reviews)
        sizes.append(len(text.load(str(tmp_path), 64, 60, "test", ALL, 0).splits["train"]))
    assert sizes == [20, 60]
    assert "changed since" in capsys.readouterr().out
    (tmp_path / text.ARCHIVE).unlink()  # what is packed needs no source any more
    assert len(text.load(str(tmp_path), 64, 60, "test", ALL, 0).splits["train"]) == 60


@pytest.mark.data
def test_the_real_archive_is_lra_text(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / text.ARCHIVE).symlink_to(shared_data / text.ARCHIVE)
    task = text.load(str(tmp_path), 4096, 4000, "test", ALL, 0)
    assert task.source == "lra"
    assert {name: len(split) for name, split in task.splits.items()} == dict.fromkeys(ALL, 25_000)
    assert task.splits["test"].labels.mean() == 0.5
    assert task.splits["train"].batch(np.arange(25_000)[::500], trim=False)[0].max() <= 256


def prepare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lra_data", "prepare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_prepare_says_what_is_ready(tmp_path: Path) -> None:
    done = prepare("listops", "trainer=smoke", f"paths.data={tmp_path}")
    assert done.returncode == 0
    assert done.stdout.startswith("listops is ready (generated): train 64, dev 8, test 8; fingerprint ")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("task.data.max_length=abc", "error: task.data.max_length=abc: Input should be a valid integer"),
        ("+task.data.foo=3", "error: task.data.foo=3: Unexpected keyword argument"),
    ],
)
def test_prepare_refuses_in_one_sentence(override: str, sentence: str) -> None:
    failed = prepare("listops", override)
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == [sentence]


def test_prepare_names_what_is_missing(tmp_path: Path) -> None:
    failed = prepare("text", f"paths.data={tmp_path}")
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"error: task=text needs {tmp_path}/aclImdb_v1.tar.gz, which is not there")
    assert len(failed.stderr.splitlines()) == 1
