"""The tables of a fixed set of records, byte for byte."""

import pytest

from tests.golden.tables import FOLDER, golden_tables


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return golden_tables()


@pytest.mark.parametrize("name", ["table2.md", "table2.tex", "table2.csv", "table2.json"])
def test_the_tables_are_the_golden_ones(name: str, made: dict[str, str]) -> None:
    assert made[name] == (FOLDER / name).read_text(), "run `make golden` if the change is meant"
