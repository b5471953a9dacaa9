"""The timeline of device work that several analyses share, and how its time is cut."""

from dataclasses import replace

import numpy as np

from lightning_rlprof.analysis.device.timeline import NEVER, device_timeline, grid_of
from lightning_rlprof.analysis.device.work import COMMUNICATION, COMPUTE, COPY, NO_STAGE
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.intervals import cells_of
from lightning_rlprof.tables.kernels import UNKNOWN
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.device_work import Job, Work, rows_of, spans_of, table
from tests.builders.kernels import Kernels, kernel_table
from tests.builders.runs import MAIN, Row

RUN = {0: [Row("run", "region", 1, 0, 100)]}


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def broken() -> Table:
    raise TraceError("trace.json: is no trace")


def kernels() -> Table:
    columns = Kernels(
        rank=ints(1, 0, 0),
        device=ints(5, 3, UNKNOWN),
        stream=ints(7, 13, 13),
        name=(ints(0, 1, 2), ["ncclDevKernel_AllReduce", "gemm", "Memcpy DtoH (Device -> Host)"]),
        start_ns=ints(10, 40, 30),
        end_ns=ints(15, 50, 35),
        stage=(ints(-1, 0, 0), ["mine"]),
        step=ints(0, 1, 1),
        range=(ints(-1, -1, -1), []),
        launch_ns=ints(UNKNOWN, 25, 29),
        graph=ints(4, UNKNOWN, UNKNOWN),
    )
    return kernel_table(columns)


def test_kernels_come_from_columns_as_a_loader_writes_them() -> None:
    rows = {rank: [Row("actor_update", "stage", 1, 0, 60)] for rank in (0, 1)}
    spans = replace(spans_of(Job(rows)), tables={"kernels": kernels})

    timeline = device_timeline(spans)

    assert [(lane.rank, lane.device) for lane in timeline.lanes] == [(0, None), (0, 3), (1, 5)]
    copy, gemm, nccl = (lane.work for lane in timeline.lanes)
    assert [work.kind.tolist() for work in (copy, gemm, nccl)] == [
        [COPY],
        [COMPUTE],
        [COMMUNICATION],
    ]
    assert [work.launch_ns.tolist() for work in (copy, gemm, nccl)] == [[29], [25], [NEVER]]
    assert [work.replay.tolist() for work in (gemm, nccl)] == [[-1], [0]]
    assert (timeline.stages, gemm.stage.tolist(), nccl.stage.tolist()) == (
        ["actor_update", "mine"],
        [1],
        [NO_STAGE],
    )
    assert timeline.copies


def test_the_table_of_copies_may_lack_launches_and_graphs() -> None:
    spans = spans_of(Job(RUN, [Work("compute", 0, 10)]))
    own = [
        {k: v for k, v in rows_of([Work("copy", 5, 9)])[0].items() if k not in ("launch", "graph")}
    ]
    own[0]["kind"] = own[0].pop("kernel")
    both = replace(spans, tables={**spans.tables, "memcpy": lambda: table("memcpy", own)})

    (lane,) = device_timeline(both).lanes

    assert lane.work.kind.tolist() == [COMPUTE, COPY]
    assert lane.work.launch_ns.tolist() == [NEVER, NEVER]


def test_work_comes_by_start_then_launch_and_none_is_empty() -> None:
    work = [
        Work("compute", 30, 40),
        Work("compute", 10, 10),
        Work("compute", 10, 20, launch_ns=8),
        Work("copy", 10, 20, launch_ns=5),
    ]

    (lane,) = device_timeline(spans_of(Job(RUN, work))).lanes

    assert lane.work.start_ns.tolist() == [10, 10, 30]
    assert lane.work.launch_ns.tolist() == [5, 8, NEVER]


def test_a_rank_reaches_from_its_first_span_launch_or_work_to_its_last() -> None:
    work = [Work("compute", 90, 120, launch_ns=-7), Work("compute", 20, 30, device=1)]

    lanes = device_timeline(spans_of(Job(RUN, work))).lanes

    assert [(lane.start_ns, lane.end_ns) for lane in lanes] == [(-7, 120)] * 2


def test_the_hosts_stages_are_those_of_the_training_thread() -> None:
    rows = [
        Row("step", "step", 1, 0, 50, MAIN, id=1),
        Row("actor_update", "stage", 1, 10, 20, MAIN, id=2),
        Row("reward", "stage", 1, 0, 50, 7, id=3),
        Row("reward", "stage", 1, 50, 60, 7, id=4),
    ]

    found = device_timeline(spans_of(Job({0: rows}, [Work("compute", 0, 10)])))

    (lane,) = found.lanes
    assert [found.stages[code] for code in lane.host.stage.tolist()] == ["actor_update"]


def test_a_grid_is_gapless_and_cut_wherever_something_changes() -> None:
    (lane,) = device_timeline(
        spans_of(Job(RUN, [Work("compute", 10, 20), Work("copy", 15, 30)]))
    ).lanes

    grid = grid_of(lane, ints(50, 300))

    assert grid.times.tolist() == [0, 10, 15, 20, 30, 50, 100]
    assert grid.busy.tolist() == [False, True, True, True, False, False]
    assert (grid.first.tolist(), grid.last.tolist()) == ([1, 2], [3, 4])
    cells = cells_of(grid.times, ints(-5, 15), ints(10, 200))
    assert [part.tolist() for part in cells] == [[0, 2], [1, 6]]


def test_a_table_that_cannot_be_read_is_noted() -> None:
    spans: Spans = spans_of(Job(RUN, [Work("compute", 0, 10)]))
    both = replace(spans, tables={**spans.tables, "memcpy": broken})

    found = device_timeline(both)

    assert len(found.lanes) == 1
    assert "The table memcpy could not be read: trace.json: is no trace." in found.notes
    assert device_timeline(replace(spans, tables={"kernels": broken})).lanes == []
