"""What attention costs: products counted, and time measured, each as a power of the length and of the features.

Shapes: B batch, H heads, n length, d head width, D features.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from macformer.attention import RMFAttention, SoftmaxAttention
from macformer.bench.race import race
from macformer.paper.finding import Finding, Interval, Verdict, at_most, slopes, student, worst
from macformer.ppsbn import PreSBN

HEAD_DIM, FEATURES = 64, 128
LENGTHS = (1024, 2048, 4096, 8192)
WIDTHS = (256, 512, 1024, 2048)
HEADS_DIMS = (32, 64, 128, 256)
LINEAR, QUADRATIC = 1.1, (1.8, 2.2)  # exponents that pass for one and for two
TURN = 0.02  # seconds that an attention is called for when it is its turn, if one call does not take longer
ROUNDS, DRAWS = 10, 4
Make = Callable[[int, int, int], nn.Module]  # d, D, seed


def rmfa(d: int, D: int, seed: int) -> nn.Module:
    return RMFAttention(d, D, generator=torch.Generator().manual_seed(seed))


def explicit(d: int, D: int, seed: int) -> nn.Module:
    return SoftmaxAttention()


def sdpa(d: int, D: int, seed: int) -> nn.Module:
    return SoftmaxAttention(implementation="sdpa")


def cost(effort: int) -> Iterator[Finding]:
    yield products(rmfa)
    yield from over_length(measure_lengths(ROUNDS * effort))
    yield over_features(measure_features(ROUNDS * effort))


def inputs(n: int, d: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    """After pre-SBN."""
    q, k, v = (torch.randn(1, 1, n, d, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return PreSBN(1e-12)(q), PreSBN(1e-12)(k), v


def products(make: Make) -> Finding:
    """Multiplications in matrix products, by torch's own count; the mean of some draws."""

    def count(n: int = 1024, d: int = HEAD_DIM, D: int = 2048) -> float:
        total = 0
        for seed in range(DRAWS):
            attention, data = make(d, D, seed), inputs(n, d)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                attention(*data)
            total += counter.get_total_flops()
        return total / DRAWS

    counts = {
        "n": (LENGTHS, [count(n=n) for n in LENGTHS]),
        "d": (HEADS_DIMS, [count(d=d) for d in HEADS_DIMS]),
        "D": (WIDTHS, [count(D=D) for D in WIDTHS]),
    }
    exponents = {name: slopes(at, [found])[0] for name, (at, found) in counts.items()}
    return Finding(
        "C operations",
        "Random Maclaurin Feature Attention, Figure 2",
        f"RMFA takes O(n d D) operations (each exponent at most {LINEAR})",
        "exponents of the multiplications in matrix products, counted: "
        + ", ".join(f"{exponents[name]:.2f} in {name} ({at[0]:,} to {at[-1]:,})" for name, (at, _) in counts.items())
        + ", the others at n, d, D = 1,024, 64, 2,048",
        worst([at_most(Interval(e, e, e), LINEAR) for e in exponents.values()]),
        "python -m scripts.claims C",
        {"exponents": exponents, "flop": {name: list(found) for name, (_, found) in counts.items()}},
    )


def timed(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call in each round."""
    taken = list(race(lambda number: arms, rounds, torch.device("cpu"), TURN))
    return {name: [each[name] for each in taken] for name in arms}


def measure_lengths(rounds: int) -> dict[str, list[list[float]]]:
    """By attention: a row a round, a column a length."""
    arms, makes = {}, (rmfa, explicit, sdpa)
    for n in LENGTHS:
        data = inputs(n)
        for make in makes:
            arms[f"{make.__name__} {n}"] = _call(make(HEAD_DIM, FEATURES, 0), data)
    return _rows(timed(arms, rounds), [make.__name__ for make in makes], LENGTHS)


def measure_features(rounds: int) -> dict[str, list[list[float]]]:
    data = inputs(LENGTHS[1])
    return _rows(timed({f"rmfa {D}": _call(rmfa(HEAD_DIM, D, 0), data) for D in WIDTHS}, rounds), ["rmfa"], WIDTHS)


def _call(attention: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        return attention(*data)

    return call


def _rows(seconds: dict[str, list[float]], names: Sequence[str], at: Sequence[int]) -> dict[str, list[list[float]]]:
    return {name: [list(row) for row in zip(*(seconds[f"{name} {x}"] for x in at), strict=True)] for name in names}


def over_length(seconds: dict[str, list[list[float]]]) -> list[Finding]:
    said = {
        "rmfa": ("C RMFA at most linear in n", f"RMFA (D = {FEATURES}) takes O(n) time (exponent at most {LINEAR})"),
        "explicit": (
            "C softmax quadratic in n",
            "softmax attention takes O(n^2) time (exponent {} to {})".format(*QUADRATIC),
        ),
        "sdpa": ("C SDPA quadratic in n", "the same, in torch's fused form (SDPA)"),
    }
    found = []
    for name, rounds in seconds.items():
        exponent = student(slopes(LENGTHS, rounds))
        verdict = at_most(exponent, LINEAR) if name == "rmfa" else about_two(exponent)
        found.append(_timed_finding(*said[name], f"n = {LENGTHS[0]:,} to {LENGTHS[-1]:,}", exponent, rounds, verdict))
    return found


def over_features(seconds: dict[str, list[list[float]]]) -> Finding:
    exponent = student(slopes(WIDTHS, seconds["rmfa"]))
    over = f"D = {WIDTHS[0]} to {WIDTHS[-1]:,}, n = {LENGTHS[1]:,}"
    claim = f"RMFA takes O(D) time (exponent at most {LINEAR})"
    return _timed_finding(
        "C RMFA at most linear in D", claim, over, exponent, seconds["rmfa"], at_most(exponent, LINEAR)
    )


def about_two(exponent: Interval) -> Verdict:
    low, high = QUADRATIC
    if exponent.within(low, high):
        return "reproduced"
    return "not reproduced" if exponent.high < low or exponent.low > high else "inconclusive"


def _timed_finding(
    id: str, claim: str, over: str, exponent: Interval, rounds: list[list[float]], verdict: Verdict
) -> Finding:
    return Finding(
        id,
        "Random Maclaurin Feature Attention, Figure 2",
        claim,
        f"exponent of the time over {over}: {exponent:.2f} ({len(rounds)} rounds in turn, d = {HEAD_DIM}, one thread)",
        verdict,
        "python -m scripts.claims C",
        {"exponent": [exponent.value, exponent.low, exponent.high], "seconds": rounds},
        clock=True,
    )
