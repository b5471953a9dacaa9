"""Shapes of matrix products in Ascend captures: the same rows from texts and from databases."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from tests.builders.ascend_output import (
    EPOCH,
    MAIN,
    PID,
    DatabaseRows,
    TraceEvents,
    capture_folder,
    tid,
)
from tests.builders.ascend_recorded import ABSENT, CAPTURES, DATA, DATABASE, ask, ns, sheet

recorded = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)
OTHER, THIRD = 4_090, 4_091
HALF = "c10::BFloat16;\r\nc10::BFloat16"

# Name, thread, start, end, dims, types.
CALLS = [
    ("aten::mm", MAIN, 1_000, 2_000, "8,16;\r\n16,4", HALF),
    ("aten::matmul", MAIN, 3_000, 4_000, "2,8,16;\r\n16,4", HALF),
    ("aten::matmul", MAIN, 5_000, 7_000, "8,4;\r\n4,8", "float;\r\nfloat"),  # calls the next
    ("aten::mm", MAIN, 5_500, 6_000, "8,4;\r\n4,8", "float;\r\nfloat"),
    ("aten::addmm", OTHER, 3_500, 9_000, "4;\r\n8,16;\r\n16,4;\r\n;\r\n", f"{HALF};\r\n{HALF}"),
    ("aten::bmm", OTHER, 9_000, 9_500, "8,x;\r\n[1]", ""),  # as nothing known writes it
    ("aten::mm", OTHER, 9_600, 9_700, "", ""),
    ("aten::mm", OTHER, 9_800, 9_900, None, None),
    ("aten::relu", OTHER, 9_950, 9_960, "8,16", HALF),
    ("aten::matmul", THIRD, 1_000, 2_000, "8,16;\r\n16,4", HALF),  # meets the next, as clocks do
    ("aten::mm", THIRD, 1_990, 2_500, "8,16;\r\n16,4", HALF),
    *[("aten::matmul", THIRD, 3_000, 4_000, "8,16;\r\n16,4", HALF)] * 2,
]
TYPES = '["c10::BFloat16","c10::BFloat16"]'
EXPECTED = [
    (MAIN, "aten::mm", 1_000, 1_000, "[[8,16],[16,4]]", TYPES),
    (MAIN, "aten::matmul", 3_000, 1_000, "[[2,8,16],[16,4]]", TYPES),
    (MAIN, "aten::mm", 5_500, 500, "[[8,4],[4,8]]", '["float","float"]'),
    (OTHER, "aten::addmm", 3_500, 5_500, "[[4],[8,16],[16,4],[],[]]", f"{TYPES[:-1]},{TYPES[1:]}"),
    (OTHER, "aten::bmm", 9_000, 500, "8,x; [1]", None),
    (THIRD, "aten::matmul", 1_000, 1_000, "[[8,16],[16,4]]", TYPES),
    (THIRD, "aten::mm", 1_990, 510, "[[8,16],[16,4]]", TYPES),
    *[(THIRD, "aten::matmul", 3_000, 1_000, "[[8,16],[16,4]]", TYPES)] * 2,
]


def text(parent: Path) -> Path:
    made = TraceEvents()
    for name, thread, start, end, dims, types in CALLS:
        args = {} if dims is None else {"Input Dims": dims, "Input type": types}
        made.row(name, PID, thread, start, end, cat="cpu_op", args=args)
    made.task("Mul", 60_000, 61_000)
    made.write(capture_folder(parent) / "trace_view.json")
    return parent


def database(parent: Path, shapes: str = "inputShapes", dtypes: str = "inputDtypes") -> Path:
    rows = DatabaseRows()
    for name, thread, start, end, dims, types in CALLS:
        cells: dict[str, Any] = {"globalTid": tid(thread), "name": name, "type": 50_001}
        cells |= {column: each for column, each in ((shapes, dims), (dtypes, types)) if each}
        rows.add("PYTORCH_API", startNs=str(EPOCH + start), endNs=str(EPOCH + end), **cells)
    rows.mark("step", 0, 100_000)
    rows.write(capture_folder(parent) / "ascend_pytorch_profiler_0.db")
    return parent


def exchanged(parent: Path) -> Path:
    return database(parent, "inputDtypes", "inputShapes")  # as torch_npu wrote them in 2025


def told(spans: Spans) -> list[tuple[Any, ...]]:
    table = spans.table("shapes")
    names = [column.name for column in table.columns]
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in table.rows]
    assert all(row["rank"] == 0 and row["values"] is None for row in rows)
    first = min(row["start"] for row in rows) - 1_000  # where the axis begins differs
    return [
        (
            *(row["thread"], row["operator"], row["start"] - first),
            *(row["duration"], row["dims"], row["types"]),
        )
        for row in rows
    ]


@pytest.mark.parametrize("made", [text, database, exchanged])
def test_products_come_with_their_shapes_as_torchs_own_traces_tell_them(
    tmp_path: Path, made: Any
) -> None:
    assert told(load(made(tmp_path))) == EXPECTED


def test_a_capture_without_shapes_has_no_products(tmp_path: Path) -> None:
    made = TraceEvents()
    made.operator("aten::mm", 1_000, 2_000)
    made.task("MatMul", 1_500, 1_800)
    made.write(capture_folder(tmp_path) / "trace_view.json")
    found = matmuls(load(tmp_path))
    assert found.abstained is not None
    assert found.abstained.startswith("This run has no shapes of matmuls. Capture a step with")


def test_what_a_database_holds_of_other_types_is_left_out(tmp_path: Path) -> None:
    rows = DatabaseRows()
    cells: dict[str, Any] = {"globalTid": tid(MAIN), "name": "aten::mm", "type": 50_001}
    for start, end, shapes in (
        *((-5, 7, "8,8;8,8"), (9, 8, "8,8;8,8")),  # no time, and one that ends before it begins
        *((10, 20, 2**40), (30, 40, "")),  # no text of that number, and an empty one
    ):
        times = {"startNs": str(EPOCH + start) if start > 0 else "x", "endNs": str(EPOCH + end)}
        rows.add("PYTORCH_API", **times, inputShapes=shapes, inputDtypes=None, **cells)
    rows.mark("step", 0, 100_000)
    rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")
    assert len(load(tmp_path).table("shapes").rows) == 0


@recorded
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
def test_a_real_captures_products_took_as_long_as_cann_says(tmp_path: Path, capture: Path) -> None:
    folder = tmp_path / capture.name
    shutil.copytree(capture, folder)
    found = matmuls(load(folder))
    if capture == DATABASE:
        sql = "SELECT value, endNs - startNs FROM TASK JOIN COMPUTE_TASK_INFO c "
        kernels = ask(f"{sql} USING (globalTaskId) JOIN STRING_IDS s ON c.name = s.id")
    else:
        rows = sheet(capture, "kernel_details.csv")
        kernels = [(row["Name"], ns(row["Duration(us)"])) for row in rows]
    of_products = [took for name, took in kernels if name.startswith(("aclnnMm_", "aclnnAddmm_"))]
    products: Any = found.rows[:-1]
    assert sum(row[4] for row in products) == found.rows[-1][4] == sum(of_products)
    assert {row[4] for row in products if row[0] == "aten::addmm"} <= {*of_products}
    assert found.rows[-1][3] == 9
    by_shape = {row[1]: row for row in products}
    flops = {"32x9216 @ 9216x4096": 2 * 32 * 9216 * 4096, "1000x32 @ 32x4096": 2 * 1000 * 32 * 4096}
    for shapes, count in flops.items():
        row = by_shape[shapes]
        assert row[6] == pytest.approx(count / row[4] / 1_000)
