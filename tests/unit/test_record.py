"""The record: its schema, its name, whole or not there."""

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from macformer import KernelAttention, PostSBN, PreSBN, RFAttention, RMFAttention, SoftmaxAttention
from macformer.harness import config as configs
from macformer.harness import record as records
from macformer.harness.checkpoint import Checkpoint
from macformer.harness.identity import DEFAULTS, identity_config, run_id
from macformer.harness.plan import RunPlan
from macformer.harness.run import run
from macformer.harness.trainer import Trainer
from macformer.model import Classifier
from tests.conftest import TASKS, Compose, committed
from tests.test_cli import Captured, Patch, train

Finished = tuple[records.Record, Path]


@pytest.fixture
def finished(cell: Compose, tmp_path: Path) -> Finished:
    record = run(cell("listops", "rfa"), ["task=listops", "model=rfa"])
    (file,) = (tmp_path / "runs" / "listops" / "rfa").glob("*.json")
    return record, file


def test_a_run_leaves_one_valid_record(finished: Finished) -> None:
    record, file = finished
    assert file.stem == record.run_id
    assert records.read(file) == record
    assert record.run_id.startswith("listops.rfa.0.")
    assert (record.status, record.steps_done, record.data.source) == ("ok", 10, "generated")
    assert record.parameters > 0
    assert record.data.examples == {"train": 16, "dev": 8, "test": 8}
    assert record.config["trainer"]["steps"] == 8
    assert record.overrides == ["task=listops", "model=rfa"]
    assert [point.step for point in record.history] == [5, 10]
    time = record.time
    assert 0 < time.warmup_seconds < time.train_seconds
    assert time.step_p10 <= time.step_p50 <= time.step_p90
    assert time.data_wait_seconds < time.train_seconds
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize("change", [{"surprise": 1}, {"status": "fine"}, {"quality": {"test_accuracy": 0.5}}])
def test_what_does_not_fit_the_schema_is_refused_by_name(finished: Finished, change: dict) -> None:
    _, file = finished
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=f"{file.name} is not a run record of schema 3: {next(iter(change))}"):
        records.read(file)


def test_a_finished_run_is_not_repeated_unless_forced(cell: Compose, finished: Finished, capsys: Captured) -> None:
    record, file = finished
    written = file.stat().st_mtime_ns
    assert run(cell("listops", "rfa"), []) == record
    assert "is finished" in capsys.readouterr().out
    assert file.stat().st_mtime_ns == written
    again = run(cell("listops", "rfa", "force=true"), [])
    assert again.quality == record.quality
    assert file.stat().st_mtime_ns > written


def test_a_record_that_is_corrupt_or_of_a_failed_run_is_replaced(
    cell: Compose, finished: Finished, capsys: Captured
) -> None:
    record, file = finished
    file.write_text(file.read_text()[:100])
    assert run(cell("listops", "rfa"), []).quality == record.quality
    assert "it does not count as finished" in capsys.readouterr().out
    records.write(record.model_copy(update={"status": "oom", "quality": None}), file)
    run(cell("listops", "rfa"), [])
    assert records.read(file).status == "ok"


def test_a_forced_repeat_that_fails_does_not_cost_the_finished_record(
    cell: Compose, finished: Finished, monkeypatch: Patch
) -> None:
    record, file = finished

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("macformer.harness.trainer.Trainer._evaluate", stop)
    with pytest.raises(KeyboardInterrupt):
        run(cell("listops", "rfa", "force=true"), [])
    assert records.read(file) == record


