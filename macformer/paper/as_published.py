"""What the paper's memory column seems to compare, written as the base code and the authors' later release do it.

Nothing trains with these: they are measured against ours. Shapes: B batch, H heads, n length, d head width, D features.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from macformer.features import RandomMaclaurin
from macformer.model import Classifier

FAR = 1e6  # what a masked logit loses
FLOOR = 1.0  # of the denominator


class StepwiseSoftmax(nn.Module):
    """Checkpointed softmax attention in which every step makes a new n x n matrix."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.drop = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool = False) -> Tensor:
        return checkpoint(self._attend, q, k, v, mask, use_reentrant=False)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        logits = q @ k.mT
        logits = logits / q.shape[-1] ** 0.5  # one name: a matrix is freed when the next one is there
        logits = logits - FAR * (1 - mask[:, None, None, :].to(q.dtype))
        return self.drop(logits.softmax(-1)) @ v


class RunningSum(nn.Module):
    """Causal RMFA, here with the paper's map, that holds the sum over j <= i of Phi(k_j) v_j for every i: O(n D d)."""

    def __init__(self, head_dim: int, features: int = 128):
        super().__init__()
        self.feature_map = RandomMaclaurin(head_dim, features)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool = True) -> Tensor:
        phi_q, phi_k = (self.feature_map(x * x.shape[-1] ** -0.25) for x in (q, k))
        phi_k = phi_k * mask[:, None, :, None]
        sums = (phi_k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)  # (B, H, n, D, d)
        denominator = (phi_q * phi_k.cumsum(2)).sum(-1, keepdim=True)
        return (phi_q.unsqueeze(-2) @ sums).squeeze(-2) / denominator.clamp(min=FLOOR)


class OneByOne(nn.Module):
    """A classifier of pairs that encodes the second text after the first one. Ours takes both in one batch."""

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.classifier = classifier

    def forward(self, ids: Tensor) -> Tensor:
        a, b = (self.classifier.encode(texts) for texts in ids.unbind(1))
        return self.classifier.head(torch.cat([a, b, a * b, a - b], -1))
