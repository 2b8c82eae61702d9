"""The benchmark: what it writes, and that it gives no figure to what is wrong."""

import json
import re
import weakref
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lra_data.base import TaskSpec
from macformer.attention import RMFAttention
from macformer.harness import config as configs
from macformer.harness.race import race
from scripts import bench_attention as bench
from scripts import bench_models as models
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of one call, and no long check: tests/unit/test_linear.py has it."""
    monkeypatch.setattr(bench, "TURN", 0.0)
    monkeypatch.setattr(bench, "LONG", [])


def test_it_writes_json_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--lengths", "64", "1024", "--rounds", "2", "--no-model", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "attention.json").read_text())
    assert [(r["shape"]["B"], r["shape"]["n"]) for r in report["results"]] == [(4, 64), (4, 1024), (1, 1024)]
    names = list(bench.attentions(seed=0))
    for result in report["results"]:
        assert list(result["arms"]) == names
        for arm in result["arms"].values():
            assert len(arm["seconds"]) == len(arm["flop"]) == 2
            assert min(arm["seconds"]) > 0
            assert arm["peak_bytes"] > 0
    long = report["results"][1]["arms"]
    assert long["rmfa_paper"]["peak_bytes"] < long["checkpointed"]["peak_bytes"] / 7
    table = (tmp_path / "attention.md").read_text()
    assert table in capsys.readouterr().out
    assert all(f"| {name} |" in table for name in names)
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["attention.json", "attention.md", "attention.png"]


def test_what_is_wrong_gets_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An RMFA that leaves out the mask: the program says so, reports the others, and fails."""
    right = RMFAttention.forward
    monkeypatch.setattr(RMFAttention, "forward", lambda self, q, k, v, mask=None: right(self, q, k, v))
    assert bench.main(["--lengths", "64", "--rounds", "2", "--no-model", "--output", str(tmp_path)]) == 1
    assert "rmfa_paper gets no figure: the output is off by" in capsys.readouterr().out
    report = json.loads((tmp_path / "attention.json").read_text())
    (result,) = report["results"]
    assert not [name for name in result["arms"] if name.startswith("rmfa")]
    assert "sdpa" in result["arms"]


class Products(TorchDispatchMode):
    """Counts the FLOP of batched matrix products as they happen."""

    flop = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::bmm", "aten::baddbmm", "aten::baddbmm_"):
            a, b = args[-2:]
            self.flop += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["rmfa_paper", "rmfa_order1", "rfa"])
def test_flop_are_those_of_the_products_that_happen(name: str) -> None:
    """The count leaves out the columns of ones and the small A, some 5% at this size."""
    attention = bench.attentions(seed=0)[name]
    with Products() as products:
        bench.run(attention, bench.inputs(1, 1, 4096, torch.device("cpu")))
    told = bench.flop(attention, 1, 1, 4096)
    assert told < products.flop < 1.08 * told


def test_what_is_not_met_is_said() -> None:
    arms = {
        name: {"seconds": [seconds], "flop": [1], "peak_bytes": 8}
        for name, seconds in {
            "explicit": 1.0,
            "checkpointed": 2.0,
            "sdpa": 0.5,
            "rmfa_paper": 0.01,
            "rmfa_order1": 0.1,
        }.items()
    }
    race = {
        "shape": {"B": 4, "H": 2, "n": 4096, "d": 32, "D": 128},
        "allocator": "default",
        "arms": arms,
        "matmul_rate": [1.0],
    }
    report = {"results": [race], "no_figure": {}, "model_peak_bytes": {}}
    report["accuracy"] = {s: {"nmse": [1.0, 1.0], "deviation": [1.0, 1.0]} for s in ("paper", "exact01")}
    report["claims"] = bench.claims(report)
    assert {c["claim"]: c["met"] for c in report["claims"]} == {
        "n = 4,096: rmfa_paper, times faster than explicit": True,
        "n = 4,096: rmfa_paper, times faster than sdpa": True,
        "n = 4,096: rmfa_order1, times faster than explicit": False,
        "n = 4,096: rmfa_order1, times faster than sdpa": False,
        "n = 4,096: memory of checkpointed softmax / rmfa_paper": False,
        "n = 4,096: memory of SDPA / rmfa_paper": True,
        "squared error of paper / exact01": False,
    }
    assert "| n = 4,096: rmfa_order1, times faster than sdpa | 60 | 5 | **not met** |" in bench.table(report)