def test_a_place_that_cannot_be_written_fails_before_the_training(
    cell: Compose, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("macformer.harness.trainer.Trainer.fit", None)  # calling it would be another error
    with pytest.raises(NotADirectoryError):
        run(cell("listops", "rfa", f"paths.results={tmp_path}/file"), [])


def test_a_finished_record_of_another_commit_is_kept_with_a_warning(
    cell: Compose, finished: Finished, capsys: Captured
) -> None:
    """Even if it was made by device=auto, and this is the device that it meant."""
    record, file = finished
    records.write(record.model_copy(update={"code": records.Code(commit="abc", dirty=False)}), file)
    assert run(cell("listops", "rfa", f"device={record.environment.device}"), []).run_id == record.run_id
    assert "made by commit abc" in capsys.readouterr().out


@pytest.fixture
def config() -> dict:
    """That of `python train.py model=macformer_exp task=listops` on a CPU."""
    settled = configs.container(configs.compose()) | {"device": "cpu"}
    settled["trainer"]["precision"] = "float32"
    return settled


def changed(config: dict, key: str, value: object) -> dict:
    tree = OmegaConf.create(config)
    OmegaConf.update(tree, key, value, force_add=True)
    return configs.container(tree)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("seed", 1), ("threads", 2), ("device", "cuda"), ("task.name", "text"), ("model.name", "rfa")],
        *[("trainer.steps", 9), ("trainer.batch_size", 1), ("trainer.learning_rate", 1.0), ("trainer.new", 3)],
        *[("model.width", 32), ("model.pre_sbn", None), ("model.attention.kernel", "inv"), ("task.data.length", 64)],
        ("model.attention._target_", "macformer.attention.KernelAttention"),
    ],
)
def test_another_run_has_another_id(config: dict, key: str, value: object) -> None:
    assert run_id(changed(config, key, value), "f") != run_id(config, "f")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("paths.data", "elsewhere"), ("force", True), ("logger", {"project": "x"}), ("trainer.telemetry", True)],
        *[("trainer.checkpoint_every", 7), ("trainer.name", "mine"), ("protocol.name", "mine")],
        *[("model.attention._target_", "moved.RMFAttention"), ("trainer._target_", "moved.Trainer")],
        *[("model.direction", "both"), ("task.data.new", 3)],
    ],
)
def test_a_class_that_moves_and_a_new_key_at_its_default_change_no_id(
    config: dict, key: str, value: object, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(DEFAULTS, "model.direction", "both")
    monkeypatch.setitem(DEFAULTS, "task.data.new", 3)
    name = run_id(config, "f")
    assert re.fullmatch(r"listops\.macformer_exp\.0\.[0-9a-f]{8}", name)
    assert run_id(changed(config, key, value), "f") == name
    assert run_id(config, "g") != name
    hashed = {key for key, value in identity_config(config).items() if value != DEFAULTS.get(key, ...)}
    assert hashed == {"task.name", "model.name", "seed"}  # of the paper's protocol, nothing else


def test_a_key_that_is_left_out_has_its_default() -> None:
    """Where the constructor has another default, two runs would have one id."""
    homes = {
        "model.attention": (RMFAttention, RFAttention, SoftmaxAttention, KernelAttention),
        "model.pre_sbn": (PreSBN,),
        "model.post_sbn": (PostSBN,),
        "trainer": (Trainer,),
        "model": (Classifier,),
    }
    compared = 0
    for home, constructors in homes.items():
        for constructor in constructors:
            for name, argument in inspect.signature(constructor).parameters.items():
                if f"{home}.{name}" in DEFAULTS and argument.default is not argument.empty:
                    assert argument.default == DEFAULTS[f"{home}.{name}"], f"{constructor.__name__}: {home}.{name}"
                    compared += 1
    assert compared >= 10


@pytest.mark.parametrize("task", TASKS)
def test_the_command_of_a_committed_record_finds_it(task: str) -> None:
    """With its data, whose fingerprint it has. Exempt: results/ablations/retired, for options that are gone."""
    composed: dict[tuple[str, ...], DictConfig] = {}
    found = [*committed(f"results/runs/{task}"), *committed(f"results/ablations/runs/{task}")]
    assert found
    for file in found:
        record = records.read(file)
        words = tuple(word for word in record.overrides if not word.startswith(("seed=", "paths.results=")))
        if words not in composed:  # which is slow
            composed[words] = configs.compose(*words, "device=cpu")
        config = composed[words].copy()
        config.seed, config.paths.results = record.seed, str(file.parents[3])
        planned, _ = RunPlan(config).record_and_checkpoint(record.data.fingerprint)
        assert planned == file
        assert records.finished(file) == record
        assert file.stem == record.run_id


@pytest.mark.slow
def test_a_committed_run_is_not_trained_again(tmp_path: Path) -> None:
    """The whole program, which makes the data first: about a minute."""
    words = "task=listops", "model=rfa", "seed=0", "experiment=table2", "trainer=cpu"
    places = f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs", "hydra.callbacks.sweep.announce=false"
    done = train("-m", *words, *places)
    assert re.search(r"^listops\.rfa\.0\.\w+ is finished: results/runs/listops/rfa/", done.stdout, re.MULTILINE)
    assert "steps on" not in done.stdout


def test_a_record_says_how_its_run_differs_from_the_papers(cell: Compose) -> None:
    """The words of the table's titles; which differences, tests/unit/test_table.py has."""
    record = run(
        cell("listops", "macformer_exp", "bucket=true", "model.attention.features=64", "task.learning_rate=1e-3"),
        ["bucket=true", "model.attention.features=64", "paths.listops=/home", "paths.data=/data", "seed=0"],
        concurrent=3,
    )
    assert record.differences.model == ["attention.features=64"]
    assert "listops learning_rate = 0.001 (paper: 0.0001)" in record.differences.task
    assert "trainer steps = 8 (paper: 10000)" in record.differences.shared
    assert "bucket = True (paper: False)" in record.differences.shared
    assert record.differences.command == ["bucket=true", "paths.listops=..."]
    assert (record.batch_size, record.padding, record.bucketing, record.concurrent) == (2, "full", True, 3)
    assert record.sessions[0].concurrent == 3


def test_a_run_is_as_concurrent_as_its_most_crowded_session(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {}, "")
    for concurrent, most in ((1, 1), (0, 1), (None, None)):
        checkpoint.begin(first_step=1, commit=None, device_name="", concurrent=concurrent)
        assert checkpoint.concurrent == most


@given(st.lists(st.booleans(), min_size=1))
def test_outcomes_survive_packing(outcomes: list[bool]) -> None:
    accuracies = {name: float(np.mean(outcomes)) for name in records.Quality.model_fields if name.endswith("accuracy")}
    known = {"test_examples": len(outcomes), "dev_step": 1, "dev_examples": 1, "dev_subset": ""}
    quality = records.Quality(correct=records.pack_bits(np.array(outcomes)), **known, **accuracies)
    assert quality.outcomes().tolist() == outcomes
