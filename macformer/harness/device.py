"""All that differs between the CPU and CUDA: the choice, precision, feed, clock, peaks of memory, running out of it."""

import ctypes
import gc
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, Literal

import filelock
import torch
from numpy.typing import NDArray
from torch import Tensor, cuda
from torch.profiler import ProfilerActivity, profile

M_TRIM_THRESHOLD, M_MMAP_MAX, MMAP_MAX = -1, -4, 65536  # glibc's names of two options; its default of the second
# Control groups of version 2 and 1, as /proc/self/cgroup calls them: the folder, the files of the limit and of the use,
# and the key in memory.stat of the files that were read, which a group gives up when memory is short.
CONTROL_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
POLL = 1.0  # seconds until the next look for a free GPU
Precision = Literal["auto", "float32", "bfloat16", "float16"]
Account = Literal["training", "data_wait", "evaluation", "pause"]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop otherwise
_runs = 0  # that this process was prepared for


def choose(name: str, root: Path = Path("/")) -> torch.device:
    """auto | cpu | cuda | cuda:N -> a device that is there; a GPU with its index. `root` has /dev.

    `auto` is the CPU where there is no GPU or the user has hidden it, not where torch cannot use the one that is there.
    """
    if not (known := re.fullmatch(r"auto|cpu|cuda(?::(0|[1-9]\d*))?", name)):
        raise ValueError(f"device={name} is not known; choose one of auto, cpu, cuda, or cuda:N for GPU number N")
    if name == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(action="ignore"):  # an old driver is a warning of torch's, and an error below
        count = cuda.device_count() if cuda.is_available() else 0
    if not count:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if not hidden and (any(root.glob("dev/nvidia[0-9]*")) or any(root.glob("usr/lib/wsl/lib/libcuda.so*"))):
            raise ValueError(f"device={name}, but torch cannot use the GPU here: {_obstacle()}, or use device=cpu")
        if name == "auto":
            return torch.device("cpu")
        raise ValueError(f"device={name}, but torch sees no CUDA GPU here; use device=cpu or device=auto")
    if (index := int(known[1] or 0)) >= count:
        seen = f"{count} CUDA GPU{'s' * (count > 1)} here, the last of them cuda:{count - 1}"
        raise ValueError(f"device={name}, but torch sees {seen}; use one of them, or device=auto")
    return torch.device("cuda", index)


def _obstacle() -> str:
    """Why torch cannot use a GPU that is there, and what to do about it."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build; install a CUDA build of the same version"
    said = "torch sees none"
    try:
        cuda.init()
    except Exception as error:
        said = str(error)
    if "too old" in said:
        found = re.search(r"found version (\d+)0(\d)0\b", said)  # 12040 is CUDA 12.4
        driver = f"its driver, of CUDA {found[1]}.{found[2]}," if found else "its driver"
        build = f"this torch, a build for CUDA {torch.version.cuda}"
        return f"{driver} is too old for {build}; install a torch built for an older CUDA or a newer driver"
    first_sentence = re.split(r"\n|\.\s+(?=[A-Z])|\.$", said.strip())[0]
    return f"{first_sentence}; see what nvidia-smi and CUDA_VISIBLE_DEVICES say"


def gpus(name: str) -> list[str]:
    """Those that runs with device=`name` may use. None on the CPU, or if `choose` refuses, as it will in each run."""
    with suppress(ValueError):
        if is_cuda(choose(str(name))):  # nobody has checked its type yet
            return [name] if ":" in name else [f"cuda:{index}" for index in range(cuda.device_count())]
    return []


@contextmanager
def own_gpu(name: str) -> Iterator[str]:
    """Lock and yield one of `gpus(name)` that no other run here has locked; wait for one. Yield `name` if it has none.

    A GPU goes by its uuid: under another CUDA_VISIBLE_DEVICES it has another index. A killed process holds no lock.
    Locks are in the system's folder for temporary files: who sets TMPDIR for one sweep must set it for all.
    """
    folder = Path(tempfile.gettempdir(), f"macformer-{getattr(os, 'getuid', str)()}")  # Windows: the user's own anyway
    files = {gpu: folder / f"{cuda.get_device_properties(gpu).uuid}.lock" for gpu in gpus(name)}
    if not files:
        yield name
        return
    folder.mkdir(exist_ok=True)
    for tries, gpu in enumerate(cycle(files), 1):
        try:
            held = filelock.FileLock(files[gpu]).acquire(timeout=0)
            break
        except filelock.Timeout:
            if tries == len(files):
                print(f"waiting for a GPU: other runs hold {', '.join(files)}", flush=True)
            if tries >= len(files):
                time.sleep(POLL)
    with held:
        try:
            yield gpu
        finally:  # what this process still has in reserve belongs to the next run there
            gc.collect()
            with suppress(RuntimeError):  # after an error of CUDA's every call raises it again
                cuda.empty_cache()


def is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def prepare(device: torch.device, threads: int, tf32: bool = False) -> None:
    """Before each run. CUDA: make this GPU the current one, allow TF32 or not. CPU: keep freed memory."""
    global _runs
    _runs += 1
    torch.set_num_threads(threads)
    if is_cuda(device):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        cuda.set_device(device)  # where the loss scaler and whatever else names no index go
        gc.collect()
        cuda.empty_cache()  # or what earlier runs of a sweep have reserved would count as this one's
        return
    keep_freed(True)
    if (free := free_bytes(device)) is not None:
        # Linux grants memory that is not there, and kills the process that uses it, the whole sweep with it. With this
        # limit the allocation fails and the run ends as oom. Runs side by side do not know of each other: two that fit
        # one by one may still be too much.
        import resource  # is not there on Windows

        most = 1024 * _number(Path("/proc/self/status"), "VmData") + free
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


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


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """What the CPU can still allocate: what the machine has, and what each control group of this process leaves.

    None where nobody says it, and on CUDA, whose allocator raises an error in time. `root` has /proc and /sys.
    """
    if is_cuda(device) or sys.platform != "linux":
        return None
    free = [1024 * _number(root / "proc/meminfo", "MemAvailable")]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, group = line.split(":", 2)
        for kind in CONTROL_GROUPS.keys() & kinds.split(","):
            home, limit, used, files = CONTROL_GROUPS[kind]
            own = root / home / group.strip("/")
            for folder in (own, *own.parents):
                if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
                    left = int(most) - int((folder / used).read_text())
                    free.append(left + _number(folder / "memory.stat", files))
    return max(min(free), 0)


def _number(file: Path, key: str) -> int:
    """Of the line that begins with `key`, in a file of Linux's own."""
    found = re.search(rf"^{key}:?\s+(\d+)", file.read_text(), re.MULTILINE)
    assert found, f"{file} has no {key}"
    return int(found[1])


