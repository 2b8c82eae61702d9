"""The README's commands are the Makefile's and the programs' commands, and its tree is the tree."""

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from macformer.harness import record as records
from macformer.kernels import KERNELS, find
from macformer.model import MultiHead
from tests.conftest import ROOT, Compose
from tests.test_cli import paths, program
from tests.unit import test_features, test_kernels, test_linear

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
DOCUMENTS = README + (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "docs" / "protocol.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
DATA_COMMANDS = sorted(set(re.findall(r"python -m lra_data (\w+)", DOCUMENTS)))
COMMANDS = sorted(set(re.findall(r"python train\.py (?!--config-dir)(.+?)(?:`|  #|$)", DOCUMENTS, re.MULTILINE)))


def test_every_make_command_is_a_target() -> None:
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", DOCUMENTS, re.MULTILINE))
    assert {"quickstart", "test", "table"} <= {a or b for a, b in named} <= TARGETS


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test\n" in README
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(["make", "-s", "help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert set(re.findall(r"^make ([a-z-]+) +\S", listed, re.MULTILINE)) == set(phony[1].split()) == TARGETS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_training_command_composes(command: str, composed: Compose) -> None:
    overrides = [word for word in shlex.split(command) if "=" in word]
    assert overrides or command == "--help"
    for override in overrides:
        key, _, values = override.partition("=")
        for value in values.split(","):
            others = (other for other in overrides if other != override and "," not in other)
            composed(*others, f"{key}={value}")


def test_every_data_command_is_one() -> None:
    told = subprocess.run([sys.executable, "-m", "lra_data", "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    assert {"prepare", "doctor", "show"} == set(DATA_COMMANDS)
    assert all(f"    {command} " in told for command in DATA_COMMANDS)


def test_the_example_trains_a_model_of_ones_own() -> None:
    code, *_ = re.findall(r"^```python\n(.+?)^```", README, re.DOTALL | re.MULTILINE)
    scope: dict = {}
    exec(code, scope)
    assert scope["losses"][0] > 1.9  # about log 8
    assert scope["losses"][-1] < 0.2


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with exactly the files that the README names for a kernel, an attention and a task of one's own."""
    folder = tmp_path_factory.mktemp("own")
    files = re.findall(r"^```(?:python|yaml)\n# (mine/\S+)\n(.+?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(files) == 6
    for name, content in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder / "mine"


def test_a_kernel_an_attention_and_a_task_of_ones_own_train_and_are_in_the_table(mine: Path, tmp_path: Path) -> None:
    (command,) = re.findall(r"^PYTHONPATH=mine python train.py --config-dir mine (.+)$", README, re.MULTILINE)
    words = ["train.py", "--config-dir", str(mine), *shlex.split(command), "trainer=smoke", *paths(tmp_path)]
    done = program(*words, PYTHONPATH=os.pathsep.join([str(mine), str(ROOT)]))
    assert done.returncode == 0, done.stderr
    ran = [records.read(file) for file in (tmp_path / "results").rglob("*.json")]
    assert {(record.task, record.model) for record in ran} == {
        ("first_symbol", "macformer_inv2"),
        ("first_symbol", "average"),
    }
    assert all((record.status, record.steps_done) == ("ok", 10) for record in ran)
    table = program("scripts/table.py", str(tmp_path / "results"), PYTHONPATH=str(ROOT)).stdout
    assert all(re.search(rf"^\| {model} +\|", table, re.MULTILINE) for model in ("macformer_inv2", "average")), table


def test_the_tests_of_kernels_hold_for_one_of_ones_own(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine)
    monkeypatch.setitem(KERNELS, "inv2", find("my_kernels.inv2"))
    test_kernels.test_series_is_the_closed_form("inv2")
    test_kernels.test_coefficients_are_not_negative_and_never_overflow("inv2")
    test_kernels.test_the_series_converges_inside_the_radius_and_not_outside("inv2")
    test_features.test_maclaurin_is_unbiased("inv2", "paper", 2.0)
    test_features.test_exact01_is_unbiased_over_draws("inv2", 24)
    test_linear.test_rmfa_is_the_plain_map_with_the_same_draw("inv2", "paper", masked=True)


def test_an_attention_without_a_causal_form_says_so(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine)
    average, x = importlib.import_module("average").AverageAttention, torch.randn(1, 5, 8)
    assert MultiHead(8, 2, 4, average, None, None)(x, x, None).shape == (1, 5, 8)
    says = r"^direction=causal needs an argument `causal`, which the forward of AverageAttention does not have$"
    with pytest.raises(ValueError, match=says):
        MultiHead(8, 2, 4, average, None, None, "causal")


def test_the_floors_are_those_of_the_file() -> None:
    """Others may stand there, too: of stand-ins, or of shortened data."""
    floors = json.loads((ROOT / "results" / "floors.json").read_text())["floors"]
    whole = [floor for floor in floors if floor["source"] != "stand-in" and floor["whole"]]
    cells = {(floor["task"], floor["protocol"]) for floor in whole}
    assert cells >= set(itertools.product(("listops", "text"), ("paper", "clean")))
    for floor in whole:
        rows = re.findall(rf"^\| {floor['task']}.*`protocol={floor['protocol']}`.*$", README, re.MULTILINE)
        figures = re.findall(r"\d+\.\d+", rows[0])
        both = zip(floor["dev_accuracy"].values(), floor["test_accuracy"].values(), strict=True)
        assert [f"{100 * accuracy:.2f}" for accuracy in itertools.chain(*both)] == figures


def test_the_tree_names_what_is_there() -> None:
    tree = re.search(r"## The tree\n\n```\n(.+?)```", README, re.DOTALL)
    assert tree
    folder, named = "", set()
    for line in tree[1].splitlines():
        inner, name = line.startswith("  "), line.split()[0]
        named.add(folder + name if inner else name)
        folder = folder if inner else name
    for name in named:
        assert (ROOT / name).exists(), name
    code = {
        str(file.relative_to(ROOT))
        for part in ("macformer", "lra_data", "scripts")
        for file in (ROOT / part).glob("*.py")
    }
    assert code - named <= {"macformer/__init__.py", "lra_data/__init__.py"}
