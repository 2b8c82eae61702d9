"""Multi30K from its files: what is read and refused, its vocabulary, and the order of its pairs."""

import gzip
import itertools
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lra_data.base import DataError
from macformer.paper import multi30k
from macformer.paper.multi30k import BEGIN, END, FILES, LONGEST, Corpus, Vocabulary, batches
from tests.conftest import captions, write_multi30k

FINGERPRINT = "574ec4bf62d7b073183cf30a76ccc31cff47db232612abd53175b16235b54588"  # of the committed runs
SIZE = 300  # of the vocabulary
PAIRS = {"train": captions()[:60], "dev": captions()[60:70], "test": captions()[70:80]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the six plain files."""
    write_multi30k(tmp_path, PAIRS)
    return tmp_path


def read(folder: Path, vocabulary: int = SIZE) -> Corpus:
    return multi30k.load(folder, vocabulary)


def test_the_pairs_are_those_of_the_files_in_their_order(folder: Path) -> None:
    corpus = read(folder)
    assert corpus.source == "stand-in"
    assert len(corpus.vocabulary) == SIZE
    for split, pairs in PAIRS.items():
        ours = corpus.splits[split]
        assert len(ours) == len(pairs)
        assert ours.references == [english for _, english in pairs]
        assert [corpus.vocabulary.decode(ids.tolist()) for ids in ours.sources] == [german for german, _ in pairs]
        assert [corpus.vocabulary.decode(ids.tolist()) for ids in ours.targets] == ours.references
        assert ours.lengths.tolist() == [[len(s), len(t)] for s, t in zip(ours.sources, ours.targets, strict=True)]
        for source, target in zip(ours.sources, ours.targets, strict=True):
            assert (target[0], target[-1], source[-1]) == (BEGIN, END, END)
            assert min(*source[:-1], *target[1:-1]) > END


def test_how_a_file_is_written_does_not_count(folder: Path) -> None:
    """Gzipped or plain, line ends, outer blanks; but a line ends at a newline and nowhere else."""
    expected = read(folder).fingerprint
    for number, file in enumerate(sorted(folder.iterdir())):
        content = b" " + file.read_bytes().replace(b"\n", b" \r\n").removesuffix(b"\n")
        file.unlink()
        name, written = (file.name, content) if number % 2 else (f"{file.name}.gz", gzip.compress(content, mtime=0))
        file.with_name(name).write_bytes(written)
    assert read(folder).fingerprint == expected != read(folder, SIZE + 1).fingerprint
    for file in folder.iterdir():
        file.unlink()
    write_multi30k(folder, PAIRS | {"dev": [("Hund\x85läuft", "dog\u2028runs"), ("Katze\u2029sitzt", "cat sits")]})
    assert read(folder).splits["dev"].references == ["dog\u2028runs", "cat sits"]


# What is refused


def refused(folder: Path, sentence: str, vocabulary: int = SIZE) -> None:
    with pytest.raises(DataError, match=rf"\A{sentence}\Z"):
        read(folder, vocabulary)


@pytest.mark.parametrize("name", [f"{name}.{end}" for name in FILES.values() for end in ("de", "en")])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    refused(folder, rf"Multi30K needs the file {folder}/{name} \(or {name}.gz\), which is not there: .*--multi30k .*")


ZIPPED = gzip.compress(b"Ein Hund.\n" * 60, mtime=0)
UNREADABLE = [
    *[ZIPPED[:-9], b"no gzip", b"\x1f\x8b"],
    bytes([*ZIPPED[:12], *(255 - byte for byte in ZIPPED[12:24]), *ZIPPED[24:]]),
]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("val.en", b"One more.\n" * 11, "{}/val has 10 German and 11 English lines; get the data again"),
        ("train.de", b"Ein\nHund\n\n" * 20, "{}/train.de: line 3 is empty; get the data again"),
        ("val.en", b"a\n" * 6 + b" \t\n" + b"a\n" * 3, "{}/val.en: line 7 is empty; get the data again"),
        ("train.en", "A café.\n".encode("latin-1") * 60, r"{}/train.en cannot be read \('utf-8' .+\); get it again"),
        *(("train.de.gz", content, r"{}/train.de.gz cannot be read \(.+\); get it again") for content in UNREADABLE),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, sentence: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    refused(folder, sentence.format(folder))


@pytest.mark.parametrize(("split", "side"), [("train", 0), ("dev", 1), ("test", 0)])
def test_a_text_that_is_too_long_is_named(split: str, side: int, folder: Path) -> None:
    """Before anything is trained, not hours later."""
    room = LONGEST - 1 - side  # END, and before a target BEGIN

    def write(tokens: int) -> None:
        long = list(PAIRS[split][5])
        long[side] = " ".join("7" * tokens)  # a blank and a digit are two tokens, if there are but bytes
        write_multi30k(folder, PAIRS | {split: [*PAIRS[split][:5], (long[0], long[1])]})

    write(room // 2)
    assert LONGEST - 1 <= read(folder, 259).splits[split].lengths[5, side] <= LONGEST
    write(room)
    where = rf"{folder}/{FILES[split]}\.{('de', 'en')[side]}: line 6"
    refused(folder, rf"{where} has 2,04\d tokens, at most 1,024 fit: shorten it or raise --vocabulary", 259)


def test_the_smallest_vocabulary_has_the_bytes(folder: Path) -> None:
    refused(folder / "none", "--vocabulary 258 is too small: at least 259, an id for each byte", 258)
    vocabulary = read(folder, 259).vocabulary
    (ids,) = vocabulary.encode(["äé"])
    assert len(vocabulary) == 259
    assert len(ids) == 1 + 4 + 1  # the blank before a word, two bytes a letter, END
    assert vocabulary.decode(ids.tolist()) == "äé"


# The vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(SIZE, [text for pair in PAIRS["train"] for text in pair])


TEXTS = [
    *("Zwölf Boxkämpfer jagen Öl über die Straße.", "a\u0308 u\u0308ber", "two  blanks , and  commas .", "don't"),
    *("🥊👩\u200d🚀", "跳过懒狗。", "ça, ﷽ \x00\x07 \U0010ffff", "", " \t outer blanks\n"),
    *("<s> is no </s> of a text", "<pad>"),
]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(random=st.text(max_size=40))
def test_any_text_comes_back(random: str, vocabulary: Vocabulary) -> None:
    texts = [*TEXTS, random]
    for text, encoded in zip(texts, vocabulary.encode(texts), strict=True):
        assert torch.equal(encoded, vocabulary.encode([text])[0])  # each by itself
        ids = encoded.tolist()
        assert ids[-1] == END
        assert all(END < id < SIZE for id in ids[:-1])
        assert vocabulary.decode(ids) == unicodedata.normalize("NFC", text).strip()
        assert vocabulary.decode([BEGIN, *ids, 0, 0]) == vocabulary.decode(ids)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=20))
def test_any_ids_are_text(ids: list[int], vocabulary: Vocabulary) -> None:
    """Even if a model writes half a character."""
    text = vocabulary.decode(ids)
    text.encode()
    assert text == text.strip()
    assert text == vocabulary.decode([id for id in ids if id > END])


def test_the_vocabulary_is_of_both_sides_of_the_training_split_alone(folder: Path) -> None:
    """Other dev and test texts: the same byte pairs, and yet other data. Other training texts: other byte pairs."""
    others = {"dev": [("Quark mit Xylophon", "zigzag quiz")] * 50, "test": [("Quark", "zigzag")] * 50}
    corpora = [read(folder)]
    for pairs in (PAIRS | others, PAIRS | {"train": others["dev"]}):
        write_multi30k(folder, pairs)
        corpora.append(read(folder))
    saved = [corpus.vocabulary.tokenizer.to_str() for corpus in corpora]
    assert saved[0] == saved[1] != saved[2]
    assert len({corpus.fingerprint for corpus in corpora}) == 3
    write_multi30k(folder, dict.fromkeys(FILES, [("Straßenbahn", "tramway")] * 5))
    train = read(folder).splits["train"]
    assert [len(train.sources[0]), len(train.targets[0])] == [2, 3]  # words of one side alone are each one id


# The order of the pairs


def test_padding_is_behind_the_text(folder: Path) -> None:
    train = read(folder).splits["train"]
    chosen = np.array([7, 3, 3, 41])
    for ids, texts in zip(train.batch(chosen), (train.sources, train.targets), strict=True):
        assert ids.shape == (4, max(len(texts[i]) for i in chosen))
        for row, i in zip(ids.tolist(), chosen, strict=True):
            assert row == [*texts[i].tolist(), *[0] * (ids.shape[1] - len(texts[i]))]


def some_lengths(pairs: int, longest: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(2, longest + 1, (pairs, 2))


@pytest.mark.parametrize("steps", [1, 7, 32, 33, 100])
def test_an_epoch_has_every_pair_once_in_batches_of_as_many_tokens(steps: int) -> None:
    lengths = some_lengths(1000)
    for epoch in (0, 1):
        found = batches(lengths, steps, 0, epoch)
        assert len(found) == steps
        assert sorted(np.concatenate(found).tolist()) == list(range(1000))
        tokens = [int(lengths[batch].sum()) for batch in found]
        assert max(tokens) - min(tokens) <= 2 * lengths.sum(1).max()
        assert max(abs(count - lengths.sum() / steps) for count in tokens) <= lengths.sum(1).max()


EXTREMES = [[3] * 50, [1000, *[2] * 49], [*[1000] * 3, *[2] * 47], [2, *[1000] * 49], [2**i for i in range(1, 51)]]


@pytest.mark.parametrize("lengths", EXTREMES, ids=["equal", "one giant", "few giants", "one dwarf", "doubling"])
def test_no_batch_is_empty(lengths: list[int]) -> None:
    for steps, seed in itertools.product((1, 2, 31, 32, 33, 49, 50), range(3)):
        found = batches(np.array([lengths] * 2).T, steps, seed, 0)
        assert min(map(len, found)) >= 1
        assert sorted(np.concatenate(found).tolist()) == list(range(50))
    with pytest.raises(DataError, match=r"^--steps-per-epoch 51 is too many for 50 pairs: a batch needs at least one$"):
        batches(np.array([lengths] * 2).T, 51, 0, 0)


def test_seed_and_epoch_alone_decide() -> None:
    def order(seed: int, epoch: int) -> list[tuple[int, ...]]:
        return [tuple(batch) for batch in batches(some_lengths(200), 7, seed, epoch)]

    orders = {key: order(*key) for key in itertools.product((0, 1), (0, 1))}
    assert all(order(*key) == orders[key] for key in reversed(orders))
    for one, other in itertools.combinations(orders.values(), 2):
        assert {frozenset(batch) for batch in one} != {frozenset(batch) for batch in other}


def test_pairs_of_like_length_meet_and_batches_come_in_no_order_of_length() -> None:
    """Less than a quarter of a batch is padding, where chance makes it nearly half."""
    lengths, steps = some_lengths(3000), 30  # sorted together
    lengths[:, 1] = lengths[:, 0]
    found = [lengths[batch, 0] for batch in batches(lengths, steps, 0, 0)]
    assert 1 - lengths[:, 0].sum() / sum(len(batch) * batch.max() for batch in found) < 0.25
    longest = [int(batch.max()) for batch in found]
    assert abs(np.corrcoef(longest, range(steps))[0, 1]) < 0.75  # at random: beyond with p < 1e-5


@pytest.mark.data
def test_the_real_files_are_multi30k(shared_data: Path) -> None:
    corpus = read(shared_data / "multi30k", 4000)
    assert corpus.source == "multi30k"
    assert corpus.fingerprint == FINGERPRINT
    assert {split: len(pairs) for split, pairs in corpus.splits.items()} == {"train": 29000, "dev": 1014, "test": 1000}
    for pairs in corpus.splits.values():
        assert [corpus.vocabulary.decode(ids.tolist()) for ids in pairs.targets] == pairs.references
