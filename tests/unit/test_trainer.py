"""The trainer: schedule, reproducibility, best-by-dev, failures, memory."""

import copy
import functools
import io
import itertools
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from macformer.harness import config as configs
from macformer.harness import device as devices
from macformer.harness import failures, trainer
from macformer.harness import record as records
from macformer.harness.plan import RunPlan
from macformer.harness.result import Result
from macformer.harness.run import run
from tests.conftest import MODELS, Compose

CPU = torch.device("cpu")


def built(config: DictConfig) -> tuple[trainer.Trainer, nn.Module, Any]:
    """Trainer, model and task; a model of its own may stand in for the second."""
    task = configs.build(config, "task.data", folder=config.paths.data)
    torch.manual_seed(config.seed)
    return configs.build(config, "trainer"), configs.build(config, "model", **asdict(task.spec)), task


def fit(config: DictConfig) -> tuple[Result, nn.Module, Any]:
    settings, model, task = built(config)
    return settings.fit(model, task, CPU, config.seed), model, task


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Tensor]]:
    """The options of the optimiser and all gradients, as it gets them in each step."""
    seen = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: object) -> None:
        (group,) = self.param_groups
        seen.append((dict(group), torch.cat([p.grad.flatten() for p in group["params"]])))
        step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    return seen


def test_same_seed_same_bits_and_another_seed_others(cell: Compose) -> None:
    """exp and trigh are the same model."""
    words = ["macformer_exp"], ["macformer_exp"], ["macformer_trigh"], ["macformer_exp", "seed=1"]
    first, *same, other = (fit(cell("listops", *more))[0] for more in words)
    assert all((result.losses, result.quality) == (first.losses, first.quality) for result in same)
    assert first.losses != other.losses


def test_schedule_rises_and_falls_linearly(cell: Compose) -> None:
    steps = ["trainer.warmup_steps=4", "trainer.steps=6", "trainer.evaluate_every=1"]
    history = fit(cell("listops", "rfa", *steps, "task.learning_rate=1e-3"))[0].history
    rates = [point.learning_rate for point in history]
    assert [rates[0], rates[3], max(rates), rates[-1]] == pytest.approx([1e-3 / 25, 1e-3, 1e-3, 1e-3 / 250_000])
    assert np.diff(rates[:4]) == pytest.approx(np.full(3, (1e-3 - 4e-5) / 3))
    assert np.diff(rates[3:]) == pytest.approx(np.full(6, (4e-9 - 1e-3) / 6))


@pytest.mark.parametrize(("protocol", "lowest", "highest"), [("paper", 0.85, 0.95), ("clean", 0.9, 0.9)])
def test_momentum_cycles_under_paper(cell: Compose, steps: list, protocol: str, lowest: float, highest: float) -> None:
    fit(cell("listops", "rfa", f"protocol={protocol}"))
    betas = [group["betas"][0] for group, _ in steps]
    assert (min(betas), max(betas)) == pytest.approx((lowest, highest))
    assert {(group["eps"], group["weight_decay"]) for group, _ in steps} == {(1e-6, 0)}


def test_the_best_by_dev_is_tested_and_the_last_one_too(cell: Compose) -> None:
    config = cell("listops", "rfa", "task.learning_rate=3e-2", "trainer.evaluate_every=1", "trainer.steps=12")
    result, model, task = fit(config)
    accuracies = [point.dev_accuracy for point in result.history]
    quality = result.quality
    assert quality.dev_accuracy == max(accuracies)
    assert quality.dev_step == accuracies.index(max(accuracies)) + 1
    assert quality.last_dev_accuracy == accuracies[-1]
    settings = replace(configs.build(config, "trainer"), batch_size=3, pad="trim")
    outcomes, _ = settings.test(model, task, CPU, result.best_weights)
    assert quality.test_accuracy == outcomes.mean()
    assert quality.outcomes().tolist() == outcomes.tolist()


