"""What differs between CPU and CUDA: on a fake CUDA, on meta tensors, and on a real GPU where there is one."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lra_data.base import TaskSpec
from macformer.attention import RFAttention, RMFAttention, SoftmaxAttention
from macformer.bench import launches
from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness.plan import RunPlan, differences
from macformer.harness.run import attention_backends, run
from tests import forked
from tests.conftest import MODELS, Compose, pytest_configure

Holder = tuple[BaseProcess, Connection]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it, and grants memory that is not there")


def calls(cuda: MagicMock) -> list[str]:
    return [name for name, _, _ in cuda.method_calls]


def test_the_choice(fake_cuda: MagicMock, tmp_path: Path) -> None:
    assert devices.choose("auto") == devices.choose("cuda") == torch.device("cuda:0")
    assert devices.choose("cuda:1") == CUDA
    assert devices.choose("cpu") == CPU
    assert devices.describe(CUDA) == "Fake GPU"
    with pytest.raises(ValueError, match=r"^device=cuda:3, but torch sees 3 CUDA GPUs here, the last of them cuda:2"):
        devices.choose("cuda:3")
    fake_cuda.is_available.return_value = False  # and an old driver has GPUs all the same
    assert devices.choose("auto", tmp_path) == CPU
    with pytest.raises(ValueError, match=r"^device=cuda:1, but torch sees no CUDA GPU here; use device=cpu"):
        devices.choose("cuda:1", tmp_path)


@pytest.mark.parametrize(
    ("build", "said", "reason"),
    [
        (None, "", r"torch 2\S+ is a CPU build; install a CUDA build of the same version"),
        (
            "13.0",
            "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by",
            "its driver, of CUDA 12.4, is too old for this torch, a build for CUDA 13.0; install a torch built for an "
            "older CUDA or a newer driver",
        ),
        ("13.0", "The driver is too old.", "its driver is too old for this torch, a build for CUDA 13.0; install .+"),
        (
            "13.0",
            "CUDA unknown error - an incorrect environment, e.g. after changes. Setting the available devices to be",
            "CUDA unknown error - an incorrect environment, e.g. after changes; see what nvidia-smi and .+ say",
        ),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error_unless_it_is_hidden(
    build: str | None, said: str, reason: str, fake_cuda: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device file is there. Without the error, a run would take weeks on the CPU, and nobody would know why."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    fake_cuda.is_available.return_value = False
    fake_cuda.init.side_effect = RuntimeError(said)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.choose("auto", tmp_path) == CPU
    (tmp_path / "dev" / "nvidia0").touch()
    for name in ("auto", "cuda"):
        with pytest.raises(ValueError, match=f"^device={name}, but .+ the GPU here: {reason}, or use device=cpu$"):
            devices.choose(name, tmp_path)
    assert devices.choose("cpu", tmp_path) == CPU
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert devices.choose("auto", tmp_path) == CPU


def test_auto_precision_is_mixed_on_cuda_alone_and_only_float16_is_scaled() -> None:
    assert [devices.choose_precision("auto", device) for device in (CUDA, CPU)] == ["float16", "float32"]
    assert devices.choose_precision("bfloat16", CUDA) == "bfloat16"
    scaled = {name: devices.scaler(CPU, name).is_enabled() for name in ("float32", "bfloat16", "float16")}
    assert scaled == {"float32": False, "bfloat16": False, "float16": True}


def test_the_clock_waits_and_books_every_second(fake_cuda: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 16.0, 20.0])
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(times))
    clock = devices.Clock(CUDA, {"training": 100.0})
    assert [clock.book(account) for account in ("data_wait", "training", "training", "pause")] == [1, 2, 3, 4]
    assert clock.seconds == {"data_wait": 1, "training": 105, "pause": 4}
    assert calls(fake_cuda) == ["synchronize"] * 5
    fake_cuda.synchronize.assert_called_with(CUDA)


def test_peaks_begin_anew_when_they_are_read(fake_cuda: MagicMock) -> None:
    fake_cuda.allocated, fake_cuda.reserved = 5, 8
    names = "peak_bytes", "reserved_bytes"
    for peaks in ((5, 8), (0, 0)):
        assert devices.cuda_peaks(CUDA) == dict(zip(names, peaks, strict=True))
    assert fake_cuda.reset_peak_memory_stats.call_count == 2


def test_the_peak_of_some_work_on_cuda(fake_cuda: MagicMock) -> None:
    assert devices.peak_bytes(CUDA, [], lambda: fake_cuda.configure_mock(allocated=42)) == 42
    measured = ["synchronize", "reset_peak_memory_stats", "synchronize"]
    assert calls(fake_cuda) == ["get_rng_state", *measured, "max_memory_allocated", "set_rng_state"]
    fake_cuda.set_rng_state.assert_called_once_with(fake_cuda.get_rng_state.return_value, CUDA)


def test_memory_is_the_peak_of_live_bytes() -> None:
    """x, 8 MB, is squared twice (two more tensors), one of them freed before a third is made."""
    x = torch.zeros(1_000_000, dtype=torch.float64)

    def step() -> None:
        y = x * x
        z = y * y
        del y
        del z
        torch.rand(1)
        (x + x).sum()

    before = torch.get_rng_state()
    peak = devices.peak_bytes(CPU, [x], step)
    assert peak == pytest.approx(24e6, rel=0.001)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("device", [CPU, torch.device("meta")], ids=str)
def test_the_feed_gives_every_batch_in_its_order(device: torch.device) -> None:
    """A device other than the CPU is fed from a thread; on the CPU that would take its time from the step."""
    threads = []

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for i in range(5):
            threads.append(threading.current_thread())
            yield np.full((2, 3), i, np.int32), np.arange(i + 1)

    fed = list(devices.feed(device, batches()))
    assert [thread is threading.main_thread() for thread in threads] == [device == CPU] * 5
    assert [(ids.shape, len(labels)) for ids, labels in fed] == [((2, 3), i + 1) for i in range(5)]
    assert {tensor.device.type for pair in fed for tensor in pair} == {device.type}
    assert {(ids.dtype, labels.dtype) for ids, labels in fed} == {(torch.int32, torch.int64)}
    assert list(devices.feed(device, [])) == []


def test_one_batch_is_made_ahead_and_no_more() -> None:
    """By a thread; what goes wrong there is raised in its turn."""
    made = []

    def batches() -> Iterator[tuple[np.ndarray]]:
        for i in range(5):
            made.append(i)
            yield (np.zeros(i),)
        raise MemoryError

    fed = devices.feed(torch.device("meta"), batches())
    for i in range(4):
        assert next(fed)[0].shape == (i,)
        deadline = time.monotonic() + 30
        while len(made) < i + 2 and time.monotonic() < deadline:
            time.sleep(0.001)  # the thread is at work
        assert made == list(range(i + 2))
    next(fed)
    with pytest.raises(MemoryError):
        next(fed)


def test_tf32_is_what_the_flag_says(fake_cuda: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = SimpleNamespace(allow_tf32=None)
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    monkeypatch.setattr(torch.backends, "cudnn", flags)
    for wanted in (True, False):
        devices.prepare(CUDA, 1, tf32=wanted)
        assert flags.allow_tf32 is wanted
    assert calls(fake_cuda) == ["set_device", "empty_cache"] * 2
    fake_cuda.set_device.assert_called_with(CUDA)


@pytest.fixture
def holders(fake_cuda: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Holder]]:
    """holders("auto") -> a process with a GPU of its own, and a pipe: it tells which, and waits to be told to end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(devices, "POLL", 0.01)
    fork, started = get_context("fork"), []

    def hold(name: str, pipe: Connection) -> None:
        with devices.own_gpu(name) as gpu:
            pipe.send(gpu)
            pipe.recv()

    def start(name: str) -> Holder:
        here, there = fork.Pipe()
        started.append(fork.Process(target=hold, args=(name, there), daemon=True))
        started[-1].start()
        return started[-1], here

    yield start
    for process in started:
        process.kill()


