"""A run of two hosts whose clocks were compared, from its files to its axis."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import TraceWriter, rank_directory
from tests.builders.nsys_export import PID, NsysExport, global_pid
from tests.builders.runs import MAIN, header

SECOND = 10**9
WALL = 5_000_000  # host b's wall clock is ahead by this
APART = 3_600 * SECOND  # host b's monotonic clock is behind by this
DRIFT = 2e-5
STEP = 10 * SECOND


def to_a(time: int) -> int:
    """Return what host a's clock says at a time of host b's clock."""
    return time + APART + round(DRIFT * time)


def two_hosts(run: Path, *, compared: bool = True) -> Path:
    """Write 60 steps of ten seconds that begin at the same true times on both hosts."""
    first = 2 * APART
    for rank, host in enumerate("ab"):
        clock = first if rank == 0 else first - APART
        wall = header().unix_ns + (WALL + round(DRIFT * (first - APART)) if rank else 0)
        writer = TraceWriter(run, header(rank, 2, host=host, clock_ns=clock, unix_ns=wall))
        lines: list[tuple[object, ...]] = []
        for step in range(60):
            at = clock + round(step * STEP * (1 if rank == 0 else 1 / (1 + DRIFT)))
            lines.append(
                ("span", "step", "step", step + 1, at, at + SECOND, MAIN, step, None, None)
            )
            if rank and compared and step % 6 == 0:
                ahead = to_a(at) - at
                reading = (at, at + ahead + 50_000, at + ahead + 60_000, at + 110_000)
                lines.append(("clock", 0, [reading]))
        writer.write([*lines, ("end", 0, "finished")])
        writer.close()
    return run


def apart(run: Path) -> npt.NDArray[np.int64]:
    """Return by how much the same step begins later on rank 1 than on rank 0."""
    spans = load(run)
    return spans.start_ns[spans.rank == 1] - spans.start_ns[spans.rank == 0]


def test_compared_hosts_stand_on_one_axis_within_their_uncertainty(tmp_path: Path) -> None:
    run = two_hosts(tmp_path)
    spans = load(run)
    (unsure,) = set(spans.table("clocks").column("uncertainty")) - {0}
    true = round(DRIFT * APART)  # how far the drift had brought the clocks when the steps began
    assert (abs(apart(run) - true) <= unsure).all()
    assert spans.warnings == ()


def test_hosts_that_were_not_compared_are_off_by_wall_clock_and_drift(tmp_path: Path) -> None:
    run = two_hosts(tmp_path, compared=False)
    assert apart(run).min() < -10_000_000 or apart(run).max() > 4_000_000
    (problem,) = load(run).warnings
    assert "clocks of 2 hosts are unsynchronized" in problem.text
    assert load(run).table("clocks").column("uncertainty") == [None, None]


def test_what_a_device_tool_dates_by_its_host_s_wall_clock_follows_the_rank(tmp_path: Path) -> None:
    run = two_hosts(tmp_path)
    spans = load(run)
    head = spans.headers[1]
    begun = head.unix_ns + 300 * SECOND  # by the wall clock of host b
    export = NsysExport(rank_directory(run, 1) / "a.sqlite", epoch=begun)
    place = {"globalPid": global_pid(PID), "deviceId": 0, "streamId": 7}
    export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copyKind=1, bytes=8, **place, start=0, end=9)
    export.write()

    (start,) = load(run).table("memcpy").column("start")

    assert start == spans.later(1, begun)
    own = spans.start_ns[spans.rank == 1]
    assert own[29] < start <= own[30] + DRIFT * 300 * SECOND
    assert start != begun - spans.unix_ns


def test_readings_that_cannot_be_true_are_passed_over(tmp_path: Path) -> None:
    two_hosts(tmp_path, compared=False)
    with (tmp_path / "rank-00001.jsonl").open("a") as file:
        file.write('["clock",0,[[5,1,2,3],[0,9,8,1],[0,1,2,9999999999999999999]]]\n')
        file.write('["clock",0,[]]\n["clock",77,[[0,1,2,3]]]\n["clock","x",[[0,1,2,3]]]\n')
    spans = load(tmp_path)
    assert any("unsynchronized" in problem.text for problem in spans.warnings)
    assert any("1 of its lines can't be read" in problem.text for problem in spans.warnings)
