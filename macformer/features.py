"""Random feature maps: Phi(x).Phi(y) is an unbiased estimate of a kernel of x and y.

These are the slow, obvious versions: each formula as it is written. They know no attention.
Shapes: d head width, D features, N degree of one feature, H heads, F frequencies (D = 2F).
"""

import math
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from macformer import kernels
from macformer.check import whole

RELEASE_DEGREES = 20  # the authors' later release samples degrees 1..20


class RandomMaclaurin(nn.Module):
    """phi_i(x) = sqrt(a_N / P[N]) prod_{j=1..N} <w_j, x>, Phi = D^(-1/2) [phi_1 .. phi_D].

    w_j is a Rademacher vector (signs +-1). E[Phi(x).Phi(y)] = K(x.y).

    sampling="paper": P[N=m] = (p-1)/p^(m+1) for every feature; for p = 2 this is the paper's 1/p^(m+1),
    for other p the factor p-1 is missing there (erratum 4).
    sampling="release": one exact constant feature sqrt(a_0); the D-1 others have degree 1..20 with
    probability proportional to p^-m. Unbiased for the series up to degree 20.

    Cost: O(d) multiplications per token and unit of degree; the mean degree is 1/(p-1).
    The draw is held in buffers: it moves with the module and is saved with it.
    """

    degrees: Tensor  # (D,), descending
    signs: Tensor  # (sum of degrees, d): first the row w_1 of each feature with N >= 1, then each w_2 with N >= 2, ...
    scales: Tensor  # (D,)

    def __init__(
        self,
        head_dim: int,
        features: int,
        kernel: str = "exp",
        p: float = 2.0,
        generator: Generator | None = None,
        sampling: Literal["paper", "release"] = "paper",
    ):
        super().__init__()
        whole(head_dim=head_dim, features=features)
        if not p > 1:
            raise ValueError(f"p={p!r} must be above 1: the degrees have probability (p-1)/p^(N+1)")
        if sampling not in ("paper", "release"):
            raise ValueError(f"sampling={sampling!r} is not known; choose one of paper, release")
        self.kernel = kernels.find(kernel)

        # A uniform number u becomes the degree m with P[N >= m] = p^-m: the geometric law, by inversion.
        uniform = torch.rand(features, generator=generator, dtype=torch.float64)
        log_p = math.log(p)
        if sampling == "paper":
            degrees = (-torch.log1p(-uniform) / log_p).floor().long()
            weight = [(p - 1) / p ** (m + 1) * features for m in range(int(degrees.max()) + 1)]
        else:
            tail = p**-RELEASE_DEGREES  # the law is cut off above degree 20 and made to sum to one
            degrees = 1 + (-torch.log1p(-uniform * (1 - tail)) / log_p).floor().long()
            degrees[0] = 0
            law = [(p - 1) / (p**m * (1 - tail)) for m in range(1, RELEASE_DEGREES + 1)]
            weight = [1.0] + [probability * (features - 1) for probability in law]
        degrees = degrees.sort(descending=True).values
        scales = [math.sqrt(self.kernel.coefficient(m) / weight[m]) for m in degrees.tolist()]
        rows = int(degrees.sum())
        bits = torch.randint(0, 2, (rows, head_dim), generator=generator)
        self.register_buffer("degrees", degrees)
        self.register_buffer("signs", (2 * bits - 1).to(torch.get_default_dtype()))
        self.register_buffer("scales", torch.tensor(scales))
        self._widths = self._count_factors()

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., D)."""
        first = self._widths[0] if self._widths else 0  # features that are no constants
        scale, constant = self.scales.split([first, len(self.scales) - first])
        # factors[j] holds <w_{j+1}, x> of the features that have it: the first ones, as degrees descend. The scale goes
        # into w_1: a d x D product is nothing beside one of n x D.
        w = torch.cat([self.signs[:first] * scale.unsqueeze(-1), self.signs[first:]])
        product = x.new_empty(*x.shape[:-1], 0)
        for factor in reversed((x @ w.to(x.dtype).mT).split(self._widths, -1)):
            deeper = product.shape[-1]
            product = torch.cat([product * factor[..., :deeper], factor[..., deeper:]], -1)
        return torch.cat([product, constant.to(x.dtype).expand(*x.shape[:-1], -1)], -1)

    def _count_factors(self) -> list[int]:
        """How many features have a first, a second, ... factor."""
        return [int((self.degrees > j).sum()) for j in range(int(self.degrees.max()))]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A saved draw may have other degrees, hence another number of rows, than the one made here.
        if (saved := state_dict.get(prefix + "signs")) is not None:
            self.signs = self.signs.new_empty(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._widths = self._count_factors()


class RandomFourier(nn.Module):
    """phi(x) = F^(-1/2) [sin(w_1.x) .. sin(w_F.x), cos(w_1.x) .. cos(w_F.x)], w ~ N(0, sigma^2 I).

    E[phi(x).phi(y)] = exp(-|sigma (x-y)|^2 / 2). sigma is trained, one per head and channel, through
    w = sigma * eps with a fixed eps ~ N(0, I) that the heads share. x is (..., H, n, d), or (..., d) when
    heads = 1. Cost: d F multiplications and D sines per token.
    """

    noise: Tensor  # (F, d)

    def __init__(self, head_dim: int, features: int, heads: int = 1, generator: Generator | None = None):
        super().__init__()
        whole(head_dim=head_dim, heads=heads, features=features)
        if features % 2:
            raise ValueError(f"features={features} must be even: a sine and a cosine for each frequency")
        self.register_buffer("noise", torch.randn(features // 2, head_dim, generator=generator))
        self.sigma = nn.Parameter(torch.ones(heads, 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., D)."""
        w = (self.sigma * self.noise).to(x.dtype)  # (H, F, d)
        angles = x @ (w[0] if len(w) == 1 else w).mT
        return torch.cat([angles.sin(), angles.cos()], -1) * len(self.noise) ** -0.5
