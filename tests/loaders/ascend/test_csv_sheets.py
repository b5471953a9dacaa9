"""CSV files of torch_npu's analysis: columns by heading, rows as far as they are whole."""

from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.csv_sheets import (
    mebibytes,
    microseconds,
    read_sheet,
    whole,
)
from lightning_rlprof.tables.kernels import UNKNOWN


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_headings_of_two_versions_are_one_column(tmp_path: Path) -> None:
    old = write(tmp_path / "old.csv", "Step Id,Start Time(us)\r\n50,1.500\t\r\n")
    new = write(tmp_path / "new.csv", "\ufeffDevice_id,Step_ID,START TIME(us)\n3,50,1.500\n")

    for path in (old, new):
        sheet = read_sheet(path, {"stepid": whole, "starttime(us)": microseconds, "name": None})
        assert sheet.number("stepid").tolist() == [50]
        assert sheet.number("starttime(us)").tolist() == [1_500]
        assert sheet.number("deviceid").tolist() == [UNKNOWN]  # not asked for
        assert sheet.text("name")[0].tolist() == [-1]
        assert sheet.problems == []


def test_cells_may_hold_commas_quotes_and_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'Name,Shape,Count\r\nMul,"""32,3""\r\n;8",4\r\nN/A,,\r\n')

    sheet = read_sheet(path, {"count": whole, "name": None, "shape": None})

    assert sheet.text("shape") == (pytest.approx([0, -1]), ['"32,3"\r\n;8'])
    assert sheet.text("name")[0].tolist() == [0, -1]
    assert sheet.number("count").tolist() == [4, UNKNOWN]


def test_units_of_memory_are_powers_of_two(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a\n2109.6015625\n")

    sheet = read_sheet(path, {"a": mebibytes})

    assert sheet.number("a").tolist() == [2_212_077_568]


@pytest.mark.parametrize(
    ("text", "rows", "problem"),
    [
        ("", 0, "is empty"),
        ("a,b\n", 0, ""),
        ("a,b\n1,2\n3,4", 1, "is truncated: 1 rows were read, the rest is missing"),
        ("a,b\n1,2\n3\n5,6\n", 2, "skipped 1 rows that are cut off"),
        ("b,a,b\n0,1,2\n3,4\n", 1, "skipped 1 rows that are cut off"),
        ("a,b\n1,2\n3,4,5\n", 1, "skipped 1 rows that are cut off or damaged"),
        ('a,b\n1,2\n"3,4\n5,6\n7",8,9\n', 1, "skipped 1 rows that are cut off or damaged"),
        ("a,b\n1,2\n\n", 1, ""),
        ("a,b\n1,2,\n", 1, ""),
        ("a,b,\n1,2,\n3,4\n", 2, ""),
        ("a,b\n1,x\n3,N/A\n", 2, "skipped 1 cells of b that cannot be read"),
        ('a,b\n1,"1,234"\n3,\n', 2, ""),
        ("a,b\n1,2\n" + "x" * 200_000 + ",4\n", 1, "is damaged; read up to the damage"),
    ],
)
def test_what_is_cut_off_is_left_out_and_told(
    tmp_path: Path, text: str, rows: int, problem: str
) -> None:
    sheet = read_sheet(write(tmp_path / "a.csv", text), {"a": whole, "b": whole})

    assert (sheet.length, len(sheet.number("a"))) == (rows, rows)
    assert problem in "".join(sheet.problems)
    assert bool(sheet.problems) is bool(problem)


def test_more_rows_than_are_read_at_once_stay_in_order(tmp_path: Path) -> None:
    count = 40_000
    body = "".join(f"{at},kernel_{at % 7}\n" for at in range(count))

    sheet = read_sheet(write(tmp_path / "a.csv", f"n,name\n{body}"), {"n": whole, "name": None})

    assert sheet.number("n").tolist() == list(range(count))
    codes, names = sheet.text("name")
    assert [names[code] for code in codes[:8]] == [f"kernel_{at % 7}" for at in range(8)]


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a\.csv: cannot be read"):
        read_sheet(tmp_path / "a.csv", {})


def test_a_column_that_every_version_writes_is_missed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a\n"1,234.5"\n')

    sheet = read_sheet(path, {"a": microseconds, "b": whole}, needed=("a", "b"))

    assert sheet.number("a").tolist() == [1_234_500]
    assert sheet.problems == ["has no column b"]
