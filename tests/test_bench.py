"""The benchmarks: what they write, and that they give no figure to what is wrong."""

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
from torch import Tensor

from lra_data import text
from macformer.attention import RMFAttention
from macformer.bench import attention, models
from macformer.bench.race import count_flop, race
from macformer.harness import config as configs
from macformer.harness.progress import mebibytes
from scripts import bench
from tests.conftest import ROOT

CPU = torch.device("cpu")
COMMITTED = ROOT / "results" / "bench"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of one call, no long check (tests/unit/test_linear.py has it), short tasks; the allocator as it is."""
    whole = configs.compose

    def composed(*overrides: str) -> DictConfig:
        config = whole(*overrides)
        config.task.batch_size, config.task.data.length, config.task.data.max_length = 4, 128, 100
        if config.task.name == "listops":
            config.task.data.min_length = 10
        return config

    monkeypatch.setattr(configs, "compose", composed)
    monkeypatch.setattr(models.devices, "prepare", lambda device, threads: None)
    monkeypatch.setattr(models.devices, "keep_freed", lambda keep: None)
    monkeypatch.setattr(attention, "TURN", 0.0)
    monkeypatch.setattr(attention, "CHECKED", [193])
    monkeypatch.setattr(models, "EXAMPLES", {"train": 64, "dev": 1, "test": 1})
    monkeypatch.setattr(models, "TOKENS", 256)
    monkeypatch.setattr(models, "LENGTHS", [64, 128])


def report(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a command of the entry; what it wrote: the record, the table, and of the attentions a plot."""
    assert bench.main([*arguments, "--output", str(folder)]) == code
    assert {file.suffix for file in folder.iterdir()} == {".json", ".md"} | (
        {".png"} if "attention" in arguments else set()
    )
    return json.loads((folder / f"{arguments[0]}.json").read_text())


def test_a_race_gives_each_arm_one_turn_a_round_and_keeps_nothing_of_it() -> None:
    """Results that are kept would take the memory that the others need."""
    calls: list[list[str]] = []
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    looked: list[str] = []

    def arm(name: str) -> Tensor:
        assert not alive
        calls[-1].append(name)
        alive.add(result := torch.zeros(1))
        return result

    def arms(number: int) -> dict[str, Any]:
        calls.append([])
        return {name: partial(arm, name) for name in "abcdefgh"}

    rounds = list(race(arms, 3, CPU, look=lambda name, result: looked.append(name)))
    assert [set(seconds) for seconds in rounds] == [set("abcdefgh")] * 3
    assert len(set(map(tuple, calls))) == 4  # in orders of their own; round 0 warms up
    assert looked == [name for each in calls[1:] for name in each]


@pytest.mark.parametrize("name", ["explicit", "checkpointed", "sdpa", "kernel", "rmfa_paper", "rmfa_order1"])
def test_flop_are_those_of_the_products(name: str) -> None:
    """RMFA: W projections of q and of k, three times; [x, F] with values, six times; ones and the small A on top."""
    n, d, attend = 1024, attention.HEAD_DIM, attention.attentions(0, CPU)[name]
    if isinstance(attend, RMFAttention):
        rows, folded = attend.feature_map.folded(torch.float32)
        widths = folded.widths
        formula, extra = 12 * n * d * (rows.shape[1] + d + sum(widths[:1])), 0.08
    else:
        formula, extra = {"checkpointed": 8, "sdpa": 7}.get(name, 6) * 2 * n * n * d, 0
    found = count_flop(partial(attention.run, attend, attention.inputs(1, 1, n, CPU)))
    assert formula <= found <= (1 + extra) * formula


