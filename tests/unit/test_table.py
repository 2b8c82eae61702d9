"""Records to Table 2: what may share a table, ratios, dashes with their command."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from macformer import config as configs
from macformer import record as records
from macformer.report import table
from tests.conftest import ROOT

Make = Callable[..., records.Record]


@pytest.fixture
def make(composed: Callable[..., DictConfig]) -> Make:
    """make("model=rfa", ..., accuracy=0.4) -> the record that such a run would leave."""

    def record(
        *overrides: str, seconds: float = 10.0, peak: int = 1000, accuracy: float = 0.37, status: str = "ok"
    ) -> records.Record:
        config = configs.container(composed(*overrides))
        return records.Record(
            run_id=records.run_id(config, "f"),
            status=status,  # type: ignore[arg-type]
            message="" if status == "ok" else "why it failed",
            task=config["task"]["name"],
            model=config["model"]["name"],
            seed=config["seed"],
            steps_done=1,
            config=config,
            overrides=list(overrides),
            code=records.Code(commit=None, dirty=None),
            data=records.Data(
                fingerprint="f",
                source="generated",
                examples={"train": 96000, "dev": 2000, "test": 2000},
                majority=0.17,
            ),
            environment=records.Environment(
                device="cpu", device_name="Test CPU", python="3.11", torch="2", threads=1, precision="float32"
            ),
            sessions=[],
            parameters=1,
            quality=records.Quality(
                test_accuracy=accuracy,
                test_examples=2000,
                correct="",
                dev_accuracy=accuracy,
                dev_step=1,
                dev_examples=2000,
                dev_subset="",
                last_dev_accuracy=accuracy,
                last_test_accuracy=accuracy,
            ),
            time=records.Time(
                train_seconds=seconds,
                warmup_seconds=0.0,
                data_wait_seconds=0.0,
                evaluation_seconds=0.0,
                pause_seconds=0.0,
                step_p10=0.0,
                step_p50=0.0,
                step_p90=0.0,
            ),
            memory=records.Memory(peak_bytes=peak, method="counted"),
            history=[],
        )

    return record


def row(text: str, name: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    (cells,) = (cells[1:] for cells in rows if cells[0] == name)
    return cells


def test_no_records_is_the_papers_table_with_dashes_and_commands() -> None:
    text = table.render([], [])
    assert row(text, "macformer_sqrt")[3:6] == ["- [0.839]", "- [2.564]", "- [38.36]"]
    for task in ("text", "listops", "retrieval"):
        assert "`python train.py -m model=transformer,rfa,macformer_exp,macformer_inv,macformer_trigh," in text
        assert f"task={task}`" in text


def test_time_and_memory_are_relative_to_the_transformer(make: Make) -> None:
    text = table.render([make("model=transformer"), make("model=rfa", seconds=5.0, peak=1500, accuracy=0.4)], [])
    assert "the paper's protocol, on Test CPU (1 thread, float32, torch 2)" in text
    assert row(text, "transformer")[3:6] == ["1.000 [1.000]", "1.000 [1.000]", "37.00 [37.30]"]
    assert row(text, "rfa")[3:6] == ["0.500 [0.836]", "1.500 [1.360]", "40.00 [37.15]"]
    assert row(text, "rfa")[:3] == ["- [0.783]", "- [1.367]", "- [65.22]"]
    assert "NOT the paper's" not in text
    assert "the majority class scores 17.00" in text


def test_without_the_transformer_there_is_no_ratio(make: Make) -> None:
    assert row(table.render([make("model=rfa")], []), "rfa")[3:6] == ["- [0.836]", "- [1.360]", "37.00 [37.15]"]


def test_seeds_are_averaged(make: Make) -> None:
    runs = [make("model=rfa", f"seed={seed}", accuracy=0.3 + 0.1 * seed) for seed in range(3)]
    assert row(table.render(runs, []), "rfa")[5] == "40.00 ± 10.00 (n=3) [37.15]"


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ("trainer=cpu", "trainer steps = 1000 (paper: 10000)"),
        ("protocol=clean", "protocol pooling = masked (paper: padded)"),
        ("pad=trim", "pad = trim (paper: full)"),
        ("trainer.batch_size=16", "trainer batch_size = 16"),
        ("task.learning_rate=1e-3", "listops learning_rate = 0.001 (paper: 0.0001)"),
        ("task.data.max_length=256", "listops data.max_length = 256 (paper: 2000)"),
    ],
)
def test_other_conditions_make_another_table_whose_title_says_so(make: Make, change: str, title: str) -> None:
    text = table.render([make("model=rfa"), make("model=rfa", change, accuracy=0.9)], [])
    paper, other = text.split("\n**Table 2")
    assert row(paper, "rfa")[5] == "37.00 [37.15]"
    heading = other.partition("**")[0].replace("\n", " ")
    assert "NOT the paper's protocol: " in heading
    assert title in heading
    assert heading.count("paper:") <= 4  # each change once, where it comes from
    assert "not the paper's.** The full one" in other
    assert row(other, "rfa")[2] == "90.00 [37.15]"


def test_a_changed_model_is_its_own_row(make: Make) -> None:
    text = table.render([make("model=rfa"), make("model=rfa", "model.attention.features=64", accuracy=0.5)], [])
    assert text.count("**Table 2") == 1
    assert row(text, "rfa")[5] == "37.00 [37.15]"
    assert row(text, "rfa (attention.features=64)")[5] == "50.00"


def test_two_records_of_one_seed_are_not_two_seeds(make: Make) -> None:
    text = table.render([make("model=rfa"), make("model=rfa", "protocol.text_dev=held-out")], [])
    assert row(text, "rfa")[5] == "37.00 [37.15]"


def test_tasks_as_the_paper_has_them_do_not_share_a_table_with_others(make: Make) -> None:
    text = table.render([make("model=rfa"), make("model=rfa", "task=text", "task.learning_rate=1e-3")], [])
    paper, other = text.split("\n**Table 2")
    assert "NOT the paper's protocol" not in paper
    assert row(paper, "rfa")[5] == "37.00 [37.15]"
    assert "listops" not in other


def test_tasks_under_the_same_changed_schedule_share_a_table(make: Make) -> None:
    text = table.render([make("model=rfa", f"task={task}", "trainer=cpu") for task in ("listops", "retrieval")], [])
    assert text.count("**Table 2") == 1
    assert len(row(text, "rfa")) == 6


def test_stand_in_data_are_in_the_title(make: Make) -> None:
    record = make("model=rfa", "task=retrieval")
    stand_in = record.model_copy(update={"data": record.data.model_copy(update={"source": "stand-in"})})
    title = table.render([stand_in], []).splitlines()[0]
    assert "NOT the paper's protocol: retrieval on STAND-IN data" in title


def test_a_changed_row_does_not_break_the_command(make: Make) -> None:
    sizes = "task.data.examples={train: 64, dev: 8, test: 8}"
    text = table.render([make("model=rfa", "model.attention.features=64", sizes)], [])
    command = re.search("to fill the dashes of listops: `(.+)`", text)
    assert command
    words = shlex.split(command[1])
    assert words[:3] == ["python", "train.py", "-m"]
    assert words[3].startswith("model=transformer,rfa,macformer_exp,")
    assert words[4:] == ["task=listops", sizes]


def test_the_command_that_fills_a_dash_has_the_conditions_of_the_table(make: Make) -> None:
    text = table.render([make("model=rfa", "trainer=cpu", "seed=4", "task.learning_rate=1e-3")], [])
    models = "transformer,macformer_exp,macformer_inv,macformer_trigh,macformer_log,macformer_sqrt"
    assert f"`python train.py -m model={models} task=listops trainer=cpu task.learning_rate=1e-3`" in text


def test_failed_runs_and_bad_files_are_named_and_left_out(make: Make, tmp_path: Path) -> None:
    for record in (make("model=rfa"), make("model=transformer", status="oom")):
        records.write(record, tmp_path / "runs" / "listops" / record.model / f"{record.run_id}.json")
    (tmp_path / "runs" / "broken.json").write_text("{")
    text = table.render(*table.load(tmp_path))
    assert "ended as oom: why it failed" in text
    assert "broken.json is not a run record" in text
    assert row(text, "rfa")[5] == "37.00 [37.15]"
    assert row(text, "transformer")[5] == "- [37.30]"


def test_the_same_records_give_the_same_bytes(make: Make) -> None:
    runs = [make("model=rfa"), make("model=transformer"), make("model=rfa", "trainer=cpu"), make("seed=1")]
    assert table.render(runs, []) == table.render(runs[::-1], [])


def test_the_table_needs_no_torch() -> None:
    code = "import sys; from macformer.report import table; table.render([], []); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_committed_table_is_the_one_that_the_records_give() -> None:
    listed = subprocess.run(["git", "ls-files", "results/runs"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout: cannot tell the committed records from yours")
    text = table.render([records.read(ROOT / name) for name in listed.stdout.split()], [])
    assert (ROOT / "results" / "tables" / "table2.md").read_text() == text, "run `make table` and commit its result"
