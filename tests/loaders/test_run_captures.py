"""Tables beside the kernels, of captures in the folders of a run.

Run directories with what device tools left in them.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.diagnosis.data_quality import data_quality
from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.run_captures import device_files
from lightning_rlprof.records.run_directory import rank_directory
from tests.builders.ascend_output import TraceEvents, capture_folder
from tests.builders.chrome import AFTER, ChromeTrace
from tests.builders.nsys_export import EPOCH, PID, NsysExport, global_pid
from tests.builders.runs import Row, header, write_rank

START = header().unix_ns  # of clock 0 of every rank


def artefacts_run_of(path: Path, ranks: int = 1) -> Path:
    """Write a run: step 4 from 0 to 1000, with a stage from 100 to 500, on each rank."""
    for rank in range(ranks):
        rows = [
            Row("actor_update", "stage", 4, 100, 500),
            Row("step", "step", 4, 0, 1000),
            Row("elsewhere", "stage", 9, 0, 1000, thread=77),
        ]
        write_rank(path, header(rank, ranks), rows)
    return path


def report(run: Path, rank: int, name: str = "step-000004/a.sqlite", late: int = 0) -> NsysExport:
    """Return an export in a rank's folder whose zero is ``late`` after the run's."""
    return NsysExport(rank_directory(run, rank) / name, epoch=START + late)


def test_kernels_of_all_ranks_come_onto_the_axis_of_the_run(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path, 2)
    for rank in (0, 1):
        made = report(run, rank, late=2000 * (rank + 1))
        made.own("critic_update", "stage", 0, 50, step=7)
        made.kernel(f"of {rank}", 60, 70 + rank, 1)
        made.call(10, 1)
        made.write()

    table = load(run).table("kernels")

    assert [row[:9] for row in table.rows] == [
        (0, 0, 7, "of 0", 2060, 10, "critic_update", 7, "critic_update"),
        (1, 0, 7, "of 1", 4060, 11, "critic_update", 7, "critic_update"),
    ]
    assert table.note == ""


def test_without_ranges_of_ours_the_run_tells_stage_and_step_at_the_launch(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path)
    made = report(run, 0, late=50)
    for number, launch in enumerate((60, 500, 2000)):
        made.kernel(f"{number}", 3000 + number, 3100, number)
        made.call(launch, number)
    made.kernel("unlaunched", 3010, 3020, 9)
    made.write()

    table = load(run).table("kernels")

    assert table.column("stage") == ["actor_update", None, None, None]
    assert table.column("step") == [4, 4, None, None]
    assert table.note == ("rank 0: 1 kernels have no recorded launch: their stage may be unknown")


def test_a_report_of_all_ranks_keeps_the_ranks_that_it_says(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path, 3)
    made = report(run, 0)
    for pid, rank in ((100, None), (101, 1), (102, 2)):
        if rank is not None:
            made.said("rlprof.rank", rank, pid=pid)
        made.kernel(f"{pid}", 10 * pid, 10 * pid + 5, 1, pid=pid)
    made.write()

    table = load(run).table("kernels")

    assert sorted(zip(table.column("rank"), table.column("kernel"), strict=True)) == [
        (0, "100"),
        (1, "101"),
        (2, "102"),
    ]


def test_reports_beside_the_ranks_need_a_rank_in_their_name(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path, 2)
    for name in ("actor_host_rank1_step4.sqlite", "other.sqlite"):
        made = NsysExport(run / name, epoch=START)
        made.kernel(name, 1, 2, 1)
        made.write()

    table = load(run).table("kernels")

    assert table.column("rank") == [1]
    assert (
        f"{run / 'other.sqlite'}: left out: its rank is unknown; put rank-N in its name"
        in table.note
    )


def test_chrome_traces_are_joined_with_the_others(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path, 2)
    made = report(run, 0)
    made.kernel("from nsys", 10, 20, 1)
    made.write()
    folder = rank_directory(run, 1) / "step-000004"
    folder.mkdir(parents=True)
    event = {"ph": "X", "cat": "kernel", "name": "from torch", "pid": 0, "tid": 7}
    args = {"device": 0, "stream": 7, "correlation": 5}
    events = [{**event, "ts": 1.0, "dur": 2.0, "args": args}]
    trace = {"schemaVersion": 1, "baseTimeNanoseconds": START, "traceEvents": events}
    (folder / "x.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))

    table = load(run).table("kernels")

    rows = zip(*(table.column(n) for n in ("rank", "kernel", "start", "duration")), strict=True)
    assert list(rows) == [(0, "from nsys", 10, 10), (1, "from torch", 1000, 2000)]


def test_a_chrome_trace_without_marks_has_the_steps_of_the_run(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path)
    made = ChromeTrace({"schemaVersion": 1}, {**AFTER, "baseTimeNanoseconds": START})
    for number, launch in enumerate((150, 900)):
        made.call(number, launch)
        made.kernel(number, 2_000 + 100 * number, 2_050 + 100 * number)
    made.kernel(7, 3_000, 3_010)
    folder = rank_directory(run, 0) / "step-000009"
    folder.mkdir(parents=True)
    made.write(folder / "step-000009_x.trace.json")

    found = column(run, "kernels", "stage", "step")

    assert found == [("actor_update", 4), (None, 4), (None, None)]


def test_files_that_cannot_be_read_are_named_and_the_others_read(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path, 2)
    rank_directory(run, 0).mkdir()
    broken = rank_directory(run, 0) / "broken.sqlite"
    broken.write_bytes(b"no")
    clockless = NsysExport(rank_directory(run, 0) / "clockless.sqlite", epoch=None)
    clockless.kernel("k", 1, 2, 1)
    clockless.write()
    empty = report(run, 1, "empty.sqlite")
    empty.own("actor_update", "stage", 0, 50, step=7)
    empty.write()

    table = load(run).table("kernels")

    assert table.abstained == "; ".join(
        [
            f"rank 0: {broken}: not an SQLite export of Nsight Systems",
            f"rank 0: {clockless.path}: left out: its recording time is unknown",
            "rank 1: this table was not recorded",
        ]
    )


def test_when_no_file_can_be_read_the_table_abstains(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path)
    rank_directory(run, 0).mkdir()
    (rank_directory(run, 0) / "broken.sqlite").write_bytes(b"no")

    table = load(run).table("kernels")

    assert table.rows == ()
    assert table.abstained is not None
    assert "not an SQLite export" in table.abstained


def test_files_are_read_when_the_table_is_asked_for(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path)
    made = report(run, 0)
    made.kernel("k", 1, 2, 1)

    rank_directory(run, 0).mkdir()
    made.path.parent.mkdir()
    made.path.touch()
    spans = load(run)
    made.path.unlink()
    made.write()

    assert spans.table("kernels").column("kernel") == ["k"]


def test_a_run_without_artefacts_offers_no_table(tmp_path: Path) -> None:
    assert dict(load(artefacts_run_of(tmp_path)).tables) == {}


def test_one_ranks_file_takes_its_own_artefacts_only(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path, 2)
    for rank in (0, 1):
        made = report(run, rank)
        made.kernel(f"of {rank}", 1, 2, 1)
        made.write()

    assert load(run / "rank-00001.jsonl").table("kernels").column("kernel") == ["of 1"]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["a.sqlite", "a.nsys-rep"], ["a.sqlite"]),
        (["a.trace.json.gz", "a.trace.json"], ["a.trace.json"]),
        (["a.sqlite", "a.trace.json.gz"], ["a.sqlite", "a.trace.json.gz"]),
        (["b.nsys-rep", "a.nsys-rep", "c.json", "d.sqlite-wal"], ["a.nsys-rep", "b.nsys-rep"]),
    ],
)
def test_of_one_thing_in_several_forms_one_is_read(
    tmp_path: Path, names: list[str], kept: list[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in device_files(tmp_path)] == kept


def test_links_out_of_the_run_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    outside = NsysExport(tmp_path / "outside" / "x.sqlite", epoch=EPOCH).write()
    (folder / "link.sqlite").symlink_to(outside)
    (folder / "folder").symlink_to(outside.parent)

    assert device_files(folder, deep=True) == []


STAGE = ("actor_update", 4)


def run_of(path: Path, ranks: int = 1) -> Path:
    """Write a run: step 4 from 0 to 1000, with a stage from 100 to 500, on each rank."""
    for rank in range(ranks):
        rows = [Row("actor_update", "stage", 4, 100, 500), Row("step", "step", 4, 0, 1000)]
        write_rank(path, header(rank, ranks), rows)
    return path


def copied(export: NsysExport, *launches: int) -> None:
    """Add copies of 8 bytes, 100 after their launches."""
    for number, at in enumerate(launches):
        cells = {"start": at + 100, "end": at + 110, "correlationId": number}
        place = {"globalPid": global_pid(PID), "deviceId": 0, "streamId": 7}
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=1, bytes=8, **place, **cells)
        export.call(at, number)
    export.write()


def column(path: Path, table: str, *names: str) -> list[tuple[Any, ...]]:
    found = load(path).table(table)
    return list(zip(*(found.column(name) for name in names), strict=True))


def test_copies_of_all_ranks_come_onto_the_axis_with_the_stages_of_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    for rank in (0, 1):
        name = rank_directory(run, rank) / "step-000004" / "a.sqlite"
        copied(NsysExport(name, epoch=START + 50 * rank), 200, 700)

    assert column(run, "memcpy", "rank", "start", "launch", "stage", "step") == [
        (0, 300, 200, *STAGE),
        (0, 800, 700, None, 4),
        (1, 350, 250, *STAGE),
        (1, 850, 750, None, 4),
    ]


def test_what_a_capture_knows_of_stages_stands(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    made = NsysExport(rank_directory(run, 0) / "a.sqlite", epoch=START)
    made.own("critic_update", "stage", 150, 400, step=9)
    copied(made, 200, 450)

    assert column(run, "memcpy", "stage", "step") == [("critic_update", 9), (None, None)]


def chrome(folder: Path, late: int = 0) -> None:
    """Write a trace that says rank 7, with an operator around another and a copy."""
    job = {"distributedInfo": {"rank": 7, "world_size": 8}}
    made = ChromeTrace({"schemaVersion": 1, **job}, {**AFTER, "baseTimeNanoseconds": START + late})
    made.event("cpu_op", "aten::outer", 110, 190, 4000, 1)
    made.event("cpu_op", "aten::inner", 120, 150, 4000, 1)
    made.call(1, 130)
    args = {"device": 0, "stream": 7, "correlation": 1, "bytes": 64}
    made.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 300, 320, 0, 7, **args)
    folder.mkdir(parents=True)
    made.write(folder / "x.trace.json")


def test_traces_have_the_rank_of_their_folder_and_calls_of_two_windows_stay_apart(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path)
    for step in (4, 5):
        chrome(rank_directory(run, 0) / f"step-00000{step}", late=10_000 * (step - 4))

    assert column(run, "memcpy", "rank", "bytes", "start", "stage", "step") == [
        (0, 64, 300, *STAGE),
        (0, 64, 10_300, None, None),
    ]
    found = load(run).table("calls")
    ids = found.column("id")
    named = dict(zip(ids, found.column("name"), strict=True))
    assert len(named) == len(ids) > 4
    inner = [at for at, name in enumerate(found.column("name")) if name == "aten::inner"]
    parents = found.column("parent")
    assert [named[parents[at]] for at in inner] == ["aten::outer"] * 2
    assert parents[inner[0]] != parents[inner[1]]
    assert {found.column("stage")[at] for at in inner} == {"actor_update", None}


def test_what_cannot_be_read_is_said_and_the_others_are_read(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    copied(NsysExport(rank_directory(run, 0) / "a.sqlite", epoch=START), 200)
    for rank in (1, 2):
        rank_directory(run, rank).mkdir()
    (rank_directory(run, 1) / "b.sqlite").write_bytes(b"no")
    copied(NsysExport(rank_directory(run, 2) / "c.sqlite", epoch=None), 200)
    copied(NsysExport(run / "whole.sqlite", epoch=EPOCH), 200)

    table = load(run).table("memcpy")

    assert table.column("rank") == [0]
    assert "rank 1: " in table.note
    assert "b.sqlite: not an SQLite export" in table.note
    assert "c.sqlite: left out: its recording time is unknown" in table.note
    assert "whole.sqlite: left out: its rank is unknown; put rank-N in its name" in table.note


def test_a_report_of_the_whole_run_has_the_ranks_that_its_marks_say(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    made = NsysExport(run / "whole.sqlite", epoch=START)
    made.said("rlprof.rank", 1)
    copied(made, 200)

    assert column(run, "memcpy", "rank", "stage") == [(1, "actor_update")]


def test_all_silent_processes_of_a_report_are_of_the_rank_of_its_folder(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    made = NsysExport(rank_directory(run, 2) / "a.sqlite", epoch=START)
    for pid in (PID, 200):
        made.kernel("k", 300, 310, 1, pid=pid)
    copied(made, 200)
    place = {"globalPid": global_pid(200), "correlationId": 9, "start": 400, "end": 410}
    made.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=2, bytes=8, **place)
    made.path.unlink()
    made.write()

    found = column(run, "memcpy", "rank", "kind", "stage")

    assert found == [(2, "HtoD", "actor_update"), (2, "DtoH", None)]


def test_tables_of_one_name_of_two_tools_are_one(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    chrome(rank_directory(run, 0) / "torch")
    trace = TraceEvents()
    trace.collective("hcom_allReduce__1_0_1", 50_000, 50_700)
    trace.write(capture_folder(rank_directory(run, 0) / "npu") / "trace_view.json")

    assert column(run, "collectives", "rank", "operation") == [(0, "all_reduce")]


@pytest.mark.parametrize("name", ["sync", "gpu_metrics"])
def test_a_table_that_no_file_turns_out_to_have_abstains(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path)
    copied(NsysExport(rank_directory(run, 0) / "a.sqlite", epoch=START), 200)

    assert load(run).table(name).abstained == "rank 0: this table was not recorded"


def test_matrix_products_in_a_capture_are_those_of_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for late in (0, 1_000):
        job = {"distributedInfo": {"rank": 7, "world_size": 8}}
        made = ChromeTrace({**job}, {**AFTER, "baseTimeNanoseconds": START + late})
        shapes = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}
        made.event("cpu_op", "aten::mm", 110, 190, PID, 1, **shapes)
        made.launched(1, 130)
        folder = rank_directory(run, 0) / f"step-{late:06}"
        folder.mkdir(parents=True)
        made.write(folder / "x.trace.json")

    found = column(run, "shapes", "rank", "operator", "start", "dims")
    assert found == [(0, "aten::mm", at, "[[4,8],[8,2]]") for at in (110, 1_110)]
    first, total = matmuls(load(run)).rows
    assert first[:5] == ("aten::mm", "4x8 @ 8x2", "float", 2, 20)
    assert total[4:6] == (20, 1.0)


def test_a_link_out_of_the_run_is_not_followed_and_said(tmp_path: Path) -> None:
    elsewhere = artefacts_run_of(tmp_path / "elsewhere", 2)
    for rank in (0, 1):
        made = report(elsewhere, rank)
        made.kernel("other", 60, 70, 1)
        made.write()
    run = artefacts_run_of(tmp_path / "run", 2)
    rank_directory(run, 0).symlink_to(rank_directory(elsewhere, 0))
    (tmp_path / "elsewhere" / "x_ascend_pt").mkdir()
    rank_directory(run, 1).mkdir()
    (rank_directory(run, 1) / "x_ascend_pt").symlink_to(tmp_path / "elsewhere" / "x_ascend_pt")

    spans = load(run)

    assert not spans.tables
    assert [(each.rank, each.text.partition(";")[0]) for each in spans.warnings] == [
        (0, "rank-00000 is a link to a directory outside of the run and was not read"),
        (1, "x_ascend_pt is a link to a directory outside of the run and was not read"),
    ]


def test_an_impossible_end_is_bounded_in_a_capture_of_a_run(tmp_path: Path) -> None:
    run = artefacts_run_of(tmp_path)
    made = report(run, 0)
    for number in range(20):
        end = 10**12 if number == 5 else number * 100_000 + 50_000
        made.kernel("gemm", number * 100_000, end, number)
        made.call(max(number * 100_000 - 10, 0), number)
    made.write()

    spans = load(run)

    assert spans.table("kernels").column("duration") == [50_000] * 5 + [100_000] + [50_000] * 14
    quality = {row[0]: row[1:] for row in data_quality(spans).rows}
    assert quality["dropped events"][0] == "warn"
    assert "impossible ends" in quality["dropped events"][1]
