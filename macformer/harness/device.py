"""All that differs between the CPU and CUDA: the choice, precision, feed, clock, peaks of memory, running out of it."""

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, cuda
from torch.profiler import ProfilerActivity, profile

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h
MMAP_MAX = 65536  # glibc's default
Array = NDArray[np.generic]
Item = TypeVar("Item")
Precision = Literal["auto", "float32", "bfloat16", "float16"]
Account = Literal["training", "data_wait", "evaluation", "pause"]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop otherwise
_runs = 0  # that this process was prepared for


def choose(name: str) -> torch.device:
    """auto | cpu | cuda -> a device that is there."""
    if name == "cuda" and not cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and cuda.is_available() else "cpu")


def is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def prepare(device: torch.device, threads: int, tf32: bool = False) -> None:
    """Before each run: set the number of threads; on CUDA allow TF32 or not; on the CPU keep freed memory."""
    global _runs
    _runs += 1
    torch.set_num_threads(threads)
    if is_cuda(device):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        gc.collect()
        cuda.empty_cache()  # or what earlier runs of a sweep have reserved would count as this one's
        return
    keep_freed(True)
    if sys.platform == "linux":
        _limit_memory()


def keep_freed(keep: bool) -> None:
    """Whether freed memory of the CPU stays with the process; if not, what is free goes back now as well.

    glibc returns large blocks at once and pays for each new one in page faults (figures in docs/log.md). Kept, they are
    split: several times what lives can become resident. Elsewhere the calls do not exist and are left out.
    """
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if libc and hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_MAX, 0 if keep else MMAP_MAX)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        if not keep:
            libc.malloc_trim(0)


def free_bytes(device: torch.device) -> int | None:
    """What the CPU can still allocate. None if nobody says it, and on CUDA, whose allocator raises an error in time."""
    return None if is_cuda(device) or sys.platform != "linux" else available_memory(Path("/"))


def _limit_memory() -> None:
    """Let an allocation fail that cannot be kept, so that the run ends as oom and a sweep goes on.

    Linux grants memory that is not there, and kills the process that uses it, the whole sweep with it. Runs side by
    side do not know of each other: two that fit one by one may still be too much.
    """
    import resource  # is not there on Windows

    (own,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData:" in line)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(own) * 1024 + available_memory(Path("/"))
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def available_memory(root: Path) -> int:
    """Bytes that this process can still get: what the machine has, and what each of its control groups leaves.

    A group counts the files that it has read, which it gives up when memory is short. `root` has /proc and /sys.
    """
    free = next(line for line in (root / "proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    rooms = [int(free.split()[1]) * 1024]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        home, limit, used, files = (
            (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if kinds
            else (root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
        )
        own = home / group.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(home) and (folder / limit).exists():
                most = (folder / limit).read_text().strip()
                told = dict(stat.split() for stat in (folder / "memory.stat").read_text().splitlines())
                if most != "max":
                    rooms.append(int(most) - int((folder / used).read_text()) + int(told[files]))
    return max(min(rooms), 0)


def describe(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if is_cuda(device):
        return cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """What `auto` means: mixed with float16 on CUDA, as in the base code; float32 on the CPU, where half is slow."""
    if name != "auto":
        return name
    return "float16" if is_cuda(device) else "float32"


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Matrix products in half precision where that is asked for. Attentions and ppSBN leave it by themselves."""
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")


def scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler:
    """Keeps small gradients from vanishing in float16; with any other precision it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=precision == "float16")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of torch's generators: of the CPU, and of the GPU if that is the device."""
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": cuda.get_rng_state(device)} if is_cuda(device) else states


def set_random_state(device: torch.device, states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if is_cuda(device) and "cuda" in states:
        cuda.set_rng_state(states["cuda"], device)


def now(device: torch.device) -> float:
    """Seconds on a steady clock, once all work given to the device is done."""
    if is_cuda(device):
        cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """Every second since it was made is booked on one account: what lies between two calls, on that of the second."""

    def __init__(self, device: torch.device, seconds: dict[Account, float]):
        self.device = device
        self.seconds = seconds
        self.last = now(device)

    def book(self, account: Account) -> float:
        """Seconds since the last call, now on `account`."""
        before, self.last = self.last, now(self.device)
        self.seconds[account] = self.seconds.get(account, 0.0) + self.last - before
        return self.last - before


def time_repeated(device: torch.device, work: Callable[[], Item], seconds: float) -> tuple[float, Item]:
    """Call it again and again for that long, at least once: mean seconds of a call, and what the last one returned."""
    begin, calls = now(device), 0
    while calls == 0 or now(device) - begin < seconds:
        result = work()
        calls += 1
    return (now(device) - begin) / calls, result


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
            yield [tensor.pin_memory() for tensor in made] if is_cuda(device) else made

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
    """torch has an exception of its own for CUDA's allocator; others raise a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def cuda_peaks(device: torch.device) -> tuple[int, int]:
    """Allocated and reserved bytes at their highest since the last call; they begin anew."""
    peaks = cuda.max_memory_allocated(device), cuda.max_memory_reserved(device)
    cuda.reset_peak_memory_stats(device)
    return peaks


def resident_peak() -> int | None:
    """Highest resident bytes of this process; None if it had other runs before, which cannot be told apart.

    Linux alone says it: ru_maxrss, which other systems have too, begins with that of the process that started this one.
    """
    status = Path("/proc/self/status")
    if _runs != 1 or not status.exists():
        return None
    (peak,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak) * 1024


def peak_bytes(device: torch.device, state: Iterable[Tensor], work: Callable[[], object]) -> int:
    """Peak memory of `work` with `state` (parameters, optimiser) alive. The random numbers stay as they were.

    CUDA: the allocator's own peak. CPU: the peak of live tensor bytes, summed over the allocator's events; the
    operating system's figure would also hold torch itself and whatever the allocator keeps.
    """
    before = random_state(device)
    if is_cuda(device):
        cuda.synchronize(device)
        cuda.reset_peak_memory_stats(device)
        work()
        cuda.synchronize(device)
        set_random_state(device, before)
        return cuda.max_memory_allocated(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    set_random_state(device, before)
    results = profiler.profiler and profiler.profiler.kineto_results
    assert results, "the profiler gave no events"
    live = peak = sum(t.numel() * t.element_size() for t in state)
    events = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
