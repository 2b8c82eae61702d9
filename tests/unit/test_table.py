"""Records to Table 2: what may share a table, ratios, what is bold, floors, empty cells with their command."""

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from macformer.harness import config as configs
from macformer.harness import record as records
from macformer.report import cells, statistics, table
from scripts.bench_table import made_up
from tests.conftest import ROOT, Compose, committed
from tests.golden.tables import BENCH, FLOORS

Make = Callable[..., records.Record]
ACCURACY, INTERVAL, PAPER, VERSUS, P = range(4, 9)  # places in a row without raced columns


@pytest.fixture
def make(composed: Compose) -> Make:
    """make("model=rfa", ..., accuracy=0.4) -> the record that such a run would leave."""
    return lambda *overrides, **given: made_up(configs.container(composed(*overrides)), overrides, **given)


def render(found: list[records.Record], floors: Any = (), bench: Any = None, problems: Any = ()) -> str:
    return table.markdown(cells.tables(found, list(floors), bench), found, list(problems))


def formats(
    found: list[records.Record], problems: list[str], floors: Any, bench: Any, **papers: bool
) -> dict[str, str]:
    return table.formats(cells.tables(found, floors, bench, **papers), found, problems)


def row(text: str, name: str, task: str = "listops") -> list[str]:
    """The cells of a row in the first table of a task."""
    (block,) = re.findall(rf"^\| {task} .+\n(?:\|.+\n?)+", text, re.MULTILINE)[:1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    (found,) = (each[1:] for each in rows if each[0] == name)
    return found


def test_no_records_is_the_papers_table_with_empty_cells_and_commands() -> None:
    text = render([])
    assert row(text, "macformer_sqrt")[:5] == ["-", "0.839", "-", "2.564", "-"]
    assert row(text, "macformer_sqrt")[PAPER] == "38.36"
    for task in ("text", "listops", "retrieval"):
        assert "`python train.py -m model=transformer,rfa,macformer_exp,macformer_inv,macformer_trigh," in text
        assert f"task={task} seed=0,1,2`" in text


def test_the_papers_table_comes_first_if_it_is_asked_for_and_nobody_ran_it(make: Make) -> None:
    short, full = make("model=rfa", "trainer=cpu"), make("model=rfa")
    titles = [table.title(each) for each in cells.tables([short], FLOORS, BENCH, papers=True)]
    assert titles[0] == "Table 2, the paper's protocol: no runs yet"
    assert "NOT the paper's protocol: " in titles[1]
    assert [table.title(each) for each in cells.tables([short], FLOORS, BENCH)] == titles[1:]
    assert len(cells.tables([short, full], FLOORS, BENCH, papers=True)) == 2


def test_the_papers_protocol_comes_first_whatever_the_machine(make: Make) -> None:
    """Tables are sorted by machine; a changed task is not among what is sorted by before it."""
    short, full = make("model=rfa", "task.data.length=1024"), make("model=rfa")
    moved = full.model_copy(update={"environment": full.environment.model_copy(update={"device_name": "ZZ GPU"})})
    for papers in (False, True):
        first, second = cells.tables([short, moved], [], None, papers=papers)
        assert table.title(first).startswith("Table 2, the paper's protocol, on ZZ GPU")
        assert second.conditions


def test_tasks_that_are_changed_stand_side_by_side_and_not_beside_the_papers(make: Make) -> None:
    """In the paper's order, if the same words made them; where they run and go does not matter."""
    grid = [make("model=rfa", f"task={task}", "trainer=cpu") for task in ("retrieval", "text")]
    grid.append(make("model=rfa", "task=listops", "experiment=table2", "trainer=cpu", "sweep=joblib", "paths.data=x"))
    whole = make("model=rfa", "task=text")
    shorter = make("model=rfa", "task=text", "trainer=cpu", "task.data.length=250", "task.data.max_length=250")
    made = cells.tables([*grid, whole, shorter], [], None)
    shown = [[column.task for column in each.columns if column.runs] for each in made]
    assert shown == [["text"], ["text"], ["text", "listops", "retrieval"]]
    assert "text data.length = 250 (paper: 4096)" in table.title(made[1])
    assert "text data.length = 256 (paper: 4096)" in table.title(made[2])


def test_settings_of_a_task_that_the_same_words_made_do_not_share_a_column(make: Make) -> None:
    """Of other data: another fingerprint."""
    one, other = (make("model=rfa", "trainer=cpu", f"seed={seed}") for seed in (0, 1))
    other = other.model_copy(update={"data": other.data.model_copy(update={"fingerprint": "g"})})
    assert [len(each.columns[0].runs) for each in cells.tables([one, other], [], None)] == [1, 1]


def test_a_gap_is_told_where_the_task_is_the_papers(make: Make) -> None:
    assert row(render([make("model=rfa", "trainer.steps=100")]), "rfa")[PAPER] == "37.15 (-0.15)"
    assert row(render([make("model=rfa", "task.data.length=1024")]), "rfa")[PAPER] == "37.15"


def test_a_gap_beyond_the_noise_of_both_test_sets_is_told(make: Make) -> None:
    """Newcombe's interval, by hand: 37% of ours is 34.91 to 39.14, the paper's 38.36% and 37.15% of as many."""
    text = render([make("model=macformer_exp", accuracy=0.37), make("model=rfa", accuracy=0.5)])
    said = re.search(r"listops: accuracy minus the paper's, .+", text)
    assert said
    assert re.findall(r"(\w+) ([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)", said[0]) == [
        ("rfa", "+12.85", "+9.79", "+15.88"),
        ("macformer_exp", "-1.36", "-4.35", "+1.65"),
    ]
    assert said[0].endswith("; beyond that noise: rfa.")
    assert "accuracy minus the paper's" not in render([make("model=rfa", "trainer=cpu")])  # another task


def test_without_the_transformer_it_is_told_what_each_row_took(make: Make) -> None:
    runs = [make("model=rfa", seconds=90.0, peak=2**30), make("model=macformer_exp", seconds=60.0, peak=2**20)]
    assert "2,000 examples; rfa took 1:30 and 1,024 MiB, macformer_exp took 1:00 and 1 MiB." in render(runs)
    assert "2,000 examples; the Transformer took 2:00 and 1 MiB." in render(
        [*runs, make("model=transformer", seconds=120.0, peak=2**20)]
    )


def test_floors_that_were_not_measured_on_test_do_not_count(make: Make) -> None:
    old = {key: value for key, value in FLOORS[0].items() if not key.startswith("test_")}
    text = render([make("model=rfa")], [old])
    assert row(text, "floor: majority")[ACCURACY] == "17.00"
    assert "floor: root operator" not in text


def settings(runs: list[records.Record], *problems: str) -> tuple[list[str], list[list[str]]]:
    """The lines of such a table, and the cells of its rows."""
    text = table.settings(cells.tables(runs, FLOORS, BENCH), runs, list(problems))
    lines = text.splitlines()
    return lines, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| rfa")]


def test_settings_stand_in_one_table_with_what_sets_them_apart(make: Make) -> None:
    runs = [
        make("model=rfa", "pad=trim", accuracy=0.5, seconds=90.0),
        make("model=rfa", "pad=trim", "seed=1", accuracy=0.6),
        make("model=rfa", "pad=trim", "protocol.pooling=masked", accuracy=0.38),
        make("model=rfa", "pad=trim", "trainer.learning_rate=0.01", "model.attention.features=64", accuracy=0.3),
    ]
    lines, rows = settings(runs, "a problem")
    assert lines[0] == (
        "**listops: settings side by side, none of them the paper's protocol. "
        "In all: pad = trim (paper: full); on Test CPU (1 thread, float32, torch 2)**"
    )
    floor = "39.00 (root operator)"
    assert [" | ".join(each) for each in rows] == [
        f"rfa | - | generated f | 55.00 ± 7.07 (n=2) † | 0.00 to 100.00 | {floor} | 55.00 | 50.0 s",
        f"rfa | protocol pooling = masked | generated f | 38.00 (n=1) † | 35.90 to 40.15 | {floor} | 38.00 | 10.0 s",
        "rfa (attention.features=64) | trainer learning_rate = 0.01 | generated f | 30.00 (n=1) † | 28.03 to 32.05 | "
        f"{floor} | 30.00 | 10.0 s",
    ]
    assert "- a problem" in lines


def test_settings_of_several_tasks_and_machines(make: Make) -> None:
    """Each task has its own table, in the paper's order; a task's own changes do not stand in another's rows."""
    listops = [make("model=rfa", "trainer=cpu", "task.learning_rate=0.01"), make("model=rfa", "trainer=cpu")]
    fast = listops[0].environment.model_copy(update={"device_name": "Fast CPU"})
    listops.append(listops[0].model_copy(update={"environment": fast, "run_id": "listops.rfa.0.fast"}))
    runs = [*listops, make("model=rfa", "trainer=cpu", "task=text")]
    lines, rows = settings(runs)
    heads = [line for line in lines if line.startswith("**")]
    assert [head.partition(":")[0] for head in heads] == ["**text", "**listops"]
    assert "text" not in heads[1]
    assert "listops data.length = 152 (paper: 2048)" in heads[1]
    test, slow, fast_row = "on Test CPU (1 thread, float32, torch 2)", "listops learning_rate = 0.001", "on Fast CPU"
    assert rows[0][1] == "-"
    assert {each[1].partition("; ")[0] for each in rows[1:]} == {slow, "listops learning_rate = 0.01"}
    assert sorted(each[1].rpartition("; ")[2] for each in rows[1:]) == [
        f"{fast_row} (1 thread, float32, torch 2)",
        test,
        test,
    ]
    assert "- text: dev is the test split" in "\n".join(lines)


def test_settings_without_a_finished_run(make: Make) -> None:
    lines, rows = settings([make("model=rfa", status="oom")])
    assert lines[0] == "**Settings side by side: no runs yet**"
    assert not rows
    assert any(" ended as oom" in line for line in lines)


def test_weights_chosen_on_test_examples_are_told(make: Make) -> None:
    said = "text: dev is the test split, as in the base code: the weights were chosen on test examples."
    assert said in render([make("model=rfa", "task=text")])
    assert said not in render([make("model=rfa", "task=text", "protocol=clean")])


def test_seeds_that_tie_do_not_support_a_difference(make: Make) -> None:
    """They do not show that there is no noise."""
    models = {"transformer": 0.40, "rfa": 0.45}
    found = [make(f"model={name}", f"seed={seed}", accuracy=models[name]) for name in models for seed in (0, 1)]
    text = render(found)
    assert "no model has two seeds that differ: the noise of training is not known" in text
    assert "**Supported:** nothing on accuracy" in text
    assert row(text, "rfa")[ACCURACY] == "45.00 ± 0.00 (n=2)"


def test_time_and_memory_are_relative_to_the_transformer(make: Make) -> None:
    text = render([make("model=transformer"), make("model=rfa", seconds=5.0, peak=1500, accuracy=0.4)])
    assert "the paper's protocol, on Test CPU (1 thread, float32, torch 2); data: listops generated f" in text
    expected = ["1.000", "1.000 (+0.000)", "1.000", "1.000 (+0.000)", "37.00 (n=1)", "34.91 to 39.14", "37.30 (-0.30)"]
    assert row(text, "transformer") == [*expected, "-", "-"]
    expected = ["0.500", "0.836 (-0.336)", "1.500", "1.360 (+0.140)", "40.00 (n=1)", "37.87 to 42.16", "37.15 (+2.85)"]
    assert row(text, "rfa")[:7] == expected
    assert row(text, "rfa", "text")[:2] == ["-", "0.783"]
    assert "NOT the paper's" not in text
    assert "with one seed the interval covers the test set, not the noise of training" in text


def test_without_the_transformer_there_is_no_ratio(make: Make) -> None:
    found = row(render([make("model=rfa")]), "rfa")
    assert [found[i] for i in (0, 2, ACCURACY, VERSUS, P)] == ["-", "-", "37.00 (n=1)", "-", "-"]


def test_time_memory_and_accuracy_are_means_over_seeds(make: Make) -> None:
    runs = [make("model=transformer", f"seed={seed}", seconds=10.0, peak=1000) for seed in range(2)]
    for seed in range(3):
        runs.append(
            make("model=rfa", f"seed={seed}", accuracy=0.3 + 0.1 * seed, seconds=4.0 + seed, peak=500 + 100 * seed)
        )
    found = row(render(runs), "rfa")
    assert found[0] == "0.500 ± 0.100"
    assert found[2] == "0.600 ± 0.100"
    assert found[ACCURACY] == "40.00 ± 10.00 (n=3) †"  # such seeds do not show that it beats the majority's 17%


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ("trainer=cpu", "trainer steps = 2000 (paper: 10000)"),
        ("protocol=clean", "protocol pooling = masked (paper: padded)"),
        ("pad=trim", "pad = trim (paper: full)"),
        ("trainer.batch_size=16", "trainer batch_size = 16"),
        ("trainer.steps=100", "trainer steps = 100 (paper: 10000)"),
        ("task.learning_rate=1e-3", "listops learning_rate = 0.001 (paper: 0.0001)"),
        ("task.data.max_length=256", "listops data.max_length = 256 (paper: 2000)"),
    ],
)
def test_other_conditions_make_another_table_whose_title_says_so(make: Make, change: str, title: str) -> None:
    text = render([make("model=rfa"), make("model=rfa", change, accuracy=0.9)])
    paper, other = text.split("\n**Table 2")
    assert row(paper, "rfa")[ACCURACY] == "37.00 (n=1)"
    heading = other.partition("**")[0].replace("\n", " ")
    assert "NOT the paper's protocol: " in heading
    assert title in heading
    changed = [each.partition(" = ")[0].split()[-1] for each in heading.partition("protocol: ")[2].split("; ")]
    assert len(changed) == len(
        set(changed)
    )  # each change once, where it comes from: not as the trainer's and the task's
    assert "not the paper's.** The full one" in other
    assert row(other, "rfa")[ACCURACY] == "90.00 (n=1)"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("environment", {"precision": "float16"}),
        ("environment", {"device_name": "Another CPU"}),
        ("environment", {"threads": 2}),
        ("data", {"fingerprint": "g"}),
        ("data", {"source": "stand-in"}),
    ],
)
def test_another_machine_precision_or_data_is_another_table(make: Make, part: str, change: dict[str, Any]) -> None:
    one, two = make("model=rfa"), make("model=rfa", "seed=1", accuracy=0.9)
    two = two.model_copy(update={part: getattr(two, part).model_copy(update=change)})
    first, second = render([one, two]).split("\n**Table 2")
    titles = [text.replace("**Table 2", "").partition("**")[0] for text in (first, second)]
    assert titles[0] != titles[1]
    found = {row(text, "rfa")[ACCURACY] for text in (first, second)}
    assert found == {"37.00 (n=1)", "90.00 (n=1)"}


