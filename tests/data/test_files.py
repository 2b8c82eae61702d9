"""Text, Retrieval and ListOps from their files: what is read, and what is refused."""

import gzip
import io
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from datasets import ClassLabel, Dataset, Features, Value

from lra_data import __main__, listops, retrieval, text
from lra_data.base import DataError, Task
from tests.conftest import ROOT, write_archive, write_pairs
from tests.data.test_base import ALL, left


def read_text(folder: Path, origin: Path | str | None = None, dev: str = "test", seed: int = 0) -> Task:
    return text.load(str(folder), 64, 60, dev, ALL, seed, origin and str(origin))


def read_pairs(folder: Path, origin: Path | None = None) -> Task:
    return retrieval.load(str(folder), 64, 60, ALL, origin and str(origin))


def sizes(task: Task) -> list[int]:
    return [len(split) for split in task.splits.values()]


def refused(complaint: str, load: Callable[..., Task], folder: Path, *given: object) -> None:
    """One sentence, and nothing half-made."""
    with pytest.raises(DataError, match=complaint):
        load(folder, *given)
    assert not left(folder / "text") + left(folder / "retrieval") + left(folder / "listops")


def words(task: Task, split: str, index: int) -> list[bytes]:
    return [stored.tobytes() for stored in task.splits[split].texts(index)]


def test_text_is_all_reviews_with_their_labels_cut_to_the_length(sources: Path) -> None:
    task = read_text(sources)
    assert sizes(task) == [40, 40, 40]
    reviews = [words(task, "train", i)[0] for i in range(40)]
    assert [b"fine" in review for review in reviews] == task.splits["train"].labels.astype(bool).tolist()
    assert {int(re.match(rb"train (\d+): ", review)[1]) for review in reviews} == set(range(20))
    assert max(map(len, reviews)) == 60
    assert task.source == "stand-in"
    # A run that takes the first examples alone should see both: 20 of 40 at random are outside with p < 1e-5.
    assert 3 <= task.splits["train"].labels[:20].sum() <= 17
    few = text.load(str(sources), 64, 60, "test", {"train": 7, "dev": 5, "test": None}, 0)
    assert sizes(few) == [7, 5, 40]


def test_text_holds_out_a_tenth_of_either_label_by_its_seed(sources: Path, tmp_path: Path) -> None:
    held = []
    for seed in (0, 0, 1):
        task = read_text(tmp_path / str(len(held)), sources, "held-out", seed)
        assert sizes(task) == [36, 4, 40]
        assert sorted(task.splits["dev"].labels) == [0, 0, 1, 1]
        dev, train = ({words(task, name, i)[0] for i in range(len(task.splits[name]))} for name in ("dev", "train"))
        assert not dev & train
        assert all(review.startswith(b"train") for review in dev)
        held.append(dev)
    assert held[0] == held[1] != held[2]


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


def reviews_in(archive: Path, part: str) -> list[dict]:
    with tarfile.open(archive) as tar:
        members = [member for member in tar if f"/{part}/" in member.name]
        return [{"text": tar.extractfile(m).read().decode(), "label": int("/pos/" in m.name)} for m in members]


def write_parquet(archive: Path, folder: Path) -> Path:
    """As the hub has it."""
    folder.mkdir(parents=True)
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    for part in text.PARTS:
        rows = Dataset.from_list(reviews_in(archive, part)[::-1], features=features)
        rows.to_parquet(folder / f"{part}-00000-of-00001.parquet")
    return folder


def write_hub_cache(archive: Path, home: Path) -> Path:
    """As huggingface_hub keeps what it has downloaded."""
    repository = home / "hub" / "datasets--stanfordnlp--imdb"
    write_parquet(archive, repository / "snapshots" / "0123abc" / "plain_text")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    return home / "hub"


