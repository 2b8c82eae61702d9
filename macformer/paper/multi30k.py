"""Multi30K: German captions and their English translations, as ids of one byte-pair vocabulary. Not a task of LRA.

The vocabulary is trained on both sides of the training split and kept in the data folder. It works on bytes: no text
has an unknown character, and what is decoded is plain text again. Id 0 is padding; BEGIN and END frame a target.
"""

import gzip
import hashlib
import json
import os
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import validate_call

from lra_data import base, hub
from lra_data.base import Caps, DataError
from macformer.harness import files

HUB = "bentrevett/multi30k"
FILES = {"train": "train", "dev": "val", "test": "test_2016_flickr"}  # split -> the name of its two files
HUB_FILES = {"train": "train.jsonl", "dev": "val.jsonl", "test": "test.jsonl"}
LANGUAGES = ("de", "en")  # source, target
PAD, BEGIN, END = 0, 1, 2
SPECIAL = ["<pad>", "<s>", "</s>"]
SMALLEST = len(SPECIAL) + 256  # vocabulary: every byte is in it
LONGEST = 1024  # tokens of a text, what frames it included: the translator has as many positions
WINDOW = 32  # batches whose pairs are sorted by length together
# sha256 over all texts of the three splits: whatever has another one is a stand-in.
MULTI30K = "e56e3756eefda4cccd1bbc761658e26ad2efcbcab269b5562f2cb9e99a79f7b9"
Ids = NDArray[np.int32]
Indices = NDArray[np.int64]
Texts = dict[str, tuple[list[str], list[str]]]  # of each split: sources and targets


@dataclass(frozen=True)
class Spec:
    """All that a model needs to know of the data."""

    vocabulary: int


@dataclass(frozen=True)
class Pairs:
    """One split, its ids without padding. A source ends with END; a target stands between BEGIN and END."""

    sources: list[Ids]
    targets: list[Ids]
    references: list[str]  # the targets as they stand in the file

    def __len__(self) -> int:
        return len(self.references)

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each source and target (pairs, 2)."""
        return np.array([[len(source), len(target)] for source, target in zip(self.sources, self.targets, strict=True)])

    def batch(self, indices: Indices) -> tuple[Ids, Ids]:
        """Sources (B, n) and targets (B, m), each padded with 0 to the longest."""
        return padded([self.sources[i] for i in indices]), padded([self.targets[i] for i in indices])


def padded(texts: list[Ids]) -> Ids:
    ids = np.full((len(texts), max(map(len, texts))), PAD, np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return ids


class Vocabulary:
    """Text <-> ids."""

    def __init__(self, saved: str):
        self.tokenizer = _tokenizers().Tokenizer.from_str(saved)
        self.tokenizer.encode_special_tokens = True  # "</s>" in a text is plain text

    def encode(self, texts: list[str]) -> list[Ids]:
        """Ids of each text, END behind them."""
        encoded = self.tokenizer.encode_batch([unicodedata.normalize("NFC", text) for text in texts])
        return [np.array([*text.ids, END], np.int32) for text in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """What a person reads; the ids that frame a text are left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()


@dataclass(frozen=True)
class Corpus:
    """Multi30K ready for use."""

    spec: Spec
    splits: dict[str, Pairs]
    vocabulary: Vocabulary
    fingerprint: str  # sha256 of the texts and the vocabulary
    source: base.Source
    majority: None = None  # there are no classes

    def order(self, steps_per_epoch: int, seed: int) -> "Batches":
        """The order in which a run of that seed sees the training pairs."""
        return Batches(self.splits["train"].lengths, steps_per_epoch, seed)


