"""Count what a training step would ask of a GPU, without one: kernel launches, bytes moved, FLOP.

The forward and the backward pass of each model at the paper's shapes, in float16, run on torch's `meta` device, which
computes nothing and takes every branch that CUDA takes. Views and new memory are free; each other operation is one
launch that reads its inputs and writes its outputs once. CUDA's autocast and fused dropout, which `meta` lacks, are put
in their place. Not counted: unscaling, clipping and the fused optimiser, six launches or so for any model.

These are counts, not times: nothing here has run on a GPU.
"""

import argparse
import itertools
import math
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from macformer.bench import models

MODELS = ["transformer", "rfa", "macformer_exp"]
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}  # new memory
FREE |= {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh"}  # views that are not marked as such
OVERWRITES = {"copy_", "fill_", "zero_"}  # in place, without reading what was there
PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}  # of our models
HEAD = """Counted on torch's meta device, by `make bench-launches`: the forward and backward pass of one training step
at the paper's shapes in float16. Not measured: nothing here has run on a GPU.

| task | model | launches | GB moved | GFLOP |
| --- | --- | --: | --: | --: |"""


class Cost(NamedTuple):
    launches: int
    bytes: int
    flop: int


real_autocast = torch.autocast


def autocast(kind: str, *args: Any, **kwargs: Any) -> torch.autocast:
    """torch.autocast, also for `meta`, which has none: that of the CPU leaves its tensors alone."""
    return real_autocast("cpu" if kind == "meta" else kind, *args, **kwargs)


class _AsOnCUDA(TorchFunctionMode):
    """Casts products to float16 while autocast is on, and takes dropout as one kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return torch.native_dropout(args[0], kwargs["p"], kwargs["training"])[0]
        if func in PRODUCTS and torch.is_autocast_enabled("cpu"):
            args = [each.half() for each in args]
        return func(*args, **kwargs)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, arguments = func(*args, **(kwargs or {})), func._schema.arguments
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in FREE:
            return out
        given = [(declared, (kwargs or {}).get(declared.name)) for declared in arguments]
        given = [*zip(arguments, args, strict=False), *given[len(args) :]]
        looks = not name.startswith("new_") and not name.endswith("_like")  # at more than shapes
        read: dict[int, Tensor] = {}
        for declared, value in given:
            changes = declared.alias_info is not None and declared.alias_info.is_write
            if looks and not (changes and (declared.is_out or name in OVERWRITES)):
                read |= {id(each): each for each in tree_leaves(value) if isinstance(each, Tensor)}
        written = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if moved := sum(map(_bytes, [*read.values(), *written])):
            self.launches += 1
            self.bytes += moved
            if count := flop_registry.get(func._overloadpacket):
                self.flop += count(*args, **(kwargs or {}), out_val=out)
        return out


def _bytes(tensor: Tensor) -> int:
    """Of its different elements: an expanded tensor has fewer than its shape says."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes, start=tensor.element_size()) if tensor.numel() else 0


def count_step(name: str, task: str) -> Cost:
    """A training step of a model of `make bench` at the task's shape, seed 0."""
    _, spec, batches = models.batches_of(f"{task}-full", None, "", torch.device("meta"))
    model, (ids, labels) = models.model(name, spec).to("meta"), next(batches)
    with patch.object(torch, "autocast", autocast), _Count() as count:
        with _AsOnCUDA(), autocast("meta", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(ids), labels)
        loss.backward()
    return Cost(count.launches, count.bytes, count.flop)


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    cells = itertools.product(models.TASKS, MODELS)
    rows = [{"task": task, "model": name, **count_step(name, task)._asdict()} for task, name in cells]
    return {"torch": torch.__version__, "seed": 0, "rows": rows}


def table(report: dict[str, Any]) -> str:
    lines = [
        f"| {row['task']} | {row['model']} | {row['launches']} | {row['bytes'] / 1e9:.2f} | {row['flop'] / 1e9:.0f} |"
        for row in report["rows"]
    ]
    return "\n".join([HEAD, *lines, ""])
