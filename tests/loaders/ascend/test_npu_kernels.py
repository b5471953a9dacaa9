"""What CANN records of kernels on an NPU: operator, shapes, cores; and the matmuls among them."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.analysis.efficiency.operator_work import FORMULAS
from lightning_rlprof.loaders.ascend.host_calls import _KINDS
from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import rank_directory
from lightning_rlprof.run import Run
from tests.builders.ascend_output import EPOCH, DatabaseRows, capture_folder, us
from tests.builders.ascend_recorded import ABSENT, CAPTURES, DATA, OUTPUT, TEXT, ask, ns, sheet
from tests.builders.runs import Row, header, write_rank

recorded = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)
NPU = ("op type", "input shapes", "block dim", "aicore time", "vector time")
HEADS = (
    "Name,Type,Start Time(us),Duration(us),{blocks},Input Shapes,Input Data Types,Input Formats,"
    "Output Shapes,Output Formats,aicore_time(us),aiv_time(us)"
)
SHAPES = (
    '"""32,16;8,16;8""",FLOAT16;FLOAT16;FLOAT16,FORMAT_ND;FORMAT_ND;FORMAT_ND,"""32,8""",FORMAT_ND'
)


def written(parent: Path, blocks: str = "Block Dim") -> Path:
    output = capture_folder(parent)
    lines = [
        HEADS.format(blocks=blocks),
        f"mm,MatMulV2,{us(EPOCH + 1_000)}\t,2.0,24,{SHAPES},1.5,0.0",
        f"hcom_allReduce__586_0_1,hcom_allReduce_,{us(EPOCH + 4_000)}\t,2.0,0{',N/A' * 7}",
    ]
    (output / "kernel_details.csv").write_text("\n".join(lines) + "\n")
    return output


@pytest.mark.parametrize("blocks", ["Block Dim", "Block Num"])
def test_a_sheet_has_operator_shapes_and_cores(tmp_path: Path, blocks: str) -> None:
    table = load(written(tmp_path, blocks).parent).table("kernels")

    rows = list(zip(*(table.column(name) for name in NPU), strict=True))
    assert rows == [
        ("MatMulV2", "32,16;8,16;8", 24, 1_500, 0),
        ("hcom_allReduce_", None, 0, None, None),
    ]


def test_they_are_columns_of_kernels_of_a_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_rank(tmp_path, header(rank, 2, unix_ns=EPOCH), [Row("step", "step", 4, 0, 90_000)])
    written(rank_directory(tmp_path, 1) / "x")

    run = Run.of(load(tmp_path))

    asked = "select rank, op_type, block_dim, aicore_time_ns, vector_time_ns from kernels"
    assert list(run.sql(asked).rows) == [
        (1, "MatMulV2", 24, 1_500, 0),
        (1, "hcom_allReduce_", 0, None, None),
    ]


def test_a_database_tells_the_same(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.task("MatMulV2", 1_000, 3_000, connection=1)
    rows.rows["COMPUTE_TASK_INFO"].clear()
    shapes = {"inputShapes": '"32,16;8,16"', "outputShapes": '"32,8"', "outputFormats": "ND"}
    shapes |= {"inputDataTypes": "FLOAT;FLOAT", "inputFormats": "ND;ND"}
    info = {"name": "mm", "opType": "MatMulV2", "taskType": "AI_CORE", "blockDim": 24}
    rows.add("COMPUTE_TASK_INFO", globalTaskId=0, **info, **shapes)
    rows.add("TASK_PMU_INFO", globalTaskId=0, name="aic_total_time", value=1_500.4)
    rows.add("TASK_PMU_INFO", globalTaskId=0, name="aiv_total_time", value=0)
    rows.add("TASK_PMU_INFO", globalTaskId=0, name="aic_mac_ratio", value=0.5)

    spans = load(rows.write(tmp_path / "ascend_pytorch_profiler_0.db"))

    table = spans.table("kernels")
    assert [table.column(name) for name in NPU] == [
        ["MatMulV2"],
        ["32,16;8,16"],
        [24],
        [1_500],
        [0],
    ]
    row, _ = matmuls(spans).rows
    assert (row[1], row[6]) == ("32x16 @ 16x8", pytest.approx(2 * 32 * 16 * 8 / 2_000 / 1_000))


@recorded
def test_of_real_captures_each_kernel_has_its_cells() -> None:
    for folder in TEXT:
        table, rows = read_ascend(folder).table("kernels"), sheet(folder, "kernel_details.csv")
        assert table.column("block dim") == [int(row["Block Dim"]) for row in rows]
        assert table.column("op type") == [row["Type"] for row in rows]
        times = [row["aicore_time(us)"] for row in rows]
        assert table.column("aicore time") == [None if t == "N/A" else ns(t) for t in times]
    database = read_ascend(CAPTURES[2]).table("kernels")
    total = ask(
        "SELECT SUM(CAST(ROUND(value) AS INTEGER)) FROM TASK_PMU_INFO WHERE name IN "
        "(SELECT id FROM STRING_IDS WHERE value = 'aic_total_time')"
    )
    assert sum(ns or 0 for ns in database.column("aicore time")) == total[0][0]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("cells", "flops", "shapes"),
    [
        (SHAPES, 2 * 32 * 8 * 16, "32x16 @ 16x8"),
        ('"""16,32;16,8""",DT_BF16;DT_BF16,ND;ND,"""32,8""",ND', 2 * 32 * 8 * 16, "32x16 @ 16x8"),
        ('"""2,4,3;3,5""",FLOAT;FLOAT,ND;ND,"""2,4,5""",ND', 2 * 2 * 4 * 3 * 5, "2x4x3 @ 3x5"),
        # Blocked formats are padded, and shapes that fit no output are not understood.
        ('"""1,2,16,16;8,16""",FLOAT;FLOAT,FRACTAL_NZ;ND,"""32,8""",ND', None, "1,2,16,16;8,16"),
        ('"""32,16;8,15""",FLOAT;FLOAT,ND;ND,"""32,8""",ND', None, "32,16;8,15"),
        ('"""32,x;8,15""",FLOAT;FLOAT,ND;ND,"""32,8""",ND', None, "32,x;8,15"),
    ],
)
def test_a_matmul_has_the_flops_of_its_shapes(
    tmp_path: Path, cells: str, flops: int | None, shapes: str
) -> None:
    output = written(tmp_path)
    text = (output / "kernel_details.csv").read_text()
    (output / "kernel_details.csv").write_text(text.replace(SHAPES, cells))

    row, _ = matmuls(load(tmp_path)).rows

    assert (row[0], row[1], row[3], row[4]) == ("MatMulV2", shapes, 1, 2_000)
    assert row[6] == (None if flops is None else pytest.approx(flops / 2_000 / 1_000))


def test_kernels_without_shapes_are_no_matmuls(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    lines = ["Name,Type,Start Time(us),Duration(us)", f"mm,MatMulV2,{us(EPOCH + 1_000)}\t,2.0"]
    (output / "kernel_details.csv").write_text("\n".join(lines) + "\n")
    assert "no shapes of matmuls" in str(matmuls(load(tmp_path)).abstained)


@recorded
def test_kernels_tell_the_shapes_that_operators_of_torch_told(tmp_path: Path) -> None:
    with_trace = matmuls(read_ascend(TEXT[0]))
    shutil.copytree(TEXT[0], tmp_path / "x_ascend_pt")
    (tmp_path / "x_ascend_pt" / OUTPUT / "trace_view.json").unlink()
    alone = matmuls(load(tmp_path))

    # Operators of torch launch more than the matmul, so their times are longer. One shape may be of
    # several operators.
    told = []
    for each in (with_trace, alone):
        sums: dict[tuple[object, ...], list[float]] = defaultdict(lambda: [0, 0])
        for row in each.rows[:-1]:
            sums[row[1], row[2]][0] += row[3]
            sums[row[1], row[2]][1] += row[6] * row[4]
        told.append({key: (calls, round(flops)) for key, (calls, flops) in sums.items()})

    assert told[0] == told[1]


def test_each_kernel_that_is_read_has_a_formula() -> None:
    kernels = {name for name in FORMULAS if "::" not in name} - {"GroupedGemm"}
    assert {name for name in kernels if any(each.fullmatch(name) for each in _KINDS)} == kernels
    plain = {f"{batch}MatMul{version}" for batch in ("", "Batch") for version in ("", "V2", "V3")}
    assert plain < kernels


ATTENTION = "2,4,128,8;2,4,128,8;0;2,4,128,64"  # statistics twice, nothing, and the result
QKV = ";".join(["2,4,128,64", "2,2,256,64", "2,2,256,64"])
FULL = 2 * 4 * 128 * 256 * 2 * (64 + 64)


@pytest.mark.parametrize(
    ("kind", "given", "made", "least", "most"),
    [
        ("FlashAttentionScore", f"{QKV};;;;;", ATTENTION, FULL, FULL),
        ("FlashAttentionScore", f"{QKV};;;;2048,2048;", ATTENTION, FULL // 256, FULL),
        (  # [batch, length, heads, size]
            *("FlashAttentionScore", "2,128,4,64;2,256,2,64;2,256,2,64"),
            *("2,4,128,8;2,4,128,8;2,128,4,64", FULL, FULL),
        ),
        (  # [batch, length, heads x size], then [length, batch, heads x size]
            *("FlashAttentionScore", "2,128,256;2,256,128;2,256,128"),
            *("2,4,128,8;2,4,128,8;2,128,256", FULL, FULL),
        ),
        (
            *("FlashAttentionScore", "128,2,256;256,2,128;256,2,128"),
            *("2,4,128,8;2,4,128,8;128,2,256", FULL, FULL),
        ),
        (  # packed
            *("FlashAttentionScore", "128,4,64;256,2,64;256,2,64"),
            *("128,4,8;128,4,8;128,4,64", FULL // 2 // 256, FULL // 2),
        ),
        (
            *("FlashAttentionScoreGrad", f"{QKV};2,4,128,64;;;;;2,4,128,8;2,4,128,8;;2,4,128,64"),
            *("2,4,128,64;2,2,256,64;2,2,256,64", FULL * 5 // 2, FULL * 5 // 2),
        ),
        ("FusedInferAttentionScore", QKV, "2,4,128,64", FULL // 256, FULL),
        ("FusedInferAttentionScore", "8,1,256;99,16,256;99,16,256", "8,1,256", 8 * 256 * 4, None),
        ("GroupedMatmul", "96,32;4,32,16;;;;;;4", "96,16", 2 * 96 * 32 * 16, 2 * 96 * 32 * 16),
        ("GroupedMatmul", "96,32;96,16;;;;4", "4,32,16", 2 * 96 * 32 * 16, 2 * 96 * 32 * 16),
        ("GroupedMatmulSwigluQuant", "96,32;4,32,16;4,16;96;4", "96,8;96", 98_304, 98_304),
        ("FlashAttentionScore", QKV, "2,4,128,64", None, None),
        ("FlashAttentionScore", "x;y;z", ATTENTION, None, None),
        ("GroupedMatmul", "96,32;4,32,16", "", None, None),
    ],
)
def test_fused_kernels_of_written_sheets_have_the_flops_that_their_shapes_decide(
    tmp_path: Path, kind: str, given: str, made: str, least: int | None, most: int | None
) -> None:
    output = written(tmp_path)
    text = (output / "kernel_details.csv").read_text().replace("MatMulV2", kind)
    count = given.count(";") + 1
    cells = [f'"""{given}"""', ";".join(["DT_BF16"] * count), ";".join(["ND"] * count)]
    cells += [f'"""{made}"""', ";".join(["ND"] * (made.count(";") + 1))]
    (output / "kernel_details.csv").write_text(text.replace(SHAPES, ",".join(cells)))

    row, _ = matmuls(load(tmp_path)).rows

    assert (row[0], row[3], row[4]) == (kind, 1, 2_000)
    exact = least is not None and least == most
    told = (row[6], None, None) if exact else (None, row[8], row[9])
    assert (row[6], row[8], row[9]) == told
    found = [row[6], row[6]] if exact else [row[8], row[9]]
    assert found == [None if n is None else pytest.approx(n / 2e6) for n in (least, most)]
    assert row[2] == (None if least is None else "BFloat16")


def test_fused_kernels_stand_beside_the_calls_of_plain_matmuls(tmp_path: Path) -> None:
    output = written(tmp_path)
    text = (output / "kernel_details.csv").read_text()
    grouped = text.replace("MatMulV2", "GroupedMatmul").replace(
        SHAPES, '"""96,32;4,32,16""",BF16;BF16,ND;ND,"""96,16""",ND'
    )
    (output / "kernel_details.csv").write_text(text + "\n".join(grouped.splitlines()[1:2]) + "\n")
    call = {"name": "aten::mm", "cat": "cpu_op", "ph": "X", "pid": 1, "tid": 2, "dur": 9.0}
    args = {"Input Dims": "32,16;16,8", "Input type": "float;float"}
    events = [{**call, "ts": us(EPOCH + 500), "args": args}]
    (output / "trace_view.json").write_text(json.dumps(events))

    rows = matmuls(load(tmp_path)).rows

    assert sorted((row[0], row[1]) for row in rows[:-1]) == [
        ("GroupedMatmul", "96x32 @ 4x32x16"),
        ("aten::mm", "32x16 @ 16x8"),
    ]
