"""The paper's Figure 3: that errors are what they are said to be, resuming, and the files that are written."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from matplotlib.axes import Axes

from macformer import KernelAttention, RMFAttention, SoftmaxAttention
from macformer.folded import plain_attention
from macformer.paper import figure3
from macformer.paper.figure3 import Settings
from scripts import figure_rmfa as script
from tests.conftest import ROOT

CPU = torch.device("cpu")
FILES = [f"{name}.{ending}" for name in ("rmfa-maps", "rmfa-samplings") for ending in ("png", "svg")]
FILES += ["rmfa.json", "rmfa.md"]
SMALL = ["--lengths", "16", "40", "--features", "8", "64", "128"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turns of one call, a short check, the state in the test's folder; the allocator is the process's and stays."""
    monkeypatch.setattr(figure3, "TURN", 0.0)
    monkeypatch.setattr(figure3, "CHECKED", 24)
    monkeypatch.setattr(script, "STATE", tmp_path / "state")
    monkeypatch.setattr(script.devices, "prepare", lambda device, threads: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(folder: Path, *options: str) -> dict[str, Any]:
    script.main([*SMALL, "--repeats", "3", *options, "--output", str(folder)])
    return json.loads((folder / "rmfa.json").read_text())


def stopped(*arguments: str) -> Any:
    """With what the command ends."""
    with pytest.raises(SystemExit) as end:
        script.main(arguments)
    return end.value.code


def test_errors_are_those_of_the_definitions() -> None:
    """In float64, by each formula as it stands, over a batch of two."""
    settings = Settings(batch=2, repeats=1, lengths=(12, 30), features=(16, 128))
    samples = [figure3.measure(settings, 5, n, CPU, warm_up=False) for n in settings.lengths]
    assert samples[0].keys() == {"explicit", "sdpa", "paper 16", "paper 128"}
    assert len(samples[1]) == 2 + 2 + 2 + 1 + 1  # softmax; paper, release, exact01 (128 alone), order1
    for n, sample in zip(settings.lengths, samples, strict=True):
        q, k, v = (x.double() for x in figure3.inputs(2, n, 5, CPU))
        assert torch.allclose(q.norm(dim=-1), torch.ones(2, 8, n, dtype=torch.float64))
        exact = KernelAttention("exp")(q, k, v)
        for sampling, D in settings.maps(n):
            attention = figure3.rmfa(sampling, D, n, 5)
            phi_q, phi_k = (attention.feature_map(x / 64**0.25) for x in (q, k))
            error = ((plain_attention(phi_q, phi_k, v, None, attention.floor) - exact) ** 2).sum()
            found = sample[f"{sampling} {D}"]
            assert found.pop("seconds") > 0
            units = {"nmse": exact, "nmse_offset": exact + 1, "deviation": exact - v.mean(2, keepdim=True)}
            assert found == pytest.approx({kind: float(error / (x**2).sum()) for kind, x in units.items()}, rel=5e-3)


def test_a_constant_in_v_goes_through_both_attentions() -> None:
    """So nmse_offset is the nmse of V ~ N(1, 1)."""
    q, k, v = figure3.inputs(1, 50, 0, CPU)
    for attention in (figure3.rmfa("paper", 64, 50, 0), SoftmaxAttention()):
        exact, shifted = attention(q, k, v), attention(q, k, v + 1)
        assert torch.allclose(shifted, exact + 1, atol=1e-5)
    scales, moved = figure3.scales(exact, v), figure3.scales(shifted, v + 1)
    assert moved["nmse"] == pytest.approx(scales["nmse_offset"], rel=1e-5)
    assert moved["deviation"] == pytest.approx(scales["deviation"], rel=1e-4)
    assert scales["nmse"] < 0.1 * scales["nmse_offset"]
    averaged = (v.mean(2, keepdim=True) - exact).double().square().sum()
    assert scales["deviation"] == pytest.approx(float(averaged), rel=1e-5)  # averaging V has a deviation of 1


def test_a_wrong_attention_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A logit twice as large: RMFA without the right scale."""
    settings, right = Settings(batch=1, repeats=1, lengths=(200,), features=(128,)), RMFAttention.forward
    before = figure3.measure(settings, 0, 200, CPU, warm_up=True)
    monkeypatch.setattr(RMFAttention, "forward", lambda self, q, k, v: right(self, 2 * q, k, v))
    after = figure3.measure(settings, 0, 200, CPU, warm_up=True)
    for arm in ("exact01 128", "order1 65"):
        assert before[arm]["deviation"] < 0.02
        assert after[arm]["deviation"] > 0.8
    said = stopped(*SMALL, "--repeats", "1", "--output", str(tmp_path / "out"))
    assert said.startswith("error: RMFA with paper features, D = 8, is off its plain definition by ")
    assert not (tmp_path / "out").exists()


def test_every_cell_and_repeat_has_its_own_draw_and_order() -> None:
    settings = Settings(batch=1, repeats=2, lengths=(12, 16), features=(8, 32))
    figure3.check(settings, CPU)  # raises if a map is wrong
    draws = [figure3.rmfa("paper", D, n, r).feature_map.seed for D in (8, 32) for n in (12, 16) for r in (0, 1)]
    assert len(set(draws)) == len(draws)
    assert not torch.equal(figure3.inputs(1, 12, 0, CPU)[2], figure3.inputs(1, 12, 1, CPU)[2])
    orders = {tuple(figure3.measure(settings, r, 12, CPU, warm_up=False)) for r in range(5)}  # 24 of them: p < 1e-5
    assert len(orders) > 1


@pytest.mark.parametrize(("kind", "examples"), [(SoftmaxAttention, 1), (RMFAttention, 3)])
def test_softmax_takes_the_examples_of_a_batch_one_by_one(kind: Any, examples: int) -> None:
    """On the CPU, where the weights of the whole batch would not fit."""
    with patch.object(kind, "forward", autospec=True, side_effect=kind.forward) as forward:
        figure3.measure(Settings(batch=3, repeats=1, lengths=(12,), features=(8,)), 0, 12, CPU, warm_up=True)
    assert {len(call.args[1]) for call in forward.call_args_list} == {examples}


def test_it_writes_numbers_pictures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    report = run(out)
    assert sorted(file.name for file in out.iterdir()) == FILES
    assert not list((tmp_path / "state").iterdir())
    written = "rmfa.json, rmfa.md, rmfa-maps.{png,svg}, rmfa-samplings.{png,svg}"
    assert f"written to {out}: {written}\n" in capsys.readouterr().out
    assert list(report) == ["code", "environment", "settings", "lengths", "features", "cells", "softmax", "samplings"]
    how = {"quick": True, "batch": 1, "heads": 8, "head_dim": 64, "eps": 1e-12, "kernel": "exp"}
    command = f"python -m scripts.figure_rmfa --lengths 16 40 --features 8 64 128 --repeats 3 --output {out}"
    assert report["settings"] == how | {"repeats": 3, "threads": 1, "command": command}
    assert [(cell["n"], cell["D"]) for cell in report["cells"]] == [(n, D) for n in (16, 40) for D in (8, 64, 128)]
    assert [times["n"] for times in report["softmax"]] == [16, 40]
    both = [(sampling, D) for sampling in ("paper", "release") for D in (8, 64, 128)]
    samplings = [(each["sampling"], each["D"]) for each in report["samplings"]]
    assert samplings == [*both, ("exact01", 128), ("order1", 65)]
    for each in (*report["cells"], *report["samplings"]):
        for key in (*figure3.ERRORS, "seconds"):
            assert len(each[key]) == 3
            assert all(x > 0 and float(f"{x:.6g}") == x for x in each[key])
    assert [{key: each[key] for key in report["cells"][0]} for each in report["samplings"][:3]] == report["cells"][3:]

    row, cell, softmax = figure3.frame(report, "cells").iloc[4], report["cells"][4], report["softmax"][1]
    assert (row.n, row.D) == (40, 64)
    faster = [theirs / ours for theirs, ours in zip(softmax["sdpa"], cell["seconds"], strict=True)]
    for name, each in {"deviation": cell["deviation"], "sdpa": faster}.items():
        logs = list(map(math.log10, each))
        assert (row[name], row[f"{name}_sd"]) == (pytest.approx(mean(logs)), pytest.approx(stdev(logs)))
    assert row.ms == pytest.approx(1e3 * median(cell["seconds"]))

    page = (out / "rmfa.md").read_text()
    assert figure3.caption(report) in page
    assert "V ~ N(0, 1), 1 x 8 heads of width d = 64; reference: exact softmax attention on the same q and k" in page
    assert all(f"- {finding}\n" in page for finding in figure3.findings(report))
    for figure in figure3.draw(report):
        png, svg = ((out / f"{figure.name}.{ending}").read_bytes() for ending in ("png", "svg"))
        assert (png, svg) == (figure.png, figure.svg)  # from the file: the same bytes
        assert png.startswith(b"\x89PNG")
        assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert b"<!-- q, k, V ~ N(0, 1), 1 x 8 heads of width d = 64; reference" in svg
    assert "<!-- log10 NMSE -->" in (out / "rmfa-maps.svg").read_text()


@pytest.mark.filterwarnings("error")
def test_one_cell_is_enough(tmp_path: Path) -> None:
    script.main(["--lengths", "16", "--features", "8", "--repeats", "1", "--output", str(tmp_path)])
    assert all((tmp_path / name).exists() for name in FILES)
    assert "± " not in (tmp_path / "rmfa.md").read_text().split("| sampling |")[1]  # of one repeat there is none


def test_the_maps_show_the_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A contour at equal speed and at the error of averaging V, where there is one; colours follow the numbers."""
    report, labels, clabel = run(tmp_path / "out"), [], Axes.clabel

    def spy(panel: Axes, *arguments: Any, fmt: str, **named: Any) -> Any:
        labels.append(fmt)
        return clabel(panel, *arguments, fmt=fmt, **named)

    monkeypatch.setattr(Axes, "clabel", spy)
    for cell in report["cells"]:
        cell["deviation"] = [64 / cell["D"]] * 3  # crosses 1
    for times in report["softmax"]:
        times["explicit"] = times["sdpa"] = [9.0] * 3  # never equal
    before = figure3._maps(report)
    assert "as averaging V" in labels
    assert "equally fast" not in labels
    report["softmax"][0]["sdpa"] = [1e-9] * 3
    report["cells"][0]["nmse"] = [1e3] * 3
    labels.clear()
    assert figure3._maps(report).png != before.png
    assert labels.count("equally fast") == 1
    faster, worse = figure3.findings(report)[:2]
    assert faster == "by the mean, faster than explicit softmax in 6 of 6 cells, than SDPA in 3"
    assert worse == "error above that of averaging V in 2 of 6 cells"


def test_a_killed_run_goes_on_and_has_the_same_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figure3, "draw", lambda report: [])  # pictures take the most time
    whole = run(tmp_path / "whole")
    measure, calls = figure3.measure, []

    def killed(settings: Settings, r: int, n: int, device: torch.device, warm_up: bool) -> figure3.Sample:
        if (r, n) == (1, 40) and len(calls) == 3:
            raise KeyboardInterrupt
        calls.append((r, n, warm_up))
        return measure(settings, r, n, device, warm_up)

    monkeypatch.setattr(figure3, "measure", killed)
    assert stopped(*SMALL, "--repeats", "3", "--output", str(tmp_path / "killed")) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "killed").exists()
    (state,) = (tmp_path / "state").iterdir()
    assert len(json.loads(state.read_text())) == 1

    script.main([*SMALL, "--repeats", "1", "--output", str(tmp_path / "other")])  # another command: anew
    assert len(calls) == 5
    again = run(tmp_path / "killed")
    assert "going on after repeat 1 of 3" in capsys.readouterr().out
    assert calls[5:] == [(1, 16, True), (1, 40, True), (2, 16, False), (2, 40, False)]
    for part in ("cells", "samplings"):
        for one, other in zip(whole[part], again[part], strict=True):
            assert one | {"seconds": None} == other | {"seconds": None}
    assert not list((tmp_path / "state").iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lengths", "1", "20"], "lengths=1 must be a whole number of at least 2"),
        (["--lengths", "40", "20"], "lengths=40 20 must be rising, each number once"),
        (["--features", "8", "8"], "features=8 8 must be rising, each number once"),
        (["--features", "0"], "features=0 must be a whole number of at least 1"),
        (["--repeats", "0"], "repeats=0 must be a whole number of at least 1"),
        (["--device", "cuda"], "device=cuda, but torch sees no CUDA GPU here; use device=cpu or device=auto"),
        (["--output", __file__], f"--output {__file__} is a file: give a folder"),
        (
            ["--repeats", "1", "--output", str(script.HOME)],
            "other lengths, features or repeats need an --output: results/figures has the whole map",
        ),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], says: str, tmp_path: Path) -> None:
    assert stopped("--output", str(tmp_path / "out"), *options) == f"error: {says}"
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_into_memory_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figure3, "measure", Mock(side_effect=MemoryError))
    says = "error: not enough memory for softmax at n = 40; use shorter --lengths"
    assert stopped(*SMALL, "--output", str(tmp_path / "out")) == says


def test_what_is_committed_is_of_the_quick_command() -> None:
    """Without the pictures: their bytes depend on the fonts of the machine."""
    folder = ROOT / "results" / "figures"
    report = json.loads((folder / "rmfa.json").read_text())
    assert report["settings"]["command"] == "python -m scripts.figure_rmfa"
    assert (report["settings"]["quick"], report["settings"]["repeats"]) == (True, script.QUICK.repeats)
    assert (report["lengths"], report["features"]) == (list(script.QUICK.lengths), list(script.QUICK.features))
    assert script.text_of(report) == (folder / "rmfa.json").read_text()
    assert figure3.markdown(report) == (folder / "rmfa.md").read_text()
    assert all((folder / name).exists() for name in FILES)
