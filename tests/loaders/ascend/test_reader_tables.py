"""Tables of Ascend captures where real ones have nothing to show: other versions, other levels."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.communication.links import links
from lightning_rlprof.loaders.ascend.reader import ascend_tables, read_ascend
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans, world_size
from tests.builders.ascend_output import (
    EPOCH,
    DatabaseRows,
    TraceEvents,
    capture_folder,
    us,
)
from tests.builders.ascend_recorded import ABSENT, CAPTURES, DATA, TEXT

recorded = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)

WINDOW = {"rlprof_window": "step-000003"}


def rows_of(path: Path, table: str) -> list[dict[str, Any]]:
    found = read_ascend(path).table(table)
    names = [column.name for column in found.columns]
    rows = (dict(zip(names, row, strict=True)) for row in found.rows)
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]


def analysis(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)


def test_steps_of_a_window_are_rl_steps_on_every_device(tmp_path: Path) -> None:
    output = capture_folder(tmp_path, metadata=WINDOW)
    (output / "step_trace_time.csv").write_text(
        "Device_id,Step,Computing,Communication(Not Overlapped),Free,Stage\n"
        "4,3,1.5,2.25,3,6.75\n5,4,1.5,2.25,3,\n4,,1,1,1,3\n"
    )

    found = rows_of(tmp_path, "step_trace")

    assert [(row.get("step"), row["device"]) for row in found] == [(3, 4), (4, 5), (None, 4)]
    assert found[0]["communication not overlapped"] == 2_250
    assert [row.get("stage") for row in found] == [6_750, None, 3_000]


def test_the_databases_steps_may_lack_a_device_and_a_step(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    rows = DatabaseRows()
    rows.mark("step", 0, 9)
    rows.add("RANK_DEVICE_MAP", rankId=0, deviceId=6)
    rows.write(output / "ascend_pytorch_profiler_0.db")
    analysis(
        output / "analysis.db",
        "CREATE TABLE StepTraceTime (step TEXT, computing NUMERIC, stage NUMERIC)",
        "INSERT INTO StepTraceTime VALUES (NULL, 8903.431, 132233.522), ('7', 1, NULL)",
    )

    assert rows_of(tmp_path, "step_trace") == [
        {"rank": 0, "device": 6, "computing": 8_903_431, "stage": 132_233_522},
        {"rank": 0, "device": 6, "step": 7, "computing": 1_000},
    ]


@pytest.mark.parametrize("form", ["text", "database"])
def test_waits_of_the_host_are_calls_of_cann(tmp_path: Path, form: str) -> None:
    calls = ["aclrtSynchronizeStream", "aclnnMm", "aclrtMemcpy", "aclrtMemcpyAsync"]
    if form == "text":
        trace = TraceEvents()
        for at, name in enumerate(calls):
            args = {"Mode": "acl", "level": "acl", "connection_id": at}
            trace.row(f"AscendCL@{name}", trace.pid("CANN"), 9, 10 * at, 10 * at + 7, args=args)
        trace.task("MatMulV2", 5, 9)
        path = trace.write(tmp_path / "trace_view.json")
    else:
        rows = DatabaseRows()
        for at, name in enumerate(calls):
            times = {"startNs": EPOCH + 10 * at, "endNs": EPOCH + 10 * at + 7}
            rows.add("CANN_API", name=name, globalTid=9, **times)
        rows.add("CANN_API", name="aclrtSynchronizeEvent", startNs=EPOCH + 9, endNs=EPOCH)
        path = rows.write(tmp_path / "ascend_pytorch_profiler_0.db")
    waits = rows_of(path, "sync")
    assert [(row["kind"], row["duration"]) for row in waits] == [
        ("aclrtSynchronizeStream", 7),
        ("aclrtMemcpy", 7),
    ]
    assert waits[1]["start"] - waits[0]["start"] == 20


def test_bytes_of_a_link_that_sdma_contains_count_once_and_rdma_counts_too(tmp_path: Path) -> None:
    output = capture_folder(tmp_path)
    link = {"Transit Size(MB)": 8.0, "Transit Time(ms)": 2.0}
    links = {"HCCS": link, "SDMA": link, "RDMA": {**link, "Transit Time(ms)": 6.0}, "PCIE": "?"}
    times = {"Start Timestamp(us)": 1736408883000000.5, "Elapse Time(ms)": 9, "Wait Time(ms)": None}
    own = {"Communication Time Info": times, "Communication Bandwidth Info": links}
    steps = {"step2": {"p2p": {"hcom_send@7": own, "Total Op Info": own}, "collective": {}}}
    (output / "communication.json").write_text(json.dumps(steps))
    TraceEvents().write(output / "trace_view.json")

    (row,) = rows_of(tmp_path, "communication")

    assert (row["kind"], row["group"], row["step"]) == ("p2p", "7", 2)
    assert (row["size"], row["bandwidth"], row["duration"]) == (16_000_000, 2.0, 9_000_000)
    assert "wait" not in row


def test_tables_of_several_captures_follow_one_another_on_one_axis(tmp_path: Path) -> None:
    for rank in (1, 0):
        output = capture_folder(tmp_path / f"r{rank}", rank=rank)
        (output / "memory_record.csv").write_text(
            "Component,Timestamp(us),Total Allocated(MB),Device Type\n"
            f"PTA,{us(EPOCH + 1_000 * rank)}\t,1.5,NPU:{rank}\n"
        )
        trace = TraceEvents()
        trace.mark("step", 500 * rank, 900)
        trace.write(output / "trace_view.json")

    assert rows_of(tmp_path, "memory") == [
        {
            "rank": rank,
            "device": rank,
            "component": "PTA",
            "time": 1_000 * rank,
            "allocated": 3 << 19,
        }
        for rank in (0, 1)
    ]


def test_a_run_gets_its_tables_on_its_own_axis_with_its_own_ranks(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.collective("hcom_send", 100, 300)
    output = capture_folder(tmp_path, rank=0)
    trace.write(output / "trace_view.json")

    def at(rank: int, times: Any) -> Any:
        return (times * 0, ["actor_update"]), times * 0 + rank

    tables = ascend_tables({output.parent: 6}, EPOCH - 50, at)

    assert tables["kernels"]().column("step") == [6]
    own = tables["collectives"]()
    assert (own.column("rank"), own.column("start")) == ([6], [150])


def matrix(folder: Path, entries: dict[str, Any], **more: Any) -> Spans:
    output = capture_folder(folder, **more)
    link = {"Transport Type": "HCCS", "Transit Size(MB)": 2.5, "Transit Time(ms)": 0.5}
    found = {operation: dict.fromkeys(pairs, link) for operation, pairs in entries.items()}
    steps = {"step1": {"p2p": {}, "collective": found}}
    (output / "communication_matrix.json").write_text(json.dumps(steps))
    return load(folder)


def test_links_are_the_sums_of_operations(tmp_path: Path) -> None:
    entries = {
        "allreduce-top1@77": ["1-1", "1-0"],
        "allreduce-total@77": ["1-1", "1-0"],
        "allreduce-bottom1@77": ["1-0"],
    }
    table = matrix(tmp_path, entries, rank=5).table("links")

    names = ("operation", "source", "destination", "source rank", "destination rank", "size")
    rows = list(zip(*(table.column(name) for name in names), strict=True))
    assert rows == [
        ("allreduce", 1, 1, 5, 5, 2_500_000),
        ("allreduce", 1, 0, 5, None, 2_500_000),
    ]
    assert set(table.column("transfer")) == {500_000}


def test_a_step_without_sums_has_the_links_of_its_single_operations(tmp_path: Path) -> None:
    entries = {"allreduce-top1@77": ["1-1", "1-7"], "allreduce-middle@77": ["1-0"]}
    spans = matrix(tmp_path, entries, rank=1)
    table = spans.table("links")
    assert table.column("operation") == ["allreduce"] * 3
    assert sorted(map(str, table.column("destination"))) == ["0", "1", "7"]
    assert world_size(spans) == 8


def test_metadata_tells_the_ranks_of_a_group(tmp_path: Path) -> None:
    groups = {"parallel_group_info": {"77": {"global_ranks": [4, 5, 6]}}}
    spans = matrix(tmp_path, {"allreduce-total@77": ["1-2"]}, rank=5, metadata=groups)
    assert [row[:4] for row in links(spans).rows] == [(5, 6, None, "HCCS")]


@recorded
def test_links_of_both_formats_have_the_bandwidth_that_cann_wrote() -> None:
    for folder in CAPTURES:
        table = links(read_ascend(folder))
        assert len(table.rows) == 7
        assert [row[3] for row in table.rows] == ["HCCS"] * 7
    file = TEXT[0] / "ASCEND_PROFILER_OUTPUT" / "communication_matrix.json"
    (total,) = (
        each
        for key, each in json.loads(file.read_text())["step50"]["collective"].items()
        if "-total@" in key
    )
    table = links(read_ascend(TEXT[0]))
    for row in table.rows:
        source, to, speed = row[0], row[1], row[6]
        assert speed == pytest.approx(total[f"{source}-{to}"]["Bandwidth(GB/s)"], rel=1e-4)
    worst = min((each["Bandwidth(GB/s)"], pair) for pair, each in total.items())[1]
    assert table.rows[0][:2] == (int(worst[0]), int(worst[2]))
    assert table.note.startswith("No slow link: each of 7 links")
