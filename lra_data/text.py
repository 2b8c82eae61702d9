"""LRA Text: IMDb reviews as bytes. Label 1 = positive.

Three places have them: the archive aclImdb_v1.tar.gz (or the folder it unpacks to), the Hugging Face hub (or a folder
of its parquet files), and tensorflow-datasets. None of the three has the order of another, so that reviews are put
into one of their own, by the sha256 of their bytes: the packed data are the same, wherever they came from.
"""

import glob
import gzip
import hashlib
import importlib.util
import itertools
import logging
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

import numpy as np
from pydantic import NonNegativeInt, PositiveInt, validate_call
from tqdm import tqdm

from lra_data import base, hub
from lra_data.base import Caps, DataError, Example, Source, Task, TaskSpec

ARCHIVE, UNPACKED = "aclImdb_v1.tar.gz", "aclImdb"
ARCHIVE_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
HUB = "stanfordnlp/imdb"
TFDS = "imdb_reviews/plain_text"
PARTS = ("train", "test")
HELD_OUT = 0.1
# sha256 over the sha256 and label of every review, in our order: whatever has another one is a stand-in.
IMDB = {
    "train": "ded911cbb54d409e192021595d3b8a40176b35ab663af0fb8b6bfd7acf9bbf06",
    "test": "340290e10a3478d6774f31c5cfcb1976477898ff4c4d4527023973092ae394df",
}
_FILE = re.compile(r"\d+_\d+\.txt")  # number and rating
_MEMBER = re.compile(rf"(?:\./)?aclImdb/(train|test)/(neg|pos)/{_FILE.pattern}")
Reviews = dict[str, list[tuple[bytes, int]]]  # of each part: (review, label)


def spec(length: int) -> TaskSpec:
    return TaskSpec(base.BYTES, length, classes=2, paired=False)


@validate_call(config={"strict": True})
def load(
    folder: str,
    length: PositiveInt,
    max_length: PositiveInt,
    dev: Literal["test", "held-out"],
    examples: Caps,
    seed: NonNegativeInt,
    origin: str | None = None,
) -> Task:
    """IMDb packed on first use from `origin`.

    origin: an archive or a folder, "hub" or "tfds"; by default aclImdb_v1.tar.gz or aclImdb/ in `folder`. Of a folder
    of reviews, a new or missing file is noticed when it was packed before; a changed one is not.
    dev="test" is the base code's (the dev split IS the test split); "held-out" takes a seeded tenth of the
    training reviews, the same share of either label. `examples` caps the splits; null = all.
    """
    limits: dict[str, Any] = {**examples}
    base.check_length(length, max_length)
    name, files, read = _place(folder, origin)

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        reviews = read()
        digests = {part: _arrange(reviews[part], f"{name} in {origin or folder}, {part}") for part in PARTS}
        train, test = reviews["train"], reviews["test"]
        held = test
        if dev == "held-out":
            chosen = _hold_out([label for _, label in train], seed)
            held = [review for i, review in enumerate(train) if i in chosen]
            train = [review for i, review in enumerate(train) if i not in chosen]
        splits = {"train": train, "dev": held, "test": test}
        return "lra" if digests == IMDB else "stand-in", {
            split: (((review[:max_length],), label) for review, label in itertools.islice(splits[split], limits[split]))
            for split in base.SPLITS
        }

    settings = {
        "max_length": max_length,
        "dev": dev,
        "examples": limits,
        "seed": seed if dev == "held-out" else None,
    }
    return base.cached(folder, "text", spec(length), settings, build, base.as_text, name, files)


