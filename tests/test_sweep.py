"""Sweeps as a person starts them: by each launcher, killed and continued, announced, with runs that fail."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from joblib import cpu_count
from omegaconf import DictConfig

import train as program_of_a_run
from macformer.harness import config as configs
from macformer.harness import files, sweep
from macformer.harness import record as records
from tests import forked
from tests.conftest import ROOT, Compose
from tests.made_up import made_up
from tests.test_cli import TINY, Captured, paths, program, train

LAUNCHERS = {  # how to choose one here
    "basic": [],
    "joblib": ["sweep=joblib"],
    "submitit_local": ["hydra/launcher=submitit_local"],
    "ray": ["sweep=ray", "hydra.launcher.ray.remote.num_gpus=0"],
}
TWO = ["sweep=joblib", "hydra.launcher.n_jobs=2"]
SLOW = pytest.mark.slow
Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def started() -> Iterator[Started]:
    """started("train.py", ...) -> a sweep in a process group of its own, which ends with the test in any case."""
    processes = []

    def start(*words: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command, env = [sys.executable, *words], os.environ | {"PYTHONUNBUFFERED": "1"}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def found(folder: Path) -> list[records.Record]:
    return [records.read(file) for file in sorted((folder / "results").rglob("*.json"))]


@pytest.mark.parametrize(
    "name", ["basic", "joblib", *(pytest.param(name, marks=SLOW) for name in ("submitit_local", "ray"))]
)
def test_two_cells_and_a_failure_by_each_launcher(name: str, tmp_path: Path) -> None:
    """Two do, one diverges, one does not fit: that is known at the end, wherever it ran. Ray's token is in HOME."""
    if name == "ray":
        pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="it is installed by `make test-all`")
    rates = "task.learning_rate=1e30,1e-3,2e-3,-1"
    words = ["train.py", "-m", *LAUNCHERS[name], "model=rfa", rates, *TINY, *paths(tmp_path)]
    for _ in range(2):  # the second time trains nothing but what failed
        done = program(*words, HOME=str(tmp_path))
        assert done.returncode == 1, done.stderr
        *_, count, diverged, unfit = done.stderr.splitlines()
        assert count == "error: 2 of the sweep's runs failed:"
        assert re.match(
            r".*task.learning_rate=1e\+30.*: listops.rfa.0.\w+ ended as diverged: after \d+ steps, the loss is",
            diverged,
        )
        assert re.match(r".*task.learning_rate=-1 .*: trainer.learning_rate=-1 does not fit Trainer", unfit)
        assert sorted(record.status for record in found(tmp_path)) == ["diverged", "ok", "ok"]
        beside = {"basic": 0, "joblib": min(4, cpu_count()) - 1}.get(name)  # a cluster does not say
        assert {record.concurrent for record in found(tmp_path)} == {beside}


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """Killed in its second run: the first is not repeated, and all ends as if nothing had happened."""
    long = ["trainer.steps=298", "trainer.checkpoint_every=20", "trainer.evaluate_every=100"]
    words = ["experiment=table2", "task=listops", *TINY, "model=macformer_exp", "seed=0,1", *long]
    output = {"output": tmp_path / "output", "errors": tmp_path / "errors"}
    process = forked.start("train.py", *words, *paths(tmp_path / "killed"), **output)
    second = tmp_path / "killed" / "outputs"
    while process.is_alive() and len(list(second.glob("*.1.*/checkpoint.pt"))) == 0:
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [(record.seed, record.status) for record in found(tmp_path / "killed")] == [(0, "ok")]

    again = train(*words, *paths(tmp_path / "killed"))
    assert re.search(r"^  listops +macformer_exp +1 +1 +0 +[\d.]+ s +\d+ MiB  seed 0$", again.stdout, re.MULTILINE)
    assert re.search(r"^listops.macformer_exp.0.\w+ is finished", again.stdout, re.MULTILINE)
    assert len(re.findall(r"^going on from step \d+", again.stdout, re.MULTILINE)) == 1

    unannounced = "hydra.callbacks.sweep.announce=false"  # the announcement runs a few steps in a process of its own
    train(*words, unannounced, *paths(tmp_path / "whole"))
    killed, whole = found(tmp_path / "killed"), found(tmp_path / "whole")
    assert len(killed) == len(whole) == 2
    assert [record.quality for record in killed] == [record.quality for record in whole]
    assert [len(record.sessions) for record in killed] == [1, 2]
    assert {record.concurrent for record in killed} == {0}


