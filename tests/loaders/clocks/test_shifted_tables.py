"""What tools date by a host's wall clock, on the axis of a run whose hosts compared clocks."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.loaders.clocks.shifted_tables import kernels_on_run, on_run, shift_times
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.run_captures import with_kernels
from lightning_rlprof.records.run_directory import rank_directory
from lightning_rlprof.tables.kernels import UNKNOWN, Kernels
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Table
from tests.builders import ascend_output
from tests.builders.ascend_output import capture_folder
from tests.builders.nsys_export import PID, NsysExport, global_pid
from tests.loaders.ascend import test_collectives
from tests.loaders.test_clocks import DRIFT, SECOND, two_hosts


def begun(spans: Spans) -> int:
    """Return what the wall clock of host b said 50 s after rank 1 started."""
    return spans.headers[1].unix_ns + 50 * SECOND


def test_times_of_a_long_capture_drift_with_its_clock(tmp_path: Path) -> None:
    spans = load(two_hosts(tmp_path))
    times = np.arange(0, 500, 3) * SECOND
    found = on_run(spans, begun(spans), 1, times)
    exact = [spans.later(1, begun(spans) + time) for time in times.tolist()]
    assert abs(found - exact).max() <= 1_000
    drifted = (found - found[0]) - times
    assert abs(int(drifted[-1]) - DRIFT * int(times[-1])) < 100_000
    assert (np.diff(found) > 0).all()


def test_a_rank_that_nobody_compared_stays_on_its_wall_clock(tmp_path: Path) -> None:
    spans = load(two_hosts(tmp_path))
    times = np.array([0, 7])
    for rank in (0, None):
        later = begun(spans) - spans.unix_ns
        assert on_run(spans, begun(spans), rank, times).tolist() == [later, later + 7]
    assert on_run(spans, begun(spans), 1, times[:0]).tolist() == []


def test_kernels_keep_their_durations_and_what_is_not_known(tmp_path: Path) -> None:
    spans = load(two_hosts(tmp_path))
    zero, code = np.zeros(2, np.int64), np.full(2, -1)
    start = np.array([0, 400 * SECOND])
    launch = np.array([UNKNOWN, 399 * SECOND])
    coded = (code, [])
    own = Kernels(zero + 1, zero, zero, coded, start, start + 9, coded, zero, coded, launch)
    found = kernels_on_run(spans, begun(spans), 1, own)
    assert (found.end_ns - found.start_ns).tolist() == [9, 9]
    assert found.start_ns.tolist() == on_run(spans, begun(spans), 1, start).tolist()
    assert found.launch_ns is not None
    assert found.launch_ns[0] == UNKNOWN
    assert abs(found.launch_ns[1] - spans.later(1, begun(spans) + 399 * SECOND)) < 1_000
    assert own.launch_ns is not None
    assert own.launch_ns.tolist() == launch.tolist()


def test_a_table_by_wall_clocks_is_put_right_by_rank(tmp_path: Path) -> None:
    spans = load(two_hosts(tmp_path))
    columns = (
        Column("rank", "count"),
        Column("start", "time", "ns"),
        Column("length", "duration", "ns"),
        Column("launch", "time", "ns"),
    )
    wall = begun(spans) - spans.unix_ns
    launch = np.ma.masked_array([5, wall], [True, False])
    cells = [np.array([0, 1]), np.array([wall, wall]), np.array([3, 4]), launch]
    table = Table("memory", columns, ColumnRows(cells), note="n")
    shift = partial(on_run, spans, spans.unix_ns)
    found = shift_times(lambda: table, shift)
    there = spans.later(1, begun(spans))
    assert list(found.rows) == [(0, wall, 3, None), (1, there, 4, there)]
    assert there != wall
    assert found.note == "n"
    empty = replace(table, rows=[])
    assert list(shift_times(lambda: empty, shift).rows) == []
    missing = Table("memory", columns, abstained="nothing")
    assert shift_times(lambda: missing, shift) is missing


def test_tables_of_ascend_and_the_stages_of_their_launches_follow_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the wall clock of host b the launch would lie outside of its step."""
    run = two_hosts(tmp_path)
    spans = load(run)
    (row,) = np.flatnonzero((spans.rank == 1) & (spans.step == 2))
    there = int(spans.end_ns[row]) - 2_000_000
    assert spans.wall_off[1](spans.unix_ns + there) > 3_000_000
    wall = spans.unix_ns + there + spans.wall_off[1](spans.unix_ns + there)
    assert spans.later(1, wall) == pytest.approx(there, abs=1_000)
    for module in (ascend_output, test_collectives):
        monkeypatch.setattr(module, "EPOCH", wall)
    output = capture_folder(rank_directory(run, 1) / "x")
    test_collectives.trace(marked=False).write(output / "trace_view.json")

    table = load(run).table("collectives")

    assert table.column("step") == [2]
    assert table.column("start") == [pytest.approx(there + 50_000, abs=1_000)]
    assert table.column("launch") == [pytest.approx(there + 3_000, abs=1_000)]
    kernels = load(run).table("kernels")
    assert kernels.column("start") == table.column("start")
    assert kernels.column("step") == [2]


def test_a_report_of_a_whole_host_follows_the_clock_of_its_ranks(tmp_path: Path) -> None:
    """Nothing in its name or folder tells a rank; its own marks do."""
    run = two_hosts(tmp_path)
    spans = load(run)
    export = NsysExport(run / "host-b.sqlite", epoch=begun(spans))
    export.said("rlprof.rank", 1)
    place = {"globalPid": global_pid(PID), "deviceId": 0, "streamId": 7}
    export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=1, bytes=8, **place, start=0, end=9)
    export.kernel("gemm", 30, 40, 1)
    export.call(20, 1)
    export.write()

    found = load(run)

    there = spans.later(1, begun(spans))
    assert found.table("memcpy").column("start") == [there]
    assert found.table("kernels").column("start") == [there + 30]
    assert found.table("kernels").column("rank") == [1]
    plain = with_kernels(replace(spans, wall_off={}, tables={}), run)
    assert plain.table("kernels").column("start") != [there + 30]
