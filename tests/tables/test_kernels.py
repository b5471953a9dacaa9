import dataclasses

import numpy as np
import pytest

from lightning_rlprof.tables.kernels import UNKNOWN, distinct, end_to_end, known
from lightning_rlprof.tables.table import ColumnRows
from tests.builders.kernels import Kernels, kernel_table


def ints(*values):
    return np.array(values, dtype=np.int64)


def kernels():
    return Kernels(
        rank=ints(0, 1),
        device=ints(3, 3),
        stream=ints(7, 13),
        name=(ints(1, 0), ["gemm", "softmax"]),
        start_ns=ints(10, 20),
        end_ns=ints(15, 50),
        stage=(ints(-1, 0), ["actor_update"]),
        step=ints(0, 10**15),
        range=(ints(0, -1), ["micro_batch"]),
    )


def test_one_row_per_kernel_and_none_for_what_is_not_known():
    table = kernel_table(kernels(), remarks=["3 lost"])

    assert [column.name for column in table.columns][:3] == ["rank", "device", "stream"]
    assert list(table.rows) == [
        (0, 3, 7, "softmax", 10, 5, None, None, "micro_batch", *(None,) * 4),
        (1, 3, 13, "gemm", 20, 30, "actor_update", 10**15, None, *(None,) * 4),
    ]
    assert table.note == "3 lost"


def test_a_column_comes_without_making_rows():
    table = kernel_table(kernels())

    assert table.column("duration") == [5, 30]
    assert table.column("stage") == [None, "actor_update"]
    assert table.to_dict()["rows"][1][3] == "gemm"


def test_rows_are_a_sequence():
    rows = kernel_table(kernels()).rows

    assert len(rows) == 2
    assert rows[-1] == rows[1]
    assert rows[5:] == []
    with pytest.raises(IndexError):
        rows[2]


def test_more_rows_than_one_batch_come_in_order():
    rows = ColumnRows([np.arange(70_000)])

    assert [row[0] for row in rows] == list(range(70_000))


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        ColumnRows([ints(1), ints(1, 2)])


def test_numbers_that_are_not_known_read_as_none():
    table = kernel_table(dataclasses.replace(kernels(), stream=ints(UNKNOWN, 13), step=ints(-1, 2)))

    assert table.column("stream") == [None, 13]
    assert table.column("step") == [None, 2]
    assert known(ints(3, 4)).tolist() == [3, 4]


def test_texts_kept_once_read_the_same():
    codes, texts = distinct(ints(), [])

    assert (codes.tolist(), texts) == ([], [])


def test_the_codes_of_many_ranks_are_longer_than_bytes():
    texts = [f"text {at}" for at in range(100)]
    columns = [(np.arange(100, dtype=np.int8), texts), (np.array([99, -1], np.int8), ["a"] * 100)]

    codes, found = end_to_end([*columns, columns[0]])

    assert [found[code] for code in codes[:100]] == texts
    assert found[codes[100]] == "a"
    assert codes[101] == -1
    assert codes[102:].tolist() == codes[:100].tolist()
