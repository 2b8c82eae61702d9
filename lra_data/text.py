"""LRA Text: IMDb reviews as bytes. Label 1 = positive.

Three places have them: the archive aclImdb_v1.tar.gz (or the folder it unpacks to), the Hugging Face hub (or a folder
of its parquet files), and tensorflow-datasets. None of the three has the order of another, so that reviews are put
into one of their own, by the sha256 of their bytes: the packed data are the same, wherever they came from.
"""

import glob
import gzip
import hashlib
import logging
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import compress
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from pydantic import NonNegativeInt, PositiveInt, validate_call
from tqdm import tqdm

from lra_data.base import BYTES, Caps, DataError, Example, Source, Task, TaskSpec, cached, check_length

ARCHIVE, UNPACKED = "aclImdb_v1.tar.gz", "aclImdb"
HUB = "stanfordnlp/imdb"
TFDS = "imdb_reviews/plain_text"
PATIENCE = 2.0  # seconds for the hub to answer
INSTEAD = f"put {ARCHIVE} into paths.data instead"
PARTS = ("train", "test")
FOLDERS = [f"{part}/{sentiment}" for part in PARTS for sentiment in ("neg", "pos")]
_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos)/\d+_\d+\.txt")  # number and rating
HELD_OUT = 0.1
# sha256 over the sha256 and label of every review, in our order: whatever has another one is a stand-in.
IMDB = "1868f694ca8e37518c1944243ce6c04ea243f37560e74290c721840162cc00fd"
Row = tuple[str, Any, Any, str]  # part, text, label, and where they stand
Review = tuple[bytes, bytes, int]  # the key of our order, text, label

spec = partial(TaskSpec, BYTES, classes=2, paired=False)


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
    check_length(length, max_length)
    name, files, rows = _find(folder, origin)

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        place = f"{origin or folder}: {name}"
        try:
            source, train, test = _arranged(rows, place)
        except DataError:
            raise
        except Exception as error:  # the libraries that read have many
            raise DataError(f"{place} cannot be read ({error!r}); get the data again, or {INSTEAD}") from None
        splits = {"train": train, "dev": test, "test": test}
        if dev == "held-out":  # of either label
            rng, labels = np.random.default_rng(seed), np.array([label for _, _, label in train])
            held = np.zeros(len(train), bool)
            for label in (0, 1):
                held[rng.permutation(np.flatnonzero(labels == label))[: round(HELD_OUT * len(train) / 2)]] = True
            splits |= {"train": list(compress(train, ~held)), "dev": list(compress(train, held))}
        return source, {
            split: (((text[:max_length],), label) for _, text, label in reviews) for split, reviews in splits.items()
        }

    settings = {"max_length": max_length, "dev": dev, "seed": seed if dev == "held-out" else None}
    hint = "put the IMDb archive there (Large Movie Review Dataset v1.0; paths.text=hub or =tfds needs none)"
    return cached(folder, "text", spec(length), settings, examples, build, name, files, place=origin, hint=hint)


def _find(folder: str, origin: str | None) -> tuple[str | None, dict[str, Path], Iterable[Row]]:
    """Name of the place, the files there, and the reviews."""
    if origin in ("hub", HUB):
        return f"hub {HUB}", {}, _read_hub()
    if origin == "tfds":
        return f"tfds {TFDS}", {}, _read_tfds()
    root = Path(origin or folder)
    places = [root / ARCHIVE, root / UNPACKED] + ([root] if origin else [])
    path = next((path for path in places if path.exists()), root if origin else places[0])
    if not path.is_dir():
        return path.name if path.exists() else None, {path.name: path}, _read_archive(path)
    if (path / FOLDERS[0]).is_dir():
        return f"{path.name}/", {name: path / name for name in FOLDERS}, _read_folder(path)
    parquet = {str(file.relative_to(path)): file for file in sorted(path.rglob("*.parquet"))}
    return f"{path.name}/*.parquet", parquet, _read_parquet(path)


