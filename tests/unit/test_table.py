"""Records to Table 2: what may share a table, ratios, what is bold, floors, empty cells with their command."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from macformer.harness import record as records
from macformer.harness.record import Record
from macformer.report import cells, statistics, table
from tests.conftest import ROOT, committed
from tests.golden.tables import BENCH, FLOORS
from tests.made_up import changed, make

ACCURACY, PAPER, P = 4, 6, 8  # without raced columns
SESSION = records.Session(began="", first_step=1, commit="a" * 40, device_name="Test CPU", concurrent=0)
MOVED = SESSION.model_copy(update={"device_name": "A100"})
LISTOPS: dict[str, Any] = FLOORS[0]


def render(found: list[Record], floors: Any = (), bench: Any = None, problems: Any = ()) -> str:
    return table.markdown(cells.tables(found, list(floors), bench), found, list(problems))


def row(text: str, name: str, task: str = "listops") -> list[str]:
    """The cells of a row in the first table of a task."""
    (block,) = re.findall(rf"^\| {task} .+\n(?:\|.+\n?)+", text, re.MULTILINE)[:1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    (found,) = (each[1:] for each in rows if each[0] == name)
    return found


def titles(text: str) -> list[str]:
    """Of each table, without line breaks."""
    return [part.partition("**")[0].replace("\n", " ") for part in text.split("**Table 2")[1:]]


def three(model: str, accuracy: float, spread: float = 0.004, seeds: int = 3) -> list[Record]:
    """Runs of a model, their accuracies `spread` apart."""
    return [make(f"{model} seed={s}", accuracy + spread * (s - (seeds - 1) / 2)) for s in range(seeds)]


def test_the_papers_protocol_comes_first_even_if_nobody_ran_it_and_whatever_the_machine() -> None:
    """Tables are sorted by machine; a changed task is not among what is sorted by before it."""
    short, full = make("rfa task.data.length=1024"), changed(make("rfa"), "environment", device_name="ZZ GPU")
    none, no, yes = "the paper's protocol: no runs yet", "NOT the paper's protocol", "the paper's protocol, on ZZ GPU"
    for runs, papers, expected in (
        ([], False, [none]),
        ([short], False, [no]),
        ([short], True, [none, no]),
        ([short, full], False, [yes, no]),
        ([short, full], True, [yes, no]),
    ):
        found = [table.title(each) for each in cells.tables(runs, FLOORS, BENCH, papers=papers)]
        assert all(says in title for says, title in zip(expected, found, strict=True))


def test_tasks_that_are_changed_stand_side_by_side_and_not_beside_the_papers() -> None:
    """In the paper's order, if the same words made them; where they run and go does not matter."""
    grid = [make(f"rfa task={task} trainer=cpu") for task in ("retrieval", "text")]
    grid.append(make("rfa task=listops experiment=table2 trainer=cpu sweep=joblib paths.data=x"))
    grid.append(changed(make("rfa task=text trainer=cpu seed=1"), "data", fingerprint="g"))  # of a column of its own
    shorter = make("rfa task=text trainer=cpu task.data.length=250 task.data.max_length=250")
    made = cells.tables([*grid, make("rfa task=text"), shorter], [], None)
    shown = [[column.task for column in each.columns for _ in column.runs] for each in made]
    assert shown == [["text"], ["text"], ["text", "listops", "retrieval"], ["text"]]
    assert [column.task for column in made[3].columns] == ["text"]  # none without runs
    assert "text data.length = 250 (paper: 4096)" in made[1].conditions
    assert "text data.length = 256 (paper: 4096)" in made[2].conditions


@pytest.mark.parametrize(
    ("words", "name", "accuracy"),
    [
        ("rfa protocol=clean model.pooling=padded", "rfa (pooling=padded)", "50.00 (n=1)"),  # even if it is the paper's
        ("rfa model.attention.features=64", "rfa (attention.features=64)", "50.00 (n=1)"),
        ("macformer_exp model.post_sbn=null", "macformer_exp (post_sbn=None)", "50.00 (n=1)"),
        ("transformer_sdpa", "transformer_sdpa", "50.00 (n=1)"),
        ("rfa protocol.text_dev=held-out", "rfa", "37.00 (n=1)"),  # of the same seed: not two seeds
    ],
)
def test_a_changed_model_is_its_own_row(words: str, name: str, accuracy: str) -> None:
    text = render([make("rfa protocol=clean" if "clean" in words else "rfa"), make(words, 0.5)])
    assert text.count("**Table 2") == 1
    assert row(text, "rfa")[ACCURACY] == "37.00 (n=1)"
    assert row(text, name)[ACCURACY] == accuracy


