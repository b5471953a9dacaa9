from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.loaders.clocks import (
    ClockRow,
    Meetings,
    OnAxis,
    clock_table,
    on_axis,
    on_run,
    shift_times,
    wall_clocks,
)
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.run_captures import with_kernels
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import rank_directory
from lightning_rlprof.tables.spans import RunWarning, Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Table
from tests.builders import ascend_output
from tests.builders.ascend_output import capture_folder
from tests.builders.nsys_export import PID, NsysExport, global_pid
from tests.builders.runs import header
from tests.loaders.ascend import test_collectives
from tests.loaders.test_clocks import DRIFT, SECOND, two_hosts

DAY = 86_400 * SECOND


def anchors(headers: dict[int, Header]) -> tuple[dict[int, int], list[RunWarning]]:
    found, problems = on_axis(headers)
    assert all(each.clock is None for each in found.values())
    return {rank: each.shift_ns for rank, each in found.items()}, problems


def meetings(offset: int, drift: float = 0.0, jump: int = 0) -> Meetings:
    """Exchange every ten minutes for an hour, with rank 0, whose clock is ahead by the offset."""
    found = []
    for number in range(7):
        at = number * 600 * SECOND
        ahead = offset + round(drift * at) + jump * (number > 2)
        readings = [(at, at + 50_000 + ahead, at + 60_000 + ahead, at + 110_000)]
        found.append((0, readings))
    return found


def rows_of(headers: dict[int, Header], met: dict[int, Meetings]) -> list[ClockRow]:
    table = clock_table(headers, on_axis(headers, met)[0])
    assert table is not None
    return [ClockRow(*row) for row in table.rows]  # type: ignore[arg-type]


def three_hosts() -> dict[int, Header]:
    """Two ranks on host a, two on b whose wall clock is 5 ms ahead, one on c that says nothing."""
    anchor = 10**18
    clocks = {"a": 7 * DAY, "b": 2 * DAY, "c": DAY}
    return {
        rank: header(
            rank,
            host=host,
            clock_ns=clocks[host],
            unix_ns=anchor + (5_000_000 if host == "b" else 0),
        )
        for rank, host in enumerate("aabbc")
    }


def test_ranks_of_one_host_share_the_median_anchor() -> None:
    skews = [0, 40, 90, 5_000_000]
    headers = {
        rank: header(rank, unix_ns=10**18 + skew + rank * 1000, clock_ns=rank * 1000)
        for rank, skew in enumerate(skews)
    }
    assert anchors(headers) == (dict.fromkeys(range(4), 10**18 + 40), [])


def test_hosts_that_nobody_compared_have_their_own_anchor() -> None:
    headers = {0: header(0, host="a", unix_ns=5 * DAY), 1: header(1, host="b", unix_ns=2 * DAY)}

    assert anchors(headers) == ({0: 5 * DAY, 1: 2 * DAY}, [])


def test_one_host_name_on_two_machines_is_noticed() -> None:
    headers = {
        rank: header(rank, unix_ns=10**18, clock_ns=clock)
        for rank, clock in enumerate([0, 50, DAY, DAY + 50])
    }

    found, problems = anchors(headers)

    assert found == {0: 10**18 - 50, 1: 10**18 - 50, 2: 10**18 - DAY - 50, 3: 10**18 - DAY - 50}
    assert (
        problems[0].text == "host node-a: its ranks' clocks differ by seconds: this may be 2 hosts"
    )
    assert [row[2] for row in rows_of(headers, {})] == [0, 0, 2, 2]


def test_a_host_that_exchanged_times_stands_on_the_reference_s_wall_clock() -> None:
    found, problems = on_axis(three_hosts(), {2: meetings(5 * DAY, drift=2e-5)})

    same = np.array([2 * DAY + 600 * SECOND])
    for rank in (2, 3):
        there = same + 5 * DAY + round(2e-5 * int(same[0]))
        assert found[rank].reference == 0
        assert abs(found[rank].unix(same) - found[0].unix(there)) <= 4_000_000_000 * 2e-5 * 100
    assert found[4].clock is None
    assert problems == []


def test_what_its_wall_clock_was_ahead_is_known() -> None:
    headers = {rank: each for rank, each in three_hosts().items() if rank < 4}
    found, problems = on_axis(headers, {2: meetings(5 * DAY)})
    assert problems == []
    for rank in (2, 3):
        assert found[rank].off(headers[rank].unix_ns) == 5_000_000
    unix = int(found[0].unix(np.array([7 * DAY]))[0])
    assert found[2].unix(np.array([2 * DAY])).tolist() == [unix]


