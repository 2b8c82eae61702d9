"""The paper's Figure 4: real runs of a tiny model on a small Multi30K made here."""

import io
import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from macformer.harness import record as records
from macformer.paper import epochs, experiments
from scripts import figure_ppsbn as script
from scripts.table import README
from tests import forked
from tests.conftest import ROOT

TINY = [
    *("model.width=32", "model.heads=2", "model.head_dim=8", "model.layers=1", "model.feedforward=32"),
    *("task.data.vocabulary=400", "trainer.epochs=2", "trainer.steps_per_epoch=20", "trainer.warmup_steps=10"),
    "task.learning_rate=1e-2",
]
FILES = {"ppsbn.json", "ppsbn.csv", "ppsbn.md", "ppsbn.png", "ppsbn.svg"}


@dataclass
class Made:
    folder: Path
    code: int
    printed: str
    words: list[str]

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "figure" / "ppsbn.json").read_text())


@pytest.fixture(scope="module")
def made(multi30k: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Both arms, two seeds, one run after the other; the sweep is a fork, which need not load torch anew."""
    folder = tmp_path_factory.mktemp("ppsbn")
    paths = [f"paths.data={multi30k}", f"paths.results={folder}/results", f"paths.outputs={folder}/outputs"]
    words = ["--full", "--seeds", "0,1", "--output", f"{folder}/figure", *TINY, "device=cpu", *paths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "sweep", lambda words: forked.run("train.py", *words).returncode)
        shown = io.StringIO()
        patch.setattr("sys.stdout", shown)
        code = script.main(words)
    return Made(folder, code, shown.getvalue(), words)


def test_the_figure_has_every_run_and_epoch(made: Made) -> None:
    assert made.code == 0, made.printed
    assert {file.name for file in (made.folder / "figure").iterdir()} == FILES
    report = made.report()
    assert [(run["ppsbn"], run["seed"]) for run in report["runs"]] == [(False, 0), (True, 0), (False, 1), (True, 1)]
    for run in report["runs"]:
        (file,) = (made.folder / "results").rglob(f"{run['run_id']}.json")
        record = records.read(file)
        assert isinstance(record, records.Translation)
        assert record.quality
        assert bool(record.config["model"]["pre_sbn"]) == bool(record.config["model"]["post_sbn"]) == run["ppsbn"]
        assert (run["bleu"], run["loss"]) == (record.quality.test_bleu, record.quality.test_loss)
        assert run["train_loss"] == record.history[-1].train_loss
        assert [point["step"] for point in run["history"]] == [20, 40]
        assert [point["dev_bleu"] for point in run["history"]] == [point.dev_bleu for point in record.history]


def test_the_sentence_and_the_files_say_what_the_runs_say(made: Made) -> None:
    report, figure = made.report(), made.folder / "figure"
    sentence = experiments.sentence4(report)
    assert sentence in made.printed
    assert sentence in (figure / "ppsbn.md").read_text()
    values = [run["perplexity"] for run in report["runs"] if run["ppsbn"]]
    assert f"| {mean(values):.2f} ± {stdev(values):.2f} (" in (figure / "ppsbn.md").read_text()
    head, *rows = (figure / "ppsbn.csv").read_text().splitlines()
    assert head == "ppsbn,seed,epoch,step,train_loss,dev_loss,dev_perplexity,dev_bleu"
    assert len(rows) == 8
    assert rows[3].startswith(f"with,0,2,40,{report['runs'][1]['history'][1]['train_loss']:.5f},")
    assert (figure / "ppsbn.png").read_bytes().startswith(b"\x89PNG")
    ET.fromstring((figure / "ppsbn.svg").read_bytes())


def test_lines_are_means_and_bands_reach_from_the_lowest_to_the_highest(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, Any, dict[str, Any]]] = []
    plot, band = epochs.Figure.subplots, []

    def watched(figure: Any, *shape: int) -> Any:
        panels = plot(figure, *shape)
        for panel in panels:
            title = len(band)
            band.append(panel)
            lines, fills = panel.plot, panel.fill_between
            panel.plot = lambda x, y, title=title, lines=lines, **look: (
                drawn.append((title, y, look)) or lines(x, y, **look)
            )
            panel.fill_between = lambda x, low, high, title=title, fills=fills, **look: (
                drawn.append((title, (low, high), {})) or fills(x, low, high, **look)
            )
        return panels

    monkeypatch.setattr(epochs.Figure, "subplots", watched)
    report = made.report()
    epochs.draw(report)
    bleu = [entry for entry in drawn if entry[0] == 2]
    assert [look["ls"] for _, _, look in bleu if look] == ["-", "--"]  # with is solid, as in the paper
    having = [[point["dev_bleu"] for point in run["history"]] for run in report["runs"] if run["ppsbn"]]
    assert bleu[0][1] == [mean(values) for values in zip(*having, strict=True)]
    assert bleu[1][1] == ([min(v) for v in zip(*having, strict=True)], [max(v) for v in zip(*having, strict=True)])
    assert len([entry for entry in drawn if entry[0] == 0]) == 8  # loss on dev and in training, two arms, with bands


def test_the_same_command_repeats_no_run(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file: file.stat().st_mtime_ns for file in (made.folder / "results").rglob("*.json")}
    done = []
    monkeypatch.setattr(script, "sweep", lambda words: done.append(forked.run("train.py", *words)) or 0)
    assert script.main(made.words) == 0
    assert done[0].stdout.count("is finished") == 4
    assert before == {file: file.stat().st_mtime_ns for file in (made.folder / "results").rglob("*.json")}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["small"], "error: small is no key=value"),
        (["seed=3"], "error: seed=3 is set here: --seeds, and both arms"),
        (["ppsbn=with"], "error: ppsbn=with is set here: --seeds, and both arms"),
        (["++seed=3"], "error: ++seed=3 is set here: --seeds, and both arms"),
        (["--output", "{}", "dry_run=true"], "error: dry_run is for single runs: python train.py -cn translate"),
        (["--output", "{}", "model=x"], "error: Could not override 'model'. No match in the defaults list. To append"),
        (["--output", "{}", "attention=rfa,softmax"], "error: attention=rfa,softmax has several values: add -m"),
        (["--output", "{}", "trainer.epoch=2"], "error: trainer.epoch is not known; the keys there are epochs, steps"),
        (["--output", "{}", "--seeds", "-1"], "error: seed=-1 does not fit translate.yaml: it should be greater than"),
        (["--output", "{}/file/below", "paths.data={data}"], "error: [Errno 20] Not a directory: '{}/file/below'"),
        (
            ["--output", "results/figures", "--seeds", "0"],
            "error: other keys or seeds need an --output: results/figures",
        ),
        (["--seeds", "0"], "error: other keys or seeds need an --output: results/figures has the whole figure"),
        (["trainer.epochs=2"], "error: other keys or seeds need an --output: results/figures has the whole figure"),
    ],
)
def test_bad_words_are_said_before_anything_runs(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    multi30k: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "sweep", None)  # calling it would be another error
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").touch()
    assert script.main([word.format(tmp_path, data=multi30k) for word in words]) == 1
    said = capsys.readouterr().err
    assert said.startswith(sentence.format(tmp_path))
    assert said.count("\n") == 1


def test_missing_data_are_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "sweep", None)
    assert script.main(["--output", f"{tmp_path}/figure", f"paths.multi30k={tmp_path}/none"]) == 1
    assert capsys.readouterr().err.startswith(
        f"error: Multi30K needs the file {tmp_path}/none/train.de (or train.de.gz)"
    )
    assert not (tmp_path / "figure").exists()


def test_a_sweep_that_fails_ends_it(multi30k: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A real one: it diverges."""
    paths = [f"paths.data={multi30k}", f"paths.results={tmp_path}/results", f"paths.outputs={tmp_path}/outputs"]
    words = ["--full", "--seeds", "0", "--output", f"{tmp_path}/figure", *TINY, "task.learning_rate=1e30", *paths]
    assert script.main(words) == 1
    assert "error: 2 of the sweep's runs failed:" in capfd.readouterr().err
    assert not list((tmp_path / "figure").iterdir())


def test_a_stopped_sweep_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C goes to both: train.py saves what it has first, and its exit code is the answer."""
    child = (
        "import signal, sys, time\nsignal.signal(2, lambda *_: [time.sleep(0.5), sys.exit(130)])\nprint(flush=True)\n"
    )

    class Stopped(subprocess.Popen[str]):
        asked = False

        def __init__(self, command: list[str]):
            super().__init__([sys.executable, "-c", child + "time.sleep(60)"], stdout=subprocess.PIPE, text=True)
            assert self.stdout
            self.stdout.readline()

        def wait(self, timeout: float | None = None) -> int:
            if not self.asked:
                self.asked = True
                self.send_signal(signal.SIGINT)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(script.subprocess, "Popen", Stopped)
    assert script.sweep([]) == 130


def test_the_committed_figure_is_that_of_its_records() -> None:
    """And the sentence in the README is that of the figure."""
    report = json.loads((ROOT / "results" / "figures" / "ppsbn.json").read_text())
    found = []
    for run in report["runs"]:
        (file,) = (ROOT / "results" / "runs" / "multi30k").rglob(f"{run['run_id']}.json")
        record = records.read(file)
        assert isinstance(record, records.Translation)
        assert record.status == "ok"
        assert record.code.dirty is False
        assert record.data.source == "multi30k"
        found.append((run["ppsbn"], record))
    assert script.report_of(found, report["settings"]["command"]) == report
    assert len(epochs.seeds(report)) >= 2
    assert min(run["bleu"] for run in report["runs"] if not run["ppsbn"]) > 25
    sentence = experiments.sentence4(report)
    assert f"{script.BEGIN}\n\n{sentence} {epochs.reached(report)}\n" in README.read_text()
    folder = ROOT / "results" / "figures"
    assert (folder / "ppsbn.md").read_text() == epochs.markdown(report, sentence)
    assert (folder / "ppsbn.csv").read_text() == epochs.csv(report)
