"""Multi30K from its files: what is read and refused, its vocabulary, and the order of its pairs."""

import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lra_data import hub
from lra_data.base import DataError
from macformer.paper import multi30k, seq2seq, translation
from macformer.paper.multi30k import BEGIN, END, FILES, HUB_FILES, Batches, Corpus, Vocabulary
from tests.conftest import ROOT, captions, write_multi30k

ALL = {"train": None, "dev": None, "test": None}
SIZE = 300  # of the vocabulary
PAIRS = {"train": captions()[:60], "dev": captions()[60:70], "test": captions()[70:80]}


def read(folder: Path, origin: Path | str | None = None, vocabulary: int = SIZE) -> Corpus:
    return multi30k.load(str(folder), vocabulary, ALL, origin and str(origin))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the six plain files."""
    write_multi30k(tmp_path / "files", PAIRS)
    return tmp_path / "files"


def write_hub_cache(home: Path, pairs: dict[str, list[tuple[str, str]]]) -> Path:
    """As huggingface_hub keeps what it has downloaded; the files are as bentrevett/multi30k has them."""
    repository = home / "datasets--bentrevett--multi30k"
    folder = repository / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    for split, name in HUB_FILES.items():
        rows = (json.dumps({"en": english, "de": german}, ensure_ascii=False) for german, english in pairs[split])
        (folder / name).write_bytes("".join(f"{row}\n" for row in rows).encode())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """hub_cache(pairs) -> the folder of their files in the cache of a machine that is offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return lambda pairs: write_hub_cache(tmp_path / "hf", pairs)


def test_the_pairs_are_those_of_the_files_in_their_order(files: Path, tmp_path: Path) -> None:
    corpus = read(tmp_path, files)
    assert corpus.source == "stand-in"
    assert corpus.majority is None
    assert corpus.spec.vocabulary == SIZE == corpus.vocabulary.tokenizer.get_vocab_size()
    for split, pairs in PAIRS.items():
        ours = corpus.splits[split]
        assert len(ours) == len(pairs)
        assert ours.references == [english for _, english in pairs]
        assert [corpus.vocabulary.decode(ids) for ids in ours.sources] == [german for german, _ in pairs]
        assert [corpus.vocabulary.decode(ids) for ids in ours.targets] == ours.references
        assert ours.lengths.tolist() == [[len(s), len(t)] for s, t in zip(ours.sources, ours.targets, strict=True)]


def test_end_is_behind_every_text_and_begin_before_targets_alone(files: Path, tmp_path: Path) -> None:
    train = read(tmp_path, files).splits["train"]
    for source, target in zip(train.sources, train.targets, strict=True):
        assert (target[0], target[-1], source[-1]) == (BEGIN, END, END)
        assert min(*source[:-1], *target[1:-1]) > END


def test_plain_and_gzipped_files_are_the_same_data(files: Path, tmp_path: Path) -> None:
    plain = read(tmp_path / "plain", files).fingerprint
    for file in sorted(files.iterdir())[::2]:  # a mixture
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    mixed = read(tmp_path / "mixed", files)
    assert mixed.fingerprint == plain
    assert mixed.source == "stand-in"


def test_line_ends_and_outer_blanks_do_not_count(files: Path, tmp_path: Path) -> None:
    expected = read(tmp_path / "a", files).fingerprint
    for file in files.iterdir():
        file.write_bytes(b" " + file.read_bytes().replace(b"\n", b" \r\n").removesuffix(b"\n"))
    assert read(tmp_path / "b", files).fingerprint == expected


@pytest.mark.parametrize("origin", ["hub", "bentrevett/multi30k"])
def test_the_hub_has_the_same_data(origin: str, hub_cache: Callable[..., Path], files: Path, tmp_path: Path) -> None:
    hub_cache(PAIRS)
    assert read(tmp_path / "a", origin).fingerprint == read(tmp_path / "b", files).fingerprint


def test_a_line_ends_at_a_newline_and_nowhere_else(hub_cache: Callable[..., Path], tmp_path: Path) -> None:
    """Unicode has more characters that end a line for str.splitlines; JSON and text files do not know them."""
    pairs = PAIRS | {"dev": [("Hund\x85läuft", "dog\u2028runs"), ("Katze\u2029sitzt", "cat sits")]}
    hub_cache(pairs)
    write_multi30k(tmp_path / "multi30k", pairs)
    corpora = read(tmp_path), read(tmp_path, "hub")
    assert [corpus.splits["dev"].references for corpus in corpora] == [["dog\u2028runs", "cat sits"]] * 2
    assert corpora[0].fingerprint == corpora[1].fingerprint