def told(pipe: Connection) -> str:
    assert pipe.poll(30)
    return pipe.recv()


def test_each_run_has_a_gpu_of_its_own(
    holders: Callable[..., Holder], fake_cuda: MagicMock, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fourth waits for one of three, whether its holder ends or is killed, and says so once."""
    processes = [holders(name) for name in ("auto", "cuda", "auto")]
    held = {told(pipe): (process, pipe) for process, pipe in processes}
    (_, fourth), (_, first) = holders("auto"), holders("cuda:0")
    fake_cuda.device_count.return_value = 1  # CUDA_VISIBLE_DEVICES=2 says that the last is the first
    fake_cuda.get_device_properties.side_effect = lambda gpu: SimpleNamespace(uuid="uuid-of-cuda:2")
    _, last = holders("auto")
    assert not any(pipe.poll(0.3) for pipe in (fourth, first, last))
    held["cuda:1"][0].kill()
    assert told(fourth) == "cuda:1"
    assert not any(pipe.poll(0.3) for pipe in (first, last))
    held["cuda:2"][1].send("end")
    assert told(last) == "cuda:0"
    assert not first.poll(0.3)
    held["cuda:0"][1].send("end")
    assert told(first) == "cuda:0"
    waited = ["cuda:0", "cuda:0", "cuda:0, cuda:1, cuda:2"]
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"waiting for a GPU: other runs hold {gpus}" for gpus in waited
    ]


def test_no_run_locks_a_gpu_that_it_cannot_have(fake_cuda: MagicMock, tmp_path: Path, monkeypatch: Any) -> None:
    """The CPU needs no lock, and a wrong name is the run's own to refuse."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("cpu", "gpu", "cuda:3", 0):
        with devices.own_gpu(name) as own:
            assert own == name
    fake_cuda.is_available.return_value = False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with devices.own_gpu("auto") as own:
        assert own == "auto"
    assert not list(tmp_path.iterdir())


@LINUX
def test_the_resident_peak_is_that_of_this_process_and_of_one_run() -> None:
    """A child of a large process, as a test or a notebook is: ru_maxrss would be its parent's."""
    child = """
import torch
from macformer.harness import device as devices
for _ in range(2):
    devices.prepare(torch.device("cpu"), 1)
    print(devices.resident_peak())
"""
    ballast = np.ones(5 * 2**28, np.uint8)  # 1.25 GiB
    first, second = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.split()
    assert ballast.all()
    assert second == "None"
    assert 2**26 < int(first) < 2**30


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was copied to pinned memory, if every device is taken for CUDA."""
    copied: list[Tensor] = []
    monkeypatch.setattr(devices, "is_cuda", lambda device: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: copied.append(tensor) or tensor)
    return copied


def test_batches_for_cuda_come_from_pinned_memory(pinned: list[Tensor]) -> None:
    fed = list(devices.feed(torch.device("meta"), [(np.zeros((2, 3), np.int32), np.zeros(2, np.int64))]))
    assert [tensor.shape for tensor in pinned] == [(2, 3), (2,)]
    assert {tensor.device.type for pair in fed for tensor in pair} == {"meta"}


def test_a_run_on_fake_cuda(cell: Compose, fake_cuda: Any, pinned: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under the name of CUDA: peaks of training and evaluation apart, without the first step."""
    monkeypatch.setattr(devices, "choose", lambda name: CPU)
    forward, seen = torch.nn.Module.__call__, []

    def allocating(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(model).__name__ == "Classifier":
            seen.append(len(seen))
            size = (900 if not seen[:-1] else 100 + len(seen)) if model.training else 50
            fake_cuda.allocated, fake_cuda.reserved = max(fake_cuda.allocated, size), max(fake_cuda.reserved, 2 * size)
        return forward(model, *args, **kwargs)

    def telemetry(*args: object) -> dict[str, float]:
        fake_cuda.allocated, fake_cuda.reserved = 300, 600
        return {}

    monkeypatch.setattr(torch.nn.Module, "__call__", allocating)
    monkeypatch.setattr(RMFAttention, "telemetry", telemetry)
    record = run(cell("listops", "macformer_exp", "trainer.telemetry=true"), [])
    assert record.status == "ok"
    assert record.environment.precision == "float16"
    assert record.environment.device_name == "Fake GPU"
    memory = record.memory
    assert 100 < memory.peak_bytes < 200  # not the 900 of the first step
    assert memory.reserved_bytes == 2 * memory.peak_bytes
    assert (memory.evaluation_peak_bytes, memory.evaluation_reserved_bytes) == (300, 600)
    assert memory.method.startswith("CUDA allocator's peaks")
    assert fake_cuda.synchronize.call_count > 3 * record.steps_done


def test_the_first_lines_name_each_attention_backend_once() -> None:
    """An attention may have a `backend`; else it goes by its class."""
    attentions = [RFAttention(8, 4), nn.Identity(), RFAttention(8, 4), SoftmaxAttention(implementation="sdpa")]
    model = nn.Sequential(*(nn.ModuleDict({"attention": attention}) for attention in attentions))
    assert attention_backends(model, CPU) == ", attention: Identity and RFA in cache blocks and sdpa softmax"
    assert "RFA in large launches" in attention_backends(model, CUDA)
    assert attention_backends(nn.Sequential(nn.Linear(1, 1)), CPU) == ""


def test_a_run_is_the_same_on_every_gpu(composed: Compose, fake_cuda: MagicMock) -> None:
    """Its id, its configuration and what it says of its command; the device that it uses is another."""
    plans = [RunPlan(composed(f"device={name}")) for name in ("auto", "cuda", "cuda:1")]
    assert [str(plan.device) for plan in plans] == ["cuda:0", "cuda:0", "cuda:1"]
    assert [plan.resolved["device"] for plan in plans] == ["cuda"] * 3
    assert len({plan.record_and_checkpoint("")[1].run_id for plan in plans}) == 1
    typed = (["device=cuda"], ["device=cuda:1"], ["device=cuda\\:12"])
    assert {str(differences(plans[0].resolved, words).command) for words in typed} == {"['device=cuda']"}


def test_a_forecast_on_the_fake_gpu(cell: Compose, fake_cuda: MagicMock, pinned: object) -> None:
    config = cell("listops", "rfa")
    task = configs.build(config, "task.data", folder=config.paths.data)
    model = configs.build(config, "model", **asdict(task.spec))
    assert configs.build(config, "trainer").forecast(model, task, CPU, 0).memory.reserved_bytes == 0


class OnlyMeta(TorchDispatchMode):
    """Fails where an operator meets or makes a tensor of the CPU; meta alone takes some of them for its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            # A scalar may stay on the CPU: the optimiser's count of steps does, and CUDA takes it as an argument.
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and tensor.dim():
                raise AssertionError(f"{func} has a tensor of the CPU, of shape {tuple(tensor.shape)}")
        return out


@pytest.mark.parametrize("paired", [False, True], ids=["single", "paired"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_stays_on_its_device(
    name: str, paired: bool, composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "autocast", launches.autocast)
    spec = TaskSpec(vocabulary=32, length=64, classes=10, paired=paired)
    model = configs.build(composed(f"model={name}"), "model", **asdict(spec)).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.ones((4, 2, 64) if paired else (4, 64), dtype=torch.int32, device="meta")
    labels = torch.zeros(4, dtype=torch.long, device="meta")
    with OnlyMeta():
        F.cross_entropy(model(ids), labels).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with OnlyMeta(), torch.inference_mode():
        assert model(ids).shape == (4, 10)


def test_the_guard_sees_a_tensor_of_the_cpu() -> None:
    with OnlyMeta(), pytest.raises(AssertionError, match="of the CPU"):
        torch.ones(3, device="meta").add_(torch.ones(3))


@pytest.mark.parametrize(
    ("expression", "seen"),
    [("gpu", True), ("gpu and not slow", True), ("not slow", False), ("not gpu", False), ("", False)],
)
def test_only_tests_chosen_by_the_gpu_mark_see_a_gpu(
    expression: str, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=expression)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0,1" if seen else "")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_run_on_a_real_gpu(name: str, precision: str, cell: Compose) -> None:
    config = cell("listops", name, "device=cuda", f"trainer.precision={precision}", "trainer.accumulate=2")
    record = run(config, [])
    assert record.status == "ok"
    assert record.environment.device == "cuda"
    assert record.memory.reserved_bytes >= record.memory.peak_bytes > 0
    assert record.memory.evaluation_peak_bytes


@LINUX
def test_freed_memory_is_kept_or_given_back() -> None:
    """In a process of its own: resident bytes once 256 MiB are freed, kept and then given back."""
    code = """
import torch
from macformer.harness import device as devices

def resident():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS:"))

devices.prepare(torch.device("cpu"), 1)
before = resident()
torch.ones(2**26)
kept = resident()
devices.keep_freed(False)
returned = resident()
torch.ones(2**26)
print(kept - before, returned - before, resident() - before)
"""
    told = forked.run("-c", code)
    assert told.returncode == 0, told.stderr
    kept, *returned = (int(word) for word in told.stdout.split())
    assert kept > 200 > 50 > max(returned)


@LINUX
def test_free_memory_is_told_of_the_cpu_alone() -> None:
    assert devices.free_bytes(CUDA) is None
    assert 2**20 < devices.free_bytes(CPU) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@LINUX
def test_available_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    """Of either version; a group's limit may stand above the one that the process is in."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    write("proc/self/cgroup", "4:cpu:/else\n3:memory:/job/task\n0::/new/leaf\n")
    assert devices.free_bytes(CPU, tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000000\n")
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "2000000\n")
    write("sys/fs/cgroup/memory/job/memory.stat", "cache 1\ntotal_inactive_file 500000\n")
    assert devices.free_bytes(CPU, tmp_path) == 3_500_000
    for name, most in (("new/leaf", "max"), ("new", "4000000")):
        write(f"sys/fs/cgroup/{name}/memory.max", most + "\n")
        write(f"sys/fs/cgroup/{name}/memory.current", "3000000\n")
        write(f"sys/fs/cgroup/{name}/memory.stat", "anon 1\ninactive_file 100000\n")
    assert devices.free_bytes(CPU, tmp_path) == 1_100_000
    write("sys/fs/cgroup/new/memory.current", "9000000\n")
    assert devices.free_bytes(CPU, tmp_path) == 0


@LINUX
def test_memory_that_is_not_there_is_refused() -> None:
    """Pieces that are each granted, twice what there is in all. Nothing is written to them: they cost nothing."""
    greedy = """
import resource, sys, torch
from macformer.harness import device
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the limit of runs in the process before this one is inherited
piece = device.free_bytes(torch.device("cpu")) // 10
if sys.argv[1] == "prepared":
    device.prepare(torch.device("cpu"), 1)
try:
    kept = [torch.empty(piece, dtype=torch.uint8) for _ in range(20)]
except RuntimeError as error:
    print(device.is_out_of_memory(error))
"""
    for how, said in (("prepared", "True\n"), ("not", "")):
        done = forked.run("-c", greedy, how)
        assert (done.returncode, done.stdout) == (0, said), done.stderr