@pytest.mark.parametrize(
    ("one", "two", "says"),
    [
        (["protocol=clean"], ["pad=full"], "pad = full (paper: full)"),
        (["task.batch_size=16"], ["trainer.batch_size=32"], "trainer batch_size = 32"),
        (["task.learning_rate=1e-3"], ["trainer.learning_rate=1e-4"], "trainer learning_rate = 0.0001"),
        (["pad=trim"], ["trainer.pad=full"], "trainer pad = full (paper: full)"),
        ([], ["~trainer.telemetry"], "~trainer.telemetry"),
    ],
)
def test_a_key_that_leaves_the_one_it_follows_is_a_change(
    make: Make, one: list[str], two: list[str], says: str
) -> None:
    """Even if that makes it the paper's again: the rest is not."""
    text = render([make("model=rfa", *one), make("model=rfa", *one, *two, "seed=1", accuracy=0.9)])
    tables = [part.replace("\n", " ") for part in text.split("**Table 2") if part]
    assert [says in part.partition("**")[0] for part in tables].count(True) == 1
    assert text.count("37.00 (n=1)") == text.count("90.00 (n=1)") == 1


def test_a_changed_key_of_the_model_is_a_row_even_if_it_is_the_papers_value(make: Make) -> None:
    text = render([make("model=rfa", "protocol=clean"), make("model=rfa", "protocol=clean", "model.pooling=padded")])
    assert row(text, "rfa (pooling=padded)")[ACCURACY] == row(text, "rfa")[ACCURACY] == "37.00 (n=1)"