def test_caps_take_the_first_pairs(files: Path, tmp_path: Path) -> None:
    corpus = multi30k.load(str(tmp_path), SIZE, {"train": 20, "dev": None, "test": 3}, str(files))
    assert {split: len(pairs) for split, pairs in corpus.splits.items()} == {"train": 20, "dev": 10, "test": 3}
    assert corpus.splits["test"].references == [english for _, english in PAIRS["test"][:3]]
    assert corpus.fingerprint != read(tmp_path, files).fingerprint


# What is refused


def refused(folder: Path, origin: Path | str | None, sentence: str, vocabulary: int = SIZE) -> None:
    with pytest.raises(DataError, match=f"^{sentence}$") as error:
        read(folder, origin, vocabulary)
    assert "\n" not in str(error.value)
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("name", [f"{name}.{end}" for name in FILES.values() for end in ("de", "en")])
def test_a_missing_file_is_named(name: str, files: Path, tmp_path: Path) -> None:
    (files / name).unlink()
    where = re.escape(str(files / name))
    refused(
        tmp_path, files, rf"Multi30K needs the file {where} \(or {name}.gz\), which is not there: .*paths.multi30k=.*"
    )
    assert not (tmp_path / "multi30k").exists()


def test_the_default_place_is_in_the_data_folder(tmp_path: Path) -> None:
    refused(tmp_path, None, f"Multi30K needs the file {tmp_path}/multi30k/train.de .*")


def test_sides_of_different_lengths_are_named(files: Path, tmp_path: Path) -> None:
    with open(files / "val.en", "ab") as file:
        file.write(b"One more.\n")
    refused(tmp_path, files, f"{files}/val has 10 German and 11 English lines; get the data again")


@pytest.mark.parametrize(("language", "side"), [("de", "German"), ("en", "English")])
@pytest.mark.parametrize("blank", ["", " \t"])
def test_an_empty_line_is_named(blank: str, language: str, side: str, files: Path, tmp_path: Path) -> None:
    file = files / f"train.{language}"
    lines = file.read_text().split("\n")
    lines[6] = blank
    file.write_text("\n".join(lines))
    refused(tmp_path, files, f"{files}/train: line 7 of the {side} side is empty; get the data again")


def test_an_empty_file_is_named(files: Path, tmp_path: Path) -> None:
    for language in ("de", "en"):
        (files / f"val.{language}").write_bytes(b"")
    refused(tmp_path, files, f"{files}/val: line 1 of the German side is empty; get the data again")


@pytest.mark.parametrize("damage", ["cut", "no gzip", "flipped", "empty"])
def test_a_broken_archive_is_named(damage: str, files: Path, tmp_path: Path) -> None:
    whole = gzip.compress((files / "train.de").read_bytes())
    flipped = bytes([*whole[:20], *(255 - byte for byte in whole[20:60]), *whole[60:]])
    content = {"cut": whole[:-20], "no gzip": b"no gzip", "flipped": flipped, "empty": b"\x1f\x8b"}[damage]
    (files / "train.de.gz").write_bytes(content)
    refused(tmp_path, files, rf"{files}/train.de.gz cannot be read \(.+\); get it again")


def test_what_is_not_utf8_is_named(files: Path, tmp_path: Path) -> None:
    (files / "train.en").write_bytes("A café.\n".encode("latin-1") * 60)
    refused(tmp_path, files, rf"{files}/train.en cannot be read \('utf-8' codec .+\); get it again")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"de": "a"', "JSONDecodeError.*"),
        (b'{"de": "a", "fr": "b"}\n', r"KeyError\('en'\)"),
        (b'["a", "b"]\n', "TypeError.*"),
        (b'{"de": "\xff", "en": "b"}\n', "UnicodeDecodeError.*"),
    ],
)
def test_damaged_files_of_the_hub_are_named(
    content: bytes, reason: str, hub_cache: Callable[..., Path], tmp_path: Path
) -> None:
    folder = hub_cache(PAIRS)
    (folder / "val.jsonl").write_bytes(content)
    refused(tmp_path, "hub", rf"{folder}/val.jsonl cannot be read \({reason}\); put Multi30K's files into a folder .*")


def test_an_empty_text_of_the_hub_is_named(hub_cache: Callable[..., Path], tmp_path: Path) -> None:
    folder = hub_cache(PAIRS | {"test": [("Hund", "dog"), ("Katze", " ")]})
    refused(tmp_path, "hub", f"{folder}/test.jsonl: line 2 of the English side is empty; get the data again")


