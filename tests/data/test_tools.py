"""python -m lra_data prepare | doctor | show, and the trivial baselines."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lra_data import __main__, base, baselines, listops
from lra_data.base import TaskSpec
from tests.conftest import ROOT, write_archive
from tests.data.test_base import cached, in_processes, left
from tests.data.test_files import lra_data

ONE, PAIR = TaskSpec(512, 64, 2, paired=False), TaskSpec(512, 64, 2, paired=True)


def doctored(folder: Path) -> list[dict]:
    return json.loads((folder / "floors.json").read_text())["floors"]


def smoke(folder: Path) -> list[str]:
    """The doctor for tiny ListOps data, all in this folder."""
    words = ["trainer=smoke", "protocol=clean", f"paths.data={folder}", f"paths.results={folder}"]
    return ["doctor", "listops", *words]


def split_up(examples: list[base.Example]) -> dict[str, list[base.Example]]:
    return {"train": examples[::2], "dev": examples[1::2], "test": examples[:1]}


def test_majority_and_length_are_fitted_on_train_and_scored_on_dev_and_test(tmp_path: Path) -> None:
    """Long texts have label 1 in train; the other splits have other shares."""
    train = [((b"a" * 5,), 0)] * 60 + [((b"a" * 20,), 1)] * 40
    dev = [((b"a" * 5,), 0)] * 10 + [((b"a" * 20,), 1)] * 25 + [((b"a" * 20,), 0)] * 5
    task = cached(tmp_path, ONE, {"train": train, "dev": dev, "test": dev[:20]})
    assert baselines.measure("no task of ours", task) == {
        "dev": {"majority": 15 / 40, "length": 35 / 40},
        "test": {"majority": 10 / 20, "length": 20 / 20},
    }


def test_a_key_that_train_does_not_have_gets_the_commonest_label(tmp_path: Path) -> None:
    train, dev, _ = cached(tmp_path, ONE, split_up([((b"a",), 1)] * 10)).splits.values()
    assert baselines.by_key(lambda split: np.full((len(split), 1), split is dev), train, dev) == 1


def letters(rng: np.random.Generator, share_of_a: float) -> bytes:
    others = (1 - share_of_a) / 3
    return bytes(rng.choice(list(b"abcd"), rng.integers(40, 60), p=[share_of_a, others, others, others]).tolist())


def test_bag_of_bytes_learns_from_shares_of_bytes_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    examples = split_up([((letters(rng, 0.4 if i // 2 % 2 else 0.25),), i // 2 % 2) for i in range(2000)])
    scored = baselines.bag_of_bytes(*(cached(tmp_path, ONE, examples).splits[name] for name in ("train", "dev")))
    shares = [(texts[0].count(b"a") / len(texts[0]) > 0.325) == label for texts, label in examples["dev"]]
    assert scored == pytest.approx(np.mean(shares), abs=0.04)  # the best line through them; s.e. 0.01
    assert scored > 0.8


def test_bag_of_bytes_of_a_pair_learns_whether_the_two_are_alike(tmp_path: Path) -> None:
    """Texts with many a and texts with few: alike in a pair of label 1. All have the same set of bytes."""
    rng = np.random.default_rng(0)

    def pair(label: int) -> base.Example:
        shares = (0.7, 0.25) if rng.integers(2) else (0.25, 0.7)
        return (letters(rng, shares[0]), letters(rng, shares[not label])), label

    task = cached(tmp_path, PAIR, split_up([pair(i // 2 % 2) for i in range(1200)]))
    measured = baselines.measure("retrieval", task)["dev"]
    assert measured["bag of bytes"] > 0.95
    assert measured["byte-set overlap"] < 0.65  # of 400: chance and 6 standard errors


def test_byte_overlap_sees_what_two_texts_share(tmp_path: Path) -> None:
    """Relative to what stands in either: 2 of 2 bytes are more than 4 of 8."""
    examples = [((b"ab", b"bba"), 1), ((b"abcdef", b"abcdxy"), 0)] * 20
    splits = cached(tmp_path, PAIR, examples).splits
    overlap = baselines.byte_overlap(splits["train"])
    assert overlap[0] > overlap[1]
    assert baselines.OWN["retrieval"]["byte-set overlap"](splits["train"], splits["dev"]) == 1


def test_the_length_of_a_pair_is_that_of_both(tmp_path: Path) -> None:
    task = cached(tmp_path, PAIR, split_up([((b"a" * 9, b"b" * long), int(long > 9)) for long in (3, 3, 20, 20)] * 20))
    assert baselines.measure("retrieval", task)["dev"]["length"] == 1


def test_the_root_and_its_digits_leave_nested_lists_out(tmp_path: Path) -> None:
    trees = {  # with brackets; without them
        "[MAX 1 [MIN 2 3 ] 9 ]": (9, 1),
        "[SM 5 [MED 1 2 ] [MAX 3 4 ] 6 7 ]": (8, 5),
        "[MED [MIN 1 2 ] 7 3 ]": (5, -1),
        "[MIN 4 2 ]": (2, 2),
    }
    for brackets in (True, False):
        tokens = [[listops.CODES[word] for word in tree.split() if brackets or word != "]"] for tree in trees]
        spec = TaskSpec(32, 64, classes=10, paired=False)
        task = cached(tmp_path / str(brackets), spec, [((bytes(codes),), 0) for codes in tokens])
        expected = [[codes[0], values[not brackets]] for codes, values in zip(tokens, trees.values(), strict=True)]
        assert baselines.root_and_digits(task.splits["train"]).tolist() == expected


def test_the_doctor_measures_the_floors_of_listops(tmp_path: Path) -> None:
    """Of 20,000 official ones: majority 17%, root operator 36 to 37%, and its digits 47%; 4 standard errors."""
    examples = "task.data.examples={train:8000,dev:2000,test:2001}"
    small = [examples, f"paths.data={tmp_path}", f"paths.results={tmp_path}"]
    done = lra_data("doctor", "listops", *small)
    assert done.returncode == 0, done.stderr
    clean, paper = doctored(tmp_path)
    data = {"task": "listops", "source": "generated", "whole": False, "data_version": base.DATA_VERSION}
    data |= {"train_examples": 8000, "dev_examples": 2000, "test_examples": 2001}
    for entry, protocol, digits in ((clean, "clean", 0.47), (paper, "paper", 0.39)):
        assert entry == entry | data | {"protocol": protocol}
        assert entry["dev_accuracy"] != entry["test_accuracy"]
        for accuracy in (entry["dev_accuracy"], entry["test_accuracy"]):
            assert accuracy["majority"] == pytest.approx(0.168, abs=0.034)
            assert accuracy["length"] == pytest.approx(0.168, abs=0.034)
            assert accuracy["root operator"] == pytest.approx(0.365, abs=0.043)
            assert accuracy["root operator and its digits"] == pytest.approx(digits, abs=0.045)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("listops, protocol=paper: ready. Source: generated, made from the generator; finger")
    assert [line.split()[:2] for line in lines[3:6]] == [["train", "8,000"], ["dev", "2,000"], ["test", "2,001"]]
    for line, start in zip(lines[6:8], ("dev [(]2,000 ", "test [(]2,001 "), strict=True):
        assert re.match(f"  baselines on {start}.*root operator and its digits", line)
    # Once more, for one protocol: the other's floors stay.
    assert lra_data("doctor", "listops", "protocol=clean", *small).returncode == 0
    assert len(doctored(tmp_path)) == 2


def test_the_doctor_tells_whole_data_from_shortened_ones(sources: Path, tmp_path: Path) -> None:
    paths = [f"paths.data={sources}", f"paths.results={tmp_path}"]
    cut = "task.data.max_length=20"
    for words in ([], [cut], ["task.data.length=8192"]):  # the last cuts nothing off
        assert lra_data("doctor", "retrieval", *words, *paths).returncode == 0
    assert sorted(floor["whole"] for floor in doctored(tmp_path)) == [False, True]


def test_the_doctor_names_what_is_missing_and_goes_on(tmp_path: Path) -> None:
    write_archive(tmp_path / "aclImdb_v1.tar.gz", reviews=20)
    done = lra_data("doctor", "retrieval", "text", f"paths.data={tmp_path}", f"paths.results={tmp_path}")
    assert done.returncode == 1
    missing = f"task=retrieval needs {tmp_path}/new_aan_pairs.train.tsv"
    assert f"retrieval, protocol=paper: NOT READY. {missing}" in done.stdout
    assert "text, protocol=clean: ready. Source: stand-in" in done.stdout
    assert {floor["task"] for floor in doctored(tmp_path)} == {"text"}


def test_the_doctor_finds_damage(tmp_path: Path) -> None:
    assert lra_data(*smoke(tmp_path)).returncode == 0
    (tokens,) = tmp_path.rglob("dev.tokens.bin")
    tokens.write_bytes(b"x" + tokens.read_bytes()[1:])
    done = lra_data(*smoke(tmp_path))
    assert done.returncode == 1
    assert re.match(r"listops, protocol=clean: NOT READY. the packed data in .* \(the sha256 of dev is", done.stdout)


def test_an_interrupted_prepare_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    words = ["lra_data", "prepare", "listops", f"paths.data={tmp_path}", "task.data.examples.train=10000000"]  # hours
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        while not list(tmp_path.rglob("train.tokens.bin")) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted: nothing half-made was left behind"
    assert "Traceback" not in said
    assert not left(tmp_path / "listops")


def test_two_doctors_at_once_keep_the_baselines_of_both(tmp_path: Path) -> None:
    """Two processes: each adds five entries, one after the other."""
    file = tmp_path / "floors.json"

    def add(task: str) -> None:
        for number in range(5):
            entry = {"task": task, "protocol": "clean", "fingerprint": f"{task}{number}", "whole": False}
            __main__.keep(file, entry | {"data_version": base.DATA_VERSION})

    in_processes(add, ("a",), ("b",))
    assert len(doctored(tmp_path)) == 10


@pytest.mark.parametrize("content", ["{", '{"floors": [{"fingerprint": "a"}]}', "[]"])
def test_damaged_results_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "floors.json").write_text(content)
    failed = lra_data(*smoke(tmp_path))
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/floors.json is damaged: delete it")


def test_show_prints_ids_text_and_label(sources: Path) -> None:
    line = (sources / "new_aan_pairs.eval.tsv").read_text().splitlines()[3]
    label, _, _, one, two = line.split("\t")
    command = ["show", "retrieval", "--index", "3", "--split", "dev", f"paths.data={sources}"]
    lines = lra_data(*command).stdout.splitlines()
    assert lines[0] == f"retrieval, dev, example 3 of 20 (stand-in): label {label[0]} of 0 to 1"
    assert lines[2] == f"{len(one.encode())} ids, then {4096 - len(one.encode()):,} of 0, which is padding:"
    assert lines[3] == " ".join(str(byte + 1) for byte in one.encode())
    assert [lines[i] for i in (6, 12)] == [one, two]


def test_show_takes_overrides_on_either_side(tmp_path: Path) -> None:
    small = ["trainer=smoke", f"paths.data={tmp_path}"]
    shown = lra_data("show", "listops", *small, "--index", "2").stdout
    assert shown == lra_data("show", "listops", "--index", "2", *small).stdout
    # No `]` in the paper's protocol.
    assert re.fullmatch(r"listops, train, example 2 of 64.*\ntext:\n\[[MS][^]]*", shown, re.DOTALL)
    assert "]" in lra_data("show", "listops", "protocol=clean", *small).stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("prepare listops task.data.max_length=abc", "task.data.max_length=abc: Input should be a valid integer"),
        ("prepare listops +task.data.foo=3", "task.data.foo=3: Unexpected keyword argument"),
        ("prepare text", "task=text needs .*/aclImdb_v1.tar.gz, .* `python -m lra_data prepare text paths.data=.*`"),
        ("show listops trainer=smoke --index 64", "--index 64: the train split of listops has the examples 0 to 63"),
        ("show listops trainer=smoke --index=-1", "--index -1: the train split of listops has the examples 0 to 63"),
        ("doctor images", "task=images is not known; choose of listops, retrieval, text"),
    ],
)
def test_one_sentence_tells_what_is_wrong(words: str, sentence: str, tmp_path: Path) -> None:
    done = lra_data("prepare", "listops", "trainer=smoke", f"paths.data={tmp_path}")
    assert done.stdout.startswith("listops is ready (generated): train 64, dev 8, test 8; fingerprint ")
    failed = lra_data(*words.split(), f"paths.data={tmp_path}")
    assert failed.returncode == 1
    assert re.fullmatch(f"error: {sentence}.*\n", failed.stderr), failed.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [("prepare", "train 64, dev 8, test 8; "), ("doctor", "baselines on dev (8 examples"), ("show", "\ntext:\n")],
)
def test_a_task_of_ones_own_is_a_file_and_a_yaml(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's."""
    blocks = re.findall(r"^# (mine/\S*first_symbol\..+?)\n(.+?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    for name, content in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    where = [f"paths.data={tmp_path}", f"paths.results={tmp_path}", "--config-dir", str(tmp_path / "mine")]
    done = lra_data(command, "first_symbol", "trainer=smoke", *where)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
