"""Collectives of Ascend captures, in each of the forms in which files tell them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.communication.collectives import communication
from lightning_rlprof.loaders.ascend.collectives import (
    _BYTES,
    group_hash,
    parse_operator_name,
    payload,
)
from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import rank_directory
from lightning_rlprof.tables.kernels import UNKNOWN
from tests.builders.ascend_output import (
    EPOCH,
    MAIN,
    QUEUE,
    DatabaseRows,
    TraceEvents,
    capture_folder,
    tid,
)
from tests.builders.ascend_recorded import ABSENT, DATA, TEXT
from tests.builders.runs import Row, header, write_rank

COMMUNICATOR = "10.0.0.1%eth0_60000_0_1736"
HASH = group_hash(COMMUNICATOR)
METADATA = {"parallel_group_info": {COMMUNICATOR: {"group_name": "tp", "global_ranks": [0, 2]}}}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows without what is not known, and without rank and device."""
    table = load(path).table("collectives")
    names = [column.name for column in table.columns]
    rows = (dict(zip(names, row, strict=True)) for row in table.rows)
    left = {"rank", "device"}
    return [{k: v for k, v in row.items() if v is not None and k not in left} for row in rows]


def database(*operators: tuple[str, int, int, int]) -> DatabaseRows:
    """Return rows with a step, a stage in it, and (name, start, type, count) within that."""
    rows = DatabaseRows()
    rows.mark("step", 0, 100_000)
    rows.mark("actor_update", 1_000, 40_000)
    for number, name in ((3, "FP16"), (4, "FP32")):
        rows.add("ENUM_HCCL_DATA_TYPE", id=number, name=name)
    for connection, (name, start, kind, count) in enumerate(operators, start=900):
        cells = {"startNs": EPOCH + start, "endNs": EPOCH + start + 500, "dataType": kind}
        cells |= {"connectionId": connection, "count": count}
        rows.add("COMMUNICATION_OP", opName=name, groupName=COMMUNICATOR, **cells)
        times = {"startNs": EPOCH + 2_000 + connection, "endNs": EPOCH + 2_900 + connection}
        rows.add("CANN_API", globalTid=tid(MAIN), connectionId=connection, **times)
    return rows


def test_a_database_tells_group_type_and_bytes_and_the_launch_tells_the_stage(
    tmp_path: Path,
) -> None:
    rows = database(
        ("hcom_allGather__1_1_1", 60_000, 3, 10), ("hcom_allReduce__1_0_1", 50_000, 4, 10)
    )
    output = capture_folder(tmp_path, metadata={**METADATA, "rlprof_window": "step-000003"})
    rows.write(output / "ascend_pytorch_profiler_0.db")

    place = {"group": HASH, "group size": 2, "duration": 500, "stage": "actor_update", "step": 3}
    assert rows_of(tmp_path) == [
        {
            **{"operation": "all_reduce", "number": 0, "bytes": 40, "dtype": "FP32"},
            **{**place, "start": 50_000, "launch": 2_901},
        },
        {
            **{"operation": "all_gather", "number": 1, "bytes": 40, "dtype": "FP16"},
            **{**place, "start": 60_000, "launch": 2_900},
        },
    ]


def test_of_two_that_begin_at_once_none_gets_the_launch_of_the_other(tmp_path: Path) -> None:
    names = ("hcom_allReduce__1_0_1", "hcom_broadcast__2_0_1")
    rows = database(*((name, 50_000, 4, 10) for name in names))
    rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")

    found = {row["operation"]: row.get("launch") for row in rows_of(tmp_path)}

    assert found["all_reduce"] in (2_900, None)
    assert found["broadcast"] in (2_901, None)
    assert set(found.values()) != {None}


def test_launches_of_a_database_tell_their_length_and_their_thread(tmp_path: Path) -> None:
    rows = database(("hcom_allReduce__1_0_1", 50_000, 4, 10))
    rows.task("Mul", 60_000, 61_000, connection=700)
    rows.add("PYTORCH_API", startNs=str(EPOCH + 3_000), endNs=str(EPOCH + 3_400))
    rows.rows["PYTORCH_API"][-1] |= {"globalTid": tid(MAIN), "connectionId": 1, "type": 50001}
    rows.add("CONNECTION_IDS", id=1, connectionId=700)
    cells = {"startNs": EPOCH + 9, "endNs": EPOCH + 3, "globalTid": tid(QUEUE)}
    rows.task("Add", 70_000, 71_000, connection=701)
    rows.add("CANN_API", connectionId=701, **cells)
    rows.task("Lost", 80_000, 81_000, connection=702)
    path = rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")

    table = read_ascend(path).table("kernels")

    names = ("launch", "launch duration", "thread", "graph")
    assert list(zip(*(table.column(name) for name in names), strict=True)) == [
        (2_900, 900, MAIN, None),
        (3_000, 400, MAIN, None),
        (9, None, QUEUE, None),
        (None, None, None, None),
    ]