def test_the_announcement_and_data_that_are_not_there(tmp_path: Path) -> None:
    """Text has no data: its cells are told of first, fail by themselves, and cost the others nothing."""
    words = ["experiment=table2", "task=text,listops", "model=rfa", "seed=0,1", "trainer=smoke", *paths(tmp_path)]
    done = train(*words, code=1)
    head, _, _ = done.stdout.partition("HYDRA")
    assert f"4 cells, by hydra/launcher=basic, their records in {tmp_path}/results/runs\n" in head
    assert re.search(r"\n  2 will fail: text: task=text needs .*aclImdb_v1.tar.gz, which is not there", head)
    assert re.search(r"\n  listops +rfa +0 +0 +2 +\S+( s)? +[\d,]+ MiB  \d+ steps\n", head)
    total = r"\n  in all \S+( s)? on .+ \(\w+, 1 at a time\): until \w+ \d+ \w+ \d\d:\d\d; checkpoints in"
    assert re.search(total, head)
    assert "error: 2 of the sweep's runs failed:" in done.stderr
    assert "Traceback" not in done.stderr
    states = [(record.task, record.seed, record.status) for record in found(tmp_path)]
    assert sorted(states) == [("listops", 0, "ok"), ("listops", 1, "ok")]


def test_the_announcement_of_a_task_of_ones_own_chosen_by_a_pattern(tmp_path: Path) -> None:
    """A finished run is finished even if its checkpoint cannot be read."""
    own = tmp_path / "configs" / "task" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((ROOT / "configs" / "task" / "listops.yaml").read_text().replace("name: listops", "name: own"))
    words = ["--config-dir", str(own.parents[1]), "task=own", "model=glob(rfa*)", "hydra.callbacks.sweep.announce=true"]
    for finished, begin in ((0, 1), (1, 0)):
        done = train("-m", *words, *TINY, *paths(tmp_path))
        assert re.search(rf"^  own +rfa +{finished} +0 +{begin} ", done.stdout, re.MULTILINE), done.stdout
        next((tmp_path / "outputs").glob("own.rfa.0.*/checkpoint.pt")).write_bytes(b"junk")
    (record,) = found(tmp_path)
    assert record.differences.task == [word for word in TINY if word.startswith("task.")]


def test_more_memory_than_there_is_ends_one_run_and_not_the_sweep(tmp_path: Path) -> None:
    """One tensor of nearly all memory that the machine has: Linux would grant it, and kill whoever fills it."""
    if sys.platform != "linux":
        pytest.skip("only Linux grants memory that is not there and lets it be limited")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    length = min(int((0.97 * total / (2 * 4)) ** 0.5), 65536)  # two texts, one head, four bytes
    if 2 * 4 * length**2 < 0.9 * total:
        pytest.skip("a text cannot be long enough to fill this machine's memory")
    words = ["model=transformer", "model.heads=1", f"task.data.length={length},64", "device=cpu", *TINY[:1], *TINY[2:]]
    done = train("-m", *words, *paths(tmp_path), code=1)
    assert "error: 1 of the sweep's runs failed:" in done.stderr
    assert re.search(rf"task.data.length={length} .* ended as oom: after 0 steps, out of memory", done.stderr)
    assert sorted(record.status for record in found(tmp_path)) == ["ok", "oom"]


def at_work(started: Started, folder: Path, runs: int, *launcher: str) -> subprocess.Popen[str]:
    """A sweep of four runs, so many of which train at the same time; the others have not begun."""
    words = ["train.py", "-m", *launcher, "model=rfa", "seed=0,1,2,3", *TINY, *paths(folder)]
    process = started(*words, *(f"trainer.{key}=100000" for key in ("steps", "checkpoint_every", "evaluate_every")))
    for line in process.stdout:
        runs -= line.count("expected end")  # after 20 steps; lines of two processes may run together
        if not runs:
            return process
    raise AssertionError(process.communicate())