def test_what_the_release_computes_stands_beside_the_papers_value_which_counts_once() -> None:
    words = {"macformer_exp (direction=causal)": "macformer_exp model.direction=causal"}
    words |= {"macformer_inv_released": "macformer_inv_released", "macformer_exp": "macformer_exp"}
    text = render([make(each, 0.37) for each in words.values()], cells.floors())
    for name in words:
        paper = cells.PAPER["accuracy"]["listops"][name.partition(" ")[0].removesuffix("_released")]
        assert row(text, name)[PAPER] == f"{paper:.2f} † ({37 - paper:+.2f})"
    assert re.search(r"the paper's accuracies marked † [^;]*\b7 of 7 on listops", " ".join(text.split()))
    assert re.search(r"^\| macformer_exp .+\n\| macformer_exp \(direction=causal\) ", text, re.MULTILINE)


def test_models_and_tasks_of_ones_own_need_no_list() -> None:
    """Records of a model and a task that no YAML of ours knows: they follow the paper's, beside the majority class."""

    def renamed(run: Record, seed: int, accuracy: float, **names: str) -> Record:
        tree = json.loads(make(f"{run.model} seed={seed}", accuracy).model_dump_json()) | names
        for group, name in names.items():
            tree["config"][group]["name"] = name
        return Record.model_validate(tree | {"run_id": f"{tree['task']}.{tree['model']}.{seed}"})

    base = make("rfa")
    found = [renamed(base, seed, 0.5, model=model) for seed in range(2) for model in ("mine", "another")]
    found += [renamed(base, seed, 0.5, model="mine", task="toy") for seed in range(2)]
    found += [renamed(make("transformer"), seed, 0.16 + 0.02 * seed, task="toy") for seed in range(2)]
    (made,) = cells.tables(found, FLOORS, BENCH)
    assert [column.task for column in made.columns] == [*cells.TASKS, "toy"]
    assert list(made.columns[1].cells) == [*cells.MODELS, "another", "mine", "transformer_sdpa"]
    text = render(found, FLOORS, BENCH)
    assert row(text, "mine", "toy")[:5] == ["1.000 ± 0.000", "-", "1.000 ± 0.000", "-", "**50.00 ± 0.00 (n=2)**"]
    assert row(text, "transformer", "toy")[ACCURACY].endswith("(n=2) †")
    assert row(text, "floor: majority", "toy")[ACCURACY] == "17.00"
    assert ",toy,mine,mine,0 1," in table.to_csv([made])


def test_a_gap_is_told_where_the_task_is_the_papers_and_named_beyond_the_noise_of_both_test_sets() -> None:
    """Newcombe's interval, by hand: 37% of ours is 34.91 to 39.14, the paper's 38.36% and 37.15% of as many."""
    text = render([make("macformer_exp"), make("rfa", 0.5)])
    assert row(text, "rfa")[PAPER] == "37.15 (+12.85)"
    gaps = ": rfa +12.85 (+9.79 to +15.88), macformer_exp -1.36 (-4.35 to +1.65); beyond that noise: rfa.\n"
    assert gaps in text.partition("listops: accuracy minus the paper's, ")[2]
    assert row(render([make("rfa trainer.steps=100")]), "rfa")[PAPER] == "37.15 (-0.15)"
    other_task = render([make("rfa task.data.length=1024")])
    assert row(other_task, "rfa")[PAPER] == "37.15"
    assert "accuracy minus the paper's" not in other_task


def settings(runs: list[Record], *problems: str) -> tuple[list[str], list[list[str]]]:
    """The lines of such a table, and the cells of its rows."""
    lines = table.settings(cells.tables(runs, FLOORS, BENCH), runs, list(problems)).splitlines()
    return lines, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| rfa")]