def describe(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if is_cuda(device):
        return cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """What `auto` means: mixed with float16 on CUDA, as in the base code; float32 on the CPU, where half is slow."""
    auto: Precision = "float16" if is_cuda(device) else "float32"
    return auto if name == "auto" else name


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Matrix products in half precision where that is asked for. Attentions and ppSBN leave it by themselves."""
    precision = choose_precision(precision, device)
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")


def scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler:
    """Keeps small gradients from vanishing in float16; with any other precision it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=choose_precision(precision, device) == "float16")


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


def feed(device: torch.device, batches: Iterable[tuple[NDArray[Any], ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Batches as tensors on the device.

    CPU: made when they are asked for; a thread would take its time from the step. Else a thread makes the next one
    while the device works on this one; for CUDA in pinned memory, from which it is copied without waiting.
    """
    upcoming = (tuple(map(torch.from_numpy, batch)) for batch in batches)
    if device.type == "cpu":
        yield from upcoming
        return
    if is_cuda(device):
        upcoming = (tuple(tensor.pin_memory() for tensor in batch) for batch in upcoming)
    with ThreadPoolExecutor(1) as thread:  # what goes wrong there is raised here, in its turn
        future = thread.submit(next, upcoming, None)
        while made := future.result():
            future = thread.submit(next, upcoming, None)
            yield tuple(tensor.to(device, non_blocking=True) for tensor in made)


def is_out_of_memory(error: BaseException) -> bool:
    """torch has an exception of its own for CUDA's allocator; others raise a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    cublas = ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")  # it allocates when it begins
    said = (*cublas, "DefaultCPUAllocator", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def cuda_peaks(device: torch.device) -> dict[str, int]:
    """Allocated and reserved bytes at their highest since the last call, as a record calls them. None on the CPU."""
    if not is_cuda(device):
        return {}
    peaks = {"peak_bytes": cuda.max_memory_allocated(device), "reserved_bytes": cuda.max_memory_reserved(device)}
    cuda.reset_peak_memory_stats(device)
    return peaks


def resident_peak() -> int | None:
    """Highest resident bytes of this process; None if it had other runs before, which cannot be told apart.

    Linux alone says it: ru_maxrss, which other systems have too, begins with that of the process that started this one.
    """
    status = Path("/proc/self/status")
    return 1024 * _number(status, "VmHWM") if _runs == 1 and status.exists() else None


def peak_bytes(device: torch.device, state: Iterable[Tensor], work: Callable[[], object]) -> int:
    """Peak memory of `work` with `state` (parameters, optimiser) alive. The random numbers stay as they were.

    CUDA: the allocator's own peak. CPU: the peak of live tensor bytes, summed over the allocator's events; the
    operating system's figure would also hold torch itself and whatever the allocator keeps.
    """
    before = random_state(device)
    if is_cuda(device):
        now(device)
        cuda.reset_peak_memory_stats(device)
        work()
        now(device)
        peak = cuda.max_memory_allocated(device)
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        results = profiler.profiler and profiler.profiler.kineto_results
        assert results, "the profiler gave no events"
        events = [event for event in results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peak = sum(tensor.nbytes for tensor in state) + max(accumulate(changes, initial=0))
    set_random_state(device, before)
    return peak