def test_a_run_that_changed_machines_has_a_table_of_its_own(make: Make) -> None:
    one = records.Session(began="", first_step=1, commit=None, device_name="A100", concurrent=0)
    sessions = [one, one.model_copy(update={"device_name": "Test CPU"})]
    moved = make("model=rfa", "seed=1").model_copy(update={"sessions": sessions})
    assert "on A100 and Test CPU (1 thread" in render([make("model=rfa"), moved])


def test_a_changed_model_is_its_own_row(make: Make) -> None:
    text = render([make("model=rfa"), make("model=rfa", "model.attention.features=64", accuracy=0.5)])
    assert text.count("**Table 2") == 1
    assert row(text, "rfa")[ACCURACY] == "37.00 (n=1)"
    assert row(text, "rfa (attention.features=64)")[ACCURACY] == "50.00 (n=1)"


def test_a_node_set_to_null_is_a_change(make: Make) -> None:
    assert row(render([make("model=macformer_exp", "model.post_sbn=null")]), "macformer_exp (post_sbn=None)")


def test_another_model_with_records_has_a_row(make: Make) -> None:
    assert row(render([make("model=transformer_sdpa")]), "transformer_sdpa")[ACCURACY] == "37.00 (n=1)"


def test_two_records_of_one_seed_are_not_two_seeds(make: Make) -> None:
    text = render([make("model=rfa"), make("model=rfa", "protocol.text_dev=held-out")])
    assert row(text, "rfa")[ACCURACY] == "37.00 (n=1)"