def test_a_race_gives_each_arm_one_turn_a_round_and_keeps_nothing_of_it() -> None:
    """Results that are kept would take the memory that the others need."""
    calls: list[list[str]] = []
    alive: list[weakref.ref[Tensor]] = []

    def arm(name: str) -> Tensor:
        assert not any(result() is not None for result in alive)
        calls[-1].append(name)
        result = torch.zeros(1)
        alive.append(weakref.ref(result))
        return result

    def arms(number: int) -> dict[str, Any]:
        calls.append([])
        return {name: partial(arm, name) for name in "abcdefgh"}

    looked: list[str] = []
    rounds = list(race(arms, 3, torch.device("cpu"), look=lambda name, result: looked.append(name)))
    assert [set(seconds) for seconds in rounds] == [set("abcdefgh")] * 3
    assert len(set(map(tuple, calls))) == 4  # in orders of their own; round 0 warms up
    assert looked == [name for each in calls[1:] for name in each]


def test_the_committed_table_and_the_readme_are_those_of_the_committed_run() -> None:
    folder = ROOT / "results" / "bench"
    table = bench.table(json.loads((folder / "attention.json").read_text()))
    assert (folder / "attention.md").read_text() == table
    asked_for = table.partition("\n\n")[0]
    assert asked_for in (ROOT / "README.md").read_text()


def test_the_committed_race_of_models_is_what_the_readme_shows() -> None:
    folder = ROOT / "results" / "bench"
    report = json.loads((folder / "models.json").read_text())
    assert models.claims(report["results"]) == report["claims"]
    assert (folder / "models.md").read_text() == models.table(report)
    assert models.break_even(report["lengths"]["results"]) == report["lengths"]["break_even"]
    assert f"{models.BEGIN}\n\n{models.summary(report)}\n{models.END}" in (ROOT / "README.md").read_text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task, short: the sizes come from the configuration. The allocator is the process's and stays as it is."""
    whole = configs.compose

    def composed(*overrides: str) -> DictConfig:
        config = whole(*overrides)
        config.task.batch_size = 4
        config.task.data.length, config.task.data.max_length = 128, 100
        if config.task.name == "listops":
            config.task.data.min_length = 10
        return config

    monkeypatch.setattr(configs, "compose", composed)
    monkeypatch.setattr(models, "EXAMPLES", {"train": 64, "dev": 1, "test": 1})
    monkeypatch.setattr(models, "TOKENS", 256)
    monkeypatch.setattr(models, "LENGTHS", [64, 128])
    monkeypatch.setattr(models.devices, "prepare", lambda device, threads: None)
    monkeypatch.setattr(models.devices, "keep_freed", lambda keep: None)