def test_settings_stand_in_one_table_with_what_sets_them_apart_if_a_run_finished() -> None:
    runs = [make("rfa pad=trim", 0.5, seconds=90.0), make("rfa pad=trim seed=1", 0.6)]
    runs += [make("rfa pad=trim protocol.pooling=masked", 0.38)]
    runs += [make("rfa pad=trim trainer.learning_rate=0.01 model.attention.features=64", 0.3)]
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
    lines, rows = settings([make("rfa", status="oom")])
    assert (lines[0], rows) == ("**Settings side by side: no runs yet**", [])
    assert any(" ended as oom" in line for line in lines)


def test_settings_of_several_tasks_and_machines() -> None:
    """Each task has its own table, in the paper's order; a task's own changes do not stand in another's rows."""
    listops = [make("rfa trainer=cpu task.learning_rate=0.01"), make("rfa trainer=cpu")]
    fast = changed(listops[0], "environment", device_name="Fast CPU")
    lines, rows = settings([*listops, fast, make("rfa trainer=cpu task=text")])
    heads = [line for line in lines if line.startswith("**")]
    assert [head.partition(":")[0] for head in heads] == ["**text", "**listops"]
    assert "text" not in heads[1]
    assert "listops data.length = 152 (paper: 2048)" in heads[1]
    assert rows[0][1] == "-"
    machine = "(1 thread, float32, torch 2)"
    assert sorted(each[1] for each in rows[1:]) == [
        f"listops learning_rate = 0.001; on Test CPU {machine}",
        f"listops learning_rate = 0.01; on Fast CPU {machine}",
        f"listops learning_rate = 0.01; on Test CPU {machine}",
    ]
    assert f"- {TEST_AS_DEV}" in lines


def taken_up_again() -> list[Record]:
    one, two = make("rfa").model_copy(update={"sessions": [SESSION, SESSION]}), make("rfa seed=1")
    return [one, two.model_copy(update={"code": records.Code(commit="a" * 40, dirty=True)})]


def same_outcomes() -> list[Record]:
    exp = make("macformer_exp")
    return [exp, make("macformer_trigh").model_copy(update={"quality": exp.quality})]


def took() -> list[Record]:
    linear = [make("rfa", seconds=90.0, peak=2**30), make("macformer_exp", seconds=60.0, peak=2**20)]
    return [make("transformer", seconds=120.0, peak=2**20), *linear]


def tied() -> list[Record]:
    return [make(f"{model} seed={s}", share) for model, share in (("transformer", 0.40), ("rfa", 0.45)) for s in (0, 1)]


TEST_AS_DEV = "text: dev is the test split, as in the base code: the weights were chosen on test examples."
BESIDE = "listops: 1 of 2 runs had others beside them: their times are no race."
TWINS = "WARNING: macformer_exp and macformer_trigh are the same model, but have other outcomes at seed 0"


@pytest.mark.parametrize(
    ("runs", "says", "is_told"),
    [
        (lambda: [make("rfa task=text")], TEST_AS_DEV, True),
        (lambda: [make("rfa task=text protocol=clean")], TEST_AS_DEV, False),
        (lambda: [make("rfa"), make("rfa seed=1", concurrent=1)], BESIDE, True),
        (lambda: [make("rfa")], "beside them", False),
        (taken_up_again, "listops: 1 of 2 runs were stopped and taken up again", True),
        (taken_up_again, "listops: the runs are of several commits: None, aaaaaaaa with changes", True),
        (lambda: [make("macformer_exp"), make("macformer_trigh")], TWINS, True),
        (same_outcomes, "WARNING", False),
        (lambda: took()[1:], "2,000 examples; rfa took 1:30 and 1,024 MiB, macformer_exp took 1:00 and 1 MiB.", True),
        (took, "2,000 examples; the Transformer took 2:00 and 1 MiB.", True),
        (lambda: [make("rfa")], "with one seed the interval covers the test set, not the noise of training", True),
        # Seeds that tie do not show that there is no noise, and so support no difference.
        (tied, "no model has two seeds that differ: the noise of training is not known", True),
        (tied, "**Supported:** nothing on accuracy", True),
        (tied, " 45.00 ± 0.00 (n=2) |", True),
    ],
)
def test_what_runs_must_be_read_with_is_told(runs: Any, says: str, is_told: bool) -> None:
    assert (says in render(runs())) == is_told


