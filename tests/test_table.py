import json

import pytest

from lightning_rlprof.table import Column, Table

COLUMNS = (Column("stage", "text"), Column("total", "duration", "ns"))


def test_to_dict_is_json_with_units_and_the_reason_to_abstain() -> None:
    data = Table("stages", COLUMNS, [("a", 2**60), (None, 3)], "a note", "no steps").to_dict()

    assert json.loads(json.dumps(data)) == {
        "name": "stages",
        "columns": [
            {"name": "stage", "kind": "text", "unit": ""},
            {"name": "total", "kind": "duration", "unit": "ns"},
        ],
        "rows": [["a", 2**60], [None, 3]],
        "note": "a note",
        "abstained": "no steps",
    }


def test_column_returns_cells_and_names_the_columns_there_are() -> None:
    table = Table("stages", COLUMNS, [("a", 1), ("b", 2)])

    assert table.column("total") == [1, 2]
    with pytest.raises(KeyError, match="table stages has no column 'mean', only stage, total"):
        table.column("mean")


def test_a_row_must_fit_under_the_columns() -> None:
    with pytest.raises(ValueError, match=r"table stages: row \('a',\) has 1 cells for 2 columns"):
        Table("stages", COLUMNS, [("a",)])
