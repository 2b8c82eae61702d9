"""A run that is killed goes on where it was, and ends as if it had never been killed: bit for bit on the CPU."""

import contextlib
import os
import re
import signal
from pathlib import Path

import filelock
import pytest
import torch

from macformer.harness import checkpoint as checkpoints
from macformer.harness import record as records
from macformer.harness.failures import RunFailed
from macformer.harness.run import run
from tests import forked
from tests.conftest import Compose
from tests.test_cli import TINY, Captured, Patch, paths, train

# What could be forgotten in a checkpoint is in it: dropout's random numbers, redrawn features, running averages.
ARGUMENTS = [
    *TINY,
    *("model=macformer_exp", "model.attention.redraw=7", "model.pre_sbn.statistics=batch", "task.learning_rate=3e-3"),
    *("trainer.steps=58", "trainer.evaluate_every=15", "trainer.checkpoint_every=10"),
]
# Runs train.py, which sends itself a signal when the function named is called for the n-th time.
SUICIDE = """
import os, runpy, signal, sys
from hydra.utils import get_object
number, where, count = sys.argv[1:4]
sys.argv[:4] = ["train.py"]
home, _, name = where.rpartition(".")
home = get_object(home)
function, calls = getattr(home, name), []

def fatal(*args, **kwargs):
    calls.append(1)
    if len(calls) == int(count):
        if name == "save":  # half of the file is written
            args[1].write(bytes(1000))
            args[1].flush()
        os.kill(os.getpid(), getattr(signal, number))
    return function(*args, **kwargs)

setattr(home, name, fatal)
runpy.run_path("train.py", run_name="__main__")
"""


def arguments(folder: Path, *more: str) -> list[str]:
    return [*ARGUMENTS, *paths(folder), *more]


Finished = tuple[records.Record, list[float], str]  # the record, all losses, and what was printed


def finish(folder: Path, *more: str) -> Finished:
    done = train(*arguments(folder, *more))
    (file,) = (folder / "results").rglob("*.json")
    (checkpoint,) = (folder / "outputs").rglob("checkpoint.pt")
    return records.read(file), checkpoints.load(checkpoint)["losses"].tolist(), done.stdout


def what_was_learned(record: records.Record) -> object:
    return [point.model_dump(exclude={"train_seconds"}) for point in record.history], record.quality


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finish(tmp_path_factory.mktemp("unharmed"))


def test_killed_at_many_moments(unharmed: Finished, tmp_path: Path) -> None:
    steps = []
    for where, count in (
        ("torch.optim.AdamW.step", 7),  # before there is any checkpoint
        ("torch.optim.AdamW.step", 18),
        ("torch.save", 2),  # in the middle of writing
        ("os.replace", 2),  # written, not renamed
        ("macformer.harness.trainer.Trainer._evaluate", 1),
        ("macformer.harness.trainer.Trainer._evaluate", 4),  # that of the test split
        ("macformer.harness.checkpoint.Checkpoint.finish", 1),  # the record is there
    ):
        killed = forked.run("-c", SUICIDE, "SIGKILL", where, str(count), *arguments(tmp_path))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert "Traceback" not in killed.stderr
        steps.append(re.findall(r"going on from step (\d+)", killed.stdout))
    assert steps == [[], [], ["15"], ["20"], ["30"], ["30"], ["60"]]
    record, losses, printed = finish(tmp_path)
    assert "is finished" in printed
    reference, reference_losses, _ = unharmed
    assert losses == reference_losses
    assert len(losses) == 60
    assert what_was_learned(record) == what_was_learned(reference)
    assert [session.first_step for session in record.sessions] == [1, 16, 21, 31, 61]
    assert not list((tmp_path / "outputs").rglob("*.tmp"))


def test_a_causal_run_goes_on(tmp_path: Path) -> None:
    words = "model=macformer_inv_released", "trainer.steps=18"
    reference, losses, _ = finish(tmp_path / "unharmed", *words)
    killed = forked.run("-c", SUICIDE, "SIGKILL", "torch.optim.AdamW.step", "18", *arguments(tmp_path, *words))
    assert killed.returncode == -signal.SIGKILL
    record, again, printed = finish(tmp_path, *words)
    assert "going on from step 15 " in printed
    assert again == losses
    assert what_was_learned(record) == what_was_learned(reference)


