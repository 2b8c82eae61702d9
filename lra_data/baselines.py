"""Trivial baselines: what cheap predictors reach, fitted on train. A model that does not beat them has learned little.

`OWN` has those of each task; the commonest label and the length serve every task.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
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
    majority = partial(by_key, lambda split: np.zeros((len(split), 1)))  # one key for all
    length = partial(by_key, attrgetter("sizes"), binned=True)
    baselines: dict[str, Baseline] = {"majority": majority, "length": length, **OWN.get(name, {})}
    return {
        split: {title: accuracy(train, task.splits[split]) for title, accuracy in baselines.items()}
        for split in ("dev", "test")
    }


def by_key(key: Callable[[Split], NDArray[Any]], train: Split, asked: Split, binned: bool = False) -> float:
    """The commonest training label of the examples with the same key (a row); of all, where a key is new.

    `binned`: numbers are the same if they are in the same bin; a bin has a twentieth of the training examples.
    """
    rows = np.concatenate([key(train), key(asked)])
    if binned:
        edges = np.quantile(rows[: len(train)], np.linspace(0, 1, BINS + 1)[1:-1], axis=0)
        rows = (rows[:, None] > edges).sum(1)
    _, keys = np.unique(rows, axis=0, return_inverse=True)
    counts = np.zeros((len(rows), train.spec.classes), np.int64)
    np.add.at(counts, (keys[: len(train)], train.labels), 1)
    answers = np.where(counts.any(1), counts.argmax(1), np.bincount(train.labels).argmax())
    return float(np.mean(answers[keys[len(train) :]] == asked.labels))


def root_operator(split: Split) -> NDArray[np.uint8]:
    return split.windows[split.starts, 0]


def root_and_digits(split: Split) -> NDArray[np.int64]:
    """The root operator, and that operator applied to its direct digit arguments.

    Without brackets nobody can tell where a nested list ends: there, to the digits before the first nested operator.
    """
    keys = []
    for index in range(len(split)):
        (tokens,) = split.texts(index)
        depth = np.cumsum((tokens < listops.ZERO) - (tokens == listops.CLOSE).astype(np.int64))
        digits = tokens[(depth == 1) & (tokens >= listops.ZERO) & (tokens < listops.CLOSE)] - listops.ZERO
        operator = listops.OPERATORS[listops.TOKENS[tokens[0]]]
        keys.append((int(tokens[0]), operator(digits.tolist()) if len(digits) else -1))
    return np.array(keys)


def byte_overlap(split: Split) -> NDArray[np.float64]:
    """How many of the bytes that stand in either text of a pair stand in both."""
    used = byte_counts(split) > 0
    first, second = used[0::2], used[1::2]
    return ((first & second).sum(1) / (first | second).sum(1))[:, None]


def byte_counts(split: Split) -> NDArray[np.int64]:
    """How often each byte stands in each text."""
    return np.array([np.bincount(text, minlength=256) for i in range(len(split)) for text in split.texts(i)])


def bag_of_bytes(train: Split, asked: Split) -> float:
    """Logistic regression on the share of each byte in the text: Newton's method, with a ridge.

    Of a pair, on the distance and the product of the two shares of each byte: are the texts alike?
    """
    shares = [byte_counts(split) / split.sizes.reshape(-1, 1) for split in (train, asked)]
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
    "listops": {
        "root operator": partial(by_key, root_operator),
        "root operator and its digits": partial(by_key, root_and_digits),
    },
    "text": {"bag of bytes": bag_of_bytes},
    "retrieval": {"byte-set overlap": partial(by_key, byte_overlap, binned=True), "bag of bytes": bag_of_bytes},
}