@pytest.fixture
def swept(composed: Compose, fake_cuda: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compose:
    """swept("sweep=joblib", ...) -> what Hydra gives the callback of a sweep of five; torch sees three GPUs."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr("joblib.effective_n_jobs", lambda count: 16 if count == -1 else count)
    monkeypatch.setattr(sweep, "estimate_cost", lambda plan: sweep.Cost(3600.0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make(*words: str) -> DictConfig:
        more = ["seed=0,1,2,3,4", f"hydra.sweep.dir={tmp_path}/sweep", "hydra.job.num=0", "hydra.mode=MULTIRUN"]
        hydra = GlobalHydra.instance().hydra
        return hydra.compose_config("train", [*words, *more, *TINY, *paths(tmp_path)], run_mode=RunMode.MULTIRUN)

    return make


@pytest.mark.parametrize(
    ("words", "at_once", "beside", "where"),
    [
        (["sweep=joblib"], 3, 0, "1:40:00 on Fake GPU (cuda, 3 at a time)"),
        (["sweep=joblib", "device=cuda", "hydra.launcher.n_jobs=2"], 2, 0, "2:30:00 on Fake GPU (cuda, 2 at a time)"),
        (["sweep=joblib", "device=cuda:1"], 1, 0, "5:00:00 on Fake GPU (cuda, 1 at a time)"),
        (["sweep=joblib", "device=cpu"], -1, 4, "(cpu, 16 at a time)"),
    ],
)
def test_a_joblib_sweep_has_as_many_runs_at_once_as_gpus(
    swept: Compose, words: list[str], at_once: int, beside: int, where: str, capsys: Captured
) -> None:
    """And the announcement counts so. On the CPU the runs share the cores."""
    config = swept(*words)
    sweep.Sweep(announce=True).on_multirun_start(config)
    launcher = Plugins.instance().instantiate_launcher(None, None, config)
    assert launcher.joblib["n_jobs"] == at_once
    assert sweep.Notes().concurrent == beside
    assert where in capsys.readouterr().out


@pytest.mark.parametrize(("launcher", "device"), [("joblib", "cuda:0"), ("basic", "auto")])
def test_a_run_of_a_joblib_sweep_takes_its_own_gpu(
    swept: Compose, fake_cuda: MagicMock, launcher: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its worker, and leaves nothing reserved there; elsewhere the choice stays what it was."""
    ran: list[str] = []
    monkeypatch.setattr(program_of_a_run, "run", lambda config, *more: ran.append(config.device))
    config = swept(f"hydra/launcher={launcher}")
    HydraConfig.instance().set_config(config)
    program_of_a_run.main.__wrapped__(config)
    assert ran == [device]
    assert fake_cuda.empty_cache.called == (launcher == "joblib")
    assert not sweep.Notes().failures()


def test_a_run_that_is_killed_in_a_worker_is_told(tmp_path: Path, started: Started) -> None:
    """joblib gives up then. What was at work is named; the same command goes on."""
    process = at_work(started, tmp_path, 2, *TWO)
    ps = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)]
    listed = subprocess.run(ps, capture_output=True, text=True)
    worker = next(int(line.split()[0]) for line in listed.stdout.splitlines() if "popen_loky" in line)
    os.kill(worker, signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert re.search("^error: A worker process managed by the executor was unexpectedly terminated", errors, re.M)
    assert re.search(r"seed=\d.*: it began, but did not report its end: it was killed, or is still running", errors)
    assert "2 of the sweep's runs did not begin: the same command goes on" in errors


@pytest.mark.parametrize("launcher", [[], TWO])
def test_an_interrupted_sweep_saves_all_its_runs(launcher: list[str], tmp_path: Path, started: Started) -> None:
    """Ctrl-C goes to every process of the group."""
    runs = 2 if launcher else 1
    process = at_work(started, tmp_path, runs, *launcher)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert len(re.findall(r"interrupted: SIGINT after [\d,]+ steps", printed)) == runs
    assert len(re.findall(r"the same command goes on from \S+checkpoint.pt", printed)) == runs
    assert [record.status for record in found(tmp_path)] == ["interrupted"] * runs
    assert len(list((tmp_path / "outputs").rglob("checkpoint.pt"))) == runs


def test_notes_of_an_earlier_sweep_do_not_count(tmp_path: Path) -> None:
    """The folder may be one that the user has named."""
    notes = tmp_path / "sweep" / "notes"
    files.write(notes / "stopped", "15")
    files.write(notes / "00007.job", "an old failure")
    done = train("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep", *TINY, *paths(tmp_path))
    assert "old failure" not in done.stderr
    assert len(found(tmp_path)) == 2


def test_cells_that_run_elsewhere_are_told_from_records(composed: Compose, tmp_path: Path, capsys: Captured) -> None:
    """One has a record, another of its kind takes as long, a third kind is not known."""
    words = [*TINY, "device=cuda", f"paths.results={tmp_path}"]  # there is none here
    wanted = (("rfa", 0), ("rfa", 1), ("macformer_exp", 0))
    cells = [composed(f"model={model}", f"seed={seed}", *words) for model, seed in wanted]
    ran = configs.container(cells[0])
    ran["trainer"]["precision"] = "float16"
    record = made_up(ran, seconds=3600.0)
    records.write(record, records.path(tmp_path, ran, record.run_id))
    sweep.announce(cells, at_once=None)
    _, rfa, macformer, total, *_ = capsys.readouterr().out.split("\n")
    assert rfa.split() == ["listops", "rfa", "1", "0", "1", "1:00:00", "0", "MiB", "seed", "0"]
    assert macformer.split() == ["listops", "macformer_exp", "0", "0", "1"]
    assert total.startswith("  in all 1:00:00 one after the other (1 cells of unknown time left out); checkpoints in ")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "steps", "sessions"), [(signal.SIGTERM, 1998, 1), (signal.SIGUSR2, 2998, 2)])