def test_without_a_hub_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(hub, "answers", lambda url: False)
    sentence = (
        r"paths.multi30k=hub: bentrevett/multi30k cannot be had \(.* cannot be reached\) .*; put Multi30K's files .*"
    )
    refused(tmp_path, "hub", sentence)


@pytest.mark.parametrize(("split", "file"), FILES.items())
@pytest.mark.parametrize(("side", "language"), [(0, "de"), (1, "en")])
def test_a_text_that_is_too_long_is_named(split: str, file: str, side: int, language: str, tmp_path: Path) -> None:
    """Before anything is trained, not hours later: a translator would refuse it when it comes to it."""
    assert multi30k.LONGEST == seq2seq.LONGEST
    room = multi30k.LONGEST - 1 - side  # END, and before a target BEGIN

    def write(tokens: int) -> None:
        long = list(PAIRS[split][5])
        long[side] = " ".join("7" * tokens)  # a blank and a digit are two tokens, if there are but bytes
        write_multi30k(tmp_path / "long", PAIRS | {split: [*PAIRS[split][:5], (long[0], long[1])]})

    write(room // 2)
    length = read(tmp_path, tmp_path / "long", 259).splits[split].lengths[5, side]
    assert multi30k.LONGEST - 1 <= length <= multi30k.LONGEST
    write(room)
    where = rf"Multi30K's {file}\.{language}: line 6 has 2,04\d tokens, and a text may have 1,024: .*vocabulary"
    refused(tmp_path, tmp_path / "long", where, 259)


def test_a_vocabulary_without_all_bytes_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    refused(tmp_path, None, "task.data.vocabulary=258 is too small: at least 259, one id a byte", 258)


def test_the_smallest_vocabulary_has_the_bytes(files: Path, tmp_path: Path) -> None:
    corpus = read(tmp_path, files, 259)
    assert corpus.spec.vocabulary == 259
    (ids,) = corpus.vocabulary.encode(["äé"])
    assert len(ids) == 1 + 4 + 1  # the blank before a word, two bytes a letter, END
    assert corpus.vocabulary.decode(ids) == "äé"


# The vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("vocabulary")
    write_multi30k(folder / "multi30k", PAIRS)
    return read(folder).vocabulary


def comes_back(vocabulary: Vocabulary, text: str) -> None:
    (ids,) = vocabulary.encode([text])
    assert ids[-1] == END
    assert (ids[:-1] > END).all()
    assert ids.max() < SIZE
    assert vocabulary.decode(ids) == unicodedata.normalize("NFC", text).strip()
    assert vocabulary.decode([BEGIN, *ids, 0, 0]) == vocabulary.decode(ids)


@pytest.mark.parametrize(
    "text",
    [
        *("Zwölf Boxkämpfer jagen Öl über die Straße.", "a\u0308 u\u0308ber", "two  blanks , and  commas .", "don't"),
        *("🥊👩\u200d🚀", "跳过懒狗。", "ça, ﷽ \x00\x07 \U0010ffff", "", " \t outer blanks\n"),
        *("<s> is no </s> of a text", "<pad>"),
    ],
)
def test_any_text_comes_back(text: str, vocabulary: Vocabulary) -> None:
    comes_back(vocabulary, text)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_at_all_comes_back(text: str, vocabulary: Vocabulary) -> None:
    comes_back(vocabulary, text)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=20))
def test_any_ids_are_text(ids: list[int], vocabulary: Vocabulary) -> None:
    """Even if a model writes half a character."""
    text = vocabulary.decode(ids)
    text.encode()
    assert text == text.strip()
    assert text == vocabulary.decode([id for id in ids if id > END])


def test_texts_are_encoded_each_by_itself(vocabulary: Vocabulary) -> None:
    texts = ["Ein Hund", "", "Ein Hund läuft im Schnee."]
    together = [ids.tolist() for ids in vocabulary.encode(texts)]
    assert together == [vocabulary.encode([text])[0].tolist() for text in texts]


