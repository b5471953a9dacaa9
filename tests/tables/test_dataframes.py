import sys
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.table import Column, ColumnRows, Table

COLUMNS = (Column("stage", "text"), Column("total", "duration", "ns"), Column("share", "share"))
ROWS = [("a", 2**62 + 1, 0.5), (None, None, None), ("b", 3, 1.0), ("a", 4, 0.25)]
IN_COLUMNS = ColumnRows(
    [
        (np.array([0, -1, 1, 0]), ["a", "b"]),
        (np.array([1, -1, 0, 2]), [3, 2**62 + 1, 4]),
        np.ma.masked_array([0.5, 0, 1.0, 0.25], mask=[0, 1, 0, 0]),
    ]
)
TABLES = [Table("stages", COLUMNS, ROWS), Table("stages", COLUMNS, IN_COLUMNS)]
FORMS = ("pandas", "polars", "arrow")


@pytest.fixture(params=TABLES, ids=["rows", "columns"])
def table(request: pytest.FixtureRequest) -> Table:
    assert list(request.param.rows) == ROWS
    return request.param  # type: ignore[no-any-return]


def test_numpy_masks_what_is_not_known_and_keeps_whole_numbers(table: Table) -> None:
    arrays = table.to_numpy()
    assert arrays["stage"].tolist() == ["a", None, "b", "a"]
    assert arrays["total"].dtype == np.int64
    assert arrays["total"].tolist() == [2**62 + 1, None, 3, 4]
    assert arrays["share"].tolist() == [0.5, None, 1.0, 0.25]


def test_numpy_gives_a_plain_array_where_all_is_known() -> None:
    arrays = Table("all", COLUMNS, [("a", 1, 0.5)]).to_numpy()
    assert not any(isinstance(array, np.ma.MaskedArray) for array in arrays.values())


def test_numbers_that_do_not_fit_become_floats() -> None:
    table = Table("huge", (Column("n", "count"),), [(2**70,), (1,)])
    assert table.to_numpy()["n"].tolist() == [2.0**70, 1.0]


def test_an_empty_table_has_typed_columns() -> None:
    arrays = Table("none", COLUMNS, []).to_numpy()
    assert {name: array.shape for name, array in arrays.items()} == dict.fromkeys(arrays, (0,))


def test_pandas_keeps_whole_numbers_beside_unknown_ones(table: Table) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    frame = table.to_pandas()
    assert str(frame["total"].dtype) == "Int64"
    assert frame["total"].tolist() == [2**62 + 1, pandas.NA, 3, 4]
    assert frame["share"].isna().tolist() == [False, True, False, False]
    assert frame["stage"].isna().tolist() == [False, True, False, False]
    assert frame["stage"][2] == "b"


def test_polars_has_every_cell(table: Table) -> None:
    pytest.importorskip("polars", reason="needs polars")
    frame = table.to_polars()
    assert frame.columns == ["stage", "total", "share"]
    assert frame.rows() == ROWS


def test_arrow_has_every_cell(table: Table) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    frame = table.to_arrow()
    assert frame.column_names == ["stage", "total", "share"]
    columns = [column.to_pylist() for column in frame.columns]
    assert list(zip(*columns, strict=True)) == ROWS


@pytest.mark.parametrize("form", FORMS)
def test_a_library_that_is_missing_is_named_with_its_installation(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "pyarrow" if form == "arrow" else form
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RlprofError, match=f"^{package} is not installed.*; pip install {package}$"):
        getattr(TABLES[0], f"to_{form}")()


@pytest.mark.parametrize("form", ["numpy", *FORMS])
def test_what_abstained_is_no_empty_frame(form: str) -> None:
    if form != "numpy":
        pytest.importorskip("pyarrow" if form == "arrow" else form, reason=f"needs {form}")
    table = Table("memcpy", COLUMNS, abstained="none was traced")
    with pytest.raises(RlprofError, match="table memcpy has no data: none was traced"):
        getattr(table, f"to_{form}")()


def shown(table: Any) -> str:
    return str(table._repr_html_())


def test_a_notebook_shows_cells_with_units() -> None:
    page = shown(TABLES[0])
    assert "<th>stage</th><th>total (ns)</th><th>share</th>" in page
    assert f"<td>{2**62 + 1:,}</td><td>50.0%</td>" in page
    assert "<td>-</td><td>-</td><td>-</td>" in page


def test_a_notebook_runs_nothing_that_a_trace_says() -> None:
    bad = "<script>alert(1)</script>&"
    table = Table(bad, (Column(bad, "text", bad),), [(bad,)], note=bad)
    assert shown(table).count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;") == 5
    assert "<script" not in shown(table)
    assert "<script" not in shown(Table("t", (), abstained=bad))


def test_a_notebook_shows_some_rows_and_counts_the_rest() -> None:
    page = shown(Table("t", (Column("n", "count"),), [(n,) for n in range(2000)]))
    assert page.count("<tr>") == 51
    assert "1,950 more rows" in page
    assert "no data. why" in shown(Table("t", (), abstained="why"))