def test_the_table_tells_of_each_rank_what_is_known_and_with_what_uncertainty() -> None:
    rows = rows_of(three_hosts(), {2: meetings(5 * DAY, drift=1e-5)})
    assert [row[:6] for row in rows] == [
        (0, "a", 0, 0, "reference", 0),
        (1, "a", 0, 0, "reference", 0),
        (2, "b", 2, 0, "ping-pong", 7),
        (3, "b", 2, 0, "ping-pong", 7),
        (4, "c", 4, None, "wall clock", 0),
    ]
    assert [row[7] for row in rows] == [0, 0, 80_000, 80_000, None]
    assert rows[2][8] == pytest.approx(10, abs=0.01)
    assert rows[4][6] is None


def test_a_rank_that_went_on_long_after_the_last_exchange_is_as_unsure_as_it_was_then() -> None:
    found, _ = on_axis(three_hosts(), {2: meetings(5 * DAY)})
    late = 24 * 3600 * SECOND
    table = clock_table(three_hosts(), found, {2: [0, 3_600 * SECOND], 3: [0, late]})
    assert table is not None
    clock = found[3].clock
    assert clock is not None
    _, _, short, long, _ = table.column("uncertainty")
    assert (short, long) == (80_000, int(clock.uncertainty([late])[0]))
    assert clock.uncertainty([late])[0] > 1_000_000


def test_one_clock_needs_no_table() -> None:
    headers = {rank: each for rank, each in three_hosts().items() if rank < 2}
    assert clock_table(headers, on_axis(headers)[0]) is None


def test_traces_of_tools_have_a_clock_per_host_and_one_of_their_own_where_it_is_not_told() -> None:
    hosts = ["a", "b", "", "a", "", "b"]
    headers = {rank: header(rank, host=host) for rank, host in enumerate(hosts)}
    headers[5] = header(5, host="b", unix_ns=0)  # which does not say when it was recorded
    assert [row.clock for row in wall_clocks(headers)] == [0, 1, 2, 0, 4, 5]
    assert {row.uncertainty_ns for row in wall_clocks(headers)} == {None}


def test_a_clock_that_was_set_is_said() -> None:
    _, problems = on_axis(three_hosts(), {2: meetings(5 * DAY, jump=40_000_000)})
    assert problems[0].text == (
        "host b: its clock was set by +40.0 ms, at an unknown time within 600 s"
    )


def test_ranks_of_one_clock_need_no_exchange() -> None:
    headers = {rank: each for rank, each in three_hosts().items() if rank < 2}
    found, problems = on_axis(headers, {1: meetings(5 * DAY)})
    assert (found[1].clock, problems) == (None, [])


def test_without_the_reference_s_file_hosts_are_uncalibrated() -> None:
    headers = {rank: each for rank, each in three_hosts().items() if rank > 1}
    found, problems = on_axis(headers, {2: meetings(5 * DAY)})
    assert found[2].clock is None
    assert problems == []
    assert {row[7] for row in rows_of(headers, {2: meetings(5 * DAY)})} == {None}


def test_exchanges_by_which_time_would_run_backwards_are_not_believed() -> None:
    damaged = [(0, [(at, 10**12 - at, 10**12 - at, at + 1)]) for at in (0, SECOND, 2 * SECOND)]
    found, problems = on_axis(three_hosts(), {2: damaged})
    assert (found[2].clock, problems) == (None, [])


def test_ranks_are_not_compared_with_all_others() -> None:
    class Counted(dict[int, OnAxis]):
        looks = 0

        def values(self) -> Any:
            Counted.looks += 1
            return super().values()

    headers = {rank: header(rank, 500, host=f"host {rank % 2}") for rank in range(500)}
    table = clock_table(headers, Counted(on_axis(headers)[0]))
    assert table is not None
    assert len(table.rows) == 500
    assert Counted.looks < 5


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


def test_a_rank_that_was_not_compared_stays_on_its_wall_clock(tmp_path: Path) -> None:
    spans = load(two_hosts(tmp_path))
    times = np.array([0, 7])
    for rank in (0, None):
        later = begun(spans) - spans.unix_ns
        assert on_run(spans, begun(spans), rank, times).tolist() == [later, later + 7]
    assert on_run(spans, begun(spans), 1, times[:0]).tolist() == []


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