def test_attentions_write_json_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path, "attention", "--lengths", "64", "1024", "--rounds", "2")
    assert [(r["shape"]["B"], r["shape"]["n"]) for r in found["results"]] == [(4, 64), (4, 1024), (1, 1024)]
    table = (tmp_path / "attention.md").read_text()
    for arms in (result["arms"] for result in found["results"]):
        assert list(arms) == list(attention.attentions(0, CPU))
        for name, arm in arms.items():
            assert len(arm["seconds"]) == len(arm["flop"]) == 2
            assert min(*arm["seconds"], *arm["flop"], arm["peak_bytes"]) > 0
            assert f"| {name} |" in table
    long = found["results"][1]["arms"]
    assert long["rmfa_paper"]["peak_bytes"] < long["checkpointed"]["peak_bytes"] / 7
    assert table in capsys.readouterr().out
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_the_core_races_the_same_formula_on_the_same_draw(tmp_path: Path) -> None:
    rows = [each.feature_map.folded(torch.float32)[0] for each in attention.attentions(3, CPU, "core").values()]
    assert all(torch.equal(rows[0], other) for other in rows)
    (result,) = report(tmp_path, "core", "--lengths", "512", "--rounds", "1")["results"]
    (core, ours), *others = ((name, arm["peak_bytes"]) for name, arm in result["arms"].items())
    assert [core, *(name for name, _ in others)] == ["rmfa_paper", "plain", "plain_checkpoint"]
    assert all(ours < theirs / 2 for _, theirs in others)
    assert "than plain torch (range) | than plain checkpoint (range) |" in (tmp_path / "core.md").read_text()


def test_causal_attention_is_raced_against_the_sums_both_ways(tmp_path: Path) -> None:
    (result,) = report(tmp_path, "causal", "--lengths", "512", "--rounds", "1")["results"]
    peaks = {name: arm["peak_bytes"] for name, arm in result["arms"].items()}
    assert list(peaks) == ["rmfa_paper", "rfa", "rmfa_causal", "rfa_causal", "causal_plain"]
    assert peaks["rmfa_causal"] < peaks["causal_plain"] / 2
    columns = "than RMFA both ways (range) | than RFA both ways (range) | than plain causal (range) |"
    assert columns in (tmp_path / "causal.md").read_text()


