"""The tables of a fixed set of records, byte for byte."""

import pytest

from tests.golden.tables import FOLDER, golden_tables


@pytest.mark.parametrize("order", [1, -1])
def test_the_tables_are_the_golden_ones_whatever_the_order_of_the_records(order: int) -> None:
    golden = {file.name: file.read_text() for file in FOLDER.glob("table2.*")}
    assert golden_tables(order) == golden, "run `make golden` if the change is meant"