def test_time_and_memory_are_relative_to_the_transformer() -> None:
    text = render([make("transformer"), make("rfa", 0.4, seconds=5.0, peak=1500)])
    assert "the paper's protocol, on Test CPU (1 thread, float32, torch 2); data: listops generated f" in text
    expected = ["1.000", "1.000 (+0.000)", "1.000", "1.000 (+0.000)", "37.00 (n=1)", "34.91 to 39.14", "37.30 (-0.30)"]
    assert row(text, "transformer") == [*expected, "-", "-"]
    expected = ["0.500", "0.836 (-0.336)", "1.500", "1.360 (+0.140)", "40.00 (n=1)", "37.87 to 42.16", "37.15 (+2.85)"]
    assert row(text, "rfa")[:7] == expected
    assert row(text, "rfa", "text")[:2] == ["-", "0.783"]
    assert "NOT the paper's" not in text
    interval, paper = "34.91 to 39.14", "37.15 (-0.15)"
    alone = ["-", "0.836", "-", "1.360", "37.00 (n=1)", interval, paper, "-", "-"]
    assert row(render([make("rfa")]), "rfa") == alone


def test_time_memory_and_accuracy_are_means_over_seeds() -> None:
    runs = [make(f"transformer seed={s}", seconds=10.0, peak=1000) for s in range(2)]
    runs += [make(f"rfa seed={s}", 0.3 + 0.1 * s, seconds=4.0 + s, peak=500 + 100 * s) for s in range(3)]
    time, _, memory, _, accuracy, *_ = row(render(runs), "rfa")
    assert (time, memory) == ("0.500 ± 0.100", "0.600 ± 0.100")
    assert accuracy == "40.00 ± 10.00 (n=3) †"  # such seeds do not show that it beats the majority's 17%


@pytest.mark.parametrize(
    ("one", "two", "says"),
    [
        ("", "trainer=cpu", "trainer steps = 2000 (paper: 10000)"),
        ("", "protocol=clean", "protocol pooling = masked (paper: padded)"),
        ("", "pad=trim", "pad = trim (paper: full)"),
        ("", "trainer.batch_size=16", "trainer batch_size = 16"),
        ("", "trainer.steps=100", "trainer steps = 100 (paper: 10000)"),
        ("", "task.learning_rate=1e-3", "listops learning_rate = 0.001 (paper: 0.0001)"),
        ("", "task.data.max_length=256", "listops data.max_length = 256 (paper: 2000)"),
        # A key that leaves the one it follows, even if that makes it the paper's again: the rest is not.
        ("protocol=clean", "pad=full", "pad = full (paper: full)"),
        ("task.batch_size=16", "trainer.batch_size=32", "trainer batch_size = 32"),
        ("task.learning_rate=1e-3", "trainer.learning_rate=1e-4", "trainer learning_rate = 0.0001"),
        ("pad=trim", "trainer.pad=full", "trainer pad = full (paper: full)"),
        ("", "~trainer.telemetry", "~trainer.telemetry"),
        ("", "task=text task.learning_rate=1e-3", "NOT the paper's protocol: text learning"),
        ("", lambda run: changed(run, "environment", precision="float16"), "float16"),
        ("", lambda run: changed(run, "environment", device_name="Another CPU"), "on Another CPU (1 thread,"),
        ("", lambda run: changed(run, "environment", threads=2), "2 threads"),
        ("", lambda run: changed(run, "data", fingerprint="g"), "generated g"),
        ("", lambda run: changed(run, "data", source="stand-in"), "protocol: listops on STAND-IN data"),
        ("", lambda run: run.model_copy(update={"sessions": [MOVED, SESSION]}), "on A100 and Test CPU (1 thread"),
    ],
)
def test_other_conditions_make_another_table_whose_title_says_so(one: str, two: Any, says: str) -> None:
    other = two(make("rfa seed=1", 0.9)) if callable(two) else make(f"rfa {one} {two} seed=1", 0.9)
    text = render([make(f"rfa {one}"), other])
    assert text.count("37.00 (n=1)") == text.count("90.00 (n=1)") == 1
    (heading,) = (title for title in titles(text) if says in title)
    changes = heading.partition("NOT the paper's protocol: ")[2].split("; ")
    keys = [change.partition(" = ")[0].rpartition(" ")[2] for change in changes]
    # Each change once, where it comes from: not as the trainer's and the task's.
    assert one or len(keys) == len(set(keys))
    differ = (not callable(two) or "protocol" in says) + bool(one)
    assert text.count("NOT the paper's protocol") == text.count("not the paper's.** The full one") == differ


