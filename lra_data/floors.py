"""What cheap predictors reach, fitted on train. A model that does not beat them has learned little.

`OWN` has those of each task; the commonest label and the length serve every task.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lra_data import listops
from lra_data.base import Split, Task

BINS = 20  # of a number: as many training examples in each
RIDGE = 1.0  # of the logistic regression, on standardised features
CLIP = 4.0  # of the features of a pair, whose products would have long tails
NEWTON_STEPS = 8
Keys = Callable[[Split, Split], tuple[Iterable[Hashable], Iterable[Hashable]]]


def measure(name: str, task: Task) -> dict[str, dict[str, float]]:
    """The accuracy of each cheap predictor of task `name` on dev and on test."""
    train = task.splits["train"]
    predictors = {"majority": by_key(nothing), "length": by_key(lengths), **OWN.get(name, {})}
    return {
        split: {title: predict(train, task.splits[split]) for title, predict in predictors.items()}
        for split in ("dev", "test")
    }


def by_key(keys: Keys) -> Callable[[Split, Split], float]:
    """The commonest training label of the examples that have the same key; of all, where a key is new."""

    def accuracy(train: Split, asked: Split) -> float:
        ours, theirs = keys(train, asked)
        classes = train.spec.classes
        counts: dict[Hashable, NDArray[np.int64]] = {}
        for key, label in zip(ours, train.labels.tolist(), strict=True):
            counts.setdefault(key, np.zeros(classes, np.int64))[label] += 1
        answers = {key: int(count.argmax()) for key, count in counts.items()}
        commonest = int(np.bincount(train.labels, minlength=classes).argmax())
        given = [answers.get(key, commonest) for key in theirs]
        return float(np.mean(given == asked.labels))

    return accuracy


def nothing(train: Split, asked: Split) -> tuple[Iterable[Hashable], Iterable[Hashable]]:
    return [0] * len(train), [0] * len(asked)


def lengths(train: Split, asked: Split) -> tuple[Iterable[Hashable], Iterable[Hashable]]:
    """Of a pair, the lengths of both texts."""
    binned = [_bins(ours, theirs) for ours, theirs in zip(train.text_lengths.T, asked.text_lengths.T, strict=True)]
    return zip(*(ours for ours, _ in binned), strict=True), zip(*(theirs for _, theirs in binned), strict=True)


def root_operator(train: Split, asked: Split) -> tuple[Iterable[Hashable], Iterable[Hashable]]:
    return train.tokens[train.offsets[:-1]].tolist(), asked.tokens[asked.offsets[:-1]].tolist()


def root_and_digits(train: Split, asked: Split) -> tuple[Iterable[Hashable], Iterable[Hashable]]:
    """The root operator, and what it makes of its own digits, its nested operators left out.

    Without brackets nobody can tell where a nested list ends: there, of the digits before the first nested operator.
    """

    def key(tokens: NDArray[np.uint8]) -> tuple[int, int]:
        depth = np.cumsum((tokens < listops.ZERO) - (tokens == listops.CLOSE).astype(np.int64))
        digits = tokens[(depth == 1) & (tokens >= listops.ZERO) & (tokens < listops.CLOSE)] - listops.ZERO
        root = int(tokens[0])
        return root, listops.apply(listops.TOKENS[root], digits.tolist()) if len(digits) else -1

    ours, theirs = ([key(split.texts(i)[0]) for i in range(len(split))] for split in (train, asked))
    return ours, theirs


def byte_overlap(train: Split, asked: Split) -> tuple[Iterable[Hashable], Iterable[Hashable]]:
    """How many of the bytes that stand in either text stand in both."""

    def overlap(split: Split) -> NDArray[np.float64]:
        used = np.zeros((2 * len(split), 256), bool)
        for row, (start, end) in zip(used, itertools.pairwise(split.offsets.tolist()), strict=True):
            row[split.tokens[start:end]] = True
        first, second = used[0::2], used[1::2]
        return (first & second).sum(1) / (first | second).sum(1)

    return _bins(overlap(train), overlap(asked))


def bag_of_bytes(train: Split, asked: Split) -> float:
    """Logistic regression on the share of each byte in the text: Newton's method, with a ridge.

    Of a pair, on the distance and the product of the two shares of each byte: are the texts alike?
    """

    def share(split: Split) -> NDArray[np.float64]:
        bounds = itertools.pairwise(split.offsets.tolist())
        counts = [np.bincount(split.tokens[start:end], minlength=256) for start, end in bounds]
        return np.array(counts) / split.text_lengths.reshape(-1, 1)

    shares = [share(split) for split in (train, asked)]
    mean, deviation = shares[0].mean(0), shares[0].std(0)
    seen = deviation > 0

    def features(split: Split, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        z = (shares[:, seen] - mean[seen]) / deviation[seen]
        if split.spec.paired:
            first, second = z.clip(-CLIP, CLIP).reshape(len(split), 2, -1).swapaxes(0, 1)
            z = np.c_[first * second, abs(first - second)]
        return np.c_[np.ones(len(z)), z]

    x, x_asked = (features(split, each) for split, each in zip((train, asked), shares, strict=True))
    weights = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-x @ weights))
        gradient = x.T @ (p - train.labels) + RIDGE * weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + RIDGE * np.eye(len(weights))
        weights -= np.linalg.solve(hessian, gradient)
    return float(np.mean((x_asked @ weights > 0) == asked.labels))


def _bins(train: NDArray[Any], asked: NDArray[Any]) -> tuple[list[int], list[int]]:
    """Numbers as the places of the BINS that hold as many training examples each."""
    edges = np.unique(np.quantile(train, np.linspace(0, 1, BINS + 1)[1:-1]))
    return np.searchsorted(edges, train).tolist(), np.searchsorted(edges, asked).tolist()


OWN: dict[str, dict[str, Callable[[Split, Split], float]]] = {
    "listops": {
        "root operator": by_key(root_operator),
        "root operator and its digits": by_key(root_and_digits),
    },
    "text": {"bag of bytes": bag_of_bytes},
    "retrieval": {"byte-set overlap": by_key(byte_overlap), "bag of bytes": bag_of_bytes},
}
