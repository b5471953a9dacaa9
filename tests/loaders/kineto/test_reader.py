"""Traces of torch.profiler as spans, with who recorded them, and when."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.kineto.reader import is_chrome_trace, read_kineto
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import RunWarning, Spans, Thread
from tests.builders.chrome import BASE, PID, ChromeTrace


def rows(spans: Spans) -> list[tuple[Any, ...]]:
    return [(s.name, s.kind, s.step, s.start_ns, s.end_ns, s.id, s.parent) for s in spans]


def read(trace: ChromeTrace, folder: Path, name: str = "t.json") -> Spans:
    return read_kineto(trace.write(folder / name))


def test_annotations_are_spans_and_nothing_else_is(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 1_000, 9_000)
    trace.mark("micro_batch", 3_000, 3_001)
    trace.mark("actor_update", 2_000, 5_000)
    trace.mark("between", 9_500, 9_600)
    trace.event("cpu_op", "aten::mm", 2_000, 2_500, PID, 1)
    trace.event("python_function", "train.py(3): fit", 0, 9_999, PID, 1)
    trace.shadow("actor_update", 2_500, 5_500)

    spans = read(trace, tmp_path)

    assert rows(spans) == [
        ("ProfilerStep#3", "step", 3, 0, 8_000, 1, None),
        ("actor_update", "stage", 3, 1_000, 4_000, 2, 1),
        ("micro_batch", "region", 3, 2_000, 2_001, 3, 2),
        ("between", "region", 0, 8_500, 8_600, 4, None),
    ]
    assert spans.unix_ns == BASE + 1_000
    assert spans.warnings == ()
    assert spans.statuses == {0: "finished"}


def test_a_parent_is_the_innermost_on_the_same_thread(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for name, start, end, tid in (
        ("began at once", 0, 5, 1),
        ("outer", 0, 100, 1),
        ("same end", 10, 100, 1),
        ("overlaps", 20, 120, 1),
        ("in it", 105, 110, 1),
        ("elsewhere", 30, 40, 2),
        ("twin", 30, 40, 2),
    ):
        trace.mark(name, start, end, tid)

    spans = read(trace, tmp_path)

    parents = {span.name: span.parent and spans.span(span.parent - 1).name for span in spans}
    assert parents == {
        "outer": None,
        "began at once": "outer",
        "same end": "outer",
        "overlaps": None,
        "in it": "overlaps",
        "elsewhere": None,
        "twin": "elsewhere",
    }


def test_threads_have_the_names_of_the_trace(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("a", 0, 1, tid=5)
    trace.mark("b", 2, 3, tid="PyTorch Profiler")
    trace.mark("c", 4, 5, tid=6)
    name = {"ph": "M", "name": "thread_name", "pid": PID, "tid": 5, "args": {"name": "main"}}
    trace.events.append(name)

    spans = read(trace, tmp_path)

    assert spans.threads == (
        Thread(0, 5, "main"),
        Thread(0, -2, "thread PyTorch Profiler"),
        Thread(0, 6, "thread 6"),
    )
    assert spans.thread.tolist() == [0, 1, 2]


def test_threads_of_several_processes_are_told_apart(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("a", 0, 9, tid=1, pid=10)
    trace.mark("b", 3, 4, tid=1, pid=11)

    spans = read(trace, tmp_path)

    assert [thread.name for thread in spans.threads] == [
        "thread 1 of process 10",
        "thread 1 of process 11",
    ]
    assert [span.parent for span in spans] == [None, None]


@pytest.mark.parametrize(
    ("told", "name", "rank", "world"),
    [
        ({"rank": 3, "world_size": 8}, "rank1-of-4.json", 3, 8),
        ({}, "step-000003_actor_rank1-of-4_pid7.trace.json", 1, 4),
        ({}, "cpu_only_rank-34.json", 34, 35),
        ({"rank": 1, "pg_config": [{"pg_size": 2}, {"pg_size": 8}]}, "trace.json", 1, 8),
        ({"rank": 1, "pg_config": [{"pg_size": "8"}]}, "trace.json", 1, 2),
        ({}, "trace.json", 0, 1),
        ({"rank": -1, "world_size": 0}, "trace.json", 0, 1),
        ({"rank": 2**70, "world_size": 2**70}, "rank_2.json", 2, 3),
        ({"rank": "3"}, "trace.json", 0, 1),
        (None, "rank99999999999.json", 0, 1),
        ([], "trace.json", 0, 1),
    ],
)
def test_the_rank_is_told_by_the_trace_else_by_the_name(
    told: Any, name: str, rank: int, world: int, tmp_path: Path
) -> None:
    trace = ChromeTrace({"distributedInfo": told})
    trace.mark("actor_update", 0, 5)

    spans = read(trace, tmp_path, name)

    assert spans.ranks == (rank,)
    assert spans.headers[rank].world_size == world
    assert spans.rank.tolist() == [rank]


def test_the_header_says_what_the_trace_and_its_name_say(tmp_path: Path) -> None:
    top = {"trace_id": "ABC", "host_name": "node-1", "cuda_runtime_version": 12040}
    trace = ChromeTrace({**top, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]})
    trace.mark("actor_update", 500, 5_000)
    name = "step-000003-actor-update_value-model_rank1-of-4_tp1_pid7.trace.json"

    spans = read(trace, tmp_path, name)

    header = spans.headers[1]
    assert (header.run_id, header.host, header.device) == ("ABC", "node-1", "NVIDIA H100")
    assert (header.role, header.pid) == ("value-model", PID)
    assert (header.unix_ns, header.clock_ns) == (BASE + 500, 0)
    assert header.versions == {"cuda_runtime_version": "12040"}


def test_role_and_step_are_in_the_name_of_a_trace_of_verl(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 5)
    name = "critic_train_step12_rank1-of-2_tp0-dp1_pid77_20261101120000123_mb0-3.json.gz"

    spans = read(trace, tmp_path, name.removesuffix(".gz"))

    assert (spans.headers[1].role, spans.headers[1].world_size) == ("critic", 2)
    assert spans.step.tolist() == [12]


@pytest.mark.parametrize("name", ["step-000007-x_actor_rank0-of-1.json", "step-000007.json"])
def test_the_step_is_in_the_name_where_the_trace_counts_none(name: str, tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 5)
    counted = ChromeTrace()
    counted.mark("ProfilerStep#2", 0, 5)
    counted.mark("later", 6, 7)

    assert read(trace, tmp_path, name).step.tolist() == [7]
    assert read(counted, tmp_path, name).step.tolist() == [2, 0]


@pytest.mark.parametrize("before", [True, False])
def test_the_base_time_may_stand_on_either_side_of_the_events(before: bool, tmp_path: Path) -> None:
    top = {"baseTimeNanoseconds": 10**18}
    trace = ChromeTrace(top if before else {}, {} if before else top)
    trace.mark("actor_update", 1_234_567, 2_000_000)

    assert read(trace, tmp_path).unix_ns == 10**18 + 1_234_567


def test_before_torch_2_3_times_are_since_1970(tmp_path: Path) -> None:
    trace = ChromeTrace(after={})
    trace.mark("actor_update", 1_712_195_495_406_752_800, 1_712_195_495_406_752_803)

    spans = read(trace, tmp_path)

    assert spans.unix_ns == 1_712_195_495_406_752_800
    assert spans.duration_ns.tolist() == [3]
    assert "from 1970" in spans.warnings[0].text


@pytest.mark.parametrize("base", [None, -5, "1", 2**70, 1e30])
def test_without_a_base_time_the_wall_clock_is_not_known(base: Any, tmp_path: Path) -> None:
    trace = ChromeTrace(after={} if base is None else {"baseTimeNanoseconds": base})
    trace.mark("actor_update", 1_000, 2_000)

    spans = read(trace, tmp_path)

    assert spans.unix_ns == 0
    text = "recording time unknown: no base time in the trace"
    assert spans.warnings == (RunWarning(0, text, "time-unknown"),)


NO_TRACES = [b"", b"{}", b"[]", b"SQLite format 3\0", b'{"format": 1}\n["span"]', b"\x1f\x8b\x08"]


@pytest.mark.parametrize("data", NO_TRACES)
def test_what_is_no_trace_is_an_error_of_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)

    assert not is_chrome_trace(path)
    with pytest.raises(TraceError, match="not a Chrome trace") as error:
        read_kineto(path)
    assert "\n" not in str(error.value)


def test_a_trace_is_known_by_its_content(tmp_path: Path) -> None:
    trace = ChromeTrace({"pg_config": "x" * 2_000_000})
    data = trace.encode("compact")
    for name, content in (
        ("plain", data),
        ("packed", gzip.compress(data)),
        ("array", b'[{"ph": "X"}]'),
        ("spaced", b"\n\n " + data),
    ):
        (tmp_path / name).write_bytes(content)
        assert is_chrome_trace(tmp_path / name)
    assert not is_chrome_trace(tmp_path)
    assert not is_chrome_trace(tmp_path / "missing")


DEVICES = {
    "mtia_ccp_events": ("mtia_runtime", "MTIA"),
    "hpu_op": ("user_annotation", "Gaudi"),
    "cuda_profiler_range": ("cuda_runtime", "CUDA"),
    "npu2_events": ("user_annotation", "unknown"),
}


def of_other_device(path: Path, category: str, *, labelled: bool = False) -> Path:
    """Write ten events of a device of 100 ns each."""
    trace = ChromeTrace()
    trace.mark("ProfilerStep#1", 0, 2_000)
    for number in range(10):
        trace.event(DEVICES[category][0], "launch", number, number + 1, PID, 1, correlation=number)
        where = {} if labelled else {"device": 0}
        args = {**where, "correlation": number}
        trace.event(category, "matmul", number * 150, number * 150 + 100, 17, 3, **args)
    if labelled:
        args = {"name": "process_labels", "ph": "M", "pid": 17, "tid": 0}
        trace.events.append({**args, "args": {"labels": "HPU 0"}})
    return trace.write(path)


@pytest.mark.parametrize("category", DEVICES)
@pytest.mark.parametrize("labelled", [False, True])
def test_work_of_another_device_is_device_time_or_counted(
    tmp_path: Path, category: str, labelled: bool
) -> None:
    run = load(of_other_device(tmp_path / "a.json", category, labelled=labelled))
    kernels = run.table("kernels")
    lost = [each.text for each in run.warnings if each.code == "rows-left-out"]

    assert run.headers[0].device == DEVICES[category][1]
    if lost:
        assert lost[0].startswith(f"10 events of category {category} are not read: ")
        assert [*kernels.losses] == lost
        assert "Capture a step" not in str(breakdown(run).abstained)
    else:
        assert kernels.column("duration") == [100] * 10
    assert bool(lost) is (
        category in ("cuda_profiler_range", "npu2_events") or (category == "hpu_op" and labelled)
    )


def test_what_other_programs_mark_is_no_device(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.event("ray_task", "rollout", 0, 100, PID, 1, task="x")
    run = load(trace.write(tmp_path / "a.json"))
    assert (run.headers[0].device, run.warnings) == ("cpu", ())
