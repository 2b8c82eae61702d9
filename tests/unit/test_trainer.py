"""The loop: schedule, reproducibility, best-by-dev, failures, memory."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import nn

import train
from macformer import config as configs
from macformer import device as devices
from macformer import trainer
from macformer.record import unpack_bits
from macformer.trainer import Result, Trainer, evaluate
from tests.conftest import MODELS

Cell = Callable[..., DictConfig]
CPU = torch.device("cpu")


def fit(config: DictConfig) -> tuple[Result, nn.Module, object]:
    task = configs.build(config, "task.data", folder=config.paths.data)
    torch.manual_seed(config.seed)
    model = configs.build(config, "model", **asdict(task.spec))
    result = configs.build(config, "trainer").fit(model, task, CPU, config.seed)
    return result, model, task


def test_same_seed_same_bits_and_another_seed_others(cell: Cell) -> None:
    losses = [fit(cell("listops", "macformer_exp", f"seed={seed}"))[0].losses for seed in (0, 0, 1)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_exp_and_trigh_are_the_same_model_bit_for_bit(cell: Cell) -> None:
    exp, trigh = (fit(cell("listops", name))[0] for name in ("macformer_exp", "macformer_trigh"))
    assert exp.losses == trigh.losses
    assert exp.quality == trigh.quality


def test_schedule_rises_and_falls_linearly(cell: Cell) -> None:
    steps = ["trainer.warmup_steps=4", "trainer.steps=6", "trainer.evaluate_every=1"]
    history = fit(cell("listops", "rfa", *steps, "task.learning_rate=1e-3"))[0].history
    rates = [point.learning_rate for point in history]
    assert rates[0] == pytest.approx(1e-3 / 25)
    assert rates[3] == max(rates) == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-3 / 250_000)
    assert np.diff(rates[:4]) == pytest.approx(np.full(3, (1e-3 - 4e-5) / 3))
    assert np.diff(rates[3:]) == pytest.approx(np.full(6, (4e-9 - 1e-3) / 6))


@pytest.mark.parametrize(("protocol", "lowest", "highest"), [("paper", 0.85, 0.95), ("clean", 0.9, 0.9)])
def test_momentum_cycles_under_the_paper_protocol_alone(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, protocol: str, lowest: float, highest: float
) -> None:
    seen: list[dict] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: object) -> None:
        seen.append(dict(self.param_groups[0]))
        step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    fit(cell("listops", "rfa", f"protocol={protocol}"))
    betas = [group["betas"][0] for group in seen]
    assert (min(betas), max(betas)) == pytest.approx((lowest, highest))
    assert {(group["eps"], group["weight_decay"]) for group in seen} == {(1e-6, 0)}


def test_the_best_by_dev_is_tested_and_the_last_one_too(cell: Cell) -> None:
    config = cell("listops", "rfa", "task.learning_rate=3e-2", "trainer.evaluate_every=1", "trainer.steps=12")
    result, model, task = fit(config)
    accuracies = [point.dev_accuracy for point in result.history]
    quality = result.quality
    assert quality is not None
    assert quality.dev_accuracy == max(accuracies)
    assert quality.dev_step == accuracies.index(max(accuracies)) + 1
    assert quality.last_dev_accuracy == accuracies[-1]
    test = task.splits["test"]
    outcomes, _ = evaluate(model, test, np.arange(len(test)), 3, CPU, trim=True)  # the model now holds the best weights
    assert quality.test_accuracy == outcomes.mean()
    assert unpack_bits(quality.correct, quality.test_examples).tolist() == outcomes.tolist()


def test_evaluation_does_not_depend_on_the_batch_size(cell: Cell) -> None:
    _, model, task = fit(cell("retrieval", "macformer_inv"))
    test = task.splits["test"]
    one, all_ = (evaluate(model, test, np.arange(len(test)), size, CPU, trim=False) for size in (1, 8))
    assert one[0].tolist() == all_[0].tolist()
    assert one[1] == pytest.approx(all_[1], rel=1e-5)
    assert model.training


def test_a_dev_subset_is_the_same_in_every_run(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["trainer.dev_examples=3", "task.data.examples.dev=12"]
    used: list[list[int]] = []
    watched = trainer.evaluate

    def evaluate(model: nn.Module, split: object, indices: np.ndarray, *rest: object) -> object:
        used.append(indices.tolist())
        return watched(model, split, indices, *rest)

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    for seed in (0, 1):
        quality = fit(cell("listops", "rfa", *sizes, f"seed={seed}"))[0].quality
        assert quality is not None
        assert quality.dev_examples == 3
    subsets = {tuple(indices) for indices in used if len(indices) == 3}
    assert len(subsets) == 1
    assert subsets != {(0, 1, 2)}


def test_a_loss_that_is_not_finite_is_a_result(cell: Cell) -> None:
    with pytest.raises(train.RunFailed, match=r"ended as diverged: the loss is (nan|inf) at step"):
        train.run(cell("listops", "transformer", "task.learning_rate=1e30"), [])


class Failing(nn.Module):
    def __init__(self, error: BaseException):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.error = error

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (torch.OutOfMemoryError(), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom"),
    ],
)
def test_other_failures_are_results_too(cell: Cell, error: BaseException, status: str) -> None:
    config = cell("listops", "rfa")
    task = configs.build(config, "task.data", folder=config.paths.data)
    result = configs.build(config, "trainer").fit(Failing(error), task, CPU, 0)
    assert result.status == status
    assert "0 steps" in result.message


def test_a_bug_is_no_result(cell: Cell) -> None:
    config = cell("listops", "rfa")
    task = configs.build(config, "task.data", folder=config.paths.data)
    with pytest.raises(RuntimeError, match="a bug"):
        configs.build(config, "trainer").fit(Failing(RuntimeError("a bug")), task, CPU, 0)


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
    peak, method = devices.peak_bytes(CPU, [x], step)
    assert peak == pytest.approx(24e6, rel=0.001)
    assert "live tensor bytes" in method
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", MODELS)
def test_memory_of_a_run_is_repeatable(cell: Cell, name: str) -> None:
    first, second = (fit(cell("listops", name))[0].peaks for _ in range(2))
    for part in ("peak_bytes", "evaluation_peak_bytes"):
        assert first[part] == second[part]
    assert first["peak_bytes"] > first["evaluation_peak_bytes"] > 100_000


def test_bad_arguments_are_named() -> None:
    good = {"warmup_steps": 2, "steps": 1, "batch_size": 1, "learning_rate": 1e-3, "evaluate_every": 1}
    good |= {"dev_examples": 1, "cycle_momentum": True, "pad": "full", "bucket": False}
    Trainer(**good)
    for bad in ({"steps": 0}, {"warmup_steps": 1}, {"learning_rate": -1.0}, {"learning_rate": float("nan")}):
        ((name, value),) = bad.items()
        with pytest.raises(ValueError, match=f"{name}={value} must be"):
            Trainer(**good | bad)


def test_the_shortest_schedule_runs(cell: Cell) -> None:
    result = fit(cell("listops", "rfa", "trainer.warmup_steps=2", "trainer.steps=1"))[0]
    assert len(result.losses) == 3


def test_gradients_are_clipped_by_value_at_one(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: object) -> None:
        seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))
        step(self, *args)

    class Steep(nn.Module):
        """Gradients of three sizes: about 1e-3, 1e3 and -1e3 times that of the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            score = (self.weight * torch.tensor([1e-3, 1e3, -1e3])).sum()
            return torch.zeros(len(ids), 10) + score * (torch.arange(10) == 0)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    config = cell("listops", "rfa")
    task = configs.build(config, "task.data", folder=config.paths.data)
    configs.build(config, "trainer").fit(Steep(), task, CPU, 0)
    small, up, down = seen[0].abs().tolist()
    assert (up, down) == (1, 1)  # by value: each element on its own ...
    assert 0 < small < 1e-2  # ... so that a small one is not scaled down with them


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