def test_tasks_as_the_paper_has_them_do_not_share_a_table_with_others(make: Make) -> None:
    text = render([make("model=rfa"), make("model=rfa", "task=text", "task.learning_rate=1e-3")])
    paper, other = text.split("\n**Table 2")
    assert "NOT the paper's protocol" not in paper
    assert row(paper, "rfa")[ACCURACY] == "37.00 (n=1)"
    assert "| listops" not in other


def test_tasks_under_the_same_changed_schedule_share_a_table(make: Make) -> None:
    text = render([make("model=rfa", f"task={task}", "trainer=cpu") for task in ("listops", "retrieval")])
    assert text.count("**Table 2") == 1
    assert row(text, "rfa", "listops")[ACCURACY] == row(text, "rfa", "retrieval")[ACCURACY] == "37.00 (n=1)"
    assert "| text" not in text


def test_stand_in_data_are_in_the_title(make: Make) -> None:
    record = make("model=rfa", "task=retrieval")
    stand_in = record.model_copy(update={"data": record.data.model_copy(update={"source": "stand-in"})})
    title = render([stand_in]).partition("\n\n")[0].replace("\n", " ")
    assert "NOT the paper's protocol: retrieval on STAND-IN data" in title


def test_a_changed_row_does_not_break_the_command(make: Make) -> None:
    sizes = "task.data.examples={train: 64, dev: 8, test: 8}"
    text = render([make("model=rfa", "model.attention.features=64", sizes)])
    command = re.search("to fill the empty cells of listops: `(.+)`", text)
    assert command
    words = shlex.split(command[1])
    assert words[:3] == ["python", "train.py", "-m"]
    assert words[3].startswith("model=transformer,rfa,macformer_exp,")
    assert words[4:] == ["task=listops", "seed=0", sizes]