def test_models_race_on_every_task(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], sources: Path
) -> None:
    """All settings, one round: the keys that the table reads, and a figure for every model."""
    archive = sources / "aclImdb_v1.tar.gz"
    assert models.main(["--rounds", "1", "--imdb", str(archive), "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "models.json").read_text())
    assert report.keys() == {"code", "environment", "left_out", "claims", "results", "lengths"}
    assert report["left_out"] == []
    assert {result["setting"]: tuple(result["arms"]) for result in report["results"]} == models.SETTINGS
    for result in report["results"]:
        task, _, kind = result["setting"].partition("-")
        trim = kind == "real"
        assert (result["task"], result["padding"], result["bucket"]) == (task, "trim" if trim else "full", trim)
        ((B, n),) = result["shapes"]
        assert B == result["batch_size"] == 4
        assert n % 64 == 0 if trim else n == 128
        assert len(result["matmul_rate"]) == 1
        for arm in result["arms"].values():
            assert arm.keys() == {"seconds", "examples", "flop", "peak_bytes"}
            assert len(arm["seconds"]) == len(arm["flop"]) == 1
            assert arm["examples"] == [4]
            assert min(*arm["seconds"], *arm["flop"], arm["peak_bytes"]) > 0
    by_name = {result["setting"]: result["arms"] for result in report["results"]}
    for name in models.MODELS:  # two texts a pair, less the head
        ratio = by_name["retrieval-full"][name]["flop"][0] / by_name["text-full"][name]["flop"][0]
        assert ratio == 2
    peaks = {name: by_name["text-full"][name]["peak_bytes"] for name in models.BASELINES}
    assert peaks["transformer_sdpa"] < peaks["transformer_checkpointed"] < peaks["transformer"]
    lengths = report["lengths"]
    assert lengths["tokens"] == 256
    assert [result["n"] for result in lengths["results"]] == [64, 128]
    for result in lengths["results"]:
        assert all(arm.keys() == {"seconds"} and len(arm["seconds"]) == 1 for arm in result["arms"].values())
    assert [told.keys() for told in lengths["break_even"]] == 4 * [
        {"model", "baseline", "n", "low", "high", "says"},
    ]
    table = (tmp_path / "models.md").read_text()
    assert table in capsys.readouterr().out
    assert all(told["says"] in table for told in lengths["break_even"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["models.json", "models.md"]


def test_the_memory_of_a_race_is_that_of_a_run(small: None, tmp_path: Path) -> None:
    """Bytes, the same in every run: what the trainer records for the same task, model and batch."""
    config = configs.compose("task=listops", "model=rfa", "trainer=smoke", "pad=trim", "trainer.dev_examples=1")
    config.trainer.batch_size, config.task.data.examples = 4, models.EXAMPLES
    task = configs.build(config, "task.data", folder=str(tmp_path))
    trained = configs.build(config, "model", **asdict(task.spec))
    result = configs.build(config, "trainer").fit(trained, task, torch.device("cpu"), 0)
    longest = next(models.real(task, 4, torch.device("cpu")))
    peak, foretold = models.peak("rfa", task.spec, longest, torch.device("cpu"))
    assert not foretold
    assert peak == pytest.approx(result.peaks["peak_bytes"], rel=0.01)


def test_a_step_that_does_not_fit_takes_a_part_of_the_batch_and_its_time_is_scaled(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two of four examples of explicit softmax. On this clock a step takes 1 an example, all else nearly 0."""
    clock, names, taken = [0.0], {}, {}
    model, step = models.model, models.step

    def named(name: str, spec: TaskSpec) -> nn.Module:
        built = model(name, spec)
        names[built] = name
        return built

    def by_the_clock(trained: nn.Module, optimizer: Any, ids: Tensor, labels: Tensor) -> None:
        step(trained, optimizer, ids, labels)
        assert len(ids) == len(labels)
        taken[names[trained]] = len(ids)
        clock[0] += len(ids)

    def now(device: torch.device) -> float:
        clock[0] += 1e-6
        return clock[0]

    def raced() -> tuple[dict[str, Any], list[str]]:
        assert models.main(["--rounds", "2", "--settings", "listops-full", "--output", str(tmp_path)]) == 0
        report = json.loads((tmp_path / "models.json").read_text())
        (result,) = report["results"]
        return result["arms"], [line for line in report["left_out"] if line.startswith("listops-full")]

    monkeypatch.setattr(models, "model", named)
    monkeypatch.setattr(models, "step", by_the_clock)
    monkeypatch.setattr(models.devices, "now", now)
    whole, nothing = raced()
    assert not nothing
    room = 0.9 * whole["transformer"]["peak_bytes"]
    monkeypatch.setattr(models.devices, "free_bytes", lambda device: int(models.SPREAD * room))
    parts, said = raced()
    assert parts.keys() == whole.keys()
    for name, arm in parts.items():
        assert arm["seconds"] == pytest.approx([4.0, 4.0], rel=1e-4)
        assert arm["examples"] == 2 * [taken[name]]
        assert (arm["flop"], arm["peak_bytes"]) == (whole[name]["flop"], whole[name]["peak_bytes"])
    for name, arm in whole.items():
        halved = arm["peak_bytes"] > room
        assert taken[name] == (2 if halved else 4)
        sentence = (
            f"listops-full: a step of {name} on 4 examples needs {arm['peak_bytes'] / 2**20:,.0f} MiB, and there is"
        )
        assert halved == any(line.startswith(sentence) for line in said)
    assert "it took 2 of them, and its time is scaled to all." in said[0]
    assert whole["rfa"]["peak_bytes"] < room


@pytest.mark.parametrize(("need", "part"), [(100, 12), (101, 6), (200, 6), (399, 3), (401, 1), (10_000, 1)])
def test_a_part_is_half_of_a_half_until_it_fits(need: int, part: int) -> None:
    assert models.part_of(12, need, 100) == part


def test_who_does_not_fit_is_left_out_and_named(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with one of the four examples: the others race, and their ratios to it are dashes."""
    monkeypatch.setattr(models, "peak", lambda name, *_: ((1000 if name == "transformer" else 100) * 2**20, False))
    monkeypatch.setattr(models.devices, "free_bytes", lambda device: models.SPREAD * 200 * 2**20)
    assert models.main(["--rounds", "1", "--settings", "listops-full", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "models.json").read_text())
    (result,) = report["results"]
    assert list(result["arms"]) == [name for name in models.MODELS if name != "transformer"]
    table = (tmp_path / "models.md").read_text()
    says = "a step on one of 4 examples would need 250 MiB, and there is room for 200 MiB."
    assert f"listops-full is without transformer: {says}" in table
    assert "text-full is left out: --settings does not name it." in table
    assert re.search(r"^\| rfa \| [^|]+ \| - \|", table, re.MULTILINE)


def test_what_is_foretold_of_the_memory_is_what_it_takes(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From batches of one and two, for eight."""
    spec = models.TASKS["text"].spec(128)
    batch = next(models.full(spec, 8, 128, torch.device("cpu")))
    takes, foretelling = models.peak("transformer", spec, batch, torch.device("cpu"))
    assert not foretelling
    monkeypatch.setattr(models.devices, "free_bytes", lambda device: 0)
    foretold, foretelling = models.peak("transformer", spec, batch, torch.device("cpu"))
    assert foretelling
    assert foretold == pytest.approx(takes, rel=0.05)


def test_another_error_is_no_lack_of_memory(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> tuple[int, bool]:
        raise RuntimeError("the shapes do not fit")

    monkeypatch.setattr(models, "peak", fails)
    with pytest.raises(RuntimeError, match="the shapes do not fit"):
        models.main(["--rounds", "1", "--settings", "listops-full", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_bad_input_of_the_race_is_one_sentence(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        models.main(["--settings", "text-real", "--imdb", str(tmp_path / "none.tar.gz"), "--output", str(tmp_path)])
    assert str(stop.value).startswith("error: ")
    assert "none.tar.gz" in str(stop.value)
    with pytest.raises(SystemExit) as stop:
        models.main(["--rounds", "0", "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert "--rounds 0: at least 1 is needed" in capsys.readouterr().err
    assert models.main(["--settings", "text-real", "--output", str(tmp_path / "new")]) == 0
    assert "text-real is left out: it needs --imdb (make bench IMDB=path)." in capsys.readouterr().out


def lengths_of(*ratios: list[float]) -> list[dict[str, Any]]:
    """At 64, 128, ...: the rounds' ratios of macformer_exp to SDPA."""
    return [
        {
            "n": 64 * 2**i,
            "arms": {"macformer_exp": {"seconds": each}, "transformer_sdpa": {"seconds": [1.0] * len(each)}},
        }
        for i, each in enumerate(ratios)
    ]


@pytest.mark.parametrize(
    ("ratios", "n", "low", "high", "says"),
    [
        # a quarter, half and three quarters of the way in log n
        (([1.25, 1.5, 1.75], [0.25, 0.5, 0.75]), 90.5, 76.1, 107.6, "from n = 91 on (single rounds: 76 to 108)"),
        (([0.9, 0.8], [0.5, 0.4]), None, None, None, "at every length measured (single rounds: below 64 to below 64)"),
        (([2.0, 3.0], [1.5, 1.0]), None, None, None, "at no length measured (single rounds: above 128 to above 128)"),
        # one round never gets there, another is there from the start
        (([0.9, 1.5, 2.0], [0.8, 0.5, 1.1]), 105.0, None, None, "(single rounds: below 64 to above 128)"),
        # faster once, by chance, and then not: the last crossing counts
        (([0.9], [1.5], [0.5]), 181.0, 181.0, 181.0, "from n = 181 on (single rounds: 181 to 181)"),
    ],
)
def test_the_break_even_length(
    ratios: tuple[list[float], ...], n: float | None, low: float | None, high: float | None, says: str
) -> None:
    (told,) = models.break_even(lengths_of(*ratios))
    assert (told["model"], told["baseline"]) == ("macformer_exp", "transformer_sdpa")
    for key, value in {"n": n, "low": low, "high": high}.items():
        assert told[key] == (value if value is None else pytest.approx(value, abs=0.1))
    assert says in told["says"]
    assert told["says"].startswith("macformer_exp is faster than transformer_sdpa ")


def test_the_plain_trunk_is_our_trunk() -> None:
    """The same function in evaluation, given the same parameters in the order in which both make them."""
    spec, ids = TaskSpec(32, 64, 10, False), torch.randint(1, 15, (2, 48))
    ours, plain = (models.model(name, spec).eval() for name in ("identity", "plain"))
    theirs = dict(plain.named_parameters())
    called = {"attend": "", "norm_attend": "norm.", "norm": "feedforward.0.", "first": "feedforward.1."}
    called = {f"{name}.": theirs for name, theirs in (called | {"second": "feedforward.4."}).items()}
    with torch.no_grad():
        for name, value in ours.named_parameters():
            layer, part, rest = re.fullmatch(r"(layers\.\d\.)?(\w+\.)(.*)", name).groups()
            theirs[f"{layer}{called[part]}{rest}" if layer else name].copy_(value)
    torch.testing.assert_close(ours(ids), plain(ids))


def test_a_model_claim_is_a_ratio_within_rounds() -> None:
    seconds = {"identity": [1.0, 2.0, 4.0], "macformer_exp": [1.5, 3.4, 6.0], "plain": [1.0, 3.0, 8.0]}
    arms = {name: {"seconds": each, "flop": [1, 1, 1]} for name, each in seconds.items()}
    first, second = models.claims([{"setting": "s", "arms": arms}])
    assert (first["value"], first["low"], first["high"], first["met"]) == (1.5, 1.5, 1.7, True)
    assert (second["value"], second["sense"], second["met"]) == (1.5, "at least", True)