def trace(*, marked: bool = True) -> TraceEvents:
    made = TraceEvents()
    if marked:
        made.mark("step", 0, 100_000)
        made.mark("actor_update", 1_000, 40_000)
    made.collective("hcom_reduceScatter__586_7_1", 50_000, 50_700)
    made.arrow("async_npu", "s", EPOCH + 50_000, 4_001, MAIN, 3_000)
    return made


@pytest.mark.parametrize("analysed", [True, False])
def test_the_lanes_of_a_trace_tell_type_and_count_and_the_analysis_the_group(
    tmp_path: Path, analysed: bool
) -> None:
    groups = {"17522688603477080586": {"global_ranks": [0, 1, 2, 3]}}
    output = capture_folder(tmp_path, metadata={"parallel_group_info": groups})
    trace().write(output / "trace_view.json")
    if analysed:
        own = {"Communication Time Info": {"Start Timestamp(us)": (EPOCH + 50_000) / 1000}}
        key = "hcom_reduceScatter__586_7_1@17522688603477080586"
        (output / "communication.json").write_text(json.dumps({"step": {"collective": {key: own}}}))

    (row,) = rows_of(tmp_path)

    assert (row["operation"], row["number"], row["dtype"]) == ("reduce_scatter", 7, "FP32")
    assert (row["start"], row["duration"], row["launch"]) == (50_000, 700, 3_000)
    assert (row["stage"], row["step"]) == ("actor_update", 1)
    known = ("17522688603477080586", 4, 64) if analysed else ("586", None, None)
    assert (row["group"], row.get("group size"), row.get("bytes")) == known


def test_a_damaged_analysis_costs_the_group_alone(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    trace().write(output / "trace_view.json")
    (output / "communication.json").write_text("{")

    (row,) = rows_of(tmp_path)

    assert (row["group"], row["operation"]) == ("586", "reduce_scatter")


def test_marks_of_hccl_tell_what_there_is_below_level0(tmp_path: Path) -> None:
    said = {"opName": "HcclAllreduce", "count": "8", "dataType": "fp16", "groupName": "7"}
    made = TraceEvents()
    made.mark("step", 0, 9_000)
    made.mark("actor_update", 500, 3_000)
    for shadow in (None, (4_000, 7_000)):
        made.mark(json.dumps(said), 1_000, 2_000, domain="communication", shadow=shadow)
    made.write(capture_folder(tmp_path) / "trace_view.json")

    own = {"operation": "all_reduce", "group": "7", "bytes": 16, "dtype": "FP16", "step": 1}
    own |= {"stage": "actor_update", "launch": 1_000}
    assert rows_of(tmp_path) == [
        {**own, "start": 1_000, "duration": 1_000},
        {**own, "start": 4_000, "duration": 3_000},
    ]


def test_a_run_of_our_own_tells_stage_and_step_where_the_capture_does_not(tmp_path: Path) -> None:
    rows = [Row("critic_update", "stage", 4, 100, 60_000), Row("step", "step", 4, 0, 90_000)]
    write_rank(tmp_path, header(1, 2, unix_ns=EPOCH), rows)
    output = capture_folder(rank_directory(tmp_path, 1) / "x")
    trace(marked=False).write(output / "trace_view.json")

    table = load(tmp_path).table("collectives")

    found = [table.column(name) for name in ("rank", "stage", "step", "start", "launch")]
    assert found == [[1], ["critic_update"], [4], [50_000], [3_000]]


def test_a_capture_without_collectives_has_none(tmp_path: Path) -> None:
    made = TraceEvents()
    made.mark("step", 0, 9_000)
    made.task("Mul", 1_000, 2_000)
    made.write(capture_folder(tmp_path) / "trace_view.json")

    table = load(tmp_path).table("collectives")

    assert (len(table.rows), table.note) == (0, "this capture has no collectives")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hcom_allReduce__210_3_1", ("all_reduce", "210", 3)),
        ("hcom_alltoallvc__210_0_1", ("all_to_all_vc", "210", 0)),
        ("hcom_receive__007_12_1", ("recv", "007", 12)),
        ("hcom_batchSendRecv_", ("batch_send_recv", "", UNKNOWN)),
        ("HcclBarrier", ("barrier", "", UNKNOWN)),
        ("hcom_allGatherV__1_2_1", ("all_gather_v", "1", 2)),
        ("AivKernel_3", ("AivKernel_3", "", UNKNOWN)),
        ("", ("", "", UNKNOWN)),
    ],
)
def test_names_of_operators(name: str, told: tuple[str, str, int]) -> None:
    assert parse_operator_name(name) == told


