"""The README's commands are the Makefile's and the programs' commands, and its tree is the tree."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from macformer.harness.run import run
from macformer.kernels import KERNELS, Kernel
from tests.conftest import ROOT, Compose
from tests.unit import test_features, test_kernels, test_linear

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
DOCUMENTS = README + (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "docs" / "protocol.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
DATA_COMMANDS = sorted(set(re.findall(r"python -m lra_data (\w+)", DOCUMENTS)))
COMMANDS = sorted(set(re.findall(r"python train\.py (.+?)(?:`|  #|$)", DOCUMENTS, re.MULTILINE)))


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
    assert overrides or command in ("--help", "-cn translate")
    root = "translate" if command.startswith("-cn translate") else "train"
    for override in overrides:
        key, _, values = override.partition("=")
        for value in values.split(","):
            others = (other for other in overrides if other != override and "," not in other)
            composed(*others, f"{key}={value}", root=root)


def test_every_data_command_is_one() -> None:
    told = subprocess.run([sys.executable, "-m", "lra_data", "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    assert {"prepare", "doctor", "show"} == set(DATA_COMMANDS)
    assert all(f"    {command} " in told for command in DATA_COMMANDS)


def test_the_example_trains_a_model_of_ones_own() -> None:
    (code,) = re.findall(r"^```python\n(.+?)^```", README, re.DOTALL | re.MULTILINE)
    scope: dict = {}
    exec(code, scope)
    assert scope["losses"][0] > 1.9  # about log 8
    assert scope["losses"][-1] < 0.2


def test_the_example_of_a_kernel_is_all_that_a_kernel_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cell: Compose
) -> None:
    """One entry and one YAML: it trains, and the tests of kernels, features and attention hold for it."""
    entry, name, yaml = (
        textwrap.dedent(re.search(pattern, README, re.DOTALL)[1])
        for pattern in (
            r"  ```python\n(.+?)  ```",
            r"`configs/model/(\w+)\.yaml`:\n\n  ```yaml",
            r"  ```yaml\n(.+?)  ```",
        )
    )
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "configs" / "model" / f"{name}.yaml").write_text(yaml)
    kernels = dict(KERNELS)
    exec(entry, {"KERNELS": kernels, "Kernel": Kernel})
    (kernel,) = kernels.keys() - KERNELS.keys()
    monkeypatch.setitem(KERNELS, kernel, kernels[kernel])

    config = cell("listops", "macformer_exp")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path / "configs"), version_base="1.3"):
        config.model = compose("train", [f"model={name}"]).model
    record = run(config, [])
    assert record.status == "ok"
    assert record.model == name

    test_kernels.test_series_is_the_closed_form(kernel)
    test_kernels.test_coefficients_are_not_negative_and_never_overflow(kernel)
    test_kernels.test_the_series_converges_inside_the_radius_and_not_outside(kernel)
    test_features.test_maclaurin_is_unbiased(kernel, "paper", 2.0)
    test_features.test_exact01_is_unbiased_over_draws(kernel, 24)
    test_linear.test_rmfa_is_the_plain_map_with_the_same_draw(kernel, "paper", masked=True)


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