def test_the_command_that_fills_a_cell_has_the_conditions_of_the_table(make: Make) -> None:
    text = render([make("model=rfa", "trainer=cpu", "seed=4", "task.learning_rate=1e-3")])
    models = "transformer,macformer_exp,macformer_inv,macformer_trigh,macformer_log,macformer_sqrt"
    assert f"`python train.py -m model={models} task=listops seed=4 trainer=cpu task.learning_rate=1e-3`" in text


def test_seeds_that_a_model_lacks_are_in_a_command(make: Make) -> None:
    runs = ("model=transformer", "seed=0"), ("model=transformer", "seed=1"), ("model=rfa", "seed=0")
    text = render([make(*words, "paths.listops=/lra", "paths.data=/packed") for words in runs])
    assert "`python train.py -m model=rfa task=listops seed=1 paths.listops=...`" in text
    assert "/lra" not in text


def three(make: Make, model: str, accuracy: float, spread: float = 0.004, seeds: int = 3) -> list[records.Record]:
    """Runs of a model, their accuracies `spread` apart."""
    return [
        make(f"model={model}", f"seed={seed}", accuracy=accuracy + spread * (seed - (seeds - 1) / 2))
        for seed in range(seeds)
    ]


def test_a_clear_difference_is_bold_and_named(make: Make) -> None:
    found = three(make, "transformer", 0.40) + three(make, "rfa", 0.47) + three(make, "macformer_exp", 0.34)
    text = render([*found, *three(make, "macformer_log", 0.401)])
    assert row(text, "rfa")[ACCURACY] == "**47.00 ± 0.40 (n=3)**"
    assert row(text, "macformer_exp")[ACCURACY] == "*34.00 ± 0.40 (n=3)*"
    assert row(text, "macformer_log")[ACCURACY] == "40.10 ± 0.40 (n=3)"
    said = text[text.index("**Supported:**") :].splitlines()[:2]
    assert re.match(r"\*\*Supported:\*\* on listops rfa is better than the Transformer by 7.00 points", said[0])
    assert "on listops macformer_exp is worse than the Transformer by 6.00 points" in said[0]
    assert "macformer_log" not in said[0]
    assert said[1] == "**Not supported:** the difference from the Transformer in 1 other cell."