def test_a_dev_subset_is_the_same_in_every_run(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the record tells subsets apart."""
    used: list[list[int]] = []
    evaluate = trainer.Trainer._evaluate

    def watched(self: trainer.Trainer, split: str, indices: np.ndarray) -> object:
        used.append(indices.tolist())
        return evaluate(self, split, indices)

    monkeypatch.setattr(trainer.Trainer, "_evaluate", watched)
    names = []
    for examples, of, seed in ((3, 12, 0), (3, 12, 1), (8, 12, 0), (8, 16, 0), ("all", 12, 0)):
        sizes = [f"trainer.dev_examples={examples}", f"task.data.examples.dev={of}", f"seed={seed}"]
        quality = fit(cell("listops", "rfa", *sizes))[0].quality
        assert quality.dev_examples == (12 if examples == "all" else examples)
        names.append(quality.dev_subset)
    subsets = {tuple(indices) for indices in used if len(indices) == 3}
    assert len(subsets) == 1
    assert subsets != {(0, 1, 2)}
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_a_loss_that_is_not_finite_is_a_result_with_time_and_memory(cell: Compose, tmp_path: Path) -> None:
    with pytest.raises(failures.RunFailed, match=r"ended as diverged: after \d+ steps, the loss is (nan|inf): lower"):
        run(cell("listops", "transformer", "task.learning_rate=1e30"), [])
    (file,) = (tmp_path / "runs").rglob("*.json")
    record = records.read(file)
    assert record.status == "diverged"
    assert record.time.train_seconds > 0
    assert record.memory.peak_bytes > 0


class Failing(nn.Module):
    def __init__(self, error: BaseException):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.error = error

    def forward(self, ids: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (torch.OutOfMemoryError(), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "oom"),
    ],
)
def test_other_failures_are_results_too_but_a_bug(cell: Compose, error: BaseException, status: str) -> None:
    settings, _, task = built(cell("listops", "rfa"))
    result = settings.fit(Failing(error), task, CPU, 0)
    assert result.status == status
    assert "0 steps" in result.message
    with pytest.raises(RuntimeError, match="a bug"):
        settings.fit(Failing(RuntimeError("a bug")), task, CPU, 0)


@pytest.mark.parametrize("name", MODELS)
def test_memory_of_a_run_is_repeatable(cell: Compose, name: str) -> None:
    first, second = (fit(cell("listops", name))[0].peaks for _ in range(2))
    assert all(first[part] == second[part] for part in ("peak_bytes", "evaluation_peak_bytes"))
    assert first["peak_bytes"] > first["evaluation_peak_bytes"] > 100_000


class Steep(nn.Module):
    """Gradients of three sizes: about 1e-3, 1e3 and -1e3 times that of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        score = (self.weight * torch.tensor([1e-3, 1e3, -1e3])).sum()
        return torch.zeros(len(ids), 10) + score * (torch.arange(10) == 0)


def test_gradients_are_clipped_by_value_at_one(cell: Compose, steps: list) -> None:
    settings, _, task = built(cell("listops", "rfa"))
    settings.fit(Steep(), task, CPU, 0)
    small, up, down = steps[0][1].abs().tolist()
    assert (up, down) == (1, 1)  # by value: each element on its own ...
    assert 0 < small < 1e-2  # ... so that a small one is not scaled down with them


@pytest.mark.parametrize(("task", "name"), [("listops", "rfa"), ("retrieval", "macformer_inv")])
def test_batch_size_and_padding_change_no_evaluation_and_buckets_train(cell: Compose, task: str, name: str) -> None:
    config = cell(task, name, "pad=trim", "bucket=true", "task.data.length=256")
    result, model, loaded = fit(config)
    assert result.status == "ok"
    assert loaded.splits["test"].batch(np.arange(3), trim=True)[0].shape[-1] == 64
    settings, weights = configs.build(config, "trainer"), copy.deepcopy(model.state_dict())
    first, *others = (
        replace(settings, batch_size=size, pad=pad).test(model, loaded, CPU, weights)
        for size, pad in ((3, "full"), (3, "trim"), (1, "full"), (8, "full"))
    )
    for other in others:
        assert other[0].tolist() == first[0].tolist()
        assert other[1] == pytest.approx(first[1], rel=1e-5)
    assert model.training


def test_memory_is_that_of_a_whole_batch_even_of_few_examples(cell: Compose) -> None:
    sizes = (["task.data.examples.train=16", f"trainer.batch_size={size}"] for size in (16, 64))
    small, large = (fit(cell("listops", "rfa", *more))[0].memory.peak_bytes for more in sizes)
    assert large > 2.5 * small


def test_telemetry_is_in_history_and_changes_nothing(cell: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    plain, watched = (fit(cell("listops", "macformer_exp", *extra))[0] for extra in ([], ["trainer.telemetry=true"]))
    assert watched.losses == plain.losses
    assert watched.quality == plain.quality
    none = fit(cell("listops", "rfa", "trainer.telemetry=true"))[0]  # its attention has none to tell
    assert not any(point.telemetry for point in [*plain.history, *none.history])
    told = ("logit_min", "logit_max", "floored", "error", "first_key", "first_key_exact")
    names = {f"layers.{i}.attend.attention.{what}" for i in (0, 1) for what in told}
    for point in watched.history:
        assert point.telemetry.keys() == names
        assert abs(point.telemetry["layers.0.attend.attention.logit_max"]) <= 32**-0.5  # pre-SBN's promise
        assert point.telemetry["layers.0.attend.attention.error"] > 0
    assert "layers.1.attend.attention.floored 0" in capsys.readouterr().out


@pytest.mark.parametrize("extra", ["model.attention.redraw=2", "model.pre_sbn.statistics=batch"])
def test_measuring_memory_changes_nothing(cell: Compose, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what moves with each pass, the running averages; nor the draws."""
    measured = fit(cell("listops", "macformer_exp", extra))[0]
    monkeypatch.setattr(trainer.Trainer, "_measure_memory", lambda settings: None)
    assert fit(cell("listops", "macformer_exp", extra))[0].losses == measured.losses


def test_the_trainer_tells_of_its_steps(cell: Compose) -> None:
    """One `step()` for each step of the optimiser, and none where there is no redraw."""
    model = fit(cell("listops", "macformer_exp", "model.attention.redraw=3"))[1]
    feature_map = model.layers[0].attend.attention.feature_map
    assert feature_map.steps in (5, 10)  # the best weights, with the draw that they had
    assert fit(cell("listops", "macformer_exp"))[1].layers[0].attend.attention.feature_map.steps == 0


@pytest.mark.parametrize(
    ("extra", "steps"),
    [
        *((f"model.attention.sampling={sampling}", 10) for sampling in ("release", "exact01", "order1")),
        ("trainer.steps=1", 3),  # the shortest schedule
    ],
)
def test_it_trains(cell: Compose, extra: str, steps: int) -> None:
    result = fit(cell("listops", "macformer_exp", extra))[0]
    assert result.status == "ok"
    assert len(result.losses) == steps


@pytest.mark.parametrize("parts", [2, 3])
def test_a_batch_in_parts_has_the_same_gradient(cell: Compose, parts: int) -> None:
    """Two or three parts of 8 examples: losses part only by rounding; memory is less."""
    sizes = ["trainer.batch_size=8", "model.dropout=0.0", "task.learning_rate=1e-2"]
    whole, split = (fit(cell("listops", "rfa", *sizes, f"trainer.accumulate={k}"))[0] for k in (1, parts))
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    assert split.losses != whole.losses
    assert split.peaks["peak_bytes"] < 0.8 * whole.peaks["peak_bytes"]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["transformer", "rfa", "macformer_exp"])
def test_mixed_precision_learns_about_the_same(cell: Compose, name: str, precision: str) -> None:
    """On the CPU, which has autocast and a loss scaler, too."""
    exact, mixed = (fit(cell("listops", name, f"trainer.precision={p}"))[0] for p in ("float32", precision))
    assert mixed.losses == pytest.approx(exact.losses, rel=0.02)
    assert mixed.losses != exact.losses
    assert mixed.status == "ok"


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_saved_state_goes_on_bit_for_bit(cell: Compose, precision: str) -> None:
    """Every state that `save` gets, through weights_only; the scaler's included."""
    config = cell("listops", "macformer_exp", f"trainer.precision={precision}", "trainer.checkpoint_every=3")
    states: list[bytes] = []

    def save(state: dict) -> None:
        stream = io.BytesIO()
        torch.save(state, stream)
        states.append(stream.getvalue())

    settings, model, task = built(config)
    whole = settings.fit(model, task, CPU, config.seed, save)
    loaded = [torch.load(io.BytesIO(state), weights_only=True) for state in states]
    assert [state["step"] for state in loaded] == [3, 5, 5, 6, 9, 10, 10]
    for state in loaded:
        settings, model, task = built(config)
        torch.manual_seed(99)
        resumed = settings.fit(model, task, CPU, config.seed, saved=state)
        assert resumed.losses == whole.losses
        assert resumed.quality == whole.quality
        assert resumed.peaks["peak_bytes"] == whole.peaks["peak_bytes"]
        assert resumed.seconds["training"] > state["seconds"]["training"] or state["step"] == 10


class Overflowing(nn.Module):
    """Its gradient is finite in float16 once the loss is scaled by a few thousand or less; with `root`, never."""

    def __init__(self, root: bool = False):
        super().__init__()
        self.weight, self.root = nn.Parameter(torch.zeros(10)), root

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.weight.sqrt() if self.root else self.weight.half() * 64
        return logits.expand(len(ids), 10)


FLOAT16 = ["trainer.precision=float16", "trainer.checkpoint_every=1"]


def test_skipped_steps_are_counted_shown_and_recorded(
    cell: Compose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss scaler begins at 65536 and halves that until the gradient is finite; each time it skips the step."""
    weights = []
    monkeypatch.setattr(RunPlan, "model", lambda plan, task: Overflowing())
    step = trainer.Trainer._step

    def watched(self: trainer.Trainer, feed: Any) -> None:
        step(self, feed)
        weights.append(self.model.weight.tolist())

    monkeypatch.setattr(trainer.Trainer, "_step", watched)
    record = run(cell("listops", "rfa", *FLOAT16), [])
    still = [now == before for before, now in itertools.pairwise([[0.0] * 10, *weights])]
    assert 1 < record.skipped_steps == sum(still) < record.steps_done
    assert record.status == "ok"
    printed = capsys.readouterr().out
    assert re.search(rf"^step +10/10  loss [\d.]+  {record.skipped_steps} steps skipped  dev", printed, re.MULTILINE)
    assert f"\nskipped {record.skipped_steps} of 10 steps, whose gradients were not finite in float16\n" in printed
    assert run(cell("listops", "rfa", "trainer.precision=bfloat16"), []).skipped_steps == 0
    assert not re.search(r" skipped|skipped \d", capsys.readouterr().out)


def test_a_run_that_goes_on_has_skipped_as_many_steps(cell: Compose) -> None:
    settings, _, task = built(cell("listops", "rfa", *FLOAT16))
    states: list[dict] = []
    whole = settings.fit(Overflowing(), task, CPU, 0, lambda state: states.append(copy.deepcopy(state)))
    for state in states:
        resumed = settings.fit(Overflowing(), task, CPU, 0, saved=state)
        assert (resumed.skipped_steps, resumed.losses) == (whole.skipped_steps, whole.losses)


def test_a_run_that_skips_a_hundred_steps_in_a_row_has_diverged(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss stays finite. Steps before a checkpoint count, too; one of older code does not have their number."""
    settings, _, task = built(cell("listops", "rfa", *FLOAT16, "trainer.steps=300", "trainer.evaluate_every=1000"))
    states: list[dict] = []
    whole = settings.fit(Overflowing(root=True), task, CPU, 0, lambda state: states.append(copy.deepcopy(state)))
    assert (whole.status, whole.skipped_steps) == ("diverged", 100)
    why, way_out = whole.message.split(": ")
    assert why == "after 100 steps, none of the last 100 had a finite gradient in float16"
    assert way_out == "use trainer.precision=bfloat16, or lower task.learning_rate"
    resumed = settings.fit(Overflowing(root=True), task, CPU, 0, saved=states[39])
    assert (resumed.message, resumed.skipped_steps) == (whole.message, 100)
    del states[39]["skipped"]
    assert settings.fit(Overflowing(root=True), task, CPU, 0, saved=states[39]).message.startswith("after 140 steps")
    monkeypatch.setattr(devices, "scaler", lambda *args: torch.amp.GradScaler("cpu", init_scale=2.0**-140))
    assert settings.fit(Overflowing(root=True), task, CPU, 0).message == whole.message  # a scale of 0 is not lowered


def test_a_saved_state_of_other_code_is_one_sentence(cell: Compose) -> None:
    settings, model, task = built(cell("listops", "rfa"))
    with pytest.raises(failures.RunFailed, match="do not fit this code: train again"):
        settings.fit(model, task, CPU, 0, saved={"model": {"other": torch.zeros(1)}})


def test_every_second_is_booked_once(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second a look: none is lost, and a step takes two, one of them for its data."""
    ticks = itertools.count()
    monkeypatch.setattr(devices, "now", lambda device: float(next(ticks)))
    result = fit(cell("listops", "rfa"))[0]
    assert result.step_seconds == [2.0] * 10
    assert (result.seconds["training"], result.seconds["data_wait"], result.seconds["evaluation"]) == (10, 10, 4)
    assert sum(result.seconds.values()) == next(ticks) - 1
    time = result.time
    assert (time.train_seconds, time.warmup_seconds, time.data_wait_seconds) == (20, 4, 10)
    assert (time.evaluation_seconds, time.pause_seconds) == (4, result.seconds["pause"])


def test_a_forecast_leaves_nothing(cell: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cell("listops", "rfa", "dry_run=true", "trainer.steps=1000", "trainer.dev_examples=4"), []) is None
    printed = capsys.readouterr().out
    assert re.search(r"a step takes [\d.]+ ms \(mean of 20\)", printed)
    assert re.search(r"peak memory of training \d+ MiB", printed)
    assert re.search(r"expected: \S+( s)? in all, \S+( s)? of it training and \S+( s)? evaluation", printed)
    assert not [*(tmp_path / "runs").rglob("*"), *(tmp_path / "outputs").rglob("*")]


def test_a_forecast_adds_up(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second a look: a step takes one, waiting for its data another."""
    sizes = "trainer.steps=98", "trainer.evaluate_every=10", "trainer.dev_examples=8"
    settings, model, task = built(cell("listops", "rfa", *sizes))
    ticks = itertools.count()
    monkeypatch.setattr(devices, "now", lambda device: float(next(ticks)))
    cost = settings.forecast(model, task, CPU, 0)
    assert cost.measured_steps == 20
    assert cost.train_seconds == 100 * 2
    assert cost.evaluation_seconds == pytest.approx((10 * 8 + 2 * 8) / 8)  # the 8 dev examples took one second


KEYS = ["task.learning_rate=1e-2", "trainer.evaluate_every=3"]


@pytest.fixture
def trained(cell: Compose) -> records.Record:
    return run(cell("listops", "rfa", *KEYS), [])


def test_evaluating_a_run_by_its_id_and_by_its_checkpoint(
    cell: Compose, trained: records.Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for name in (trained.run_id, f"{tmp_path}/outputs/{trained.run_id}/checkpoint.pt"):
        assert run(cell("listops", "rfa", *KEYS, f"evaluate={name}", "threads=2"), []) is None
        best, last = re.findall(r"test accuracy ([\d.]+)% of 8", capsys.readouterr().out)
        assert float(best) == pytest.approx(100 * trained.quality.test_accuracy, abs=0.01)
        assert float(last) == pytest.approx(100 * trained.quality.last_test_accuracy, abs=0.01)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.attention.features=64", "model.attention.features=128 (here 64)"),
        ("seed=5", "seed=0 (here 5)"),
        ("trainer.steps=9", "trainer.steps=8 (here 9)"),
        ("task.data.examples.test=16", "task.data.examples.test=8 (here 16)"),
    ],
)
def test_evaluating_a_checkpoint_of_another_configuration_is_refused_by_key(
    cell: Compose, trained: records.Record, change: str, named: str
) -> None:
    with pytest.raises(failures.RunFailed, match=re.escape(named)):
        run(cell("listops", "rfa", *KEYS, f"evaluate={trained.run_id}", change), [])


def test_evaluating_what_is_not_there(cell: Compose) -> None:
    with pytest.raises(
        failures.RunFailed, match=r"there is no checkpoint .*outputs/listops.rfa.0.nosuch/checkpoint.pt"
    ):
        run(cell("listops", "rfa", "evaluate=listops.rfa.0.nosuch"), [])


def compile_with(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=backend))


def test_weights_go_through_torch_compile(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the weights stay the same, so that a checkpoint fits either way."""
    compile_with("aot_eager", monkeypatch)
    with torch._functorch.config.patch(backward_pass_autocast="same_as_forward"):
        plain, compiled = (  # without dropout, whose random numbers are others then
            fit(cell("listops", "transformer_sdpa", "model.dropout=0.0", f"trainer.compile={flag}"))
            for flag in ("false", "true")
        )
        # What leaves autocast would come into it in the backward pass: tests/unit/test_half_precision.py.
        assert torch._functorch.config.backward_pass_autocast == "off"
    assert compiled[0].losses == pytest.approx(plain[0].losses, rel=1e-4)
    assert compiled[1].state_dict().keys() == plain[1].state_dict().keys()


def test_a_compiled_run_goes_on_as_it_was(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, evaluations and all. A module that does nothing in evaluation is not compiled any more after it."""
    compile_with("aot_eager", monkeypatch)
    config = cell("listops", "macformer_exp", "trainer.compile=true", "trainer.checkpoint_every=3")
    states: list[dict] = []
    losses = []
    for _ in range(2):
        torch.compiler.reset()
        settings, model, task = built(config)
        saved = states[0] if states else None
        result = settings.fit(model, task, CPU, config.seed, lambda new: states.append(copy.deepcopy(new)), saved)
        losses.append(result.losses)
    assert states[0]["step"] == 3
    assert losses[0] == losses[1]


def test_a_compiler_that_fails_is_one_sentence(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long story")

    compile_with(broken, monkeypatch)
    with pytest.raises(failures.RunFailed, match=r"^trainer.compile=true does not work here \(.+\): leave it out$"):
        fit(cell("listops", "transformer", "trainer.compile=true"))


def test_a_request_to_stop_waits_and_a_late_second_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with failures.Stop() as stop:
        stop.check()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):  # at once: a checkpoint may be under way
            signal.raise_signal(number)
        with pytest.raises(failures.Stopped):
            stop.check()
        assert stop.signal == signal.SIGINT
        monkeypatch.setattr(failures, "PATIENCE", -1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_late_signal_stops_a_sweep(cell: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the run has nothing left to do."""

    def late(outcomes: np.ndarray) -> str:
        signal.raise_signal(signal.SIGTERM)
        return records.pack_bits(outcomes)

    monkeypatch.setattr(trainer, "pack_bits", late)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(cell("listops", "rfa"), [])
    assert stopped.value.args == (signal.SIGTERM,)
    (file,) = (tmp_path / "runs").rglob("*.json")
    assert records.read(file).status == "ok"


def test_a_forecast_and_an_evaluation_say_that_memory_is_short(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(cell("listops", "rfa"), [])

    def short(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(nn.Embedding, "forward", short)
    for what in ("dry_run=true", f"evaluate={record.run_id}"):
        with pytest.raises(failures.RunFailed, match=r"^out of memory: raise trainer.accumulate=1 .* or lower"):
            run(cell("listops", "rfa", what), [])


def test_an_evaluation_stops_when_it_is_asked_to(cell: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of it; what was trained until then is saved, and the evaluation comes first when it goes on."""
    settings, model, task = built(cell("listops", "rfa", "task.data.examples.dev=32", "trainer.dev_examples=32"))

    evaluate = trainer.Trainer._evaluate

    def asked(self: trainer.Trainer, split: str, indices: np.ndarray) -> object:
        if split == "dev":
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, split, indices)

    monkeypatch.setattr(trainer.Trainer, "_evaluate", asked)
    states: list[dict] = []
    result = settings.fit(model, task, CPU, 0, states.append)
    assert (result.status, result.message) == ("interrupted", "SIGTERM after 5 steps")
    assert [(state["step"], len(state["history"])) for state in states] == [(5, 0), (5, 0)]


def test_wandb_without_a_login_is_one_sentence(cell: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no terminal to ask for one, nothing sent: wandb refuses before it calls anyone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(configs.ConfigError, match=r"^logger: mode=online does not work: .+; use mode=offline$"):
        run(cell("listops", "rfa", "logger=wandb", "logger.mode=online"), [])
    assert not list((tmp_path / "runs").rglob("*.json"))


def test_a_signal_that_somebody_else_handles_is_left_to_them() -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        with failures.Stop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked == [signal.SIGTERM]
            stop.check()
    finally:
        signal.signal(signal.SIGTERM, before)