def test_the_vocabulary_is_kept(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(tmp_path, files)
    (file,) = (tmp_path / "multi30k").iterdir()
    assert re.fullmatch(r"vocabulary-[0-9a-f]{8}\.json", file.name)
    with monkeypatch.context() as patch:
        patch.setattr(multi30k, "_train", None)  # calling it would be an error
        second = read(tmp_path, files)
    assert second.fingerprint == first.fingerprint
    assert [ids.tolist() for ids in second.splits["dev"].sources] == [
        ids.tolist() for ids in first.splits["dev"].sources
    ]


def test_the_vocabulary_made_anew_has_the_same_bytes(files: Path, tmp_path: Path) -> None:
    """In this process and in another, whose hashes have another seed."""
    first = read(tmp_path, files)
    (file,) = (tmp_path / "multi30k").iterdir()
    kept = file.read_bytes()
    file.unlink()
    assert read(tmp_path, files).fingerprint == first.fingerprint
    assert file.read_bytes() == kept
    file.unlink()
    code = f"from macformer.paper import multi30k; multi30k.load({str(tmp_path)!r}, {SIZE}, {ALL}, {str(files)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert file.read_bytes() == kept


def test_the_vocabulary_is_of_the_training_split_alone(files: Path, tmp_path: Path) -> None:
    """Other dev and test texts: the same byte pairs, and yet other data. Other training texts: other byte pairs."""
    others = {"dev": [("Quark mit Xylophon", "zigzag quiz")] * 50, "test": [("Quark", "zigzag")] * 50}
    corpora = [read(tmp_path, files)]
    for pairs in (PAIRS | others, PAIRS | {"train": others["dev"]}):
        write_multi30k(files, pairs)
        corpora.append(read(tmp_path, files))
    saved = [corpus.vocabulary.tokenizer.to_str() for corpus in corpora]
    assert saved[0] == saved[1] != saved[2]
    assert len({corpus.fingerprint for corpus in corpora}) == 3


def test_the_vocabulary_has_both_sides(files: Path, tmp_path: Path) -> None:
    """Words that are on one side alone are each one id."""
    pairs = [("Straßenbahn", "tramway")] * 5
    write_multi30k(files, dict.fromkeys(FILES, pairs))
    train = read(tmp_path, files).splits["train"]
    assert [len(train.sources[0]), len(train.targets[0])] == [2, 3]


def test_the_size_of_the_vocabulary_is_part_of_the_fingerprint(files: Path, tmp_path: Path) -> None:
    assert read(tmp_path, files).fingerprint != read(tmp_path, files, SIZE + 1).fingerprint


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", '"text"', '{"fingerprint": "0"}', '{"fingerprint": "0", "tokenizer": "{}"}'),
        "another tokenizer",
    ],
)
def test_a_damaged_vocabulary_is_named(damage: str, files: Path, tmp_path: Path) -> None:
    read(tmp_path, files)
    (file,) = (tmp_path / "multi30k").iterdir()
    if damage == "another tokenizer":  # that of other texts, under the right name
        write_multi30k(tmp_path / "others", PAIRS | {"train": captions()[100:160]})
        read(tmp_path / "elsewhere", tmp_path / "others")
        (other,) = (tmp_path / "elsewhere" / "multi30k").iterdir()
        damage = json.dumps(json.loads(file.read_text()) | {"tokenizer": json.loads(other.read_text())["tokenizer"]})
    file.write_text(damage)
    refused(tmp_path, files, f"{file} is damaged: delete it, and it will be made anew")


def test_a_vocabulary_of_other_texts_under_this_name_is_refused(files: Path, tmp_path: Path) -> None:
    read(tmp_path, files)
    (file,) = (tmp_path / "multi30k").iterdir()
    read(tmp_path / "elsewhere", files, SIZE + 1)
    (other,) = (tmp_path / "elsewhere" / "multi30k").iterdir()
    file.write_bytes(other.read_bytes())
    refused(tmp_path, files, f"{file} is damaged: delete it, and it will be made anew")


def test_the_ids_that_frame_a_target_are_those_of_the_search() -> None:
    """Data and models do not know each other."""
    assert (multi30k.PAD, multi30k.BEGIN, multi30k.END) == (0, translation.BEGIN, translation.END)


# The order of the pairs


def test_padding_is_behind_the_text(files: Path, tmp_path: Path) -> None:
    train = read(tmp_path, files).splits["train"]
    chosen = np.array([7, 3, 3, 41])
    for ids, texts in zip(train.batch(chosen), (train.sources, train.targets), strict=True):
        assert ids.dtype == np.int32
        assert ids.shape == (4, max(len(texts[i]) for i in chosen))
        for row, i in zip(ids, chosen, strict=True):
            assert row.tolist() == [*texts[i], *[0] * (ids.shape[1] - len(texts[i]))]


