"""Multi30K: German captions and their English translations, as ids of one byte-pair vocabulary.

The vocabulary is trained on both sides of the training split. It works on bytes: no text has an unknown character, and
decoded ids are plain text again. Id 0 is padding; a source ends with END, and a target stands between BEGIN and END.
"""

import gzip
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lra_data.base import SPLITS, DataError

FILES = {"train": "train", "dev": "val", "test": "test_2016_flickr"}  # split -> name of its two files
LANGUAGES = ("de", "en")  # source, target
PAD, BEGIN, END = 0, 1, 2
LONGEST = 1024  # tokens of a text
SPECIAL = ["<pad>", "<s>", "</s>"]
SMALLEST = len(SPECIAL) + 256  # vocabulary: every byte is in it
WINDOW = 32  # batches whose pairs are sorted by length together
# sha256 of all texts of the three splits. Any other data are called a stand-in.
MULTI30K = "e56e3756eefda4cccd1bbc761658e26ad2efcbcab269b5562f2cb9e99a79f7b9"
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """One split, its ids without padding."""

    sources: list[Tensor]
    targets: list[Tensor]
    references: list[str]  # the targets as they stand in the file

    def __len__(self) -> int:
        return len(self.references)

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each source and target (pairs, 2)."""
        return np.array([[len(source), len(target)] for source, target in zip(self.sources, self.targets, strict=True)])

    def batch(self, indices: Indices) -> list[Tensor]:
        """Sources (B, n) and targets (B, m), each padded with 0 to the longest."""
        return [pad_sequence([side[i] for i in indices], batch_first=True) for side in (self.sources, self.targets)]


class Vocabulary:
    """Text <-> ids: byte pairs, trained on the texts."""

    def __init__(self, size: int, texts: Iterable[str]):
        blanks = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)  # a word keeps the blank before it
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, initial_alphabet=sorted(blanks.alphabet()), show_progress=False
        )
        self.tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
        self.tokenizer.pre_tokenizer, self.tokenizer.decoder = blanks, tokenizers.decoders.ByteLevel()
        self.tokenizer.train_from_iterator((unicodedata.normalize("NFC", text) for text in texts), trainer)
        self.tokenizer.encode_special_tokens = True  # "</s>" in a text is plain text

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, texts: list[str], *begin: int) -> list[Tensor]:
        """Ids of each text between `begin` and END."""
        encoded = self.tokenizer.encode_batch([unicodedata.normalize("NFC", text) for text in texts])
        return [torch.tensor([*begin, *text.ids, END], dtype=torch.int32) for text in encoded]

    def decode(self, ids: list[int]) -> str:
        """Plain text. Padding, BEGIN and END are left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()


@dataclass(frozen=True)
class Corpus:
    splits: dict[str, Pairs]
    vocabulary: Vocabulary
    fingerprint: str  # sha256 of the texts and the vocabulary
    source: Literal["multi30k", "stand-in"]


def load(folder: Path, vocabulary: int) -> Corpus:
    """Multi30K from a folder with {train,val,test_2016_flickr}.{de,en}, plain or gzipped; `vocabulary` ids."""
    if vocabulary < SMALLEST:
        raise DataError(f"--vocabulary {vocabulary} is too small: at least {SMALLEST}, an id for each byte")
    texts = {split: [_read_lines(folder / f"{name}.{end}") for end in LANGUAGES] for split, name in FILES.items()}
    digest = _sha256("\n".join(json.dumps(texts[split]) for split in SPLITS))
    words, splits = Vocabulary(vocabulary, chain(*texts["train"])), dict[str, Pairs]()
    for split, (german, english) in texts.items():
        file = folder / FILES[split]
        if len(german) != len(english):
            raise DataError(f"{file} has {len(german)} German and {len(english)} English lines; get the data again")
        splits[split] = pairs = Pairs(words.encode(german), words.encode(english, BEGIN), english)
        line, side = np.unravel_index(pairs.lengths.argmax(), pairs.lengths.shape)
        if (tokens := pairs.lengths[line, side]) > LONGEST:
            where = f"{file}.{LANGUAGES[side]}: line {line + 1}"
            raise DataError(f"{where} has {tokens:,} tokens, at most {LONGEST:,} fit: shorten it or raise --vocabulary")
    fingerprint = _sha256(_sha256(f"{vocabulary} {digest}") + words.tokenizer.to_str())
    return Corpus(splits, words, fingerprint, "multi30k" if digest == MULTI30K else "stand-in")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_lines(plain: Path) -> list[str]:
    """The lines of that file, or of its gzipped copy beside it."""
    zipped = plain.with_name(f"{plain.name}.gz")
    file = zipped if zipped.is_file() else plain
    try:
        content = gzip.decompress(file.read_bytes()) if file == zipped else file.read_bytes()
        lines = [line.strip() for line in content.decode().removesuffix("\n").split("\n")]
    except FileNotFoundError:
        says = f"Multi30K needs the file {plain} (or {zipped.name}), which is not there"
        raise DataError(f"{says}: put its task 1's raw files there, or give --multi30k FOLDER") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); get it again") from None
    if "" in lines:
        raise DataError(f"{plain}: line {lines.index('') + 1} is empty; get the data again")
    return lines


def batches(lengths: Indices, steps: int, seed: int, epoch: int) -> list[Indices]:
    """All pairs in the `steps` batches of an epoch: their indices, in an order of this seed and epoch.

    Batches have equal numbers of tokens (source and target, to within a pair), not of pairs. Runs of WINDOW batches are
    sorted by the longer of the two texts before they are cut, every other one descending, so that pairs of like length
    meet (a tenth is padding then); then the batches are shuffled.
    """
    if steps > len(lengths):
        raise DataError(f"--steps-per-epoch {steps} is too many for {len(lengths)} pairs: a batch needs at least one")
    rng = np.random.default_rng((seed, epoch))
    windows = np.array_split(rng.permutation(len(lengths)), -(-steps // WINDOW))
    by_length = [window[np.argsort(lengths[window].max(1), kind="stable")] for window in windows]
    order = np.concatenate([window[:: (-1) ** number] for number, window in enumerate(by_length)])
    tokens = lengths[order].sum(1)
    ends, ordinals = np.cumsum(tokens), np.arange(1, steps)
    # Where each batch ends, if all are to have the same number of tokens and at least one pair.
    spare = np.searchsorted(ends - tokens / 2, ends[-1] * ordinals / steps) - ordinals
    spare = np.maximum.accumulate(np.clip(spare, 0, len(order) - steps))
    found = np.split(order, spare + ordinals)
    return [found[i] for i in rng.permutation(steps)]
