"""The benchmark: what it writes, and that it gives no figure to what is wrong."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lra_data.base import TaskSpec
from macformer.attention import RMFAttention
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
    table = models.table(report)
    assert (folder / "models.md").read_text() == table
    assert table.partition("\n\n")[0] in (ROOT / "README.md").read_text()


def test_models_race_at_real_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few examples of ListOps; every model has a figure, and what is left out is said."""
    monkeypatch.setattr(models, "EXAMPLES", {"train": 64, "dev": 1, "test": 1})
    monkeypatch.setattr(models, "FULL", (1, 128))
    monkeypatch.setattr(models.devices, "prepare", lambda device, threads: None)  # the allocator is the process's
    assert models.main(["--rounds", "1", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "models.json").read_text())
    real, full = report["results"]
    assert list(real["arms"]) == list(models.STEPS)
    assert list(full["arms"]) == [*models.STEPS, "transformer_sdpa"]
    assert all(n % 64 == 0 for _, n in real["shapes"])
    for arm in (*real["arms"].values(), *full["arms"].values()):
        assert len(arm["seconds"]) == len(arm["flop"]) == 1
        assert min(arm["seconds"]) > 0
    table = (tmp_path / "models.md").read_text()
    assert table in capsys.readouterr().out
    assert "Text is left out" in table
    assert sorted(file.name for file in tmp_path.iterdir()) == ["models.json", "models.md"]


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


def test_the_committed_table_of_the_models_is_that_of_the_committed_run() -> None:
    folder = ROOT / "results" / "bench"
    assert (folder / "models.md").read_text() == models.table(json.loads((folder / "models.json").read_text()))