def some_lengths(pairs: int, longest: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(2, longest + 1, (pairs, 2))


@pytest.mark.parametrize(("pairs", "steps"), [(1000, 1), (1000, 7), (1000, 32), (1000, 33), (1000, 100)])
def test_an_epoch_has_every_pair_once_in_batches_of_as_many_tokens(pairs: int, steps: int) -> None:
    lengths = some_lengths(pairs)
    order = Batches(lengths, steps, 0)
    for epoch in (0, 1):
        batches = [order.indices(epoch * steps + step) for step in range(steps)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(pairs))
        tokens = [int(lengths[batch].sum()) for batch in batches]
        assert max(tokens) - min(tokens) <= 2 * lengths.sum(1).max()
        assert max(abs(count - lengths.sum() / steps) for count in tokens) <= lengths.sum(1).max()


DISTRIBUTIONS = {
    "equal": [3] * 50,
    "one giant": [1000, *[2] * 49],
    "few giants": [*[1000] * 3, *[2] * 47],
    "one dwarf": [2, *[1000] * 49],
    "doubling": [2**i for i in range(1, 51)],
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 49, 50])
def test_no_batch_is_empty(name: str, steps: int) -> None:
    lengths = np.array([DISTRIBUTIONS[name]] * 2).T
    for seed in range(3):
        batches = [Batches(lengths, steps, seed).indices(step) for step in range(steps)]
        assert min(map(len, batches)) >= 1
        assert sorted(np.concatenate(batches).tolist()) == list(range(50))


def test_a_batch_follows_from_seed_and_step_alone() -> None:
    """Forwards, backwards, at random, and asked by a fresh object each time."""
    lengths, steps = some_lengths(200), 7
    forwards = Batches(lengths, steps, 5)
    expected = {step: forwards.indices(step).tolist() for step in range(4 * steps)}
    other = Batches(lengths, steps, 5)
    for step in [*reversed(expected), *np.random.default_rng(0).permutation(list(expected)).tolist()]:
        assert other.indices(step).tolist() == expected[step]
    for step in (0, steps, 4 * steps - 1):
        assert Batches(lengths, steps, 5).indices(step).tolist() == expected[step]


def test_epochs_and_seeds_differ() -> None:
    lengths, steps = some_lengths(200), 7
    epochs = [
        tuple(tuple(order.indices(epoch * steps + step).tolist()) for step in range(steps))
        for order in (Batches(lengths, steps, seed) for seed in (0, 1))
        for epoch in (0, 1)
    ]
    for one, other in itertools.combinations(epochs, 2):
        assert one != other
        assert {frozenset(batch) for batch in one} != {frozenset(batch) for batch in other}


def test_pairs_of_like_length_meet_and_batches_come_in_no_order_of_length() -> None:
    """Less than a quarter of a batch is padding, where chance makes it nearly half."""
    lengths, steps = some_lengths(3000), 30  # sorted together
    lengths[:, 1] = lengths[:, 0]
    order = Batches(lengths, steps, 0)
    batches = [lengths[order.indices(step), 0] for step in range(steps)]
    padding = 1 - lengths[:, 0].sum() / sum(len(batch) * batch.max() for batch in batches)
    assert padding < 0.25
    longest = [int(batch.max()) for batch in batches]
    assert abs(np.corrcoef(longest, range(steps))[0, 1]) < 0.75  # at random: beyond with p < 1e-5


def test_the_corpus_orders_its_training_pairs(files: Path, tmp_path: Path) -> None:
    corpus = read(tmp_path, files)
    ours, expected = corpus.order(5, 3), Batches(corpus.splits["train"].lengths, 5, 3)
    assert [ours.indices(step).tolist() for step in range(7)] == [expected.indices(step).tolist() for step in range(7)]


def test_more_batches_than_pairs_are_refused() -> None:
    Batches(some_lengths(5), 5, 0)
    with pytest.raises(DataError, match=r"^trainer\.steps_per_epoch=6 is too many for 5 pairs: a batch has one$"):
        Batches(some_lengths(5), 6, 0)


@pytest.mark.data
def test_the_real_files_are_multi30k(shared_data: Path, tmp_path: Path) -> None:
    if not (shared_data / "multi30k").is_dir():
        pytest.skip(f"no real data: {shared_data}/multi30k is not there")
    corpus = read(tmp_path, shared_data / "multi30k", 4000)
    assert corpus.source == "multi30k"
    assert {split: len(pairs) for split, pairs in corpus.splits.items()} == {
        "train": 29_000,
        "dev": 1_014,
        "test": 1_000,
    }
    assert corpus.spec.vocabulary == 4000
    for pairs in corpus.splits.values():
        assert [corpus.vocabulary.decode(ids) for ids in pairs.targets] == pairs.references
