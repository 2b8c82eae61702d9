"""Trivial baselines: what cheap predictors reach, fitted on train. A model that does not beat them has learned little.

`OWN` has those of each task; the commonest label and the length serve every task.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lra_data import listops
from lra_data.base import Split, Task

BINS = 20
RIDGE = 1.0  # of the logistic regression, on standardised features
CLIP = 4.0  # of the features of a pair, whose products would have long tails
NEWTON_STEPS = 8
Baseline = Callable[[Split, Split], float]  # fitted on the first: the accuracy on the second


def measure(name: str, task: Task) -> dict[str, dict[str, float]]:
    """The accuracy of each trivial baseline of task `name` on dev and on test."""
    train = task.splits["train"]
    baselines = {"majority": by_key(nothing), "length": by_key(lengths, binned=True), **OWN.get(name, {})}
    return {
        split: {title: accuracy(train, task.splits[split]) for title, accuracy in baselines.items()}
        for split in ("dev", "test")
    }


def by_key(key: Callable[[Split], NDArray[Any]], binned: bool = False) -> Baseline:
    """The commonest training label of the examples with the same key (a row); of all, where a key is new.

    `binned`: numbers are the same if they are in the same bin; a bin has a twentieth of the training examples.
    """

    def accuracy(train: Split, asked: Split) -> float:
        ours, theirs = key(train), key(asked)
        if binned:
            edges = [np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1])) for column in ours.T]
            ours, theirs = (
                np.stack([np.searchsorted(*both) for both in zip(edges, rows.T, strict=True)], 1)
                for rows in (ours, theirs)
            )
        counts: dict[tuple[int, ...], NDArray[np.int64]] = {}
        for row, label in zip(map(tuple, ours.tolist()), train.labels.tolist(), strict=True):
            counts.setdefault(row, np.zeros(train.spec.classes, np.int64))[label] += 1
        answers = {row: int(count.argmax()) for row, count in counts.items()}
        commonest = int(np.bincount(train.labels).argmax())
        return float(np.mean([answers.get(row, commonest) for row in map(tuple, theirs.tolist())] == asked.labels))

    return accuracy


def nothing(split: Split) -> NDArray[np.int64]:
    return np.zeros((len(split), 1), np.int64)


def lengths(split: Split) -> NDArray[np.int64]:
    """Of a pair, the lengths of both texts."""
    return split.text_lengths


def root_operator(split: Split) -> NDArray[np.uint8]:
    return split.tokens[split.offsets[:-1], None]


def root_and_digits(split: Split) -> NDArray[np.int64]:
    """The root operator, and that operator applied to its direct digit arguments.

    Without brackets nobody can tell where a nested list ends: there, to the digits before the first nested operator.
    """

    def key(tokens: NDArray[np.uint8]) -> tuple[int, int]:
        depth = np.cumsum((tokens < listops.ZERO) - (tokens == listops.CLOSE).astype(np.int64))
        digits = tokens[(depth == 1) & (tokens >= listops.ZERO) & (tokens < listops.CLOSE)] - listops.ZERO
        root = int(tokens[0])
        return root, listops.apply(listops.TOKENS[root], digits.tolist()) if len(digits) else -1

    return np.array([key(split.texts(i)[0]) for i in range(len(split))])


def byte_overlap(split: Split) -> NDArray[np.float64]:
    """How many of the bytes that stand in either text of a pair stand in both."""
    used = byte_counts(split) > 0
    first, second = used[0::2], used[1::2]
    return ((first & second).sum(1) / (first | second).sum(1))[:, None]


def byte_counts(split: Split) -> NDArray[np.int64]:
    """How often each byte stands in each text."""
    bounds = itertools.pairwise(split.offsets.tolist())
    return np.array([np.bincount(split.tokens[start:end], minlength=256) for start, end in bounds])


def bag_of_bytes(train: Split, asked: Split) -> float:
    """Logistic regression on the share of each byte in the text: Newton's method, with a ridge.

    Of a pair, on the distance and the product of the two shares of each byte: are the texts alike?
    """
    shares = [byte_counts(split) / split.text_lengths.reshape(-1, 1) for split in (train, asked)]
    mean, deviation = shares[0].mean(0), shares[0].std(0)
    seen = deviation > 0

    def features(shares: NDArray[np.float64]) -> NDArray[np.float64]:
        z = (shares[:, seen] - mean[seen]) / deviation[seen]
        if train.spec.paired:
            first, second = z.clip(-CLIP, CLIP).reshape(len(z) // 2, 2, -1).swapaxes(0, 1)
            z = np.c_[first * second, abs(first - second)]
        return np.c_[np.ones(len(z)), z]

    x, x_asked = map(features, shares)
    weights = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-x @ weights))
        gradient = x.T @ (p - train.labels) + RIDGE * weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + RIDGE * np.eye(len(weights))
        weights -= np.linalg.solve(hessian, gradient)
    return float(np.mean((x_asked @ weights > 0) == asked.labels))


OWN: dict[str, dict[str, Baseline]] = {
    "listops": {"root operator": by_key(root_operator), "root operator and its digits": by_key(root_and_digits)},
    "text": {"bag of bytes": bag_of_bytes},
    "retrieval": {"byte-set overlap": by_key(byte_overlap, binned=True), "bag of bytes": bag_of_bytes},
}