def test_asked_to_stop(unharmed: Finished, tmp_path: Path) -> None:
    """In the 18th step. It saves first: that step is not lost, though the next checkpoint was far away."""
    words = "-c", SUICIDE, "SIGTERM", "torch.optim.AdamW.step", "18"
    stopped = forked.run(*words, *arguments(tmp_path, "trainer.checkpoint_every=1000"))
    assert stopped.returncode == 128 + signal.SIGTERM
    assert "interrupted: SIGTERM after 18 steps" in stopped.stdout
    (file,) = (tmp_path / "results").rglob("*.json")
    interrupted = records.read(file)
    assert (interrupted.status, interrupted.steps_done) == ("interrupted", 18)
    record, losses, printed = finish(tmp_path)
    assert "going on from step 18 " in printed
    assert losses == unharmed[1]
    assert what_was_learned(record) == what_was_learned(unharmed[0])
    assert record.time.train_seconds > interrupted.time.train_seconds  # it adds up


def test_a_forced_repeat_goes_on(cell: Compose, monkeypatch: Patch, capsys: Captured) -> None:
    """A finished run is repeated, and a repeat that was stopped is continued."""
    changes = "trainer.steps=18", "trainer.checkpoint_every=4", "trainer.evaluate_every=100"
    first = run(cell("listops", "rfa", *changes), [])
    step, calls = torch.optim.AdamW.step, []

    def stopping(self: torch.optim.AdamW, *args: object) -> None:
        calls.append(1)
        if len(calls) == 11:
            raise KeyboardInterrupt  # in the middle of a step: nothing can be saved
        step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", stopping)
    capsys.readouterr()
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            again = run(cell("listops", "rfa", *changes, "force=true"), [])
    assert re.findall("going on from step (\\d+)", capsys.readouterr().out) == ["8"]
    assert len(calls) == 11 + 12
    assert what_was_learned(again) == what_was_learned(first)


def test_force_begins_anew(cell: Compose, monkeypatch: Patch, capsys: Captured) -> None:
    """Even if the finished run was killed before its checkpoint said so."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoint, "finish", lambda checkpoint, steps: None)
        run(cell("listops", "rfa"), [])
    run(cell("listops", "rfa", "force=true"), [])
    assert "going on" not in capsys.readouterr().out


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    cell: Compose, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """What was saved before is of no use then: it is not the end of the run."""
    write = checkpoints.write

    def full(file: Path, state: dict) -> None:
        if state["step"] > 5:
            raise OSError("No space left on device")
        write(file, state)

    monkeypatch.setattr(checkpoints, "write", full)
    record = run(cell("listops", "rfa"), [])
    assert record.status == "ok"
    assert "cannot be written, the run goes on without: No space left" in capsys.readouterr().err
    assert not list((tmp_path / "outputs").rglob("checkpoint.pt"))


def test_what_another_process_has_just_finished_is_not_repeated(cell: Compose, monkeypatch: Patch) -> None:
    record = run(cell("listops", "rfa"), [])
    looks = iter([None, record])
    monkeypatch.setattr(records, "finished", lambda file: next(looks))
    monkeypatch.setattr("macformer.harness.trainer.Trainer.fit", None)  # calling it would be an error
    assert run(cell("listops", "rfa"), []) is record


def test_two_processes_do_not_work_on_one_run(cell: Compose, tmp_path: Path) -> None:
    run_id = run(cell("listops", "rfa"), []).run_id
    busy = pytest.raises(RunFailed, match=f"{run_id} is being trained by another process")
    with filelock.FileLock(tmp_path / "outputs" / run_id / "lock"), busy:
        run(cell("listops", "rfa", "force=true"), [])


def test_a_checkpoint_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "checkpoint.pt"
    checkpoints.write(file, {"format": 1, "step": 1})

    def fail(*args: object) -> None:
        args[1].write(b"half")  # type: ignore[attr-defined]
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoints.write(file, {"format": 1, "step": 2})
    assert checkpoints.load(file)["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut off", Evil(), {"format": 0}, [1]])
def test_what_is_no_checkpoint_is_named_and_runs_no_code(content: object, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("checkpoint.pt")
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(RunFailed, match=f"{file} cannot be read as a checkpoint: a run starts anew"):
        checkpoints.load(file)
    assert not Path("pwned").exists()
