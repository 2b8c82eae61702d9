"""The README's commands are the Makefile's and the programs' commands, and its tree is the tree."""

import re
import shlex
import subprocess
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
DOCUMENTS = README + (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "docs" / "protocol.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
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
def test_every_training_command_composes(command: str, composed: Callable[..., DictConfig]) -> None:
    overrides = [word for word in shlex.split(command) if "=" in word]
    assert overrides or command == "--help"
    for override in overrides:
        key, _, values = override.partition("=")
        for value in values.split(","):
            composed(*(other for other in overrides if other != override and "," not in other), f"{key}={value}")


def test_the_python_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    assert scope["out"].shape == (4, 2, 1000, 32)
    assert scope["out"].isfinite().all()


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
