"""The parts of a device's time: every nanosecond is in one, and tables are sums of them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.device.breakdown import (
    COMPUTE_CLASSES,
    EDGE,
    IDLE,
    MAX_COLUMNS,
    NOT_PROFILED,
    PARTS,
    REPLAY,
    UNKNOWN,
    WORK,
    DeviceParts,
    annotation_times,
    breakdown,
    device_time,
)
from lightning_rlprof.analysis.device.timeline import device_timeline, idle
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of as rows_of_table
from tests.analysis.device.test_agreement import TRACES
from tests.builders.device_jobs import jobs
from tests.builders.device_work import Job, Work, rows_of, spans_of, table
from tests.builders.runs import Row
from tests.effort import examples
from tests.places import SHARED_DATA

UNCERTAIN = (REPLAY, UNKNOWN, EDGE, NOT_PROFILED)
NAMED = {
    "matmul": "ampere_sgemm_128x64_nn",
    "attention": "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>",
    "reduction": "void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>()",
}


def parts(spans: Spans) -> Counter[str]:
    """Return the time of each part, of all devices."""
    sums = device_time(spans).ns.sum(axis=(0, 1)).tolist()
    return Counter(dict(zip(PARTS, sums, strict=True)))


def named(spans: Spans, *work: tuple[str, int, int]) -> Spans:
    """Return the run with these kernels: name, start and end."""
    rows = rows_of([Work("compute", start, end, None, start) for _, start, end in work])
    rows = [row | {"kernel": name} for row, (name, _, _) in zip(rows, work, strict=True)]
    return replace(spans, tables={"kernels": lambda: table("kernels", rows)})


def check(spans: Spans) -> None:
    found, time, rows = parts(spans), device_time(spans), breakdown(spans)
    if not time.places:
        assert rows.abstained is not None
        return
    total = rows_of_table(rows)[-1]
    assert sum(found.values()) == total["wall"]
    assert sum(found[each] for each in COMPUTE_CLASSES) == (total["compute"] or 0)
    assert found["exposed communication"] == (total["exposed communication"] or 0)
    assert found["exposed memcpy"] == (total["exposed memcpy"] or 0)
    assert sum(found[each] for each in UNCERTAIN) == total["unknown"]
    gaps = idle(spans)
    causes: Counter[str] = Counter()
    for row in rows_of_table(gaps) if gaps.abstained is None else ():
        causes[row["kind"]] += row["total"]
    assert {each: found[each] for each in IDLE} == {each: causes[each] for each in IDLE}
    assert time.columns.shape == (min(MAX_COLUMNS, time.end_ns - time.start_ns), len(WORK))
    busy = sum(found[each] for each in WORK)
    missing = busy - int(time.columns.sum())
    outside = 0.02 * busy if found[EDGE] else 0  # Few kernels may lie beyond a gap at the edge.
    assert -time.columns.size <= missing <= time.columns.size + outside


def check_columns(spans: Spans) -> None:
    """Compare columns over all the time of each device with the partition of that time."""
    found, time = DeviceParts(spans), device_time(spans)
    lanes = device_timeline(spans).lanes
    for lane, place, whole in zip(lanes, time.places, time.ns, strict=True):
        window = found.columns(lane.rank, lane.start_ns, lane.end_ns, 7)
        (own,) = (each.ns for each in window if (lane.rank, each.device) == place)
        assert own.sum(axis=0).tolist() == whole.sum(axis=0).tolist()


@given(jobs(), st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
@settings(max_examples=examples(60), deadline=None)
def test_columns_of_a_window_hold_every_nanosecond_of_each_device(
    job: Job, start: int, length: int, count: int
) -> None:
    spans = spans_of(job)
    found = DeviceParts(spans)
    for rank in job.ranks:
        coarse = found.columns(rank, start, start + length, count)
        fine = found.columns(rank, start, start + length, length)
        assert [each.device for each in coarse] == [each.device for each in fine]
        edges = np.arange(min(count, length) + 1) * length // max(1, min(count, length))
        for wide, single in zip(coarse, fine, strict=True):
            assert wide.ns.sum(axis=1).tolist() == np.diff(edges).tolist()
            assert (single.ns.sum(axis=1) == 1).all(), "a nanosecond is in one part"
            assert wide.ns.tolist() == np.add.reduceat(single.ns, edges[:-1]).tolist()
    check_columns(spans)


@given(jobs())
@settings(max_examples=examples(60), deadline=None)
def test_parts_add_up_to_the_tables_to_the_nanosecond(job: Job) -> None:
    check(spans_of(job))


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
@pytest.mark.parametrize("name", TRACES)
def test_parts_of_real_traces_add_up_to_the_tables(name: str) -> None:
    spans = load(SHARED_DATA / name)
    check(spans)
    check_columns(spans)


def test_of_kernels_that_run_at_once_the_first_class_has_the_time() -> None:
    spans = named(
        spans_of(Job({0: [Row("run", "region", 1, 0, 100)]})),
        (NAMED["reduction"], 0, 50),
        (NAMED["matmul"], 10, 20),
        (NAMED["attention"], 15, 30),
    )
    found = parts(spans)
    wanted = {"matmul": 10, "attention": 10, "reduction": 30}
    assert {name: found[name] for name in COMPUTE_CLASSES if found[name]} == wanted


def test_time_outside_captures_is_not_profiled_and_a_gap_in_a_replay_is_unknown() -> None:
    rows = [
        Row("rlprof open capture", "region", 1, 9, 10, id=1),
        Row("rlprof close capture", "region", 1, 50, 51, id=2),
        Row("actor_update", "stage", 1, 0, 100, id=3),
    ]
    kernels = [Work("compute", 10, 20, None, 5, 1), Work("compute", 30, 40, None, 5, 1)]
    found = parts(spans_of(Job({0: rows}, kernels, ours=True)))
    assert found[NOT_PROFILED] == 10 + 50
    assert found[REPLAY] == 10
    assert found["unattributed idle"] == 10
    assert found["matmul"] == 20


def test_an_annotation_has_what_it_launched() -> None:
    spans = spans_of(Job({0: [Row("run", "region", 1, 0, 100)]}))
    rows = rows_of([Work("compute", 0, 7), Work("communication", 5, 30), Work("compute", 40, 44)])
    for row, name in zip(rows, ("forward", "forward", None), strict=True):
        row["range"] = name
    spans = replace(spans, tables={"kernels": lambda: table("kernels", rows)})
    found = {
        each.name: dict(zip(WORK, each.ns.tolist(), strict=True))
        for each in annotation_times(spans)
    }
    assert [*found] == ["forward", ""]
    assert (found["forward"]["matmul"], found["forward"]["exposed communication"]) == (7, 25)
    assert found[""]["matmul"] == 4
