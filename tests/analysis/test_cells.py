"""Columns of a run's tables: what could not be read becomes a remark."""

from dataclasses import replace

import numpy as np

from lightning_rlprof.analysis.cells import read
from lightning_rlprof.table import Column, ColumnRows, Table
from tests.analysis.scripted import Script, play


def test_rows_that_a_loader_left_out_are_a_remark_of_whoever_reads_the_table() -> None:
    note = "3 kernels: fine; 1721 rows are left out: their times are wrong"
    table = Table("kernels", (Column("rank", "count"),), ColumnRows([np.zeros(2)]), note=note)
    spans = replace(play(Script(ranks=1, steps=1), 1).spans, tables={"kernels": lambda: table})
    remarks: list[str] = []
    assert read(spans, "kernels", remarks) is table
    assert remarks == [
        "The table kernels is not whole: 1721 rows are left out: their times are wrong."
    ]
