"""All that differs between the CPU and CUDA: the choice, the feed, the clock, the peak of memory, running out of it."""

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h
Array = NDArray[np.generic]
Item = TypeVar("Item")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop otherwise


def choose(name: str) -> torch.device:
    """auto | cpu | cuda -> a device that is there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def prepare(device: torch.device, threads: int) -> None:
    """Set the number of threads; on the CPU, keep freed memory instead of giving it back to the kernel.

    glibc returns large blocks at once and pays for each new one in page faults (figures in docs/log.md). Elsewhere the
    call does not exist and is left out.
    """
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if device.type == "cpu" and mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def describe(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def now(device: torch.device) -> float:
    """Seconds on a steady clock, once all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def feed(device: torch.device, batches: Iterable[tuple[Array, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Batches as tensors on the device.

    CPU: made when they are asked for; a thread would take its time from the step. Else a thread makes the next one
    while the device works on this one; for CUDA in pinned memory, from which it is copied without waiting.
    """
    if device.type == "cpu":
        for batch in batches:
            yield tuple(torch.from_numpy(array) for array in batch)
        return

    def tensors() -> Iterator[list[Tensor]]:
        for batch in batches:
            made = [torch.from_numpy(array) for array in batch]
            yield [tensor.pin_memory() for tensor in made] if device.type == "cuda" else made

    for made in _one_ahead(tensors()):
        yield tuple(tensor.to(device, non_blocking=True) for tensor in made)


def _one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The items in their order; while one is in use, a thread makes the next. What goes wrong there is raised here."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, end)
        while (item := upcoming.result()) is not end:
            upcoming = thread.submit(next, items, end)
            yield cast(Item, item)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an exception of its own; the CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def peak_bytes(device: torch.device, state: Iterable[Tensor], step: Callable[[], None]) -> tuple[int, str]:
    """Peak memory of `step` with `state` (parameters, optimiser) alive, and how it was measured.

    `step` is run once more than needed and leaves the random numbers as they were.
    CUDA: the allocator's own peak. CPU: the peak of live tensor bytes, summed over the allocator's events; the
    operating system's figure would also hold torch itself and whatever the allocator keeps.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            step()
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device), "CUDA allocator peak over one training step"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    results = profiler.profiler and profiler.profiler.kineto_results
    assert results, "the profiler gave no events"
    live = peak = sum(t.numel() * t.element_size() for t in state)
    events = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, "peak of live tensor bytes over one training step (allocator events)"