class ImdbReviews(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """tensorflow-datasets' own writer, fed with our reviews: its builder of that name downloads the real ones."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="plain_text")]  # noqa: RUF012
    archive = Path()

    def _info(self) -> tfds.core.DatasetInfo:
        label = tfds.features.ClassLabel(names=["neg", "pos"])
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, _: object) -> dict:
        return {part: self._generate_examples(part) for part in text.PARTS}

    def _generate_examples(self, part: str) -> enumerate:
        return enumerate(reviews_in(self.archive, part))


def write_tfds(archive: Path, folder: Path) -> Path:
    ImdbReviews.archive = archive
    ImdbReviews(data_dir=str(folder), file_format="array_record").download_and_prepare()
    return folder


def test_every_source_gives_the_same_bytes(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them read by the library that people would use; the order of the reviews differs between them."""
    archive = sources / text.ARCHIVE
    monkeypatch.setenv("TFDS_DATA_DIR", str(write_tfds(archive, tmp_path / "tfds")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(write_hub_cache(archive, tmp_path / "hf")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    named = {
        archive: "aclImdb_v1.tar.gz",
        sources: "aclImdb_v1.tar.gz",
        unpack(archive, tmp_path / "unpacked"): "aclImdb/",
        tmp_path / "unpacked" / text.UNPACKED: "aclImdb/",
        write_parquet(archive, tmp_path / "we[i]rd st*r"): "we[i]rd st*r/*.parquet",
        "hub": "hub stanfordnlp/imdb",
        "stanfordnlp/imdb": "hub stanfordnlp/imdb",
        "tfds": "tfds imdb_reviews/plain_text",
    }
    tasks = [read_text(tmp_path / str(i), origin, "held-out") for i, origin in enumerate(named)]
    assert len({task.fingerprint for task in tasks}) == 1
    assert [task.manifest.origin for task in tasks] == list(named.values())


def test_what_is_packed_needs_no_source(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = read_text(tmp_path, sources)
    assert read_text(tmp_path).fingerprint == first.fingerprint
    assert "made anew" not in capsys.readouterr().out
    read_text(tmp_path, write_parquet(sources / text.ARCHIVE, tmp_path / "pq"))
    assert "was made from aclImdb_v1.tar.gz, not from pq/*.parquet: it is made anew" in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense", "silent"])
def test_without_a_hub_nothing_is_tried_twice_and_the_way_out_is_said(endpoint: str, tmp_path: Path) -> None:
    """Nor waited for long where a server takes the call and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = endpoint.replace("silent", f"http://127.0.0.1:{server.getsockname()[1]}")
        command = [sys.executable, "-m", "lra_data", "prepare", "text", f"paths.data={tmp_path}", "paths.text=hub"]
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        failed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert failed.returncode == 1
    sentence = rf"error: paths.text=hub: stanfordnlp/imdb cannot be had \({endpoint} cannot be reached\) .* put aclImdb"
    assert re.match(sentence, failed.stderr), failed.stderr
    assert len(failed.stderr.splitlines()) == 1


def test_damaged_tfds_is_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead = ".*put aclImdb_v1.tar.gz into paths"
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    refused(f"not there: make it with `pip install .*`tfds build imdb_reviews{instead}", read_text, tmp_path, "tfds")
    monkeypatch.setenv("TFDS_DATA_DIR", str(write_tfds(sources / text.ARCHIVE, tmp_path / "tfds")))
    with monkeypatch.context() as patch:
        patch.setattr(tfds.core.SplitInfo, "num_examples", 41)
        refused(f"40 of 41 train reviews{instead}", read_text, tmp_path, "tfds")
    (records,) = tmp_path.rglob("imdb_reviews-train.array_record*")
    for file, content in ((records, records.read_bytes()[:100]), (records.parent / "dataset_info.json", b"{")):
        before = file.read_bytes()
        file.write_bytes(content)
        refused(f"cannot be read{instead}", read_text, tmp_path, "tfds")
        file.write_bytes(before)


def test_retrieval_is_pairs(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = retrieval.load(str(sources), 64, 60, {"train": 6, "dev": None, "test": None})
    assert sizes(task) == [6, 20, 20]
    line = (sources / "new_aan_pairs.train.tsv").read_bytes().splitlines()[3]
    assert words(task, "train", 3) == [field[:60] for field in line.split(b"\t")[3:]]
    assert task.splits["train"].labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert task.source == task.manifest.source == "stand-in"
    monkeypatch.setattr(retrieval, "PAIRS", dict.fromkeys(ALL, 20))
    assert read_pairs(tmp_path, sources).source == "lra"


def test_retrieval_keeps_bytes_as_they_are_and_cuts_what_is_long(tmp_path: Path) -> None:
    """No quoting, no decoding: quotes, bytes that are not UTF-8, a carriage return within. At most 10,000 are read."""
    write_pairs(tmp_path, lines=2)
    one, two = b'"a ""b"\xff\xfe\x00', b"\xc3 \r'c"
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(b"1\tx\ty\t" + one + b"\t" + two + b"\r\n")
    task = read_pairs(tmp_path)
    assert words(task, "dev", 0) == [one, two]
    assert task.decode(task.splits["dev"].texts(0)[0]) == '"a ""b"\ufffd\ufffd\x00'
    (tmp_path / "new_aan_pairs.test.tsv").write_text(f"0.0\tx\ty\t{'a' * 20_000}\t{'b' * 20_000}\n")
    for max_length, expected in ((4000, 4000), (30_000, 10_000)):
        task = retrieval.load(str(tmp_path), 30_000, max_length, ALL)
        assert [len(side) for side in task.splits["test"].texts(0)] == [expected, expected]


def write_listops(folder: Path, end: str) -> list[tuple[str, int]]:
    """LRA's three files, with generated expressions in them."""
    folder.mkdir(exist_ok=True)
    drawn = [example for example, _ in zip(listops.generate(7, 10, 40), range(30), strict=False)]
    for number, part in enumerate(("train", "val", "test")):
        rows = [f"{source}\t{target}" for source, target in drawn[number * 10 : number * 10 + 10]]
        (folder / f"basic_{part}.tsv").write_bytes(end.join(["Source\tTarget", *rows, ""]).encode())
    return drawn


def read_listops(folder: Path, origin: Path, brackets: bool = True, examples: int = 100) -> Task:
    return listops.load(str(folder), 64, 60, 10, brackets, dict.fromkeys(ALL, examples), 0, str(origin))


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("brackets", [True, False])
def test_lras_listops_files_are_read(end: str, brackets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = write_listops(tmp_path, end)
    task = read_listops(tmp_path, tmp_path, brackets)
    assert task.source == "stand-in"
    for number, (source, target) in enumerate(drawn):
        split, i = list(task.splits.values())[number // 10], number % 10
        kept = source.replace("(", "").replace(")", "").replace("]", "]" if brackets else "").split()
        assert (task.decode(split.texts(i)[0]).split(), split.labels[i]) == (kept, target)
    assert len(read_listops(tmp_path, tmp_path, examples=4).splits["dev"]) == 4
    monkeypatch.setattr(listops, "RELEASED", dict.fromkeys(ALL, 10))
    assert read_listops(tmp_path / "other", tmp_path).source == "lra"


@pytest.mark.parametrize(
    ("name", "line", "complaint"),
    [
        ("new_aan_pairs.eval.tsv", "1.0\ta\tb\tonly four", "4 fields, not 5"),
        ("new_aan_pairs.eval.tsv", "2.0\ta\tb\tone\ttwo", "the label '2.0' is not 0 or 1"),
        ("new_aan_pairs.eval.tsv", "1.0\ta\tb\t\ttwo", "an empty text"),
        ("basic_train.tsv", "[MAX 1 2 ]", "1 fields, not 2"),
        ("basic_train.tsv", "[MAX 1 2 ]\t10", "the label '10' is not 0 to 9"),
        ("basic_train.tsv", "[AVG 1 2 ]\t1", r"unexpected '\[AVG' in '\[AVG 1 2 \]'"),
        ("basic_train.tsv", "[MAX 1 [MIN 2 ]\t1", r"not one whole expression: '\[MAX 1 \[MIN 2 \]'"),
    ],
)
def test_a_bad_line_is_named(name: str, line: str, complaint: str, tmp_path: Path) -> None:
    write_listops(files := tmp_path / "files", "\n")
    write_pairs(files, lines=11)
    with open(files / name, "a") as file:
        file.write(line + "\n")
    refused(f"{name}, line 12: {complaint}", read_listops if "basic" in name else read_pairs, tmp_path, files)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:2000],  # truncated
        lambda content: content[:-8],  # but for the checksum at the end
        lambda content: content[:-8] + b"\0\0\0\0" + content[-4:],  # a wrong checksum
        lambda content: content[:3000] + bytes(50) + content[3050:],  # damaged within
        lambda _: gzip.compress(b"nothing"),
        lambda _: b"no archive",
        lambda _: b"",
    ],
)
def test_a_damaged_archive_is_named(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    write_archive(tmp_path / text.ARCHIVE, reviews=200)
    archive = tmp_path / text.ARCHIVE
    archive.write_bytes(change(archive.read_bytes()))
    refused(f"{text.ARCHIVE} cannot be read", read_text, tmp_path)


REVIEW = "aclImdb/train/pos/0_9.txt"


@pytest.mark.parametrize(
    ("name", "kind", "content", "complaint"),
    [
        ("aclImdb/train/pos/../../../../0_9.txt", tarfile.REGTYPE, b"a review", "0 positive of 0 reviews"),
        (REVIEW, tarfile.SYMTYPE, b"", "0 positive of 0 reviews"),
        (REVIEW, tarfile.LNKTYPE, b"", "0 positive of 0 reviews"),
        ("other/0_9.txt", tarfile.REGTYPE, b"a review", "0 positive of 0 reviews"),
        (REVIEW, tarfile.REGTYPE, b"a review", "train: 1 positive of 1 reviews, not half"),
        (REVIEW, tarfile.REGTYPE, b" \n", rf"{REVIEW}: the text is b' \\n'"),
    ],
)
def test_another_archive_is_refused(name: str, kind: bytes, content: bytes, complaint: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / text.ARCHIVE, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
        tar.addfile(member, io.BytesIO(content))
    refused(complaint, read_text, tmp_path)


def test_a_review_keeps_its_bytes_utf8_or_not(tmp_path: Path) -> None:
    folder = tmp_path / text.UNPACKED
    for name in text.FOLDERS:
        (folder / name).mkdir(parents=True)
        (folder / name / "0_5.txt").write_bytes(f"{name} ".encode() + b"\xff\xe9\x00")
    (folder / "train" / "neg" / "._0_5.txt").write_text("what a Mac leaves in a folder is no review")
    task = read_text(tmp_path)
    reviews = sorted(words(task, "train", i) for i in range(len(task.splits["train"])))
    assert reviews == [[b"train/neg \xff\xe9\x00"], [b"train/pos \xff\xe9\x00"]]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "a", "label": 2}, "row 1: the label is 2, not 0 or 1"),
        ({"text": "a", "label": None}, "row 1: the label is None, not 0 or 1"),
        ({"text": None, "label": 1}, "row 1: the text is None"),
        ({"text": " ", "label": 1}, "row 1: the text is ' '"),
    ],
)
def test_a_bad_row_of_parquet_is_named(row: dict, complaint: str, tmp_path: Path) -> None:
    for part in text.PARTS:
        Dataset.from_list([{"text": "fine", "label": 1}, row]).to_parquet(tmp_path / f"{part}.parquet")
    refused(f"{tmp_path}, train, {complaint}", read_text, tmp_path, tmp_path)


def test_damaged_parquet_is_named(sources: Path, tmp_path: Path) -> None:
    folder = write_parquet(sources / text.ARCHIVE, tmp_path / "parquet")
    file = folder / "train-00000-of-00001.parquet"
    for damage, complaint in (
        (lambda: file.write_bytes(file.read_bytes()[:200]), r"parquet/\*.parquet cannot be read \(.*Parquet"),
        (lambda: Dataset.from_dict({"review": ["a"]}).to_parquet(file), r"parquet/\*.parquet cannot be read \(.*text"),
        (file.unlink, "has neither train/neg and train/pos, .* nor train-"),
    ):
        damage()
        refused(f"{folder}:? {complaint}", read_text, tmp_path, folder)


def test_every_kind_of_source_is_watched(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = sources / text.ARCHIVE
    folder = unpack(archive, tmp_path / "unpacked") / text.UNPACKED
    parquet = write_parquet(archive, tmp_path / "parquet")
    write_pairs(tmp_path, lines=4)
    write_listops(lines := tmp_path / "lines", "\n")

    def add_reviews() -> None:
        for sentiment in ("neg", "pos"):
            (folder / "train" / sentiment / "77_5.txt").write_text("one more")

    write_archive(tmp_path / text.ARCHIVE, 10)
    for load, change, named in (
        (lambda: read_text(tmp_path), lambda: write_archive(tmp_path / text.ARCHIVE, 30), text.ARCHIVE),
        (lambda: read_text(tmp_path, folder), add_reviews, "train/neg, train/pos"),
        (lambda: read_text(tmp_path, parquet), lambda: os.utime(parquet / "test-00000-of-00001.parquet"), "test-00000"),
        (lambda: read_pairs(tmp_path), lambda: write_pairs(tmp_path, 5), "new_aan_pairs.train.tsv"),
        (lambda: read_listops(tmp_path, lines), lambda: os.utime(lines / "basic_val.tsv"), "basic_val.tsv"),
    ):
        load()
        capsys.readouterr()
        load()
        assert "made anew" not in capsys.readouterr().out
        change()
        load()
        assert f"was made from another {named}" in capsys.readouterr().out


def test_a_place_that_was_named_must_be_there_packed_data_or_not(sources: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    write_listops(tmp_path / "files", "\n")
    for load in (
        lambda origin: read_text(tmp_path, origin),
        lambda origin: read_pairs(tmp_path, origin),
        lambda origin: read_listops(tmp_path, tmp_path / "files" if origin == sources else origin),
    ):
        load(sources)
        with pytest.raises(DataError, match=f"{nowhere}.*, which is not there: .* paths.[a-z]+={nowhere}`"):
            load(nowhere)
    with pytest.raises(DataError, match=r"basic_train.tsv, which is not there: .* leave paths.listops out"):
        read_listops(tmp_path, nowhere)


def test_texts_longer_than_the_padded_length_are_refused_before_they_are_read(tmp_path: Path) -> None:
    for load in (lambda: text.load(str(tmp_path), 64, 65, "test", ALL, 0), lambda: retrieval.load("x", 64, 65, ALL)):
        with pytest.raises(DataError, match=r"task\.data\.length=64 is too short .* 65 tokens"):
            load()


@pytest.mark.data
def test_one_changed_review_is_not_lras(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(text._read_archive(shared_data / text.ARCHIVE))
    monkeypatch.setattr(text, "_read_archive", lambda _: rows)
    task = text.load(str(tmp_path), 4096, 4000, "test", ALL, 0, str(shared_data))
    assert task.source == "lra"
    assert sizes(task) == [25_000, 25_000, 25_000]
    assert task.splits["test"].labels.mean() == 0.5
    assert task.splits["train"].batch(np.arange(25_000)[::500], trim=False)[0].max() <= 256
    part, review, *rest = rows[0]
    rows[0] = (part, review + b".", *rest)
    assert read_text(tmp_path, shared_data).source == "stand-in"


@pytest.mark.data
def test_the_stand_in_for_retrieval_is_marked_as_one(shared_data: Path, tmp_path: Path) -> None:
    maker = shared_data.parent / "tools" / "make_pairs.py"
    sizes = ["--train", "60", "--eval", "20", "--test", "20"]
    command = [sys.executable, str(maker), "--aan", str(shared_data / "aan_small"), "--out", str(tmp_path), *sizes]
    subprocess.run(command, check=True, capture_output=True)
    task = retrieval.load(str(tmp_path), 4096, 4000, ALL)
    assert (task.source, task.manifest.splits["train"].labels) == ("stand-in", [30, 30])
    assert task.splits["train"].lengths.max() == 4000


def lra_data(*words: str) -> subprocess.CompletedProcess[str]:
    """What `python -m lra_data words...` does, without the second that its imports take."""
    output, errors, code = io.StringIO(), io.StringIO(), None
    with redirect_stdout(output), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lra_data", *words])
        try:
            __main__.main()
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):  # what sys.exit prints
        errors.write(f"{code}\n")
        code = 1
    return subprocess.CompletedProcess(words, code or 0, output.getvalue(), errors.getvalue())
