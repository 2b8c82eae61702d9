"""LRA ListOps: nested MIN, MAX, MED and SM over digits, drawn by the rules of LRA's generator.

A tree: with probability 0.25, and above the last level, a node is an operator with 2..10 arguments; else a
digit. Kept if min_length < L < max_length, L = operators + digits + `]`; no expression stands twice.

Trees are drawn, laid out and evaluated many at once, level by level, with numpy; `evaluate` is the slow, obvious
definition of the value. LRA's released files, basic_{train,val,test}.tsv, are read too.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, validate_call
from tqdm import tqdm

from lra_data.base import SPLITS, DataError, Example, Sizes, Source, Task, TaskSpec, cached
from lra_data.lines import line_files

# Frozen and ordered: a token is stored as its place here. The digits 0..9 are 4..13; without brackets, 14 tokens.
TOKENS = ("[MIN", "[MAX", "[MED", "[SM", *"0123456789", "]")
CODES = {word: code for code, word in enumerate(TOKENS)}
ZERO, CLOSE = 4, 14
OPERATOR_PROBABILITY = 0.25
VOCABULARY = 32  # the base code's embedding table
CHUNK = 2048  # trees drawn at once; part of what a seed means
FILES = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}  # of LRA's release
RELEASED = {"train": 96_000, "dev": 2_000, "test": 2_000}  # expressions in them
DRY_CHUNKS = 50  # so many chunks in a row without a new expression: there are no more to be had

Expression = tuple[NDArray[np.uint8], int]


def evaluate(source: str) -> int:
    """The value of an expression, with or without the parentheses of the official form."""
    stack: list[list[Any]] = [[]]
    for token in source.replace("(", " ").replace(")", " ").split():
        if token == "]" and len(stack) > 1:
            operator, *values = stack.pop()
            if not values:
                raise ValueError(f"{operator} has no arguments in {source[:60]!r}")
            stack[-1].append(apply(operator, values))
        elif token.isdecimal() and len(token) == 1:
            stack[-1].append(int(token))
        elif token in TOKENS[:ZERO]:
            stack.append([token])
        else:
            raise ValueError(f"unexpected {token!r} in {source[:60]!r}")
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"not one whole expression: {source[:60]!r}")
    return stack[0][0]


def apply(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[MED":
        return int(np.median(values))
    return sum(values) % 10


def generate(
    seed: int, min_length: int = 500, max_length: int = 2000, max_depth: int = 10, max_args: int = 10
) -> Iterator[tuple[str, int]]:
    """Endless distinct (source, value), the source in the official form with parentheses."""
    for tokens, label in _distinct(seed, min_length, max_length, max_depth, max_args):
        yield to_source(tokens), label


def to_source(tokens: NDArray[np.uint8]) -> str:
    """The official text: `[MAX 1 2 ]` is `( ( ( [MAX 1 ) 2 ) ] )`; k arguments stand in k + 1 parentheses."""
    unfinished: list[str] = []  # the text of each open list so far
    for token in tokens.tolist():
        text = TOKENS[token]
        if token < ZERO:
            unfinished.append(text)
            continue
        if token == CLOSE:
            text = f"( {unfinished.pop()} ] )"
        if not unfinished:
            return text
        unfinished[-1] = f"( {unfinished[-1]} {text} )"
    raise ValueError("the expression does not end")


spec = partial(TaskSpec, VOCABULARY, classes=10, paired=False)


@validate_call(config={"strict": True})
def load(
    folder: str,
    length: PositiveInt,
    max_length: PositiveInt,
    min_length: PositiveInt,
    brackets: bool,
    examples: Sizes,
    seed: NonNegativeInt,
    origin: str | None = None,
) -> Task:
    """ListOps packed on first use: generated, or read from LRA's files in the folder `origin`.

    `brackets` keeps `]`. Of files, `examples` is the most that is taken, and min_length, max_length and seed mean
    nothing.
    """
    settings: dict[str, Any] = {"brackets": brackets}
    if origin:
        parse, hint = partial(_parse, brackets=brackets), "put LRA's there, or leave paths.listops out"
        build, files = line_files("listops", folder, origin, FILES, RELEASED, parse, hint, header=b"Source\tTarget")
        title = "basic_{train,val,test}.tsv"
    else:
        longest = max_length - 1
        if not brackets:  # m operators have at most 9m + 1 digits, so that L is at most 11m + 1
            longest -= -(-(longest - 1) // 11)
        if not (2 <= min_length < max_length - 1 and longest <= length):
            raise DataError(
                f"task.data needs 2 <= min_length < max_length - 1 and length >= {longest} (the longest text), "
                f"got min_length={min_length}, max_length={max_length}, length={length}"
            )
        settings |= {"min_length": min_length, "max_length": max_length, "seed": seed}
        build, files = partial(_generated, examples, brackets, seed, min_length, max_length), {}
        title = "the generator"
    return cached(folder, "listops", spec(length), settings, examples, build, title, files, to_text)


def _generated(
    examples: Sizes, brackets: bool, seed: int, min_length: int, max_length: int
) -> tuple[Source, dict[str, Iterator[Example]]]:
    total = sum(examples[split] for split in SPLITS)
    drawn = tqdm(_distinct(seed, min_length, max_length), "generating ListOps", total, mininterval=1)
    return "generated", dict.fromkeys(SPLITS, (_example(*expression, brackets) for expression in drawn))


def _example(tokens: NDArray[np.uint8], label: int, brackets: bool) -> Example:
    return ((tokens if brackets else tokens[tokens != CLOSE]).tobytes(),), label


def to_text(tokens: NDArray[np.uint8]) -> str:
    """The tokens as the model gets them, in words."""
    return " ".join(TOKENS[token] for token in tokens.tolist())


def _parse(line: bytes, brackets: bool) -> Example:
    """A line of LRA's files: Source and Target, a tab between."""
    fields = line.split(b"\t")
    if len(fields) != 2:
        raise ValueError(f"{len(fields)} fields, not 2 (Source, Target)")
    source, target = (field.decode(errors="replace") for field in fields)
    words = source.replace("(", "").replace(")", "").split()
    if unknown := next((word for word in words if word not in CODES), None):
        raise ValueError(f"{unknown!r} is no token of ListOps")
    tokens = np.array([CODES[word] for word in words], np.uint8)
    opens, closes = tokens < ZERO, tokens == CLOSE
    depth = np.cumsum(opens.astype(np.int64) - closes)
    # The root is open until the last token, and no list is empty.
    if not (len(tokens) and (depth[:-1] > 0).all() and depth[-1] == 0) or (opens[:-1] & closes[1:]).any():
        raise ValueError("not one whole expression")
    if target not in TOKENS[ZERO:CLOSE]:
        raise ValueError(f"the label {target!r} is not 0 to 9")
    return _example(tokens, int(target), brackets)