def test_a_job_of_a_cluster_goes_on(
    number: signal.Signals, steps: int, sessions: int, tmp_path: Path, started: Started
) -> None:
    """SIGTERM comes before SLURM's own end of the job, and is submitit's to handle: the run must not be interrupted.

    SIGUSR2 is submitit's signal before the time limit, or at preemption: it queues the job again, here by itself.
    """
    long = [f"trainer.steps={steps}", "trainer.checkpoint_every=20", "trainer.evaluate_every=1000"]
    words = ["train.py", "-m", *LAUNCHERS["submitit_local"], "model=rfa", "seed=0", *TINY, *long]
    process = started(*words, *paths(tmp_path))
    while process.poll() is None and not list((tmp_path / "outputs").glob("*/checkpoint.pt")):
        time.sleep(0.01)
    (pickled,) = (tmp_path / "outputs").rglob("*_submitted.pkl")
    name = f"submitit.core._submit {pickled.parent.parent}"
    jobs = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True)
    os.kill(int(jobs.stdout.split()[0]), number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    (record,) = found(tmp_path)
    assert (record.status, len(record.sessions)) == ("ok", sessions)
    assert sessions == 1 or record.sessions[1].first_step > 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("", ""),
        ("TASKS=listops,text MODELS=rfa SEEDS=0,1", " task=listops,text model=rfa seed=0,1"),
        ("PROTOCOL=clean TRAINER=cpu SWEEP=joblib", " protocol=clean trainer=cpu sweep=joblib"),
        ("IMDB=a.tar.gz PAIRS=b", " paths.text=a.tar.gz paths.retrieval=b"),
    ],
)
def test_make_reproduce_is_the_sweep_and_the_table(settings: str, words: str) -> None:
    command = ["make", "-n", "reproduce", *settings.split()]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    line = " ".join(made.stdout.replace("\\\n", " ").split()).replace(" ;", ";")
    assert (
        f"python train.py experiment=table2{words}; code=$?; .venv/bin/python scripts/table.py results; exit $code"
        in line
    )


def test_a_launcher_that_is_not_installed_is_named_with_the_command() -> None:
    hidden = "import sys, runpy; sys.modules['hydra_plugins'] = None; runpy.run_path('train.py', run_name='__main__')"
    missing = program("-c", hidden, "-m", "sweep=ray", "seed=0,1")
    assert missing.returncode == 1
    sentence = "error: hydra/launcher=ray is not installed: pip install -c constraints.txt -e '.["
    assert missing.stderr.startswith(sentence)
    for extra in configs.EXTRAS.values():
        for part in extra.split(","):
            assert f"\n{part} = [" in (ROOT / "pyproject.toml").read_text()