def _place(folder: str, origin: str | None) -> tuple[str | None, dict[str, Path], Callable[[], Reviews]]:
    """Name of the place, the files there, and what reads them."""
    if origin in ("hub", HUB):
        return f"hub {HUB}", {}, lambda: _read_parquet(_download())
    if origin == "tfds":
        return f"tfds {TFDS}", {}, _read_tfds
    root = Path(origin or folder)
    places = [root / ARCHIVE, root / UNPACKED] + ([root] if origin else [])
    path = next((path for path in places if path.exists()), None)
    if path is None:

        def missing() -> NoReturn:
            raise DataError(
                f"task=text needs {origin or places[0]}, which is not there: put the IMDb archive there (Large Movie "
                f"Review Dataset v1.0), then run `{base.command('text', folder, origin)}`; or run it with "
                "paths.text=hub (Hugging Face) or paths.text=tfds"
            )

        if origin:  # a place that was named must be there, packed data or not
            missing()
        return None, {}, missing
    if path.is_file():
        return path.name, {path.name: path}, lambda: _read_archive(path)
    leaves = {f"{part}/{sentiment}": path / part / sentiment for part in PARTS for sentiment in ("neg", "pos")}
    if leaves["train/neg"].is_dir():
        return f"{path.name}/", leaves, lambda: _read_folder(path)
    parquet = {str(file.relative_to(path)): file for file in sorted(path.rglob("*.parquet"))}
    return f"{path.name}/*.parquet", parquet, lambda: _read_parquet(path)


def _arrange(reviews: list[tuple[bytes, int]], where: str) -> str:
    """Check the reviews of a part, put them into our order, and return the sha256 of what they are."""
    positive = sum(label for _, label in reviews)
    if not reviews or 2 * positive != len(reviews):
        raise DataError(f"{where}: {positive} positive of {len(reviews)} reviews, not one half; get the data again")
    keyed = sorted((hashlib.sha256(review).digest() + bytes([label]), review, label) for review, label in reviews)
    reviews[:] = [(review, label) for _, review, label in keyed]
    return hashlib.sha256(b"".join(key for key, _, _ in keyed)).hexdigest()


def _hold_out(labels: list[int], seed: int) -> set[int]:
    """Places of a tenth of the negative and a tenth of the positive reviews."""
    rng = np.random.default_rng(seed)
    places = (rng.permutation(np.flatnonzero(np.equal(labels, label))) for label in (0, 1))
    return {int(i) for of_label in places for i in of_label[: round(HELD_OUT * len(of_label))]}


def _review(content: bytes, name: str) -> bytes:
    """Without white space at the ends, as tensorflow-datasets has it (the real ones have none)."""
    review = content.strip()
    if not review:
        raise DataError(f"{name} is empty; get the data again")
    return review


def _read_archive(archive: Path) -> Reviews:
    """Read as a stream, nothing is unpacked. Read to its end, where the checksum is."""
    found: dict[str, dict[str, tuple[bytes, int]]] = {part: {} for part in PARTS}
    try:
        with gzip.open(archive) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tqdm(tar, f"reading {archive.name}", unit=" files", mininterval=1):
                    path = PurePosixPath(member.name)
                    if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                        raise DataError(
                            f"{archive}: its member {member.name} is a link or leads out of the archive: this is not "
                            "the IMDb archive; get it again"
                        )
                    if name := _MEMBER.fullmatch(member.name):
                        part, sentiment = name.groups()
                        file = tar.extractfile(member)
                        review = _review(file.read() if file else b"", f"{archive}: {member.name}")
                        found[part][member.name] = review, int(sentiment == "pos")
            while stream.read(2**20):
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive} cannot be read ({error}); get the archive again") from None
    return {part: list(reviews.values()) for part, reviews in found.items()}


def _read_folder(folder: Path) -> Reviews:
    """The unpacked archive."""
    found: Reviews = {part: [] for part in PARTS}
    for part in PARTS:
        for label, sentiment in enumerate(("neg", "pos")):
            files = [file for file in (folder / part / sentiment).iterdir() if _FILE.fullmatch(file.name)]
            for file in tqdm(files, f"reading {part}/{sentiment}", unit=" files", mininterval=1):
                found[part].append((_review(file.read_bytes(), str(file)), label))
    return found


