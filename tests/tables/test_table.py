"""Columns of a run's tables: what could not be read becomes a remark."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lightning_rlprof.tables.table import Column, ColumnRows, Loss, PartRows, Table, noted
from tests.builders.scripted import Script, play

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


def test_rows_in_parts_are_the_same_rows_and_read_no_more_than_is_asked_for() -> None:
    asked: list[tuple[int, int]] = []

    def read(low: int, high: int) -> ColumnRows:
        asked.append((low, high))
        return ColumnRows([np.arange(low, high), (np.arange(low, high) % 3 - 1, ["a", "b"])])

    whole = read(0, 10)
    table = Table("calls", COLUMNS, PartRows(10, read))
    assert asked == [(0, 10), (0, 0)]

    assert [len(part) for part in table.rows.parts(4)] == [4, 4, 2]
    assert asked[2:] == [(0, 4), (4, 8), (8, 10)]
    assert table.rows[3] == whole[3]
    assert asked[-1] == (3, 4)
    assert (table.rows[2:9], table.rows[8:1:-2]) == (whole[2:9], whole[8:1:-2])
    assert list(table.rows) == list(whole)
    assert table.column("total") == whole.column(1)


def test_rows_that_a_loader_left_out_are_a_remark_of_whoever_reads_the_table() -> None:
    said = noted(["3 kernels: fine", Loss("1721 rows are left out: their times are wrong")])
    table = Table("kernels", (Column("rank", "count"),), ColumnRows([np.zeros(2)]), **said)
    spans = replace(play(Script(ranks=1, steps=1), 1).spans, tables={"kernels": lambda: table})
    remarks: list[str] = []
    assert spans.try_table("kernels", remarks) is table
    assert remarks == [
        "The table kernels is incomplete: 1721 rows are left out: their times are wrong."
    ]


def test_a_table_that_no_profiler_recorded_is_no_remark() -> None:
    spans = play(Script(ranks=1, steps=1), 1).spans
    for recorded, said in ((False, []), (True, ["The table kernels is missing: disk gone."])):
        table = Table("kernels", (), abstained="disk gone", recorded=recorded)
        remarks: list[str] = []
        told = replace(spans, tables={"kernels": lambda table=table: table})
        assert told.try_table("kernels", remarks) is None
        assert remarks == said
