"""The table of the critical path inside a rank: exact sums, names, and what it leaves out."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_rlprof.analysis.device.device_critical_path import device_critical_path
from lightning_rlprof.analysis.device.timeline import LATENCY_NS
from lightning_rlprof.analysis.device.work import no_work
from lightning_rlprof.analysis.steps.step_selection import CLOSED, OPENED
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.calls import Call, Copy, Kernel, run
from tests.builders.runs import MAIN, Row, header, loaded
from tests.places import SHARED_DATA

DATA = SHARED_DATA
KINETO = DATA / "kineto"
STEP = [Row("step", "step", 1, 0, 1000), Row("actor_update", "stage", 1, 100, 900)]
LAUNCH = Call("cudaLaunchKernel", 100, 110, kind="runtime")
SYNC = Call("cudaDeviceSynchronize", 150, 620, kind="runtime")
GEMM = Kernel("gemm", 120, 600, launch=100, call=10, stage="actor_update")

TOOL = {rank: header(rank, 2, config={}) for rank in range(2)}

Totals = dict[tuple[Any, ...], int]


def totals(spans: Spans, **options: Any) -> Totals:
    """Return total by part, name and stage."""
    rows = device_critical_path(spans, **options).rows
    return {row[:3]: int(row[4] or 0) for row in rows}


def job(rows: list[Row], *tables: Any) -> Spans:
    """Return an external trace, so without a configuration of rlprof, with these tables."""
    return replace(loaded(rows), headers=TOOL, tables=run(*tables).tables)


def test_a_step_is_divided_among_host_launch_kernel_and_host_again() -> None:
    table = device_critical_path(job(STEP, [LAUNCH, SYNC], [GEMM]))
    assert list(table.rows) == [
        ("kernel", "gemm", "actor_update", 0.48, 480, 1.0, 1),
        ("host", None, "actor_update", 0.28, 280, None, 1),
        ("host", None, None, 0.2, 200, None, 2),
        ("host", "cudaDeviceSynchronize", "actor_update", 0.02, 20, None, 1),
        ("host", "cudaLaunchKernel", "actor_update", 0.01, 10, None, 1),
        ("launch latency", None, "actor_update", 0.01, 10, None, 1),
    ]
    assert table.note == (
        "Critical path over 1 step: host 51.0%, kernel 48.0%, launch latency 1.0%. "
        "Device work was recorded on 1 of 2 ranks."
    )


def test_work_off_the_path_lowers_the_share_that_is_on_it() -> None:
    short = Kernel("gemm", 121, 241, launch=100, call=10, stream=3, stage="actor_update")
    table = device_critical_path(job(STEP, [LAUNCH, SYNC], [GEMM, short]))
    assert table.rows[0] == ("kernel", "gemm", "actor_update", 0.48, 480, 0.8, 1)


def test_communication_and_copies_are_parts_of_their_own() -> None:
    kernels = [Kernel("ncclDevKernel_AllReduce", 120, 300, launch=100, call=10)]
    copies = [Copy("DtoH", 310, 600, launch=290, call=320)]
    sums: Counter[str] = Counter()
    for (part, name, _), total in totals(job(STEP, [LAUNCH], kernels, copies)).items():
        sums[part, name] += total
    assert sums["communication", "ncclDevKernel_AllReduce"] == 180
    assert sums["copy", "Memcpy DtoH"] == 290  # its call returned after it: the host waited


def test_a_step_that_ends_inside_the_one_before_has_no_path() -> None:
    rows = [Row("step", "step", at, 1000 * at, 1000 * at + 1000) for at in range(3)]
    starts = (100, 200, 1100, 2100)
    calls = [Call("cudaLaunchKernel", at, at + 10, "runtime") for at in starts]
    ends = ((120, 3400, 0), (3500, 5000, 0), (1120, 1500, 1), (2120, 2500, 1))
    kernels = [
        Kernel("gemm", start, end, launch=at, call=10, stream=stream)
        for at, (start, end, stream) in zip(starts, ends, strict=True)
    ]
    table = device_critical_path(job(rows, calls, kernels))
    assert sum(int(row[4] or 0) for row in table.rows) == 5_000
    assert [row[4:] for row in table.rows if row[0] == "kernel"] == [(4780, 4780 / 5540, 2)]


@pytest.mark.parametrize("kind", ["memset", "DtoD", "HtoD"])
def test_the_host_does_not_wait_for_copies_that_stay_on_the_device(kind: str) -> None:
    calls = [LAUNCH, Call("cudaMemsetAsync", 700, 760, "runtime")]
    kernel = GEMM._replace(start=115, end=705)
    found = totals(job(STEP, calls, [kernel], [Copy(kind, 725, 728, launch=700, call=60)]))
    assert {part for part, _, _ in found} == {"host"}


def test_a_copy_in_a_replay_waits_for_what_ran_before_it() -> None:
    calls = [Call("cudaGraphLaunch", 100, 400, "runtime"), SYNC]
    kernels = [
        Kernel("one", 150, 380, launch=100, call=300, graph=0),
        Kernel("two", 420, 600, launch=100, call=300, graph=0),
    ]
    copies = [Copy("memset", 385, 415, launch=100, call=300)]
    found = totals(job(STEP, calls, kernels, copies))
    assert found["kernel", "one", None] == 230
    assert found["copy", "Memset", None] == 30


def test_only_calls_of_the_driver_wait() -> None:
    module = Call("nn.Module: SynchronizedBatchNorm_0", 150, 620, kind="module")
    assert {part for part, _, _ in totals(job(STEP, [LAUNCH, module], [GEMM]))} == {"host"}
    free = SYNC._replace(name="cudaFree")
    assert totals(job(STEP, [LAUNCH, free], [GEMM]))["kernel", "gemm", "actor_update"] == 480


def test_a_kernel_that_ends_before_its_call_is_not_waited_for() -> None:
    short = GEMM._replace(start=112, end=118, call=30)
    found = totals(job(STEP, [LAUNCH._replace(end=130)], [short]))
    assert sum(found.values()) == 1_000
    assert {part for part, _, _ in found} == {"host"}


def test_steps_follow_one_another_where_the_host_runs_ahead() -> None:
    rows = [Row("step", "step", at, 100 * at, 100 * at + 100) for at in range(3)]
    calls = [Call("cudaLaunchKernel", 100 * at + 10, 100 * at + 20, "runtime") for at in range(3)]
    kernels = [
        Kernel("gemm", 30 + 502 * at, 530 + 502 * at, launch=100 * at + 10, call=10, step=at)
        for at in range(3)
    ]
    table = device_critical_path(job(rows, calls, kernels))
    found = {row[:2]: row[4:7] for row in table.rows}
    assert found["kernel", "gemm"] == (1500, 1.0, 3)
    assert found["kernel gap", None] == (4, None, 2)
    assert sum(int(row[4] or 0) for row in table.rows) == kernels[-1].end
    assert "3 steps: kernel 97.8%" in table.note


def test_a_late_start_without_a_known_cause_is_an_unattributed_delay() -> None:
    late = 110 + LATENCY_NS + 1
    kernel = GEMM._replace(start=late, end=late + 9)
    rows = [Row("step", "step", 1, 0, late + 9)]
    assert (
        totals(job(rows, [LAUNCH], [kernel]))["unattributed delay", None, "actor_update"]
        == LATENCY_NS + 1
    )


def test_of_a_replay_only_the_first_kernel_waits_for_the_host() -> None:
    calls = [Call("cudaGraphLaunch", 100, 300, "runtime"), SYNC]
    kernels = [
        Kernel("one", 150, 200, launch=100, call=200, graph=0),
        Kernel("two", 205, 280, launch=100, call=200, graph=0),
    ]
    found = totals(job(STEP, calls, kernels))
    assert found["kernel", "one", None] == 50
    assert found["kernel gap", None, None] == 5
    assert found["host", "cudaGraphLaunch", "actor_update"] == 50


def test_calls_of_threads_that_neither_launch_nor_train_are_not_waited_for() -> None:
    aside = SYNC._replace(thread=99)
    assert ("kernel", "gemm", "actor_update") not in totals(job(STEP, [LAUNCH, aside], [GEMM]))
    trains = SYNC._replace(thread=MAIN)
    assert ("kernel", "gemm", "actor_update") in totals(job(STEP, [LAUNCH, trains], [GEMM]))


def test_only_what_was_captured_counts() -> None:
    rows = [
        *STEP,
        Row(OPENED, "region", 1, 80, 90),
        Row(CLOSED, "region", 1, 640, 700),
        Row("step", "step", 2, 1000, 2000),
    ]
    found = totals(job(rows, [LAUNCH, SYNC], [GEMM]))
    assert sum(found.values()) == 640 - 90
    with_spans = job([*STEP, rows[-1]], [LAUNCH, SYNC], [GEMM])
    with_spans = replace(with_spans, headers={0: header()})
    assert sum(totals(with_spans).values()) == 600 - 100


def test_waits_that_nsight_systems_records_are_waits() -> None:
    columns = [Column(name, "count") for name in ("rank", "kind", "start", "duration")]
    rows = [(0, "stream waits for event", 5, 900), (0, "event", 150, 470)]
    sync = Table("sync", tuple(columns), rows)
    spans = job(STEP, None, [GEMM])
    spans = replace(spans, tables={**spans.tables, "sync": lambda: sync})
    found = totals(spans)
    assert found["kernel", "gemm", "actor_update"] == 480
    assert found["host", "event", "actor_update"] == 20


def test_ranks_add_up_and_can_be_chosen() -> None:
    both = [[*STEP], [*STEP]]
    calls = [LAUNCH, SYNC, LAUNCH._replace(rank=1), SYNC._replace(rank=1)]
    kernels = [GEMM, GEMM._replace(rank=1, end=610)]
    spans = replace(loaded(*both), headers=TOOL, tables=run(calls, kernels).tables)
    assert totals(spans)["kernel", "gemm", "actor_update"] == 480 + 490
    assert totals(spans, ranks=[1])["kernel", "gemm", "actor_update"] == 490
    assert "2 steps on 2 ranks" in device_critical_path(spans).note
    alone = replace(spans, tables=run(calls[:2], kernels).tables)
    assert device_critical_path(alone).note.endswith(
        "1 ranks are left out: their host calls were not recorded."
    )


def test_without_steps_it_covers_the_whole_recording() -> None:
    table = device_critical_path(
        job([Row("actor_update", "stage", 0, 0, 90)], [LAUNCH, SYNC], [GEMM])
    )
    assert sum(int(row[4] or 0) for row in table.rows) == 600
    assert "Critical path over the whole recording: kernel 80.0%" in table.note


def test_a_step_that_launches_nothing_has_no_path() -> None:
    later = [Row("step", "step", 2, 1_000, 1_100), Row("step", "step", 3, 1_100, 1_200)]
    launch = LAUNCH._replace(start=1_150, end=1_160)
    last = GEMM._replace(start=1_165, end=1_170, launch=1_150)
    table = device_critical_path(job([*STEP, *later], [LAUNCH, SYNC, launch], [GEMM, last]))
    assert sum(int(row[4] or 0) for row in table.rows) == 1_000 + 100
    assert "2 steps" in table.note


def test_it_abstains_without_kernels_or_calls() -> None:
    assert device_critical_path(loaded(STEP)).abstained == no_work(None)
    lost = str(device_critical_path(job(STEP, [LAUNCH], [])).abstained)
    assert lost.startswith(no_work(None, ["1 of 1 launches have no kernel"]))
    assert device_critical_path(job(STEP, [SYNC], [GEMM]), ranks=[5]).abstained == no_work([5])
    outside = GEMM._replace(start=1_200, end=1_300, launch=1_100)
    no_step = device_critical_path(job(STEP, [SYNC], [outside])).abstained
    assert str(no_step).startswith("No step that was profiled launched device work.")
    without_calls = device_critical_path(job(STEP, None, [GEMM])).abstained
    assert str(without_calls).startswith("Host calls were not recorded, so what the host waited")


@pytest.mark.skipif(not DATA.is_dir(), reason="no real captures in ../shared/data")
@pytest.mark.parametrize("name", ["text_level1_rank0", "db_level1_rank0"])
def test_ascend_captures_have_waits(name: str) -> None:
    spans = load(DATA / "ascend" / name)
    table = device_critical_path(spans)
    parts: Counter[object] = Counter()
    for part, _, _, share, *_ in table.rows:
        parts[part] += share
    assert parts["communication"] == pytest.approx(0.675, abs=0.01)
    assert parts["host"] == pytest.approx(0.26, abs=0.015)
    assert parts["copy"] == pytest.approx(0.0055, abs=0.0005)
    assert ("host", "aclrtSynchronizeStreamWithTimeout", None) in [row[:3] for row in table.rows]
