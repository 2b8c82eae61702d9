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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NoReturn, cast

import numpy as np
from pydantic import NonNegativeInt, PositiveInt, validate_call
from tqdm import tqdm

from lra_data import hub
from lra_data.base import BYTES, Caps, DataError, Example, Source, Task, TaskSpec, cached
from lra_data.lines import check_length, missing

ARCHIVE, UNPACKED = "aclImdb_v1.tar.gz", "aclImdb"
HUB = "stanfordnlp/imdb"
TFDS = "imdb_reviews/plain_text"
PARTS = ("train", "test")
FOLDERS = [f"{part}/{sentiment}" for part in PARTS for sentiment in ("neg", "pos")]
HELD_OUT = 0.1
# sha256 over the sha256 and label of every review, in our order: whatever has another one is a stand-in.
IMDB = {
    "train": "ded911cbb54d409e192021595d3b8a40176b35ab663af0fb8b6bfd7acf9bbf06",
    "test": "340290e10a3478d6774f31c5cfcb1976477898ff4c4d4527023973092ae394df",
}
_FILE = re.compile(r"\d+_\d+\.txt")  # number and rating
_MEMBER = re.compile(rf"(?:\./)?aclImdb/(?:{'|'.join(FOLDERS)})/{_FILE.pattern}")
Reviews = dict[str, list[tuple[bytes, int]]]  # of each part: (review, label)
Row = tuple[str, Any, Any, str]  # part, text, label, and where they stand


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
    name, files, read = _find(folder, origin)

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        reviews = _checked(read())
        digests = {part: _arrange(reviews[part], f"{name} in {origin or folder}, {part}") for part in PARTS}
        splits = {"train": reviews["train"], "dev": reviews["test"], "test": reviews["test"]}
        if dev == "held-out":
            held = _hold_out([label for _, label in reviews["train"]], seed)
            for split, is_held in (("train", False), ("dev", True)):
                splits[split] = [review for i, review in enumerate(reviews["train"]) if (i in held) == is_held]
        return "lra" if digests == IMDB else "stand-in", {
            split: (((review[:max_length],), label) for review, label in chosen) for split, chosen in splits.items()
        }

    settings = {"max_length": max_length, "dev": dev, "seed": seed if dev == "held-out" else None}
    return cached(folder, "text", spec(length), settings, examples, build, name, files)


def _find(folder: str, origin: str | None) -> tuple[str | None, dict[str, Path], Callable[[], Iterable[Row]]]:
    """Name of the place, the files there, and what reads them."""
    if origin in ("hub", HUB):
        return f"hub {HUB}", {}, _read_hub
    if origin == "tfds":
        return f"tfds {TFDS}", {}, _read_tfds
    root = Path(origin or folder)
    places = [root / ARCHIVE, root / UNPACKED] + ([root] if origin else [])
    path = next((path for path in places if path.exists()), None)
    if path is None:
        hint = "put the IMDb archive there (Large Movie Review Dataset v1.0)"
        otherwise = "; or run it with paths.text=hub (Hugging Face) or paths.text=tfds"
        error = missing("text", folder, origin, origin or str(places[0]), hint, otherwise)
        if origin:  # a place that was named must be there, packed data or not
            raise error
        return None, {}, partial(_raise, error)
    if path.is_file():
        return path.name, {path.name: path}, partial(_read_archive, path)
    if (path / FOLDERS[0]).is_dir():
        return f"{path.name}/", {name: path / name for name in FOLDERS}, partial(_read_folder, path)
    parquet = {str(file.relative_to(path)): file for file in sorted(path.rglob("*.parquet"))}
    return f"{path.name}/*.parquet", parquet, partial(_read_parquet, path)


def _raise(error: DataError) -> NoReturn:
    raise error


def _checked(rows: Iterable[Row]) -> Reviews:
    """The reviews without white space at the ends, as tensorflow-datasets has them (the real ones have none)."""
    found: Reviews = {part: [] for part in PARTS}
    for part, text, label, where in rows:
        if not isinstance(text, str | bytes):
            raise DataError(f"{where}: the text is {text!r}; get the data again")
        if label not in (0, 1):
            raise DataError(f"{where}: the label is {label!r}, not 0 or 1; get the data again")
        review = (text.encode() if isinstance(text, str) else text).strip()
        if not review:
            raise DataError(f"{where} is empty; get the data again")
        found[part].append((review, int(label)))
    return found


