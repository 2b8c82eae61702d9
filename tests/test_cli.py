"""The programs as a person runs them."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from macformer.harness import record as records
from tests import forked
from tests.conftest import ROOT

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
TINY = ["trainer=smoke", "task.data.length=64", "task.data.min_length=10", "task.data.max_length=60"]

# Two terabytes of attention weights, in a model that is small otherwise.
HUGE = ["model=transformer", "model.heads=64", "model.head_dim=1", "task.data.length=65536"]


def program(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | env)


def train(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = forked.run("train.py", *words)
    assert done.returncode == code, done.stderr
    return done


def paths(folder: Path) -> list[str]:
    return [f"paths.{name}={folder / name}" for name in ("data", "results", "outputs")]


def test_help_explains_the_groups_with_two_examples() -> None:
    done = program("train.py", "--help")
    assert done.returncode == 0
    assert len(re.findall(r"^  python train.py ", done.stdout, re.MULTILINE)) == 2
    for group in ("model", "task", "trainer", "protocol", "logger", "experiment"):
        assert re.search(rf"^  {group} +\w", done.stdout, re.MULTILINE), group
        assert re.search(rf"^{group}: \w", done.stdout, re.MULTILINE), group


def test_a_run_shows_what_it_is_its_progress_and_its_end(tmp_path: Path) -> None:
    done = program("train.py", "model=macformer_inv", *TINY, *paths(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"macformer_inv \([\d,]+ parameters\) on listops \(generated: 64 / 8 / 8\)", lines[0])
    assert re.match(r"10 steps on .+ \(cpu, float32\), attention: \w.*; record: /", lines[1])
    progress = r"step +5/10  loss \d.\d{4}  dev accuracy +\d+.\d\d%  [\d.]+ steps/s  \d+ MiB  [\d.]+ s left"
    assert re.match(progress, lines[2])
    assert lines[-3].startswith("test accuracy ")
    assert re.match(r"peak memory of training \d+ MiB, of evaluation \d+ MiB, of the process [\d,]+ MiB", lines[-1])
    assert "USDT" not in done.stderr  # the profiler's chatter
    (file,) = (tmp_path / "results").rglob("*.json")
    assert records.summary(records.read(file)).splitlines() == lines[-3:]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.attention.features=12x", "model.attention.features=12x does not fit RMFAttention"),
        ("model.attention.featurs=64", "model.attention.featurs is not known; the keys there are head_dim, features"),
        ("model=macformer_cos", "model=macformer_cos is not known; choose one of macformer_exp, macformer_exp_"),
        ("task=text", "task=text needs .*aclImdb_v1.tar.gz, which is not there"),
    ],
)
def test_bad_input_is_one_sentence_behind_hydras_line(override: str, sentence: str, tmp_path: Path) -> None:
    failed = train(override, *paths(tmp_path), code=1)
    (error,) = (line for line in failed.stderr.splitlines() if not line.startswith("Error executing job"))
    assert re.match(f"error: {sentence}", error)
    assert not list((tmp_path / "results").rglob("*.json"))


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (["task.learning_rate=1e30"], 3, r"ended as diverged: after \d+ steps, the loss is (nan|inf): lower"),
        (HUGE, 4, "ended as oom: after 0 steps, out of memory: raise trainer.accumulate=1"),
    ],
)
def test_each_failure_has_a_code_and_a_record(change: list[str], code: int, sentence: str, tmp_path: Path) -> None:
    failed = train(*TINY, *change, *paths(tmp_path), code=code)
    assert re.search(f"error: .* {sentence}", failed.stderr)
    assert "Traceback" not in failed.stderr
    (file,) = (tmp_path / "results").rglob("*.json")
    assert records.read(file).status == {3: "diverged", 4: "oom"}[code]


def test_a_bug_in_a_sweep_is_listed_and_shown(tmp_path: Path) -> None:
    """The second run has it, the first diverges: neither hides the other."""
    broken = """
import runpy, sys
from macformer.harness.trainer import Trainer
fit = Trainer.fit
def bug(self, *args):
    if self.learning_rate < 1:
        raise RuntimeError("a real bug")
    return fit(self, *args)
Trainer.fit = bug
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""
    done = forked.run("-c", broken, "train.py", "-m", "task.learning_rate=1e30,1e-3", *TINY, *paths(tmp_path))
    assert done.returncode == 1
    assert "error: 2 of the sweep's runs failed:" in done.stderr
    assert re.search(r"task.learning_rate=0.001 .*: a real bug$", done.stderr, re.MULTILINE)
    assert "RuntimeError: a real bug" in done.stderr


def test_one_live_line_on_a_terminal(tmp_path: Path) -> None:
    """On a pseudo-terminal the line is written over and over; the lines of the evaluations stay."""
    main, other = os.openpty()
    termios.tcsetwinsize(other, (24, 120))
    command = [sys.executable, "train.py", *TINY, "trainer.steps=498", "trainer.evaluate_every=500", *paths(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=other, stderr=other)
    os.close(other)
    screen = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while piece := os.read(main, 4096):
            screen += piece
    assert process.wait() == 0
    live = [part for part in screen.decode().split("\r") if re.search(r"step +\d+/500 ", part)]
    assert len(live) >= 2
    assert all("steps/s" in part and "left" in part for part in live)


def test_table_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "listops" / "rfa" / "a.json"
    file.parent.mkdir(parents=True)
    shutil.copy(next((ROOT / "results" / "runs" / "listops" / "rfa").glob("*.json")), file)
    readme = (ROOT / "README.md").read_text()
    done = program("scripts/table.py", str(tmp_path), "--settings")
    assert done.returncode == 0
    assert done.stdout.startswith((tmp_path / "tables" / "settings.md").read_text())
    assert "| rfa " in done.stdout
    again = f"{tmp_path}/tables: settings.md; after more runs: python scripts/table.py {tmp_path} --settings"
    assert done.stdout.endswith(f"written to {again}\n")
    assert (ROOT / "README.md").read_text() == readme  # which shows another folder


def test_wandb_offline_needs_no_login(tmp_path: Path) -> None:
    done = program("train.py", *TINY, "logger=wandb", *paths(tmp_path), HOME=str(tmp_path), WANDB_SILENT="true")
    assert done.returncode == 0, done.stderr
    (offline,) = (tmp_path / "outputs" / "wandb").glob("offline-run-*")
    (content,) = (file.read_bytes() for file in offline.glob("*.wandb"))
    (run_id,) = (file.stem for file in (tmp_path / "results").rglob("*.json"))
    for part in ("dev_accuracy", "train_loss", f"{run_id}.json", "warmup_steps"):  # curves, artifact, configuration
        assert part.encode() in content, part


@pytest.mark.slow
def test_quickstart_beats_the_majority_class_by_three_standard_errors(tmp_path: Path) -> None:
    """Six minutes. The very sweep of `make quickstart`."""
    models = "model=transformer,rfa,macformer_exp"
    done = program("train.py", "-m", "experiment=quickstart", models, *paths(tmp_path)[::2])
    assert done.returncode == 0, done.stderr
    found = [records.read(file) for file in (tmp_path / "outputs").rglob("runs/**/*.json")]
    assert {record.model for record in found} == {"transformer", "rfa", "macformer_exp"}
    for record in found:
        floor = record.data.majority
        error = (floor * (1 - floor) / record.data.examples["test"]) ** 0.5
        assert record.quality
        assert record.quality.test_accuracy > floor + 3 * error, record.model
