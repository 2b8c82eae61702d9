"""Macformer: a Transformer with Random Maclaurin Feature Attention.

Names are loaded when they are first used, so that the report can be made without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from macformer.attention import KernelAttention, RFAttention, RMFAttention, SoftmaxAttention
    from macformer.features import RandomFourier, RandomMaclaurin
    from macformer.kernels import KERNELS
    from macformer.ppsbn import PostSBN, PreSBN

_HOME = {
    "KERNELS": "kernels",
    "RandomFourier": "features",
    "RandomMaclaurin": "features",
    "KernelAttention": "attention",
    "RFAttention": "attention",
    "RMFAttention": "attention",
    "SoftmaxAttention": "attention",
    "PostSBN": "ppsbn",
    "PreSBN": "ppsbn",
}
__all__ = [
    "KERNELS",
    "KernelAttention",
    "PostSBN",
    "PreSBN",
    "RFAttention",
    "RMFAttention",
    "RandomFourier",
    "RandomMaclaurin",
    "SoftmaxAttention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'macformer' has no attribute {name!r}")
    return getattr(import_module(f"macformer.{_HOME[name]}"), name)