@pytest.mark.parametrize("few", ["transformer", "rfa"])
def test_with_one_seed_nothing_is_bold(make: Make, few: str) -> None:
    """However small p is."""
    seeds = {"transformer": 3, "rfa": 3} | {few: 1}
    text = render(
        three(make, "transformer", 0.2, seeds=seeds["transformer"]) + three(make, "rfa", 0.8, seeds=seeds["rfa"])
    )
    assert float(row(text, "rfa")[P]) < 0.001  # the spread of the other's seeds is small
    assert row(text, "rfa")[ACCURACY].startswith("80.00")
    assert "the difference from the Transformer in 1 cell (1 of them with one seed, which supports none)" in text


def test_a_difference_below_the_noise_floor_is_not_bold(make: Make) -> None:
    """The A/A pair varies by 8 points from seed to seed: 7 points say nothing, whatever p is."""
    clear = three(make, "transformer", 0.40) + three(make, "rfa", 0.47)
    for model in ("macformer_log", "macformer_inv", "macformer_sqrt", "transformer_sdpa"):
        clear += three(make, model, 0.40)
    noisy = [
        make(f"model={twin}", f"seed={seed}", accuracy=accuracy)
        for twin in statistics.TWINS
        for seed, accuracy in enumerate((0.33, 0.41))
    ]
    assert row(render(clear), "rfa")[ACCURACY].startswith("**")
    text = render(clear + noisy)
    assert float(row(text, "rfa")[P]) < 0.05
    assert row(text, "rfa")[ACCURACY] == "47.00 ± 0.40 (n=3)"
    assert re.search(
        r"the noise floor is 8.00 points.+macformer_exp at one seed minus macformer_trigh at another.+ 8.00, "
        "at most 8.00, in 2 pairs",
        text,
    )


def test_several_comparisons_are_corrected(make: Make) -> None:
    models = {"transformer": 0.4, "rfa": 0.45, "macformer_exp": 0.4, "macformer_log": 0.4, "macformer_inv": 0.4}
    found = [run for model, accuracy in models.items() for run in three(make, model, accuracy)]
    (made,) = cells.tables(found, [], None)
    (column,) = (column for column in made.columns if column.runs)
    rfa = column.cells["rfa"]
    assert rfa.versus
    assert rfa.versus.p < 0.05
    assert rfa.p_holm == pytest.approx(4 * rfa.versus.p)


def test_twins_that_differ_at_one_seed_are_told(make: Make) -> None:
    exp, other = make("model=macformer_exp"), make("model=macformer_trigh")
    assert "WARNING" not in render([exp, other.model_copy(update={"quality": exp.quality})])
    text = render([exp, other])
    assert "WARNING: macformer_exp and macformer_trigh are the same model, but have other outcomes at seed 0" in text


def test_a_cell_that_does_not_beat_its_floor_is_marked(make: Make) -> None:
    """The floor is 39%; 40% of 2,000 examples is above it, but not its interval."""
    found = [make("model=transformer", accuracy=0.42), make("model=rfa", accuracy=0.40)]
    text = render(found, FLOORS)
    assert row(text, "transformer")[ACCURACY] == "42.00 (n=1)"
    assert row(text, "rfa")[ACCURACY] == "40.00 (n=1) †"
    assert row(text, "transformer")[PAPER] == "37.30 † (+4.70)"
    assert row(text, "floor: root operator")[ACCURACY] == "39.00"
    assert "that our accuracies marked † take more than a cheap predictor (1 of 2 on listops)" in text
    assert "that the paper's accuracies marked † take more than a cheap predictor (7 of 7 on listops)" in text
    assert "†" not in row(text, "rfa", "text")[PAPER]  # nobody measured a floor there


def test_runs_side_by_side_are_told(make: Make) -> None:
    alone, beside = make("model=rfa"), make("model=rfa", "seed=1", concurrent=1)
    assert "beside them" not in render([alone])
    assert "listops: 1 of 2 runs had others beside them: their times are no race." in render([alone, beside])


def test_floors_of_other_data_do_not_count_but_the_majority_does(make: Make) -> None:
    other = [FLOORS[0] | {"fingerprint": "g", "protocol": "clean"}]
    text = render([make("model=rfa", accuracy=0.18)], other)
    assert row(text, "rfa")[ACCURACY] == "18.00 (n=1) †"
    assert row(text, "floor: majority")[ACCURACY] == "17.00"
    assert "floor: root operator" not in text


def test_floors_of_shortened_data_do_not_count_for_the_papers_values(make: Make) -> None:
    """Whatever the number of their examples."""
    short = FLOORS[0] | {
        "whole": False,
        "fingerprint": "g",
        "train_examples": 10**6,
        "test_accuracy": {"majority": 0.9},
    }
    assert row(render([make("model=rfa", accuracy=0.42)], [*FLOORS, short]), "rfa")[PAPER] == "37.15 † (+4.85)"
    assert "†" not in row(render([make("model=rfa", accuracy=0.42)], [short]), "rfa")[PAPER]


