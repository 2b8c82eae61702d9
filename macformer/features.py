"""Random feature maps: Phi(x).Phi(y) is an unbiased estimate of a kernel of x and y.

`forward` is the slow, obvious version: each formula as it is written. `folded` is what attention computes with.
They know no attention. Shapes: d head width, D features, N degree of one feature, H heads, F frequencies (D = 2F).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Generator, Tensor, nn

from macformer import kernels
from macformer.check import require_int
from macformer.kernels import Kernel

RELEASE_DEGREES = 20  # the authors' later release samples degrees 1..20
Sampling = Literal["paper", "release", "exact01", "order1"]


@dataclass(frozen=True)
class FoldedMap:
    """A feature map as attention computes with it: Phi(x).Phi(y) = c0 + x A y + F(x).F(y), and what surrounds it.

    All constants are one number and all features of degree 1 one d x d matrix. F are the features of degree 2 and more,
    each a product of projections x rows^T: widths[j] of them have a factor j. widths=None: sines and cosines of these.
    """

    constant: float = 0.0  # c0
    linear: Tensor | None = None  # A (d, d)
    root: Tensor | None = None  # L (l, d) with A = L^T L, l <= d; None where there are no products
    widths: tuple[int, ...] | None = None
    floor: float = 0.0  # lower limit of the denominator
    floor_per_key: bool = True  # times the number of keys that are seen
    normalise: Literal["no", "centred", "unit"] = "no"  # x before it is mapped | (x - mean) / |x - mean| | x / |x|
    eps: float = 0.0  # guards against a norm of zero

    def floors(self, seen: Tensor) -> Tensor:
        """Lower limits of the denominators of queries that see so many keys."""
        return self.floor * seen.clamp(min=1) if self.floor_per_key else torch.full_like(seen, self.floor)


def products(projected: Tensor, widths: Sequence[int]) -> Tensor:
    """(..., W) -> (..., f): factor j of the first widths[j] features lies behind the factors before; widths fall."""
    product = projected[..., :0]
    for factor in reversed(projected.split(list(widths), -1)):
        deeper = product.shape[-1]
        product = torch.cat([product * factor[..., :deeper], factor[..., deeper:]], -1)
    return product


class RandomMaclaurin(nn.Module):
    """phi_i(x) = s_i prod_{j=1..N_i} <w_ij, x>, Phi = [phi_1 .. phi_D]. E[Phi(x).Phi(y)] = K(x.y).

    What differs is how the D degrees N, the vectors w and the scales s are chosen (`sampling`):

    paper     P[N=m] = (p-1)/p^(m+1), s = sqrt(a_N / (P[N] D)), w Rademacher (signs +-1). For p = 2 this is the paper's
              1/p^(m+1); for other p the factor p-1 is missing there (docs/errata.md, erratum 4).
    release   one exact constant sqrt(a_0); the D-1 others have degree 1..20 with probability proportional to p^-m.
              Unbiased for the series up to degree 20 (D = 1 is the constant alone).
    exact01   degrees 0 and 1 exact: sqrt(a_0) and sqrt(a_1) x, d + 1 features. The others are shared out to the degrees
              in proportion to a_N d^(-N/2), which makes the variance smallest at logits of 1/sqrt(d); the last one
              samples the degrees that got none. w: rows of a Hadamard matrix under random signs. Needs D >= d + 2.
    order1    degrees 0 and 1 exact and nothing else: D = d + 1 whatever `features` says. No random part, a known bias.

    p matters to paper and release alone. Cost: d multiplications per token and unit of degree.
    The draw is made from a seed of its own (taken from `generator`, or torch's), and held in buffers: it moves with the
    module and is saved with it. It stays as it is, or is made anew every `redraw` training steps, which `step` counts:
    call it after each step of the optimiser (our trainer does).
    """

    degrees: Tensor  # (D,), falling
    rows: Tensor  # (sum of degrees, d): first the w_1 of each feature with N >= 1, then each w_2 with N >= 2, ...
    scales: Tensor  # (D,)

    def __init__(
        self,
        head_dim: int,
        features: int,
        kernel: str = "exp",
        p: float = 2.0,
        generator: Generator | None = None,
        sampling: Sampling = "paper",
        redraw: int | None = None,
    ):
        super().__init__()
        require_int(head_dim=head_dim, features=features)
        if redraw is not None:
            require_int(redraw=redraw)
        if not p > 1:
            raise ValueError(f"p={p!r} must be above 1: the degrees have probability (p-1)/p^(N+1)")
        if sampling not in get_args(Sampling):
            raise ValueError(f"sampling={sampling!r} is not known; choose one of {', '.join(get_args(Sampling))}")
        if sampling == "exact01" and features < head_dim + 2:
            raise ValueError(
                f"features={features} is too few for sampling='exact01' with head_dim={head_dim}: it needs "
                f"{head_dim + 2} or more (one constant, {head_dim} linear, one for all higher degrees)"
            )
        kernels.find(kernel)
        self.kernel = kernel  # its name: functions cannot be pickled
        self.head_dim, self.features, self.p, self.sampling, self.redraw = head_dim, features, p, sampling, redraw
        device = generator.device if generator else "cpu"
        self.seed = int(torch.randint(2**62, (), generator=generator, device=device))
        self.steps = 0
        self._folded: dict[tuple[torch.dtype, torch.device], tuple[Tensor, FoldedMap]] = {}
        for name in ("degrees", "rows", "scales"):
            self.register_buffer(name, torch.empty(0))
        self._draw()

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., D)."""
        first = self._widths[0] if self._widths else 0  # features that are no constants
        scale, constant = self.scales.split([first, len(self.scales) - first])
        # The scale goes into w_1: a d x D product is nothing beside one of n x D.
        w = torch.cat([self.rows[:first] * scale.unsqueeze(-1), self.rows[first:]])
        product = products(x @ w.to(x.dtype).mT, self._widths)
        return torch.cat([product, constant.to(x.dtype).expand(*x.shape[:-1], -1)], -1)

    def folded(self, dtype: torch.dtype) -> tuple[Tensor, FoldedMap]:
        """rows (1, W, d) and the map of x/d^(1/4), made once for a draw: do not write into the buffers in place."""
        key = dtype, self.rows.device
        if key not in self._folded:
            self._fold(dtype)
        return self._folded[key]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled graph is to find it, not to make it
    @torch.inference_mode(False)  # an evaluation may be the first to ask, and what it made be used in training
    @torch.no_grad()
    def _fold(self, dtype: torch.dtype) -> None:
        linear, deep = self._widths[0] if self._widths else 0, self._widths[1] if len(self._widths) > 1 else 0
        w, scale = self.rows.to(dtype), self.head_dim**-0.25  # once in each projection, twice in A
        scaled = w[:linear] * self.scales[:linear].to(dtype).unsqueeze(-1)
        root, A = scaled[deep:], None
        kind = w.device.type
        with torch.autocast(kind if torch.amp.is_autocast_available(kind) else "cpu", enabled=False):
            if len(root):
                A = (root.mT @ root) * scale**2  # autocast would round it
            if len(root) > self.head_dim:
                root = torch.linalg.qr(root, "r").R
        rows = torch.cat([scaled[:deep], w[linear:]]) * scale
        widths = (deep, *self._widths[1:]) if deep else ()
        self._folded[dtype, w.device] = rows.unsqueeze(0), FoldedMap(self._constant, A, root * scale, widths)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)
        self._fold_anew()  # the buffers have moved, or have another dtype
        return self

    def _fold_anew(self) -> None:
        self._folded.clear()
        self._fold(torch.promote_types(self.scales.dtype, torch.float32))  # what will be asked for

    def step(self) -> None:
        """Count a training step; make a new draw if it is time."""
        self.steps += 1
        if self.redraw and self.steps % self.redraw == 0:
            self._draw()

    def _draw(self) -> None:
        # On the CPU, and a generator for each draw: the same numbers on every device, and after a resumed run.
        rng = torch.Generator().manual_seed(self.seed + (self.steps // self.redraw if self.redraw else 0))
        kernel = kernels.find(self.kernel)
        match self.sampling:
            case "paper":
                degrees, expected = _paper(self.features, self.p, rng)
            case "release":
                degrees, expected = _release(self.features, self.p, rng)
            case "exact01":
                degrees, expected = _exact01(self.features, self.head_dim, kernel, rng)
            case "order1":
                degrees, expected = [0, *[1] * self.head_dim], {0: 1.0, 1: 1.0}
        degrees.sort(reverse=True)
        widths = [sum(j < N for N in degrees) for j in range(degrees[0])]
        if self.sampling in ("paper", "release"):
            blocks = [_signs(width, self.head_dim, rng) for width in widths]
        else:  # the features of degree 1 are the coordinates
            random, linear = [degrees.index(1), *widths[1:]], torch.eye(self.head_dim, device="cpu")
            first, *others = (_orthogonal_signs(width, self.head_dim, rng) for width in random)
            blocks = [first, linear, *others]
        like = self.scales  # keeps dtype and device of a module that was moved
        squares = [kernel.coefficient(N) / expected[N] for N in degrees]
        scales = torch.tensor(squares, dtype=torch.float64, device="cpu").sqrt().to(like.dtype)
        self.degrees = torch.tensor(degrees, device=like.device)
        self.rows = torch.cat([torch.empty(0, self.head_dim, device="cpu"), *blocks]).to(like)
        self.scales = scales.to(like.device)
        self._plan(degrees, scales.tolist())

    def _plan(self, degrees: list[int], scales: list[float]) -> None:
        """What the buffers say, as plain numbers: asking a GPU for them in every step would make it wait."""
        self._widths = [sum(j < N for N in degrees) for j in range(degrees[0])]
        self._constant = sum(s**2 for s, N in zip(scales, degrees, strict=True) if N == 0)
        self._fold_anew()

    def get_extra_state(self) -> dict[str, int]:
        return {"seed": self.seed, "steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seed, self.steps = state["seed"], state["steps"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A saved draw of as many features may have other degrees, hence another number of rows, than the one made here.
        names = ("degrees", "scales", "rows")
        degrees, scales, rows = (state_dict.get(prefix + name, torch.empty(0)) for name in names)
        fits = degrees.shape == scales.shape == self.degrees.shape and rows.shape[1:] == self.rows.shape[1:]
        if fits:
            self.rows = self.rows.new_empty(rows.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if fits:
            self._plan(degrees.tolist(), scales.tolist())


# Each returns the features' degrees, and how many of each degree are expected among them: s^2 is a_N over that number.


def _paper(features: int, p: float, rng: Generator) -> tuple[list[int], dict[int, float]]:
    degrees = _geometric(features, p, rng)
    return degrees, {N: features * (p - 1) / p ** (N + 1) for N in degrees}


def _release(features: int, p: float, rng: Generator) -> tuple[list[int], dict[int, float]]:
    beyond = p**-RELEASE_DEGREES
    degrees = [1 + N for N in _geometric(features - 1, p, rng, beyond)]
    return [0, *degrees], {0: 1.0} | {N: (features - 1) * (p - 1) / (p**N * (1 - beyond)) for N in degrees}


def _exact01(features: int, d: int, kernel: Kernel, rng: Generator) -> tuple[list[int], dict[int, float]]:
    # The variance that degree N adds is about (a_N r^N)^2 over its number of features, at logits of r = 1/sqrt(d).
    free = features - d - 2
    size = {N: kernel.coefficient(N) * d ** (-N / 2) for N in range(2, 2 + RELEASE_DEGREES)}
    total = sum(size.values())
    numbers: dict[int, int] = {}
    for N in (N for N in size if size[N]):
        if not (number := int(free * size[N] / total)):
            break
        numbers[N] = number
    last = max(numbers, default=1)
    if numbers:  # what rounding left
        numbers[min(numbers)] += free - sum(numbers.values())
    sampled = free + 1 - sum(numbers.values())
    p = max(2.0, math.sqrt(d))  # the terms of the series fall like d^(-N/2), or faster
    tail = [last + 1 + N for N in _geometric(sampled, p, rng)]
    degrees = [0, *[1] * d, *(N for N in numbers for _ in range(numbers[N])), *tail]
    expected = {N: sampled * (p - 1) / p ** (N - last) for N in tail}
    return degrees, {0: 1.0, 1: 1.0} | {N: float(number) for N, number in numbers.items()} | expected


def _geometric(count: int, p: float, rng: Generator, beyond: float = 0.0) -> list[int]:
    """P[N >= m] = p^-m, by inversion; its upper end, of probability `beyond`, is left out."""
    uniform = torch.rand(count, generator=rng, dtype=torch.float64, device="cpu") * (1 - beyond)
    return (-torch.log1p(-uniform) / math.log(p)).floor().long().tolist()


def _signs(count: int, d: int, rng: Generator) -> Tensor:
    return 2.0 * torch.randint(0, 2, (count, d), generator=rng, device="cpu") - 1


def _orthogonal_signs(count: int, d: int, rng: Generator) -> Tensor:
    """Rows of +-1 that are orthogonal among each size of them if d is a power of 2 (nearly so if not); E[w w^T] = I.

    Rows of a Hadamard matrix in random order, its columns under random signs: another order and signs for each block.
    """
    hadamard = torch.ones(1, 1, device="cpu")
    while (size := len(hadamard)) < d:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    blocks = [hadamard[:0, :d]]
    for _ in range(math.ceil(count / size)):
        order = torch.randperm(size, generator=rng, device="cpu")
        blocks.append(hadamard[order, :d] * _signs(1, d, rng))
    return torch.cat(blocks)[:count]


class RandomFourier(nn.Module):
    """phi(x) = F^(-1/2) [sin(w_1.x) .. sin(w_F.x), cos(w_1.x) .. cos(w_F.x)], w ~ N(0, sigma^2 I).

    E[phi(x).phi(y)] = exp(-|sigma (x-y)|^2 / 2). sigma is trained, one per head and channel, through
    w = sigma * eps with a fixed eps ~ N(0, I) that the heads share. x is (..., H, n, d), or (..., d) when
    heads = 1. Cost: d F multiplications and D sines per token.
    """

    noise: Tensor  # (F, d)

    def __init__(self, head_dim: int, features: int, heads: int = 1, generator: Generator | None = None):
        super().__init__()
        require_int(head_dim=head_dim, heads=heads, features=features)
        if features % 2:
            raise ValueError(f"features={features} must be even: a sine and a cosine for each frequency")
        self.register_buffer("noise", torch.randn(features // 2, head_dim, generator=generator))
        self.sigma = nn.Parameter(torch.ones(heads, 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., D)."""
        w = self.frequencies().to(x.dtype)
        angles = x @ (w[0] if len(w) == 1 else w).mT
        return torch.cat([angles.sin(), angles.cos()], -1) * len(self.noise) ** -0.5

    def frequencies(self) -> Tensor:
        """w (H, F, d)."""
        return self.sigma * self.noise
