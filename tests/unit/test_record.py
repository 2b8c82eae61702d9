"""The record: its schema, its name, whole or not there."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from macformer.harness import record as records
from macformer.harness.run import run

Cell = Callable[..., DictConfig]


@pytest.fixture
def finished(cell: Cell, tmp_path: Path) -> tuple[records.Record, Path]:
    record = run(cell("listops", "rfa"), ["task=listops", "model=rfa"])
    (file,) = (tmp_path / "runs" / "listops" / "rfa").glob("*.json")
    return record, file


def test_a_run_leaves_one_valid_record(finished: tuple[records.Record, Path]) -> None:
    record, file = finished
    assert file.stem == record.run_id
    assert records.read(file) == record
    assert record.run_id.startswith("listops.rfa.0.")
    assert record.status == "ok"
    assert record.steps_done == 10
    assert record.parameters > 0
    assert record.data.source == "generated"
    assert record.data.examples == {"train": 16, "dev": 8, "test": 8}
    assert record.config["trainer"]["steps"] == 8
    assert record.overrides == ["task=listops", "model=rfa"]
    assert [point.step for point in record.history] == [5, 10]
    time = record.time
    assert time is not None
    assert 0 < time.warmup_seconds < time.train_seconds
    assert time.step_p10 <= time.step_p50 <= time.step_p90
    assert time.data_wait_seconds < time.train_seconds
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"surprise": 1}, "surprise"),
        ({"status": "fine"}, "status"),
        ({"quality": {"test_accuracy": 0.5}}, "quality"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_by_name(
    finished: tuple[records.Record, Path], change: dict, complaint: str
) -> None:
    _, file = finished
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=f"{file.name} is not a run record of schema 2: {complaint}"):
        records.read(file)


def test_a_truncated_record_is_refused(finished: tuple[records.Record, Path]) -> None:
    _, file = finished
    file.write_text(file.read_text()[:100])
    with pytest.raises(ValueError, match="is not a run record"):
        records.read(file)


def test_a_finished_run_is_not_repeated_unless_forced(
    cell: Cell, finished: tuple[records.Record, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record, file = finished
    written = file.stat().st_mtime_ns
    assert run(cell("listops", "rfa"), []) == record
    assert "is finished" in capsys.readouterr().out
    assert file.stat().st_mtime_ns == written
    again = run(cell("listops", "rfa", "force=true"), [])
    assert again.quality == record.quality
    assert file.stat().st_mtime_ns > written


def test_a_corrupt_record_is_replaced_with_a_warning(
    cell: Cell, finished: tuple[records.Record, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record, file = finished
    file.write_text(file.read_text()[:100])
    assert run(cell("listops", "rfa"), []).quality == record.quality
    assert "it does not count as finished" in capsys.readouterr().out
    assert records.read(file).status == "ok"


def test_a_forced_repeat_that_fails_does_not_cost_the_finished_record(
    cell: Cell, finished: tuple[records.Record, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, file = finished

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("macformer.harness.trainer.evaluate", stop)
    with pytest.raises(KeyboardInterrupt):
        run(cell("listops", "rfa", "force=true"), [])
    assert records.read(file) == record


def test_a_place_that_cannot_be_written_fails_before_the_training(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("macformer.harness.trainer.Trainer.fit", None)  # calling it would be another error
    with pytest.raises(NotADirectoryError):
        run(cell("listops", "rfa", f"paths.results={tmp_path}/file"), [])


def test_auto_and_the_device_it_means_are_one_run(cell: Cell, finished: tuple[records.Record, Path]) -> None:
    record, _ = finished
    kind = record.environment.device
    assert run(cell("listops", "rfa", f"device={kind}"), []).run_id == record.run_id


def test_a_run_that_failed_is_repeated_and_replaced(cell: Cell, finished: tuple[records.Record, Path]) -> None:
    record, file = finished
    records.write(record.model_copy(update={"status": "oom", "quality": None}), file)
    assert run(cell("listops", "rfa"), []).status == "ok"
    assert records.read(file).status == "ok"


def test_a_finished_record_of_another_commit_is_kept_with_a_warning(
    cell: Cell, finished: tuple[records.Record, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record, file = finished
    records.write(record.model_copy(update={"code": records.Code(commit="abc", dirty=False)}), file)
    run(cell("listops", "rfa"), [])
    assert "made by commit abc" in capsys.readouterr().out


def test_run_id_covers_what_decides_the_result() -> None:
    config = {"task": {"name": "text"}, "model": {"name": "rfa"}, "seed": 3, "paths": {"data": "a"}, "force": False}
    config["trainer"] = {"steps": 8, "telemetry": False}
    name = records.run_id(config, "f")
    assert name.startswith("text.rfa.3.")
    assert records.run_id(config | {"paths": {"data": "b"}, "force": True, "logger": {"x": 1}}, "f") == name
    assert records.run_id(config | {"trainer": {"steps": 8, "telemetry": True}}, "f") == name
    assert records.run_id(config | {"trainer": {"steps": 9, "telemetry": False}}, "f") != name
    assert records.run_id(config, "g") != name
    assert records.run_id(config | {"threads": 2}, "f") != name


@given(st.lists(st.booleans(), min_size=1))
def test_outcomes_survive_packing(outcomes: list[bool]) -> None:
    accuracies = {name: float(np.mean(outcomes)) for name in records.Quality.model_fields if name.endswith("accuracy")}
    quality = records.Quality(
        test_examples=len(outcomes),
        correct=records.pack_bits(np.array(outcomes)),
        dev_step=1,
        dev_examples=1,
        dev_subset="",
        **accuracies,
    )
    assert quality.outcomes().tolist() == outcomes