def _arrange(reviews: list[tuple[bytes, int]], where: str) -> str:
    """Check the labels of a part, put its reviews into our order, and return the sha256 of what they are."""
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


@contextmanager
def _explained(what: str, instead: str) -> Iterator[None]:
    """One sentence for whatever a library says of data that it cannot read, or of a column that is not there."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # libraries have many
        raise DataError(f"{what} cannot be read ({error!r}); {instead}") from None


def _read_archive(archive: Path) -> Iterator[Row]:
    """Read as a stream, nothing is unpacked. Read to its end, where the checksum is."""
    with _explained(str(archive), "get the archive again"), gzip.open(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tqdm(tar, f"reading {archive.name}", unit=" files", mininterval=1):
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise DataError(
                        f"{archive}: its member {member.name} is a link or leads out of the archive: this is not "
                        "the IMDb archive; get it again"
                    )
                if _MEMBER.fullmatch(member.name):
                    content = cast(IO[bytes], tar.extractfile(member)).read()
                    yield path.parts[-3], content, path.parts[-2] == "pos", f"{archive}: {member.name}"
        while stream.read(2**20):
            pass


def _read_folder(folder: Path) -> Iterator[Row]:
    """The unpacked archive."""
    for name in FOLDERS:
        files = [file for file in (folder / name).glob("*.txt") if _FILE.fullmatch(file.name)]
        for file in tqdm(files, f"reading {name}", unit=" files", mininterval=1):
            yield name.partition("/")[0], file.read_bytes(), name.endswith("pos"), str(file)


def _read_parquet(folder: Path) -> Iterator[Row]:
    """The hub's layout: train-*.parquet and test-*.parquet, in `folder` or below, with columns text and label."""
    import datasets  # takes seconds

    for part in PARTS:
        files = sorted(glob.escape(str(file)) for file in folder.rglob(f"{part}*.parquet"))
        if not files:
            raise DataError(
                f"{folder} has neither {part}/neg and {part}/pos, as the IMDb archive has, nor {part}-*.parquet, as "
                "the hub has: give the folder that does"
            )
        with _explained(f"{folder}, {part}: its files", "get them again"):
            # Streaming: nothing is copied into a cache of its own.
            rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
            yield from _rows(part, rows, f"{folder}, {part}")


def _rows(part: str, rows: Iterable[Any], where: str) -> Iterator[Row]:
    for number, row in enumerate(tqdm(rows, f"reading {part}", unit=" reviews", mininterval=1)):
        yield part, row["text"], row["label"], f"{where}, row {number}"


def _read_hub() -> Iterator[Row]:
    instead = f"put {ARCHIVE} into paths.data instead, or give a folder of its parquet files as paths.text"
    return _read_parquet(hub.download(HUB, [f"*/{part}-*.parquet" for part in PARTS], "paths.text=hub", instead))


def _read_tfds() -> Iterator[Row]:
    """As tensorflow-datasets has prepared it in its own folder (TFDS_DATA_DIR)."""
    import tensorflow_datasets as tfds

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of a folder that is not there
    instead = f"put {ARCHIVE} into paths.data instead"
    with _explained(f"paths.text=tfds: {TFDS}", instead):
        builder = tfds.builder(TFDS, data_dir=os.environ.get("TFDS_DATA_DIR"))  # read here, not at its import
        if not builder.is_prepared():
            raise DataError(
                f"paths.text=tfds: {builder.data_dir} is not there: make it with `pip install 'macformer[tfds]'` and "
                f"`tfds build imdb_reviews --file_format=array_record`, or {instead}"
            )
        random_access = builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD  # the others need TensorFlow
        for part in PARTS:
            rows = builder.as_data_source(part) if random_access else tfds.as_numpy(builder.as_dataset(split=part))
            rows, total = list(rows), builder.info.splits[part].num_examples
            if len(rows) != total:  # some of its formats lose rows
                raise DataError(f"{builder.data_dir}: {len(rows)} of {total} {part} reviews; {instead}")
            yield from _rows(part, rows, f"{builder.data_dir}, {part}")