def test_one_item_is_made_ahead_and_no_more() -> None:
    made = []

    def items() -> Iterator[int]:
        for i in range(10):
            made.append((i, threading.current_thread().name))
            yield i

    ahead = devices._one_ahead(items())
    for i in range(4):
        assert next(ahead) == i
        deadline = time.monotonic() + 30
        while len(made) < i + 2 and time.monotonic() < deadline:
            time.sleep(0.001)  # the thread is at work
        assert [item for item, _ in made] == list(range(i + 2))
    ahead.close()
    assert {thread for _, thread in made}.isdisjoint({threading.main_thread().name})


def test_what_goes_wrong_in_the_feeding_thread_is_raised_in_its_turn() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise MemoryError

    ahead = devices._one_ahead(items())
    assert next(ahead) == 0
    with pytest.raises(MemoryError):
        next(ahead)


def test_device_choice() -> None:
    assert devices.choose("cpu").type == "cpu"
    assert devices.choose("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_missing_device() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use device=cpu"):
            devices.choose("cuda")


@pytest.mark.parametrize("task", ["listops", "retrieval"])
def test_trimming_changes_no_evaluation_and_buckets_train(cell: Cell, task: str) -> None:
    config = cell(task, "rfa", "pad=trim", "bucket=true", "model.dropout=0.0", "task.data.length=256")
    result, model, loaded = fit(config)
    assert result.status == "ok"
    split = loaded.splits["test"]
    assert split.batch(np.arange(3), trim=True)[0].shape[-1] == 64
    full, trimmed = (evaluate(model, split, np.arange(len(split)), 3, CPU, trim) for trim in (False, True))
    assert full[0].tolist() == trimmed[0].tolist()
    assert full[1] == pytest.approx(trimmed[1], rel=1e-5)