def test_raced_figures_stand_beside_those_of_the_runs(make: Make) -> None:
    text = render([make("model=transformer"), make("model=rfa", seconds=5.0)], bench=BENCH)
    assert row(text, "rfa")[:6] == [
        "0.500",
        "0.836 (-0.336)",
        "0.100 (0.091 to 0.125)",
        "1.000",
        "1.360 (-0.360)",
        "0.250",
    ]
    assert row(text, "transformer_sdpa")[2] == "0.545 (0.500 to 0.550)"
    assert "raced: training steps of all models in turn on the same batches in one process, on Test CPU" in text
    assert "- raced: listops-full is without macformer_exp: too large.\n" in text
    assert "text-full is without rfa" not in text  # there is no race of Text
    assert len(row(text, "rfa", "text")) == 9


def test_without_the_transformer_there_is_no_race_but_the_reason(make: Make) -> None:
    arms = {name: arm for name, arm in BENCH["results"][0]["arms"].items() if name != "transformer"}
    text = render([make("model=rfa")], bench=BENCH | {"results": [BENCH["results"][0] | {"arms": arms}]})
    assert "time, raced" not in text
    assert "- raced: listops-full is without macformer_exp: too large.\n" in text


@pytest.mark.parametrize(
    "change", ["pad=trim", "bucket=true", "trainer.batch_size=8", "task.data.max_length=100", "trainer.accumulate=4"]
)
def test_a_race_at_other_batches_is_not_shown(make: Make, change: str) -> None:
    assert "raced" not in render([make("model=rfa", change)], bench=BENCH)


def test_a_race_on_another_machine_is_not_shown(make: Make) -> None:
    elsewhere = BENCH | {"environment": BENCH["environment"] | {"device_name": "Another CPU"}}
    assert "raced" not in render([make("model=rfa")], bench=elsewhere)
    assert "raced" in render([], bench=elsewhere)  # there is no other


def test_runs_that_were_taken_up_again_and_several_commits_are_told(make: Make) -> None:
    session = records.Session(began="", first_step=1, commit="a" * 40, device_name="Test CPU", concurrent=0)
    one = make("model=rfa").model_copy(update={"sessions": [session, session]})
    two = make("model=rfa", "seed=1").model_copy(update={"code": records.Code(commit="a" * 40, dirty=True)})
    text = render([one, two])
    assert "listops: 1 of 2 runs were stopped and taken up again" in text
    assert "listops: the runs are of several commits: None, aaaaaaaa with changes" in text


def spoil(record: records.Record, file: Path, **change: Any) -> None:
    tree = json.loads(record.model_dump_json())
    for key, value in change.items():
        part, _, name = key.rpartition("__")
        (tree[part] if part else tree)[name] = value
    file.write_text(json.dumps(tree))


