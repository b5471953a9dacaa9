"""What captures mark: the same spans out of a trace_view.json and out of a database."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.tables.spans import Spans
from tests.builders.ascend_output import (
    CONNECTION,
    EPOCH,
    MAIN,
    PID,
    DatabaseRows,
    TraceEvents,
    capture_folder,
    tid,
)

Write = Callable[..., Path]
MICROSECOND = 1_000


def text(parent: Path, marks: list[tuple[Any, ...]], **about: Any) -> Path:
    """Write marks (name, start, end, domain, shadow, thread) as a trace."""
    trace = TraceEvents()
    for name, start, end, domain, shadow, thread in marks:
        trace.mark(name, start, end, domain=domain, shadow=shadow, thread=thread)
    return trace.write(capture_folder(parent, **about) / "trace_view.json").parent.parent


def database(parent: Path, marks: list[tuple[Any, ...]], **about: Any) -> Path:
    """Write the same as a database."""
    rows = DatabaseRows()
    for at, (name, start, end, domain, shadow, thread) in enumerate(marks):
        more = {"globalTid": tid(thread), "connectionId": CONNECTION + at}
        rows.mark(name, start, end, domain=domain or "default", **more)
        if shadow is not None:
            times = {"startNs": EPOCH + shadow[0], "endNs": EPOCH + shadow[1], "deviceId": 0}
            rows.add("TASK", **times, connectionId=CONNECTION + at, taskType="MARKER")
    output = capture_folder(parent, **about)
    return rows.write(output / "ascend_pytorch_profiler_0.db").parent.parent


@pytest.fixture(params=[text, database], ids=["text", "database"])
def write(request: pytest.FixtureRequest) -> Write:
    return request.param  # type: ignore[no-any-return]


def mark(
    name: str,
    start: int,
    end: int | None,
    domain: str | None = "rlprof",
    *,
    shadow: tuple[int, int] | None = None,
    thread: int = MAIN,
) -> tuple[Any, ...]:
    scaled = [None if ns is None else ns * MICROSECOND + 1 for ns in (start, end)]
    return (name, *scaled, domain, shadow, thread)


def told(run: Spans) -> list[tuple[str, str, int]]:
    return [(span.name, span.kind, span.step) for span in run]


STEPS = [
    mark("rlprof.canary", 0, 1),
    mark("ProfilerStep#0", 1, 101, "default"),
    mark("step", 2, 100),
    mark("actor_generate", 10, 40, shadow=(5_000, 45_000)),
    mark("my own", 12, 30),
    mark("dataloader", 50, 60, "default"),
    mark("hello", 70, None),
    mark("step", 101, 200),
    mark("actor_update", 110, 190),
]


def test_stages_and_steps_are_of_our_own_domain_and_count_from_the_window(
    write: Write, tmp_path: Path
) -> None:
    run = read_ascend(write(tmp_path, STEPS, metadata={"rlprof_window": "step-000007"}))

    assert told(run) == [
        ("step", "step", 7),
        ("actor_generate", "stage", 7),
        ("my own", "region", 7),
        ("dataloader", "region", 7),
        ("hello", "mark", 7),
        ("step", "step", 8),
        ("actor_update", "stage", 8),
    ]
    assert [span.parent for span in run] == [None, 0, 1, 0, 0, None, 5]
    assert run.unix_ns == EPOCH + 2_001
    assert run.span(1).start_ns == 8_000
    assert run.span(1).duration_ns == 30_000
    assert run.threads == ((0, MAIN, f"thread {MAIN}"),)
    assert run.warnings == ()


def test_the_time_that_the_device_was_in_a_range_is_a_counter_of_its_span(
    write: Write, tmp_path: Path
) -> None:
    run = read_ascend(write(tmp_path, STEPS))

    assert [span.counters for span in run if span.kind == "stage"] == [{"device_ns": 40_000}, None]


def test_without_a_window_steps_count_from_one_and_that_is_said(
    write: Write, tmp_path: Path
) -> None:
    run = read_ascend(write(tmp_path, STEPS))

    assert [span.step for span in run if span.kind == "step"] == [1, 2]
    assert "counted from 1" in run.warnings[0].text


def test_a_window_of_one_stage_holds_no_step_and_all_of_it_is_in_the_windows_step(
    write: Write, tmp_path: Path
) -> None:
    marks = [mark("ProfilerStep#0", 0, 99, "default"), mark("actor_update", 1, 90)]
    about = {"rlprof_window": "step-000012-actor_update-2"}

    run = read_ascend(write(tmp_path / "ours", marks, metadata=about))
    assert told(run) == [("actor_update", "stage", 12)]

    run = read_ascend(write(tmp_path / "theirs", marks[:1], metadata=about))
    assert told(run) == [("ProfilerStep#0", "region", 12)]


@pytest.mark.parametrize("window", ["step-000012", "step-000012-2", "", "step-x"])
def test_steps_of_torch_npu_are_steps_where_we_marked_none(
    write: Write, tmp_path: Path, window: str
) -> None:
    marks = [mark(f"ProfilerStep#{at}", at * 10, at * 10 + 9, "default") for at in (12, 13)]
    marks.append(mark("actor_update", 131, 135))

    run = read_ascend(write(tmp_path, marks, metadata={"rlprof_window": window}))

    assert told(run) == [
        ("ProfilerStep#12", "step", 12),
        ("ProfilerStep#13", "step", 13),
        ("actor_update", "stage", 13),
    ]


def test_other_domains_are_regions_even_with_a_stages_name(write: Write, tmp_path: Path) -> None:
    marks = [mark("actor_update", 0, 9, "default"), mark("step", 1, 8, "mine")]

    run = read_ascend(write(tmp_path, marks))

    assert told(run) == [("actor_update", "region", 0), ("step", "region", 0)]
    assert any("has no stages" in note.text for note in run.notes)


def test_versions_without_domains_carry_ours_in_the_name(write: Write, tmp_path: Path) -> None:
    marks = [mark("rlprof::rlprof.canary", 0, 1, None), mark("rlprof::actor_update", 2, 9, None)]

    run = read_ascend(write(tmp_path, marks))

    assert told(run) == [("actor_update", "stage", 0)]


def test_collectives_that_hccl_marks_have_the_name_of_their_operator(
    write: Write, tmp_path: Path
) -> None:
    plain = '{"opName": "hcom_allReduce", "count": "8", "dataType": "fp16", "groupName": "tp"}'
    marks = [
        mark(plain, 0, 9, "communication"),
        mark(plain.replace('"', '\\"'), 10, 19, "communication"),
        mark("no JSON", 20, 29, "communication"),
    ]

    run = read_ascend(write(tmp_path, marks))

    assert [span.name for span in run] == ["hcom_allReduce", "hcom_allReduce", "no JSON"]


def test_a_thread_that_marks_no_steps_is_in_those_of_the_one_that_trains(
    write: Write, tmp_path: Path
) -> None:
    marks = [mark("step", 0, 50), mark("prefetch", 10, 20, "default", thread=99)]

    run = read_ascend(write(tmp_path, marks, metadata={"rlprof_window": "step-000003"}))

    assert told(run) == [("step", "step", 3), ("prefetch", "region", 3)]
    assert run.span(1).parent is None


def test_overlapping_ranges_nest_only_where_one_holds_the_other(
    write: Write, tmp_path: Path
) -> None:
    marks = [mark("a", 0, 10), mark("b", 5, 15), mark("c", 7, 9), mark("d", 11, 20)]

    run = read_ascend(write(tmp_path, marks))

    assert [(span.name, span.parent) for span in run] == [
        ("a", None),
        ("b", None),
        ("c", 1),
        ("d", None),
    ]


def test_who_recorded_it_comes_from_the_files_beside(write: Write, tmp_path: Path) -> None:
    groups = {"g": {"group_name": "default_group", "global_ranks": [0, 1, 2, 3]}}
    metadata = {"role": "actor", "parallel_group_info": groups, "rlprof_run": "r1"}

    run = read_ascend(write(tmp_path, STEPS, rank="2", metadata=metadata))

    header = run.headers[2]
    assert (header.rank, header.world_size, header.role, header.run_id) == (2, 4, "actor", "r1")
    assert (header.host, header.pid, header.device) == ("node-7", PID, "npu")
    assert header.versions == {"torch_npu": "2.7.1"}
    assert run.statuses == {2: "finished"}


def test_a_database_alone_tells_what_the_files_beside_would(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.mark("step", 0, 10)
    rows.add("RANK_DEVICE_MAP", rankId=5, deviceId=1)
    rows.add("META_DATA", name="rlprof_window", value='"step-000004"')
    rows.add("META_DATA", name="role", value='"critic"')
    rows.add("HOST_INFO", hostUid="1", hostName="far")

    run = read_ascend(rows.write(tmp_path / "copied.db"))

    assert told(run) == [("step", "step", 4)]
    assert (run.headers[5].role, run.headers[5].host) == ("critic", "far")


def test_with_both_formats_the_database_is_read_and_nothing_is_there_twice(tmp_path: Path) -> None:
    folder = text(tmp_path, STEPS)
    rows = DatabaseRows()
    rows.mark("actor_update", 0, 10)
    rows.write(folder / "ASCEND_PROFILER_OUTPUT" / "ascend_pytorch_profiler.db")

    assert told(read_ascend(folder)) == [("actor_update", "stage", 0)]


def test_steps_that_torch_and_mstx_both_show_are_there_once(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.operator("ProfilerStep#4", 0, 100_000)
    folder = trace.write(capture_folder(tmp_path) / "trace_view.json").parent
    assert told(read_ascend(folder)) == [("ProfilerStep#4", "step", 4)]

    trace.mark("ProfilerStep#4", 1_000, 99_000, domain="default")
    trace.write(folder / "trace_view.json")
    run = read_ascend(folder)
    assert told(run) == [("ProfilerStep#4", "step", 4)]
    assert run.span(0).duration_ns == 98_000


def test_a_capture_without_a_device_warns_of_its_clock(write: Write, tmp_path: Path) -> None:
    run = read_ascend(write(tmp_path, STEPS[:2], activities=["ProfilerActivity.CPU"]))

    assert "only the CPU was profiled" in run.warnings[-1].text
    assert run.headers[0].device == "cpu"


def test_nothing_but_a_capture_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(TraceError, match="contains no output of torch_npu"):
        read_ascend(tmp_path)
    with pytest.raises(TraceError, match="not an output of torch_npu"):
        read_ascend(tmp_path / "a.txt")
    with pytest.raises(TraceError, match="not an output of torch_npu"):
        read_ascend(tmp_path / "nothing")


def test_a_mark_takes_no_time_whatever_the_trace_says(tmp_path: Path) -> None:
    trace = TraceEvents()
    trace.mark("saved", 100)
    next(row for row in trace.events if row["name"] == "saved")["dur"] = 5
    trace.write(capture_folder(tmp_path) / "trace_view.json")

    assert [(span.kind, span.duration_ns) for span in read_ascend(tmp_path)] == [("mark", 0)]
