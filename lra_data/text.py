"""LRA Text: IMDb reviews as bytes, from the archive aclImdb_v1.tar.gz. Label 1 = positive."""

import itertools
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import PositiveInt, validate_call
from tqdm import tqdm

from lra_data import base
from lra_data.base import Caps, DataError, Example, Source, Task, TaskSpec

ARCHIVE = "aclImdb_v1.tar.gz"
VOCABULARY = 512  # the base code's embedding table; 257 ids are real
REVIEWS = 25_000  # of the real archive, in train and in test
HELD_OUT = 0.1
_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos)/(\d+)_\d+\.txt")


@validate_call(config={"strict": True})
def load(
    folder: str,
    length: PositiveInt,
    max_length: PositiveInt,
    dev: Literal["test", "held-out"],
    examples: Caps,
    seed: int,
) -> Task:
    """IMDb packed from folder/aclImdb_v1.tar.gz on first use.

    dev="test" is the base code's (the dev split IS the test split); "held-out" takes a seeded tenth of the
    training reviews, as many negative as positive. `examples` caps the splits; null = all.
    """
    archive = Path(folder) / ARCHIVE
    limits: dict[str, Any] = {**examples}

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        reviews = _read(archive, max_length)
        real = all(len(reviews[part]) == REVIEWS for part in ("train", "test"))
        train, test = reviews["train"], reviews["test"]
        held: list[Example] = test
        if dev == "held-out":
            # Reviews 2i and 2i + 1 are a negative and a positive one.
            pairs = np.random.default_rng(seed).permutation(len(train) // 2)
            chosen = set(pairs[: round(HELD_OUT * len(pairs))].tolist())
            held = [review for i, review in enumerate(train) if i // 2 in chosen]
            train = [review for i, review in enumerate(train) if i // 2 not in chosen]
        splits = {"train": train, "dev": held, "test": test}
        return "lra" if real else "stand-in", {
            split: itertools.islice(splits[split], limits[split]) for split in base.SPLITS
        }

    settings = {
        "max_length": max_length,
        "dev": dev,
        "examples": limits,
        "seed": seed if dev == "held-out" else None,
    }
    spec = TaskSpec(VOCABULARY, length, classes=2, paired=False)
    return base.cached(folder, "text", spec, settings, build, [archive])


def _read(archive: Path, max_length: int) -> dict[str, list[Example]]:
    """The reviews of each part, negative and positive in turn, by their number in the archive."""
    found: dict[str, dict[tuple[int, int], bytes]] = {"train": {}, "test": {}}
    try:
        with tarfile.open(archive) as tar:
            for member in tqdm(tar, f"reading {archive.name}", unit=" files", mininterval=1):
                if name := _MEMBER.fullmatch(member.name):
                    part, sentiment, number = name.groups()
                    file = tar.extractfile(member)
                    review = file.read(max_length) if file else b""
                    if not review:
                        raise DataError(f"{archive}: {member.name} is empty; get the archive again")
                    found[part][int(number), int(sentiment == "pos")] = review
    except FileNotFoundError:
        raise DataError(
            f"task=text needs {archive}, which is not there: put the IMDb archive there "
            "(Large Movie Review Dataset v1.0), then run `python -m lra_data prepare text`"
        ) from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{archive} cannot be read ({error}); get the archive again") from None
    for part, reviews in found.items():
        negative = sum(label == 0 for _, label in reviews)
        if not reviews or 2 * negative != len(reviews):
            raise DataError(
                f"{archive} has {negative} negative of {len(reviews)} {part} reviews, not one half; "
                "get the archive again"
            )
    return {part: [((reviews[key],), key[1]) for key in sorted(reviews)] for part, reviews in found.items()}
