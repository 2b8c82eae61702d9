"""The tables of a fixed set of records, byte for byte."""

from tests.golden.tables import FOLDER, golden_tables


def test_the_tables_are_the_golden_ones() -> None:
    golden = {file.name: file.read_text() for file in FOLDER.glob("table2.*")}
    assert golden_tables() == golden, "run `make golden` if the change is meant"