def test_bad_files_are_named_and_left_out_and_the_rest_comes(make: Make, tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "listops"
    for record in (make("model=rfa"), make("model=transformer", status="oom")):
        records.write(record, runs / record.model / f"{record.run_id}.json")
    other = make("model=rfa", "seed=1", accuracy=0.9)
    (runs / "truncated.json").write_text(other.model_dump_json()[:2000])
    (runs / "binary.json").write_bytes(b"\xff\x00\x01")
    (runs / "list.json").write_text("[]")
    spoil(other, runs / "old.json", schema_version=1)
    spoil(other, runs / "unknown.json", surprise=1)
    spoil(other, runs / "tampered.json", quality__test_accuracy=0.95)
    spoil(other, runs / "short.json", quality__correct=other.quality.correct[:-4])
    spoil(other, runs / "other.json", data__examples={"train": 1, "dev": 1, "test": 1})
    spoil(other, runs / "no_time.json", time=None)
    spoil(other, runs / "fast.json", time__train_seconds=0.0)
    spoil(other, runs / "renamed.json", model="transformer")
    spoil(other, runs / "bare.json", config={})
    found, problems = cells.load(tmp_path)
    text = render(found, problems=problems)
    left_out = text.partition("**Files left out**")[2]
    for name, why in (
        ("truncated", "is not a run record of schema 3: "),
        ("binary", "is not a run record of schema 3: "),
        ("list", "is not a run record of schema 3: .*should be an object"),
        ("old", "has schema 1, and schema 3 is read here: run it anew"),
        ("unknown", "is not a run record of schema 3: surprise"),
        ("tampered", "is not a run record of schema 3: quality .+its test outcomes do not have its test accuracy"),
        ("other", "is not a run record of schema 3: .*not tested on as many examples"),
        ("no_time", "is not a run record of schema 3: .*it is ok, but lacks quality, time or memory"),
        ("fast", "is not a run record of schema 3: time.train_seconds"),
        ("bare", "is not a run record of schema 3: .*its configuration has no task, model or seed"),
        ("renamed", "is not a run record of schema 3: .*task, model or seed are not those of the configuration"),
        ("short", "is not a run record of schema 3: quality .+1992 test outcomes for 2000 examples"),
    ):
        assert re.search(rf"^- runs/listops/{name}.json {why}", left_out, re.MULTILINE), name
    assert "ended as oom: why it failed" in text
    assert row(text, "rfa")[ACCURACY] == "37.00 (n=1)"
    assert row(text, "transformer")[ACCURACY] == "-"


def test_the_order_of_the_records_does_not_matter(make: Make) -> None:
    runs = [make("model=rfa"), make("model=transformer"), make("model=rfa", "trainer=cpu"), make("seed=1")]
    assert formats(runs, [], FLOORS, BENCH) == formats(runs[::-1], [], FLOORS, BENCH)


def test_the_csv_has_every_cell_and_floor(make: Make) -> None:
    text = formats([make("model=transformer"), make("model=rfa", accuracy=0.5)], [], FLOORS, BENCH)["csv"]
    lines = csv.DictReader(text.splitlines())
    found = {line["row"]: line for line in lines if line["task"] == "listops"}
    assert found["rfa"]["accuracy"] == "0.5"
    assert found["rfa"]["accuracy_paper"] == "0.3715"
    assert found["rfa"]["raced_time"] == "0.1"
    assert found["floor: root operator"]["accuracy"] == "0.39"


def test_the_json_has_the_ids_of_the_runs(make: Make) -> None:
    run = make("model=rfa")
    tree = json.loads(formats([run], ["a problem"], FLOORS, BENCH)["json"])
    (listops,) = (column for column in tree["tables"][0]["columns"] if column["task"] == "listops")
    assert listops["cells"]["rfa"]["runs"] == [run.run_id]
    assert tree["left_out"] == ["a problem"]


def test_tex_has_its_special_characters_escaped(make: Make) -> None:
    text = formats([make("model=rfa", "model.attention.features=64")], [], FLOORS, None)["tex"]
    assert r"macformer\_exp & - & 1.057 & - & 2.564 & - & - & 38.36 \dag{} & -" in text
    assert r"rfa (attention.features=64) & - & - & - & - & 37.00 (n=1) \dag{} & 34.91 to 39.14" in text
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    assert not re.search(r"(?<!\\)[%_#$~^](?!\\pm)", text.partition("\n")[2].replace(r"$\pm$", ""))
    assert {line.count("&") for line in text.splitlines() if r"\\" in line} == {8}
    assert table.tex("50% **a_b** {x} $y *z* \\") == r"50\% \textbf{a\_b} \{x\} \$y \textit{z} \textbackslash{}"


def committed_records(folder: str = "results") -> list[records.Record]:
    """Those of LRA."""
    found = map(records.read, committed(f"{folder}/runs"))
    return [record for record in found if isinstance(record, records.Record)]


@pytest.mark.parametrize("ending", ["md", "tex", "csv", "json"])
def test_the_committed_tables_are_those_that_the_records_give(ending: str) -> None:
    text = formats(committed_records(), [], cells.floors(), cells.bench(), papers=True)[ending]
    file = ROOT / "results" / "tables" / f"table2.{ending}"
    assert file.read_text() == text, "run `make table` and commit what it writes"


def test_the_table_in_the_readme_is_the_committed_one() -> None:
    text = (ROOT / "results" / "tables" / "table2.md").read_text()
    assert text in (ROOT / "README.md").read_text(), "run `make table`: it writes the table into the README"


def test_the_committed_settings_are_those_that_the_records_give() -> None:
    found = committed_records("results/ablations")
    text = table.settings(cells.tables(found, cells.floors(), cells.bench()), found, [])
    file = ROOT / "results" / "ablations" / "tables" / "settings.md"
    assert file.read_text() == text, "run `make table` and commit what it writes"
    assert text in (ROOT / "README.md").read_text(), "run `make table`: it writes the table into the README"