def _read_parquet(folder: Path) -> Reviews:
    """The hub's layout: train-*.parquet and test-*.parquet, in `folder` or below, with columns text and label."""
    files = {part: sorted(glob.escape(str(file)) for file in folder.rglob(f"{part}*.parquet")) for part in PARTS}
    for part in PARTS:
        if not files[part]:
            raise DataError(
                f"{folder} has neither {part}/neg and {part}/pos, as the IMDb archive has, nor {part}-*.parquet, as "
                "the hub has: give the folder that does"
            )

    import datasets  # takes seconds

    found: Reviews = {part: [] for part in PARTS}
    for part in PARTS:
        try:
            # Streaming: nothing is copied into a cache of its own.
            rows = datasets.load_dataset("parquet", data_files=files, split=part, streaming=True)
            for number, row in enumerate(tqdm(rows, f"reading {part}", unit=" reviews", mininterval=1)):
                found[part].append(_row(row["text"], row["label"], f"{folder}, {part}, row {number}"))
        except DataError:
            raise
        except Exception as error:  # of pyarrow, fsspec or datasets, or a column that is not there
            raise DataError(f"{folder}, {part}: its files cannot be read ({error!r}); get them again") from None
    return found


def _row(text: Any, label: Any, where: str) -> tuple[bytes, int]:
    """A review out of a table."""
    if not isinstance(text, str | bytes):
        raise DataError(f"{where}: the text is {text!r}; get the data again")
    if label not in (0, 1):
        raise DataError(f"{where}: the label is {label!r}, not 0 or 1; get the data again")
    return _review(text.encode() if isinstance(text, str) else text, where), int(label)


def _download() -> Path:
    instead = f"put {ARCHIVE} into paths.data instead, or give a folder of its parquet files as paths.text"
    return hub.download(HUB, [f"*/{part}-*.parquet" for part in PARTS], "paths.text=hub", instead)


def _read_tfds() -> Reviews:
    """As tensorflow-datasets has prepared it, or prepares it now, in its own folder (TFDS_DATA_DIR)."""
    import tensorflow_datasets as tfds

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of a folder that is not there
    instead = f"put {ARCHIVE} into paths.data instead"
    tensorflow = importlib.util.find_spec("tensorflow")
    found: Reviews = {part: [] for part in PARTS}
    try:
        home = os.environ.get("TFDS_DATA_DIR")  # else its default; read here, not when it is imported
        builder = tfds.builder(TFDS, data_dir=home)
        if not builder.is_prepared():
            if not tensorflow:
                raise DataError(
                    f"paths.text=tfds: {builder.data_dir} is not there, and tensorflow-datasets needs TensorFlow to "
                    f"make it: pip install 'macformer[tfds]', or {instead}"
                )
            if not hub.answers(ARCHIVE_URL):
                raise DataError(f"paths.text=tfds: {ARCHIVE_URL} cannot be reached; {instead}")
            builder = tfds.builder(TFDS, data_dir=home, file_format="array_record")  # to be read without TensorFlow
            builder.download_and_prepare()
        random_access = builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD
        if not random_access and not tensorflow:
            raise DataError(
                f"paths.text=tfds: {builder.data_dir} is in a format that only TensorFlow reads: pip install "
                f"'macformer[tfds]', or {instead}"
            )
        for part in PARTS:
            told = builder.info.splits[part].num_examples
            rows = builder.as_data_source(part) if random_access else tfds.as_numpy(builder.as_dataset(split=part))
            for number, row in enumerate(tqdm(rows, f"reading {part}", told, unit=" reviews", mininterval=1)):
                found[part].append(_row(row["text"], row["label"], f"{builder.data_dir}, {part}, row {number}"))
            if len(found[part]) != told:  # some of its formats lose rows
                raise DataError(f"{builder.data_dir}: {len(found[part])} of {told} {part} reviews; {instead}")
    except DataError:
        raise
    except Exception as error:  # of tensorflow-datasets: there are many
        raise DataError(f"paths.text=tfds: {TFDS} cannot be read ({error!r}); {instead}") from None
    return found
