"""LRA ListOps: nested MIN, MAX, MED and SM over digits, drawn by the rules of LRA's generator.

A tree: with probability 0.25, and above the last level, a node is an operator with 2..10 arguments; else a
digit. Kept if min_length < L < max_length, L = operators + digits + `]`; no expression stands twice.

Trees are drawn, laid out and evaluated many at once, level by level, with numpy; `evaluate` is the slow, obvious
definition of the value. LRA's released files, basic_{train,val,test}.tsv, are read too.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, validate_call
from tqdm import tqdm

from lra_data.base import SPLITS, DataError, Example, Sizes, Source, Task, TaskSpec, cached, check_length, line_files

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
# Frozen and ordered: a token is stored as its place here. The digits 0..9 are 4..13; without brackets, 14 tokens.
DIGITS = {str(digit): digit for digit in range(10)}
TOKENS = (*OPERATORS, *DIGITS, "]")
CODES = {word: code for code, word in enumerate(TOKENS)}
ZERO, CLOSE = CODES["0"], CODES["]"]
OPERATOR_PROBABILITY = 0.25
VOCABULARY = 32  # the base code's embedding table
CHUNK = 2048  # trees drawn at once; part of what a seed means
FILES, COLUMNS = "basic_{train,val,test}.tsv", ["Source", "Target"]  # of LRA's release
RELEASED = {"train": 96_000, "dev": 2_000, "test": 2_000}  # expressions in them
DRY_CHUNKS = 50  # so many chunks in a row without a new expression: there are no more to be had

_Trees = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]  # tokens, end to end; length and value of each


def evaluate(source: str) -> int:
    """The value of an expression, with or without the parentheses of the official form."""
    stack: list[list[Any]] = [[]]
    for word in _words(source):
        if word in DIGITS:
            stack[-1].append(DIGITS[word])
        elif word in OPERATORS:
            stack.append([word])
        elif word == "]" and len(stack) > 1 and len(stack[-1]) > 1:
            operator, *values = stack.pop()
            stack[-1].append(OPERATORS[operator](values))
        else:
            raise ValueError(f"unexpected {word!r} in {source[:60]!r}")
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"not one whole expression: {source[:60]!r}")
    return stack[0][0]


def _words(source: str) -> list[str]:
    return source.replace("(", " ").replace(")", " ").split()


def generate(
    seed: int, min_length: int = 500, max_length: int = 2000, max_depth: int = 10, max_args: int = 10
) -> Iterator[tuple[str, int]]:
    """Endless distinct (source, value), the source in the official form with parentheses."""
    for tokens, label in _distinct(seed, min_length, max_length, max_depth, max_args):
        yield to_source(tokens), label


def to_source(tokens: bytes) -> str:
    """The official text: `[MAX 1 2 ]` is `( ( ( [MAX 1 ) 2 ) ] )`; k arguments stand in k + 1 parentheses."""
    unfinished: list[str] = []  # the text of each open list so far
    for token in tokens:
        text = f"( {unfinished.pop()} ] )" if token == CLOSE else TOKENS[token]
        if token < ZERO or not unfinished:
            unfinished.append(text)
        else:
            unfinished[-1] = f"( {unfinished[-1]} {text} )"
    return unfinished[0]


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

    `brackets` keeps `]`. Of files, at most `examples` are taken; min_length, max_length and seed are not used.
    """
    settings: dict[str, Any] = {"brackets": brackets}
    dropped = b"" if brackets else bytes([CLOSE])
    if origin:
        source = line_files(origin, FILES, COLUMNS, RELEASED, partial(_parse, dropped))
        hint = "put LRA's there, or leave paths.listops out"
        return cached(folder, "listops", spec(length), settings, examples, *source, to_text, origin, hint)
    longest = max_length - 1
    if not brackets:  # m operators have at most 9m + 1 digits, so that L is at most 11m + 1
        longest -= -(-(longest - 1) // 11)
    check_length(length, longest)

    def build() -> tuple[Source, dict[str, Iterable[Example]]]:
        total = sum(examples[split] for split in SPLITS)
        drawn = tqdm(_distinct(seed, min_length, max_length), "generating ListOps", total, mininterval=1)
        return "generated", dict.fromkeys(
            SPLITS, (((tokens.translate(None, dropped),), value) for tokens, value in drawn)
        )

    settings |= {"min_length": min_length, "max_length": max_length, "seed": seed}
    return cached(folder, "listops", spec(length), settings, examples, build, "the generator", decode=to_text)


def to_text(tokens: NDArray[np.uint8]) -> str:
    """The tokens as the model gets them, in words."""
    return " ".join(TOKENS[token] for token in tokens.tolist())


def _parse(dropped: bytes, *fields: bytes) -> Example:
    """A line of LRA's files."""
    source, target = (field.decode(errors="replace") for field in fields)
    evaluate(source)  # raises ValueError if it is no expression
    if target not in DIGITS:
        raise ValueError(f"the label {target!r} is not 0 to 9")
    return (bytes(CODES[word] for word in _words(source)).translate(None, dropped),), DIGITS[target]


def _distinct(seed: int, min_length: int, max_length: int, *shape: int) -> Iterator[tuple[bytes, int]]:
    """(tokens, value) of expressions in the order of their chunks, each one once, without end."""
    seen: set[bytes] = set()
    last = -1  # the last chunk with a new expression
    for chunk in itertools.count():
        tokens, length, value = _grow(np.random.default_rng((seed, chunk)), CHUNK, 1, *shape)
        ends = np.cumsum(length)
        for i in np.flatnonzero((min_length < length) & (length < max_length)):
            expression = tokens[ends[i] - length[i] : ends[i]].tobytes()
            digest = hashlib.blake2b(expression, digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                last = chunk
                yield expression, int(value[i])
        if chunk - last == DRY_CHUNKS:
            found = f"only {len(seen)} distinct ListOps expressions were found within these lengths"
            raise DataError(f"{found}: ask for fewer examples or widen min_length..max_length")


def _grow(rng: np.random.Generator, nodes: int, depth: int, max_depth: int = 10, max_args: int = 10) -> _Trees:
    """Random subtrees whose roots are these nodes. At depth 1 all are operators: a digit is too short to be kept."""
    operator = rng.random(nodes) < OPERATOR_PROBABILITY if 1 < depth < max_depth else np.full(nodes, depth == 1)
    value = rng.integers(0, 10, nodes)
    token = np.where(operator, rng.integers(0, 4, nodes), ZERO + value).astype(np.uint8)
    length = np.ones_like(value)
    arguments = rng.integers(2, max_args + 1, np.count_nonzero(operator))
    if not len(arguments):
        return token, length, value
    below, lengths, values = _grow(rng, int(arguments.sum()), depth + 1, max_depth, max_args)

    first = np.cumsum(arguments) - arguments  # of the arguments of each operator
    parent = np.repeat(np.arange(len(arguments)), arguments)
    ordered = np.sort(parent * 10 + values) % 10  # within each parent
    least, greatest = ordered[first], ordered[first + arguments - 1]
    middle = ordered[first + (arguments - 1) // 2] + ordered[first + arguments // 2]
    total = np.add.reduceat(values, first)
    in_order_of_tokens = [least, greatest, middle // 2, total % 10]
    value[operator] = np.choose(token[operator], in_order_of_tokens)

    length[operator] = 2 + np.add.reduceat(lengths, first)
    ends = np.cumsum(length)
    tokens = np.full(ends[-1], CLOSE, np.uint8)
    inner = np.ones(ends[-1], bool)
    inner[ends - length] = inner[ends - 1] = False
    tokens[inner] = below
    tokens[ends - length] = token
    return tokens, length, value