def test_memory_is_that_of_a_whole_batch_even_of_few_examples(cell: Cell) -> None:
    peaks = []
    for size in (16, 64):
        memory = fit(cell("listops", "rfa", f"trainer.batch_size={size}", "task.data.examples.train=16"))[0].memory
        assert memory is not None
        peaks.append(memory.peak_bytes)
    assert peaks[1] > 2.5 * peaks[0]


def test_telemetry_is_in_history_and_changes_nothing(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    plain, watched = (fit(cell("listops", "macformer_exp", *extra))[0] for extra in ([], ["trainer.telemetry=true"]))
    assert watched.losses == plain.losses
    assert watched.quality == plain.quality
    assert not any(point.telemetry for point in plain.history)
    names = {
        f"layers.{i}.attend.attention.{what}" for i in (0, 1) for what in ("logit_min", "logit_max", "floored", "error")
    }
    for point in watched.history:
        assert point.telemetry.keys() == names
        assert abs(point.telemetry["layers.0.attend.attention.logit_max"]) <= 32**-0.5  # pre-SBN's promise
        assert point.telemetry["layers.0.attend.attention.error"] > 0
    assert "layers.1.attend.attention.floored 0" in capsys.readouterr().out


def test_telemetry_of_a_model_that_has_none_is_empty(cell: Cell) -> None:
    result = fit(cell("listops", "rfa", "trainer.telemetry=true"))[0]
    assert not any(point.telemetry for point in result.history)


@pytest.mark.parametrize("extra", ["model.attention.redraw=2", "model.pre_sbn.statistics=batch"])
def test_measuring_memory_changes_nothing(cell: Cell, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what moves with each pass, the running averages; nor the draws."""
    measured = fit(cell("listops", "macformer_exp", extra))[0]
    monkeypatch.setattr(trainer._Run, "measure_memory", lambda run: None)
    assert fit(cell("listops", "macformer_exp", extra))[0].losses == measured.losses


def test_the_trainer_tells_of_its_steps(cell: Cell) -> None:
    """One `step()` for each step of the optimiser, and none where there is no redraw."""
    model = fit(cell("listops", "macformer_exp", "model.attention.redraw=3"))[1]
    feature_map = model.layers[0].attend.attention.feature_map
    assert feature_map.steps in (5, 10)  # the best weights, with the draw that they had
    assert fit(cell("listops", "macformer_exp"))[1].layers[0].attend.attention.feature_map.steps == 0


@pytest.mark.parametrize("sampling", ["release", "exact01", "order1"])
def test_every_sampling_trains(cell: Cell, sampling: str) -> None:
    result = fit(cell("listops", "macformer_exp", f"model.attention.sampling={sampling}"))[0]
    assert result.status == "ok"
    assert len(result.losses) == 10