def _distinct(
    seed: int, min_length: int, max_length: int, max_depth: int = 10, max_args: int = 10
) -> Iterator[Expression]:
    """Expressions in the order of their chunks, each one once, without end."""
    seen: set[bytes] = set()
    dry = 0
    for chunk in itertools.count():
        before = len(seen)
        for tokens, label in _draw(chunk, seed, min_length, max_length, max_depth, max_args):
            digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield tokens, label
        dry = 0 if len(seen) > before else dry + 1
        if dry == DRY_CHUNKS:
            raise DataError(
                f"only {len(seen)} distinct ListOps expressions were found within these lengths: "
                "ask for fewer examples or widen min_length..max_length"
            )


@dataclass
class _Level:
    """The nodes of all trees at one depth, left to right. The children of its operators make up the next level."""

    operator: NDArray[np.bool_]
    token: NDArray[np.uint8]
    arguments: NDArray[np.int64]  # of the operators alone
    value: NDArray[np.int64]
    length: NDArray[np.int64]  # tokens of the subtree

    @property
    def first_child(self) -> NDArray[np.int64]:
        return np.cumsum(self.arguments) - self.arguments


def _draw(chunk: int, seed: int, min_length: int, max_length: int, max_depth: int, max_args: int) -> list[Expression]:
    """The kept ones of CHUNK trees. Digits at the root are too short to be kept: roots are operators."""
    rng = np.random.default_rng((seed, chunk))
    levels: list[_Level] = []
    nodes = CHUNK
    for depth in range(1, max_depth + 1):
        if depth == 1:
            operator = np.ones(nodes, bool)
        elif depth < max_depth:
            operator = rng.random(nodes) < OPERATOR_PROBABILITY
        else:
            operator = np.zeros(nodes, bool)
        digit = rng.integers(0, 10, nodes)
        token = np.where(operator, rng.integers(0, 4, nodes), ZERO + digit).astype(np.uint8)
        arguments = rng.integers(2, max_args + 1, np.count_nonzero(operator))
        levels.append(_Level(operator, token, arguments, digit, np.ones(nodes, np.int64)))
        nodes = int(arguments.sum())
        if not nodes:
            break

    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):  # values and lengths, from the leaves up
        starts = level.first_child
        level.length[level.operator] = 2 + np.add.reduceat(below.length, starts)
        parent = np.repeat(np.arange(len(starts)), level.arguments)
        ordered = np.sort(parent * 10 + below.value) % 10  # within each parent
        middle = ordered[starts + (level.arguments - 1) // 2] + ordered[starts + level.arguments // 2]
        level.value[level.operator] = np.choose(
            level.token[level.operator],
            [  # in the order of TOKENS: least, greatest, middle, sum
                ordered[starts],
                ordered[starts + level.arguments - 1],
                middle // 2,
                np.add.reduceat(below.value, starts) % 10,
            ],
        )

    ends = np.cumsum(levels[0].length)
    tokens = np.empty(ends[-1], np.uint8)
    place = ends - levels[0].length  # where each node's subtree begins, from the roots down
    for level, below in itertools.pairwise(levels):
        tokens[place] = level.token
        inner = place[level.operator]
        tokens[inner + level.length[level.operator] - 1] = CLOSE
        before = np.cumsum(below.length) - below.length
        place = before + np.repeat(inner + 1 - before[level.first_child], level.arguments)
    tokens[place] = levels[-1].token  # digits all

    kept = (min_length < levels[0].length) & (levels[0].length < max_length)
    return [
        (tokens[end - size : end].copy(), int(value))
        for end, size, value in zip(ends[kept], levels[0].length[kept], levels[0].value[kept], strict=True)
    ]