def _arranged(rows: Iterable[Row], place: str) -> tuple[Source, list[Review], list[Review]]:
    """Whose reviews they are, and those of train and of test, checked and in our order."""
    parts: dict[str, list[Review]] = {part: [] for part in PARTS}
    for part, text, label, where in tqdm(rows, "reading IMDb", unit=" reviews", delay=1, mininterval=1):
        review = text.encode() if isinstance(text, str) else text
        # tensorflow-datasets strips them; the real ones have no white space at their ends
        if not isinstance(review, bytes) or not (review := review.strip()):
            raise DataError(f"{where}: the text is {text!r}; get the data again")
        if label not in (0, 1):
            raise DataError(f"{where}: the label is {label}, not 0 or 1; get the data again")
        parts[part].append((hashlib.sha256(review).digest() + bytes([int(label)]), review, int(label)))
    digest = hashlib.sha256()
    for part, reviews in parts.items():
        positive = sum(label for _, _, label in reviews)
        if not reviews or 2 * positive != len(reviews):
            raise DataError(f"{place}, {part}: {positive} positive of {len(reviews)} reviews, not half; get them again")
        reviews.sort()
        digest.update(b"".join(key for key, _, _ in reviews))
    return "lra" if digest.hexdigest() == IMDB else "stand-in", parts["train"], parts["test"]


def _read_archive(archive: Path) -> Iterator[Row]:
    """Read as a stream, nothing is unpacked. Read to its end, where the checksum is."""
    with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            if member.isfile() and (path := _MEMBER.fullmatch(member.name)):
                content = cast(IO[bytes], tar.extractfile(member)).read()
                yield path[1], content, path[2] == "pos", f"{archive}: {member.name}"
        while stream.read(2**20):
            pass


def _read_folder(folder: Path) -> Iterator[Row]:
    """The unpacked archive."""
    for name in FOLDERS:
        part, sentiment = name.split("/")
        for file in (folder / name).glob("[0-9]*_[0-9]*.txt"):  # a Mac leaves others there
            yield part, file.read_bytes(), sentiment == "pos", str(file)


def _read_parquet(folder: Path) -> Iterator[Row]:
    """The hub's layout: train-*.parquet and test-*.parquet, in `folder` or below, with columns text and label."""
    import datasets  # takes seconds

    for part in PARTS:
        files = sorted(glob.escape(str(file)) for file in folder.rglob(f"{part}*.parquet"))
        if not files:
            what = f"neither {part}/neg and {part}/pos, as the IMDb archive has, nor {part}-*.parquet, as the hub has"
            raise DataError(f"{folder} has {what}: give the folder that does")
        # Streaming: nothing is copied into a cache of its own.
        rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        for number, row in enumerate(rows):
            yield part, row["text"], row["label"], f"{folder}, {part}, row {number}"


def _read_hub() -> Iterator[Row]:
    """From the hub, or from its cache on this machine if the hub cannot be reached."""
    from huggingface_hub import constants, dataset_info, snapshot_download

    unreachable, wanted = "", [f"*/{part}-*.parquet" for part in PARTS]
    try:  # snapshot_download alone would wait without end for a server that does not answer
        dataset_info(HUB, timeout=PATIENCE)
    except Exception:  # of the network or of the hub: there are many
        unreachable = f"{constants.ENDPOINT} cannot be reached"
    try:
        folder = snapshot_download(HUB, repo_type="dataset", allow_patterns=wanted, local_files_only=bool(unreachable))
    except Exception as error:
        what = f"paths.text=hub: {HUB} cannot be had ({unreachable or repr(error)}) and is not cached on this machine"
        raise DataError(f"{what}; {INSTEAD}, or give a folder of its parquet files as paths.text") from None
    yield from _read_parquet(Path(folder))


def _read_tfds() -> Iterator[Row]:
    """As tensorflow-datasets has prepared it in its own folder (TFDS_DATA_DIR)."""
    import tensorflow_datasets as tfds

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of a folder that is not there
    builder = tfds.builder(TFDS, data_dir=os.environ.get("TFDS_DATA_DIR"))  # read here, not at its import
    if not builder.is_prepared():
        commands = "`pip install 'macformer[tfds]'` and `tfds build imdb_reviews --file_format=array_record`"
        raise DataError(f"paths.text=tfds: {builder.data_dir} is not there: make it with {commands}, or {INSTEAD}")
    random_access = builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD  # the others need TensorFlow
    for part in PARTS:
        rows = builder.as_data_source(part) if random_access else tfds.as_numpy(builder.as_dataset(split=part))
        rows, total = list(rows), builder.info.splits[part].num_examples
        if len(rows) != total:  # some of its formats lose rows
            raise DataError(f"{builder.data_dir}: {len(rows)} of {total} {part} reviews; {INSTEAD}")
        for number, row in enumerate(rows):
            yield part, row["text"], row["label"], f"{builder.data_dir}, {part}, row {number}"
