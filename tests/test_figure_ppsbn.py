"""The paper's Figure 4: real runs of a tiny model on a small Multi30K made here."""

import contextlib
import io
import json
import os
import re
import signal
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from macformer.paper import experiments, figure4
from macformer.paper.translation import Settings, finished, record_file
from scripts import figure_ppsbn as script
from scripts.table import README
from tests import forked
from tests.conftest import ROOT
from tests.data.test_multi30k import FINGERPRINT

TINY = [
    *("--width", "32", "--heads", "2", "--head-dim", "8", "--layers", "1", "--feedforward", "32"),
    *("--vocabulary", "400", "--epochs", "2", "--steps-per-epoch", "20", "--warmup-steps", "10"),
    *("--learning-rate", "1e-2"),
]
FILES = {"ppsbn.json", "ppsbn.md", "ppsbn.png", "ppsbn.svg"}


def words(folder: Path, multi30k: Path, *more: str) -> list[str]:
    places = [f"--output={folder}/figure", f"--results={folder}/results", f"--outputs={folder}/outputs"]
    return [*TINY, f"--multi30k={multi30k}", "--seeds=0,1", "--jobs=2", *places, *more]


@pytest.fixture(scope="module")
def made(multi30k: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and what was printed: both arms, two seeds."""
    folder = tmp_path_factory.mktemp("ppsbn")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        script.main(words(folder, multi30k))
    return folder, printed.getvalue()


def report_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "figure" / "ppsbn.json").read_text())


def stopped(*arguments: str) -> object:
    """With what the command ends."""
    with pytest.raises(SystemExit) as end:
        script.main(arguments)
    return end.value.code


def test_the_figure_has_every_run_and_epoch(made: tuple[Path, str]) -> None:
    folder, printed = made
    report, figure = report_in(folder), folder / "figure"
    assert {file.name for file in figure.iterdir()} == FILES
    assert report["settings"]["preset"] == "changed"
    assert [(run["ppsbn"], run["seed"]) for run in report["runs"]] == [(False, 0), (True, 0), (False, 1), (True, 1)]
    for run in report["runs"]:
        (file,) = (folder / "results").rglob(f"{run['run_id']}.json")
        record = finished(file)
        assert record
        assert record.settings.pre_sbn == record.settings.post_sbn == run["ppsbn"]
        assert {name: run[name] for name in ("bleu", "loss", "perplexity")} == record.test.model_dump()
        assert run["train_loss"] == record.history[-1].train_loss
        assert [point["step"] for point in run["history"]] == [20, 40]
        assert [point["dev_bleu"] for point in run["history"]] == [point.dev_bleu for point in record.history]
    sentence, page = experiments.sentence4(report), (figure / "ppsbn.md").read_text()
    assert sentence in printed
    assert sentence in page
    values = [run["perplexity"] for run in report["runs"] if run["ppsbn"]]
    assert f"| {mean(values):.2f} ± {stdev(values):.2f} (" in page
    assert (figure / "ppsbn.png").read_bytes().startswith(b"\x89PNG")
    ET.fromstring((figure / "ppsbn.svg").read_bytes())


def test_lines_are_means_and_bands_reach_from_the_lowest_to_the_highest(
    made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure4, "saved", lambda name, figure, *rest: figure)
    report = report_in(made[0])
    loss, _, bleu = figure4.draw(report).axes  # type: ignore[attr-defined]
    assert [line.get_linestyle() for line in bleu.lines] == ["-", "--"]  # with is solid, as in the paper
    assert len(loss.lines) == len(loss.collections) == 4  # on dev and in training, two arms
    for ppsbn, line, band in zip((True, False), bleu.lines, bleu.collections, strict=True):
        by_run = ([point["dev_bleu"] for point in run["history"]] for run in report["runs"] if run["ppsbn"] == ppsbn)
        by_epoch = list(zip(*by_run, strict=True))
        assert list(line.get_ydata()) == pytest.approx(list(map(mean, by_epoch)), rel=1e-12)
        heights = {float(y) for _, y in band.get_paths()[0].vertices}
        assert heights == {limit(values) for values in by_epoch for limit in (min, max)}


def test_the_same_command_repeats_no_run(
    made: tuple[Path, str], multi30k: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made
    before = {file: file.read_bytes() for file in folder.rglob("*.*") if file.is_file()}
    monkeypatch.setattr(script, "Process", None)  # calling it would be an error
    script.main(words(folder, multi30k))
    assert "4 of 4 runs are finished\n" in capsys.readouterr().out
    assert before == {file: file.read_bytes() for file in folder.rglob("*.*") if file.is_file()}


def test_a_signal_stops_all_runs_and_the_same_command_goes_on(
    made: tuple[Path, str], multi30k: Path, tmp_path: Path
) -> None:
    """After the last whole epochs, to the same bits; also if it is killed, and its runs are not."""
    command = "scripts/figure_ppsbn.py", *words(tmp_path, multi30k, "--jobs=1")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        output, errors = tmp_path / f"printed.{number}", tmp_path / f"errors.{number}"
        process = forked.start(*command, output=output, errors=errors)
        for line in forked.lines(process, output):
            if "epoch 1/2" in line:
                break
        assert process.pid
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == code
        assert ("stopped; the same command goes on" in errors.read_text()) == (number == signal.SIGINT)
        time.sleep(0.3)
        was = output.read_text()
        time.sleep(0.3)
        assert output.read_text() == was  # no run goes on alone
    done = forked.run(*command)
    assert done.returncode == 0, done.stderr
    assert "goes on after epoch 1" in done.stdout
    for run, other in zip(report_in(tmp_path)["runs"], report_in(made[0])["runs"], strict=True):
        assert run | {"seconds": 0} == other | {"seconds": 0}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--seeds=a"], "--seeds a should be whole numbers, as in 0,1,2"),
        (["--seeds=-1"], "--seeds -1 should be whole numbers, as in 0,1,2"),
        (["--epochs=0"], "epochs should be greater than 0"),
        (["--width=15"], "width should be a multiple of 2"),
        (["--warmup-steps=40"], "--warmup-steps 40 must be below the 40 steps of all epochs"),
        (["--steps-per-epoch=301"], "--steps-per-epoch 301 is too many for 300 pairs: a batch needs at least one"),
        (["--multi30k={}/none"], "Multi30K needs the file {}/none/train.de (or train.de.gz), which is not there: put"),
        (["--output={}/file/below"], "[Errno 20] Not a directory: '{}/file/below'"),
    ],
)
def test_bad_words_are_said_before_anything_runs(
    more: list[str], sentence: str, tmp_path: Path, multi30k: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "Process", None)  # calling it would be another error
    (tmp_path / "file").touch()
    said = str(stopped(*words(tmp_path, multi30k, *(word.format(tmp_path) for word in more))))
    assert said.startswith(f"error: {sentence.format(tmp_path)}")
    assert "\n" not in said
    assert not (tmp_path / "figure").exists()


@pytest.mark.parametrize("more", [["--seeds=0"], ["--epochs=2", "--output=results/figures"]])
def test_the_committed_figure_is_not_replaced(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    says = "error: other settings or seeds need an --output: results/figures has the whole figure"
    assert stopped(*more) == says


def test_runs_that_fail_are_counted(multi30k: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They diverge."""
    said = stopped(*words(tmp_path, multi30k, "--seeds=0", "--learning-rate=1e30"))
    assert said == "error: 2 of 2 runs failed (see above)"
    said = capfd.readouterr().err
    for model in ("seq2seq", "seq2seq_ppsbn"):
        sentence = rf"^error: {model}, seed 0: the loss is (nan|inf) after step \d+: lower --learning-rate 1e\+30$"
        assert re.search(sentence, said, re.MULTILINE)
    assert not list((tmp_path / "figure").iterdir())
    assert not (tmp_path / "results").exists()


def test_the_committed_figure_is_that_of_its_records() -> None:
    """And the sentence in the README is that of the figure."""
    folder = ROOT / "results" / "figures"
    report, found = json.loads((folder / "ppsbn.json").read_text()), []
    for run in report["runs"]:
        settings = Settings(seed=run["seed"], pre_sbn=run["ppsbn"], post_sbn=run["ppsbn"])
        record = finished(record_file(settings, FINGERPRINT, ROOT / "results"))
        assert record
        assert (record.run_id, record.settings) == (run["run_id"], settings)
        assert (record.code.dirty, record.source) == (False, "multi30k")
        found.append(record)
    assert figure4.report(found, "python -m scripts.figure_ppsbn") == report
    assert list(figure4.of_arm(report, True).seed) == list(map(int, script.SEEDS.split(",")))
    assert min(run["bleu"] for run in report["runs"] if not run["ppsbn"]) > 25
    sentence = experiments.sentence4(report)
    assert f"{script.BEGIN}\n\n{sentence} {figure4.reached(report)}\n" in README.read_text()
    assert (folder / "ppsbn.md").read_text() == figure4.markdown(report, sentence)