class Batches:
    """The endless order of the training pairs: every epoch is one seeded shuffle, in `steps_per_epoch` batches.

    Batches have equal numbers of tokens (source and target, to within a pair), not of pairs. Runs of WINDOW batches are
    sorted by the longer of the two texts before they are cut, every other one falling, so that pairs of like length
    meet (a tenth is padding then); then the batches are shuffled. The batch of a step follows from (seed, step) alone:
    a resumed run needs no state.
    """

    def __init__(self, lengths: Indices, steps_per_epoch: int, seed: int):
        if steps_per_epoch > len(lengths):
            raise DataError(
                f"trainer.steps_per_epoch={steps_per_epoch} is too many for {len(lengths)} pairs: a batch has one"
            )
        self.lengths, self.steps_per_epoch, self.seed = lengths, steps_per_epoch, seed
        self._epoch, self._batches = -1, list[Indices]()

    def indices(self, step: int) -> Indices:
        """Indices of the pairs of step 0, 1, ..."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._cut(epoch)
        return self._batches[place]

    def _cut(self, epoch: int) -> list[Indices]:
        rng, steps = np.random.default_rng((self.seed, epoch)), self.steps_per_epoch
        windows = np.array_split(rng.permutation(len(self.lengths)), -(-steps // WINDOW))
        by_length = [
            window[np.argsort(self.lengths[window].max(1), kind="stable")][:: -1 if number % 2 else 1]
            for number, window in enumerate(windows)
        ]
        order = np.concatenate(by_length)
        tokens = self.lengths[order].sum(1)
        ends = np.cumsum(tokens)
        # Where each batch ends, if all are to have the same number of tokens and one pair at least.
        places = np.arange(1, steps)
        cuts = np.searchsorted(ends - tokens / 2, ends[-1] * places / steps)
        cuts = np.maximum.accumulate(np.maximum(cuts - places, 0)) + places
        cuts = np.minimum(cuts, len(order) - steps + places)
        batches = np.split(order, cuts)
        return [batches[i] for i in rng.permutation(steps)]


@validate_call(config={"strict": True})
def load(folder: str, vocabulary: int, examples: Caps, origin: str | None = None) -> Corpus:
    """Multi30K from `origin`: a folder with train, val and test_2016_flickr, .de and .en, plain or gzipped, or "hub".

    By default that folder is `folder`/multi30k. `vocabulary` is the number of ids; `examples` caps the splits.
    """
    if vocabulary < SMALLEST:
        raise DataError(f"task.data.vocabulary={vocabulary} is too small: at least {SMALLEST}, one id a byte")
    texts = _read_hub() if origin in ("hub", HUB) else _read_files(Path(origin or Path(folder) / "multi30k"))
    whole = _digest(texts)
    limits: dict[str, Any] = {**examples}
    texts = {split: (texts[split][0][: limits[split]], texts[split][1][: limits[split]]) for split in base.SPLITS}
    fingerprint, words = _vocabulary(Path(folder), vocabulary, texts)
    splits = {}
    for split, (sources, targets) in texts.items():
        begin = np.array([BEGIN], np.int32)
        framed = [np.concatenate([begin, ids]) for ids in words.encode(targets)]
        splits[split] = Pairs(words.encode(sources), framed, targets)
        _check_lengths(split, splits[split])
    return Corpus(
        Spec(words.tokenizer.get_vocab_size()),
        splits,
        words,
        fingerprint,
        "multi30k" if whole == MULTI30K else "stand-in",
    )


def _check_lengths(split: str, pairs: Pairs) -> None:
    line, side = np.unravel_index(pairs.lengths.argmax(), pairs.lengths.shape)
    if (tokens := pairs.lengths[line, side]) > LONGEST:
        raise DataError(
            f"Multi30K's {FILES[split]}.{LANGUAGES[side]}: line {line + 1} has {tokens:,} tokens, and a text may have "
            f"{LONGEST:,}: shorten it, or raise task.data.vocabulary"
        )


def _vocabulary(folder: Path, size: int, texts: Texts) -> tuple[str, Vocabulary]:
    """Fingerprint and vocabulary, from the data folder or trained and put there."""
    key = hashlib.sha256(f"{size} {_digest(texts)}".encode()).hexdigest()
    file = folder / "multi30k" / f"vocabulary-{key[:8]}.json"
    if file.exists():
        kept = _kept(file)
        if not kept or kept["key"] != key:
            raise DataError(f"{file} is damaged: delete it, and it will be made anew")
        return kept["fingerprint"], Vocabulary(kept["tokenizer"])
    saved = _train(size, (text for side in texts["train"] for text in side))
    fingerprint = hashlib.sha256((key + saved).encode()).hexdigest()
    # Of two runs at once, both write the same.
    files.write(file, json.dumps({"fingerprint": fingerprint, "key": key, "tokenizer": saved}))
    return fingerprint, Vocabulary(saved)


def _kept(file: Path) -> dict[str, str] | None:
    """What the file holds, if that has its fingerprint."""
    try:
        kept = json.loads(file.read_text())
        fingerprint = hashlib.sha256((kept["key"] + kept["tokenizer"]).encode()).hexdigest()
        return kept if kept["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tokenizers() -> Any:
    try:
        import tokenizers  # of an extra
    except ModuleNotFoundError:
        raise DataError("tokenizers is not there: pip install 'macformer[translate]' (make setup does)") from None
    # Its threads do not outlive a fork, and runs have one core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return tokenizers


def _train(size: int, texts: Iterator[str]) -> str:
    """Byte pairs, joint over both languages. A word keeps the blank before it, so that decoding needs no rules."""
    parts = _tokenizers()
    tokenizer = parts.Tokenizer(parts.models.BPE())
    tokenizer.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = parts.decoders.ByteLevel()
    trainer = parts.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(parts.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((unicodedata.normalize("NFC", text) for text in texts), trainer)
    return tokenizer.to_str()


def _digest(texts: Texts) -> str:
    lines = (json.dumps(texts[split]) for split in base.SPLITS)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read_files(folder: Path) -> Texts:
    def missing(file: Path) -> NoReturn:
        raise DataError(
            f"Multi30K needs the file {file} (or {file.name}.gz), which is not there: put the raw files of Multi30K's "
            "task 1 there, or give their folder as paths.multi30k=FOLDER, or paths.multi30k=hub (Hugging Face)"
        )

    def lines(name: str) -> list[str]:
        plain = folder / name
        file = next((file for file in (folder / f"{name}.gz", plain) if file.is_file()), None) or missing(plain)
        try:
            content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            return content.decode().removesuffix("\n").split("\n")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read ({error}); get it again") from None

    return {
        split: _checked(f"{folder}/{name}", *([line.strip() for line in lines(f"{name}.{end}")] for end in LANGUAGES))
        for split, name in FILES.items()
    }


def _read_hub() -> Texts:
    instead = "put Multi30K's files into a folder and give that as paths.multi30k instead"
    there = hub.download(HUB, list(HUB_FILES.values()), "paths.multi30k=hub", instead)
    texts = {}
    for split, name in HUB_FILES.items():
        try:
            content = (there / name).read_bytes().decode()
            rows = [json.loads(line) for line in content.removesuffix("\n").split("\n")]
            sides = [[str(row[language]).strip() for row in rows] for language in LANGUAGES]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{there / name} cannot be read ({error!r}); {instead}") from None
        texts[split] = _checked(str(there / name), *sides)
    return texts


def _checked(where: str, sources: list[str], targets: list[str]) -> tuple[list[str], list[str]]:
    """The lines of both sides belong together, and there is something in each."""
    if len(sources) != len(targets):
        raise DataError(f"{where} has {len(sources)} German and {len(targets)} English lines; get the data again")
    for side, language in ((sources, "German"), (targets, "English")):
        if "" in side:
            raise DataError(f"{where}: line {side.index('') + 1} of the {language} side is empty; get the data again")
    return sources, targets