OTHERS = ",".join(model for model in cells.MODELS if model != "rfa")
SMALL = "task.data.examples={train:64,dev:8,test:8}"
MOVED_DATA, PLACES = "paths.listops=/lra paths.data=/packed", "seed=1 paths.listops=..."


@pytest.mark.parametrize(
    ("runs", "model", "words"),
    [
        # A changed row does not break the command; what the shell would read is quoted.
        ([f"rfa model.attention.features=64 {SMALL}"], ",".join(cells.MODELS), f"seed=0 {SMALL}"),
        # It has the conditions of the table.
        (["rfa trainer=cpu seed=4 task.learning_rate=1e-3"], OTHERS, "seed=4 trainer=cpu task.learning_rate=1e-3"),
        # Seeds that a model lacks; where the data are is yours to say.
        ([f"{each} {MOVED_DATA}" for each in ("transformer", "transformer seed=1", "rfa")], "rfa", PLACES),
    ],
)
def test_commands_fill_the_empty_cells(runs: list[str], model: str, words: str) -> None:
    text = render([make(each) for each in runs])
    commands = [shlex.split(each) for each in re.findall("to fill the empty cells of listops: `(.+)`", text)]
    assert ["python", "train.py", "-m", f"model={model}", "task=listops", *words.split()] in commands
    assert "/lra" not in text


def test_a_clear_difference_is_bold_and_named() -> None:
    found = three("transformer", 0.40) + three("rfa", 0.47) + three("macformer_exp", 0.34)
    text = render([*found, *three("macformer_log", 0.401)])
    assert row(text, "rfa")[ACCURACY] == "**47.00 ± 0.40 (n=3)**"
    assert row(text, "macformer_exp")[ACCURACY] == "*34.00 ± 0.40 (n=3)*"
    assert row(text, "macformer_log")[ACCURACY] == "40.10 ± 0.40 (n=3)"
    said = text[text.index("**Supported:**") :].splitlines()[:2]
    assert re.match(r"\*\*Supported:\*\* on listops rfa is better than the Transformer by 7.00 points", said[0])
    assert "on listops macformer_exp is worse than the Transformer by 6.00 points" in said[0]
    assert "macformer_log" not in said[0]
    assert said[1] == "**Not supported:** the difference from the Transformer in 1 other cell."


@pytest.mark.parametrize("few", ["transformer", "rfa"])
def test_with_one_seed_nothing_is_bold(few: str) -> None:
    """However small p is: the spread of the other's seeds is small."""
    accuracies = {"transformer": 0.2, "rfa": 0.8}
    text = render([run for model, a in accuracies.items() for run in three(model, a, seeds=1 if model == few else 3)])
    assert float(row(text, "rfa")[P]) < 0.001
    assert row(text, "rfa")[ACCURACY].startswith("80.00")
    assert "the difference from the Transformer in 1 cell (1 of them with one seed, which supports none)" in text