@pytest.mark.parametrize(("wrong", "command"), [(RMFAttention, "attention"), (attention.PlainTorch, "core")])
def test_what_is_wrong_gets_no_figure(
    wrong: Any, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out the mask: the program says so, reports the others, and fails."""
    right = wrong.forward
    monkeypatch.setattr(wrong, "forward", lambda self, q, k, v, mask: right(self, q, k, v, torch.ones_like(mask)))
    (result,) = report(tmp_path, command, "--lengths", "64", "--rounds", "1", code=1)["results"]
    every = attention.attentions(0, CPU, command)
    named = re.findall(r"(\w+) gets no figure: its output and gradients of q, k and v are off", capsys.readouterr().out)
    assert named == [name for name, arm in every.items() if isinstance(arm, wrong)]
    assert list(result["arms"]) == [name for name in every if name not in named]


def test_tables_and_the_readme_are_those_of_the_committed_runs() -> None:
    found = {name: json.loads((COMMITTED / f"{name}.json").read_text()) for name in bench.COMMANDS}
    tables = {name: module.table(found[name]) for name, module in bench.COMMANDS.items()}
    assert tables == {name: (COMMITTED / f"{name}.md").read_text() for name in tables}
    readme, lengths = (ROOT / "README.md").read_text(), found["models"]["lengths"]
    assert models.break_even(lengths["results"]) == lengths["break_even"]
    assert all(f"- {found['says']}\n" in readme for found in lengths["break_even"])
    assert re.search(r"\*\*B, H, n, d, D = 4, 2, 4,096.*?\n\n.*?\n\n", tables["attention"], re.DOTALL)[0] in readme


def test_models_race_on_every_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], sources: Path) -> None:
    """All settings, one round: the keys that the table reads, and a figure for every model."""
    found = report(tmp_path, "models", "--rounds", "1", "--imdb", str(sources / "aclImdb_v1.tar.gz"))
    assert (found.keys(), found["left_out"]) == ({"code", "environment", "left_out", "results", "lengths"}, [])
    names = [*models.TRUNKS, *models.BASELINES, *list(models.PAPER["accuracy"]["text"])[1:]]
    raced = {result["setting"]: result for result in found["results"]}
    assert list(raced) == list(models.ROUNDS)[:-1]
    for setting, result in raced.items():
        task, _, kind = setting.partition("-")
        trim = kind == "real"
        assert (result["task"], result["padding"], result["bucket"]) == (task, "trim" if trim else "full", trim)
        ((B, n),) = result["shapes"]
        assert B == result["batch_size"] == 4
        assert n % 64 == 0 if trim else n == 128
        assert (list(result["arms"]), len(result["matmul_rate"])) == (names, 1)
        for arm in result["arms"].values():
            assert (arm.keys(), arm["examples"]) == ({"seconds", "examples", "flop", "peak_bytes"}, [4])
            (seconds,), (flop,) = arm["seconds"], arm["flop"]
            assert min(seconds, flop, arm["peak_bytes"]) > 0
    for name, one in (text_arms := raced["text-full"]["arms"]).items():  # two texts a pair, and a wider head
        assert raced["retrieval-full"]["arms"][name]["flop"][0] == pytest.approx(2 * one["flop"][0], rel=0.01)
    explicit, checkpointed, sdpa = (text_arms[name]["peak_bytes"] for name in models.BASELINES)
    assert sdpa < checkpointed < explicit
    lengths = found["lengths"]
    assert (lengths["tokens"], [result["n"] for result in lengths["results"]]) == (256, [64, 128])
    arms_over_length = [arm for result in lengths["results"] for arm in result["arms"].values()]
    assert all(arm.keys() == {"seconds"} and len(arm["seconds"]) == 1 for arm in arms_over_length)
    keys = {"model", "baseline", "n", "low", "high", "says"}
    assert [crossing.keys() for crossing in lengths["break_even"]] == [keys] * 4
    table = (tmp_path / "models.md").read_text()
    assert table in capsys.readouterr().out
    assert all(crossing["says"] in table for crossing in lengths["break_even"])


def test_the_memory_of_a_race_is_that_of_a_run(tmp_path: Path) -> None:
    """Bytes, the same in every run: what the trainer records for the same task, model and batch."""
    config = configs.compose("task=listops", "model=rfa", "trainer=smoke", "pad=trim", "trainer.dev_examples=1")
    config.trainer.batch_size, config.task.data.examples = 4, models.EXAMPLES
    task = configs.build(config, "task.data", folder=str(tmp_path))
    trained = configs.build(config, "model", **asdict(task.spec))
    peak = configs.build(config, "trainer").fit(trained, task, CPU, 0).peaks["peak_bytes"]
    _, spec, batches = models.batches_of("listops-real", None, str(tmp_path), CPU)
    raced = models.race_steps("", spec, ["rfa"], batches, 1, CPU)
    assert (raced["arms"]["rfa"]["peak_bytes"], raced["left_out"]) == (pytest.approx(peak, rel=0.01), [])


@pytest.mark.parametrize(("room", "fit", "how"), [(0.5, 4, ""), (0.34, 2, " (estimated from batches of 1 and 2)")])
def test_a_step_that_does_not_fit_takes_a_part_of_the_batch_and_its_time_is_scaled(
    room: float, fit: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the length needs a quarter: there all fit. On this clock a step takes 1 an example, all else nearly 0."""
    clock, step, spec = [0.0], models.Trained.step, text.spec(128)

    def by_the_clock(self: models.Trained, ids: Tensor, labels: Tensor) -> None:
        step(self, ids, labels)
        clock[0] += len(ids)

    def now(device: torch.device) -> float:
        clock[0] += 1e-6
        return clock[0]

    def raced() -> tuple[dict[str, Any], list[str]]:
        long, short = (next(models.full(spec, 8, n, CPU)) for n in (128, 64))
        found = models.race_steps("full", spec, ["transformer"], iter([long, short, long, short]), 2, CPU)
        return found["arms"]["transformer"], found["left_out"]

    monkeypatch.setattr(models.Trained, "step", by_the_clock)
    monkeypatch.setattr(models.devices, "now", now)
    whole, said = raced()
    assert (whole["examples"], said) == ([8, 8], [])
    free = int(room * whole["peak_bytes"])
    monkeypatch.setattr(models.devices, "free_bytes", lambda device: models.SPREAD * free)
    part, said = raced()
    assert (part["examples"], part["flop"]) == ([fit, 8], whole["flop"])
    assert part["seconds"] == pytest.approx([8.0, 8.0], rel=1e-4)
    assert part["peak_bytes"] == pytest.approx(whole["peak_bytes"], rel=0.05 if how else 0)
    needs = f"full: a step of transformer on 8 examples needs {mebibytes(part['peak_bytes'])}{how}"
    only = f"only {mebibytes(free)} are free: it is timed on at least {fit} of them and scaled."
    assert said == [f"{needs}, and {only}"]


def test_a_part_is_half_of_a_half_until_it_fits() -> None:
    needs = [100, 101, 200, 399, 401, 1200, 1201]
    assert [models.fitting(12, need, free=100) for need in needs] == [12, 6, 6, 3, 1, 1, 0]


def test_who_does_not_fit_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with one of the four examples: the others race, with those of --models; their ratios to it are dashes."""

    def peak(self: models.Trained, *batch: Tensor) -> int:
        explicit = any(getattr(part, "implementation", "") == "explicit" for part in self.model.modules())
        return (1000 if explicit else 100) * 2**20

    monkeypatch.setattr(models.Trained, "peak", peak)
    monkeypatch.setattr(models.devices, "free_bytes", lambda device: models.SPREAD * 200 * 2**20)
    settings = "text-real", "listops-full"
    found = report(tmp_path, "models", "--rounds", "1", "--models", "macformer_inv,rfa", "--settings", *settings)
    assert list(found["results"][0]["arms"]) == [*models.TRUNKS, *models.BASELINES[1:], "macformer_inv", "rfa"]
    assert "text-full is left out: --settings does not name it." in found["left_out"]
    assert "text-real is left out: it needs --imdb (make bench IMDB=path)." in found["left_out"]
    table = (tmp_path / "models.md").read_text()
    needs = "listops-full: a step of transformer on 4 examples needs 1,000 MiB (estimated from batches of 1 and 2)"
    assert f"{needs}, and only 200 MiB are free: not even one fits.\n" in table
    assert re.search(r"^\| rfa \| [^|]+ \| - \|", table, re.MULTILINE)


def test_another_error_is_no_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.Trained, "peak", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        report(tmp_path, "models", "--rounds", "1", "--settings", "listops-full")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--settings", "text-real", "--imdb", "none.tar.gz"], "none.tar.gz"),
        (["--models", "mine"], "model=mine is not known; choose one of macformer_exp, "),
        (["--rounds", "0"], "argument --rounds: 0 should be a whole number, 1 or more"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        report(tmp_path, "models", *arguments)
    assert re.search(f"error: .*{re.escape(says)}", f"{stop.value} {capsys.readouterr().err}")


@pytest.mark.parametrize(
    ("ratios", "numbers", "says"),  # of macformer_exp to SDPA, by round, at 64, 128, ...; n, lowest, highest
    [  # a quarter, half and three quarters of the way in log n
        (([1.25, 1.5, 1.75], [0.25, 0.5, 0.75]), [90.5, 76.1, 107.6], "from n = 91 on (single rounds: 76 to 108)"),
        (([0.9], [0.5]), [None] * 3, "at every length measured (single rounds: below 64 to below 64)"),
        (([2.0], [1.5]), [None] * 3, "at no length measured (single rounds: above 128 to above 128)"),
        # one round never gets there, another is there from the start
        (([0.9, 1.5, 2.0], [0.8, 0.5, 1.1]), [105.0, None, None], "(single rounds: below 64 to above 128)"),
        # faster once, by chance, and then not: the last crossing counts
        (([0.9], [1.5], [0.5]), [181.0] * 3, "from n = 181 on (single rounds: 181 to 181)"),
    ],
)
def test_the_break_even_length(ratios: Any, numbers: list[float | None], says: str) -> None:
    ones = {"seconds": [1.0] * len(ratios[0])}
    arms = [{"macformer_exp": {"seconds": each}, "transformer_sdpa": ones} for each in ratios]
    (found,) = models.break_even([{"n": 64 * 2**i, "arms": each} for i, each in enumerate(arms)])
    assert (found["model"], found["baseline"]) == ("macformer_exp", "transformer_sdpa")
    assert [found[key] for key in ("n", "low", "high")] == [x and pytest.approx(x, abs=0.1) for x in numbers]
    assert says in found["says"]
    assert found["says"].startswith("macformer_exp is faster than transformer_sdpa ")