@given(st.sampled_from(sorted(_BYTES)), st.integers(0, 2**32), st.integers(2, 2**19))
def test_bytes_are_the_larger_of_what_a_rank_gives_and_gets(
    kind: str, count: int, ranks: int
) -> None:
    each = _BYTES[kind]
    given_and_got = {
        "all_reduce": (count, count),
        "all_gather": (count, count * ranks),
        "reduce_scatter": (count * ranks, count),
        "all_to_all": (count * ranks, count * ranks),
        "send": (count, 0),
    }
    names = list(given_and_got)
    shape = len(names)

    found = payload(names, [kind] * shape, np.full(shape, count), np.full(shape, ranks))

    assert found.tolist() == [max(pair) * each for pair in given_and_got.values()]


def test_bytes_that_nothing_tells_are_not_known() -> None:
    names = ["all_to_all_v", "all_gather", "all_reduce", "all_reduce"]
    kinds, counts = ["FP16", "FP16", "N/A", "FP16"], np.array([1, 1, 1, UNKNOWN])

    assert set(payload(names, kinds, counts, np.array([8, UNKNOWN, 8, 8])).tolist()) == {UNKNOWN}


# Two groups whose hashes end alike, so that their collectives have one name.
TWINS = ("17522688603477080586", "20000000000000000586")


def without_trace(folder: Path, rank: int, *, analyzed: bool) -> None:
    """Write one rank of two groups that communicate at the same time, and no trace."""
    output = capture_folder(folder / str(rank), rank=rank)
    name = "hcom_allReduce__586_0_1"
    times = {TWINS[0]: (1_000, 9), TWINS[1]: (90_000, 5)}
    lines = ["Name,Start Time(us),Duration(us)", f"MatMul,{(EPOCH + 10) / 1000:.3f}\t,1.5"]
    found = {}
    for group, (start, took) in times.items():
        at = f"{(EPOCH + start) // 1000}.{(EPOCH + start) % 1000:03d}"
        lines.append(f"{name},{at}\t,{took + rank}")
        own = {"Start Timestamp(us)": float(at), "Elapse Time(ms)": (took + rank) / 1000}
        found[f"{name}@{group}"] = {"Communication Time Info": own}
    (output / "kernel_details.csv").write_text("\n".join(lines) + "\n")
    if analyzed:
        text = json.dumps({"step1": {"p2p": {}, "collective": found}})
        (output / "communication.json").write_text(text)


def test_without_a_trace_collectives_meet_in_their_group_alone(tmp_path: Path) -> None:
    for rank in (0, 1):
        without_trace(tmp_path, rank, analyzed=True)

    table = communication(load(tmp_path))

    found = zip(*(table.column(name) for name in ("group", "matched", "transfer")), strict=True)
    assert sorted(found) == [(TWINS[0], 1, 9_000), (TWINS[1], 1, 5_000)]


def test_without_an_analysis_the_group_is_the_one_in_the_name(tmp_path: Path) -> None:
    without_trace(tmp_path, 0, analyzed=False)

    table = load(tmp_path).table("collectives")

    assert table.column("group") == ["586"] * 2
    assert table.column("operation") == ["all_reduce"] * 2


@pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)
def test_real_ranks_and_both_formats_tell_the_same_collectives() -> None:
    names = ("operation", "number", "bytes", "dtype")
    found = []
    for folder in (*TEXT, DATA / "db_level1_rank0"):
        table = read_ascend(folder).table("collectives")
        found.append(list(zip(*(table.column(name) for name in names), strict=True)))
        own = read_ascend(folder).table("communication")
        moved = zip(own.column("size"), table.column("bytes"), strict=True)
        # A ring of eight ranks moves each byte 2 * 7 / 8 times.
        assert [round(wire / size, 2) for wire, size in moved] == [1.75] * 4  # type: ignore[operator]
        assert own.column("group") == table.column("group")
    assert found[0] == found[1] == found[2]
    assert [size for _, _, size, _ in found[0]] == [16_388_000, 67_125_248, 151_011_328, 9_878_784]