def test_a_difference_below_the_noise_floor_is_not_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The A/A pair varies by 8 points from seed to seed: 7 points say nothing, whatever p is."""
    monkeypatch.setattr(statistics, "REPLICATES", 1999)
    clear = three("transformer", 0.40) + three("rfa", 0.47)
    for model in ("macformer_log", "macformer_inv", "macformer_sqrt", "transformer_sdpa"):
        clear += three(model, 0.40)
    noisy = [make(f"{twin} seed={s}", a) for twin in statistics.TWINS for s, a in enumerate((0.33, 0.41))]
    assert row(render(clear), "rfa")[ACCURACY].startswith("**")
    text = render(clear + noisy)
    assert float(row(text, "rfa")[P]) < 0.05
    assert row(text, "rfa")[ACCURACY] == "47.00 ± 0.40 (n=3)"
    twins = "macformer_exp at one seed minus macformer_trigh at another"
    assert re.search(f"the noise floor is 8.00 points.+{twins}.+ 8.00, at most 8.00, in 2 pairs", text)


def test_several_comparisons_are_corrected() -> None:
    accuracies = {"transformer": 0.4, "rfa": 0.45} | dict.fromkeys(cells.MODELS[2:5], 0.4)
    (made,) = cells.tables([run for model, share in accuracies.items() for run in three(model, share)], [], None)
    ((rfa, versus),) = [(cell, cell.versus) for _, cell in made.cells if cell.row == "rfa" and cell.versus]
    assert versus.p < 0.05
    assert rfa.p_holm == pytest.approx(4 * versus.p)


def test_a_cell_that_does_not_beat_its_floor_is_marked() -> None:
    """The floor is 39%; 40% of 2,000 examples is above it, but not its interval."""
    text = render([make("transformer", 0.42), make("rfa", 0.40)], FLOORS)
    assert row(text, "transformer")[ACCURACY] == "42.00 (n=1)"
    assert row(text, "rfa")[ACCURACY] == "40.00 (n=1) †"
    assert row(text, "transformer")[PAPER] == "37.30 † (+4.70)"
    assert row(text, "floor: root operator")[ACCURACY] == "39.00"
    assert "that our accuracies marked † take more than a cheap predictor (1 of 2 on listops)" in text
    assert "that the paper's accuracies marked † take more than a cheap predictor (7 of 7 on listops)" in text
    assert "†" not in row(text, "rfa", "text")[PAPER]  # nobody measured a floor there


OF_OTHER_DATA = LISTOPS | {"fingerprint": "g"}
SHORTENED = OF_OTHER_DATA | {"whole": False, "train_examples": 10**6, "test_accuracy": {"majority": 0.9}}


@pytest.mark.parametrize(
    ("floors", "paper", "floor"),
    [
        ([LISTOPS, SHORTENED], "37.15 † (-0.15)", "39.00"),  # whatever the number of its examples
        ([SHORTENED], "37.15 (-0.15)", None),
        ([OF_OTHER_DATA], "37.15 † (-0.15)", None),
        ([OF_OTHER_DATA | {"protocol": "clean"}], "37.15 (-0.15)", None),
    ],
)
def test_floors_count_for_their_data_those_of_whole_data_for_the_paper_and_else_the_majority(
    floors: list[dict[str, Any]], paper: str, floor: str | None
) -> None:
    text = render([make("rfa"), make("macformer_exp", 0.18)], floors)
    assert row(text, "rfa")[ACCURACY] == ("37.00 (n=1) †" if floor else "37.00 (n=1)")
    assert row(text, "macformer_exp")[ACCURACY] == "18.00 (n=1) †"
    assert row(text, "rfa")[PAPER] == paper
    assert row(text, "floor: majority")[ACCURACY] == "17.00"
    assert ("floor: root operator" in text) == bool(floor)


ARMS = {name: arm for name, arm in BENCH["results"][0]["arms"].items() if name != "transformer"}
NO_BASELINE = BENCH | {"results": [BENCH["results"][0] | {"arms": ARMS}]}
ELSEWHERE = BENCH | {"environment": BENCH["environment"] | {"device_name": "Another CPU"}}


@pytest.mark.parametrize(
    ("runs", "bench", "shown"),
    [
        (["rfa"], BENCH, True),
        ([], ELSEWHERE, True),  # there is no other
        (["rfa"], ELSEWHERE, False),
        (["rfa"], NO_BASELINE, False),
        *(([f"rfa {key}"], BENCH, False) for key in ("pad=trim", "bucket=true", "trainer.batch_size=8")),
        *(([f"rfa {key}"], BENCH, False) for key in ("task.data.max_length=100", "trainer.accumulate=4")),
    ],
)
def test_only_a_race_at_the_same_batches_on_the_same_machine_is_shown(runs: list[str], bench: Any, shown: bool) -> None:
    text = render([make(words) for words in runs], bench=bench)
    assert ("time, raced" in text) == shown
    told = shown or bench is NO_BASELINE
    assert ("- raced: listops-full is without macformer_exp: too large.\n" in text) == told


NOT_A_RECORD = "is not a run record of schema 3: "
# The name of a file -> what is changed in a whole record, or is in its place, and what is said of it.
SPOILT: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "old": ({"schema_version": 1}, "has schema 1, and schema 3 is read here: run it anew"),
    "tampered": ({"quality.test_accuracy": 0.95}, f"{NOT_A_RECORD}quality .+its test outcomes do not have its"),
    "short": ({"quality.test_examples": 2008}, f"{NOT_A_RECORD}quality .+2000 test outcomes for 2008 examples"),
    "other": ({"data.examples": {"train": 1, "dev": 1, "test": 1}}, f"{NOT_A_RECORD}.*not tested on as many examples"),
    "no_time": ({"time": None}, f"{NOT_A_RECORD}.*it is ok, but lacks quality, time or memory"),
    "fast": ({"time.train_seconds": 0.0}, f"{NOT_A_RECORD}time.train_seconds"),
    "renamed": ({"model": "transformer"}, f"{NOT_A_RECORD}.*task, model or seed are not those of the configuration"),
    "bare": ({"config": {}}, f"{NOT_A_RECORD}.*its configuration has no task, model or seed"),
    "truncated": (b'{"schema_version": 3, "run_id": "lis', NOT_A_RECORD),
    "binary": (b"\xff\x00\x01", NOT_A_RECORD),
    "list": (b"[]", f"{NOT_A_RECORD}.*should be an object"),
}


def test_bad_files_are_named_and_left_out_and_the_rest_comes(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs" / "listops", make("rfa seed=1", 0.9).model_dump_json()
    for record in (make("rfa"), make("transformer", status="oom")):
        records.write(record, runs / record.model / f"{record.run_id}.json")
    for name, (change, _) in SPOILT.items():
        tree = json.loads(other)
        for key, value in change.items() if isinstance(change, dict) else ():
            part, _, leaf = key.rpartition(".")
            (tree[part] if part else tree)[leaf] = value
        (runs / f"{name}.json").write_bytes(change if isinstance(change, bytes) else json.dumps(tree).encode())
    (runs / "translation.json").write_text(json.dumps({"kind": "translation"}))  # no problem, only another kind
    found, problems = cells.load(tmp_path)
    text = render(found, problems=problems)
    left_out = text.partition("**Files left out**")[2]
    for name, (_, why) in SPOILT.items():
        assert re.search(rf"^- runs/listops/{name}.json {why}", left_out, re.MULTILINE), name
    assert len(problems) == len(SPOILT)
    assert "ended as oom: why it failed" in text
    assert row(text, "rfa")[ACCURACY] == "37.00 (n=1)"
    assert row(text, "transformer")[ACCURACY] == "-"


def committed_records(folder: str = "results") -> list[Record]:
    """Those of LRA."""
    names = {file.stem for file in committed(f"{folder}/runs")}
    return [record for record in cells.load(ROOT / folder)[0] if record.run_id in names]


@pytest.mark.parametrize(("folder", "name"), [("", "table2"), ("ablations", "settings")])
def test_the_committed_tables_are_those_that_the_records_give(folder: str, name: str) -> None:
    found = committed_records(f"results/{folder}".rstrip("/"))
    made = cells.tables(found, cells.floors(), cells.bench(), papers=not folder)
    shown = table.settings(made, found, []) if folder else table.markdown(made, found, [])
    texts = {f"{name}.md": shown} | ({} if folder else {f"{name}.csv": table.to_csv(made)})
    files = {file: (ROOT / "results" / folder / "tables" / file).read_text() for file in texts}
    assert files == texts, "run `make table` and commit what it writes"
    assert shown in (ROOT / "README.md").read_text(), "run `make table`: it writes the table into the README"
