"""Clocks of ranks compared by the collectives in which they met: injected offsets come back."""

import gzip
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.loaders.clocks import ClockRow, aligned
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import RankNote, Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.clock_jobs import MS, SECOND, Job, drifting, job_of, run_of, true
from tests.places import SHARED_DATA

DATA = SHARED_DATA / "kineto" / "two_ranks"


def rows_of(run: Spans) -> list[ClockRow]:
    return [ClockRow(*row) for row in run.table("clocks").rows]  # type: ignore[arg-type]


def off(run: Spans, job: Job, rank: int) -> Int64s:
    """Return how far the calls of a rank lie from where they were, counted like those of rank 0."""
    table = run.table("collectives")
    start = np.array(table.column("start"), np.int64)
    base = start[job.rank == 0][0] - job.start[job.rank == 0][0]
    return np.asarray((start - job.start - base)[job.rank == rank], np.int64)


@pytest.mark.parametrize("how", ["number", "step"])
def test_injected_offsets_and_drifts_come_back_within_the_uncertainty(how: str) -> None:
    inside = []
    for seed in range(100):
        job = job_of(seed, [(0, 1)])
        clock, ahead = drifting(seed)
        run = aligned(run_of(job, "ab", [true, clock], how=how))
        first, second = rows_of(run)
        assert (first.method, second.method, second.reference) == ("reference", "collectives", 0)
        assert second.uncertainty_ns is not None
        assert second.uncertainty_ns < 2 * MS
        assert abs(second.off_ns - ahead) < MS  # type: ignore[operator]
        inside.append((abs(off(run, job, 1)) <= second.uncertainty_ns).all())
    assert np.mean(inside) >= 0.95


def test_spans_notes_and_tables_of_a_moved_rank_stay_together() -> None:
    job = job_of(3, [(0, 1)])
    before = run_of(job, "ab", [true, lambda times: times - 300 * MS])
    before = replace(before, notes=(RankNote(1, int(before.start_ns[-1]), "info", "here"),))
    run = aligned(before)
    theirs = run.rows(rank=1)
    start = np.array(run.table("collectives").column("start"), np.int64)
    assert (run.start_ns[theirs] == start[job.rank == 1]).all()
    assert run.notes[0].time_ns == run.start_ns[-1]
    took = run.table("collectives").column("duration")
    assert took == before.table("collectives").column("duration")
    unix = run.headers[1].unix_ns
    assert abs(run.later(1, unix) - before.later(1, unix) - 300 * MS) < 2 * MS
    assert "unsynchronized" not in str(run.warnings)


def test_the_axis_begins_earlier_where_a_rank_was_ahead_and_no_time_is_negative() -> None:
    job = job_of(4, [(0, 1)])
    before = run_of(job, "ab", [true, lambda times: times + 2 * SECOND])
    run = aligned(before)
    by = before.unix_ns - run.unix_ns
    assert by > SECOND
    mine = run.rows(rank=0)
    assert (run.start_ns[mine] == before.start_ns[mine] + by).all()
    assert run.later(0, 5 * SECOND) == before.later(0, 5 * SECOND) + by


def test_a_clock_that_was_set_is_found() -> None:
    job = job_of(5, [(0, 1)], meetings=400)
    run = aligned(run_of(job, "ab", [true, lambda times: times + 40 * MS * (times > 11 * SECOND)]))
    second = rows_of(run)[1]
    assert second.jumps == 1
    assert second.uncertainty_ns is not None
    assert 40 * MS <= second.uncertainty_ns < 60 * MS
    assert (abs(off(run, job, 1)) <= second.uncertainty_ns).all()


def test_ranks_of_one_host_move_together() -> None:
    job = job_of(7, [(0, 1, 2, 3)])
    clock, _ = drifting(3)
    run = aligned(run_of(job, "aabb", [true, true, clock, clock]))
    assert [row.method for row in rows_of(run)] == ["reference"] * 2 + ["collectives"] * 2
    assert len({row.uncertainty_ns for row in rows_of(run)}) == 2
    assert (abs(off(run, job, 1)) == 0).all()


def test_one_host_is_left_as_it_is() -> None:
    run = run_of(job_of(8, [(0, 1)]), "aa", [true, lambda times: times + MS])
    assert aligned(run) is run


@pytest.mark.parametrize(
    "more",
    [
        {"how": "order"},  # neither step nor number: any of them may have met any
        {"operation": "broadcast"},  # its root is done before others come
        {"operation": "all_to_all"},
    ],
)
def test_what_does_not_certify_moves_nothing_and_is_said(more: dict[str, str]) -> None:
    before = run_of(job_of(9, [(0, 1)]), "ab", [true, lambda times: times + 50 * MS], **more)
    run = aligned(before)
    assert (run.start_ns == before.start_ns).all()
    assert {row.uncertainty_ns for row in rows_of(run)} == {None}
    assert "clocks of 2 hosts are unsynchronized" in run.warnings[0].text


def test_hosts_that_never_met_are_not_certified_by_collectives_of_the_same_name() -> None:
    """Without groups those of one host look like those of another one, and nobody waits."""
    job = job_of(10, [(0, 1)])
    for seed in range(20):
        came = job.start + np.random.default_rng(seed).integers(0, 3 * MS, len(job.start))
        alone = job._replace(start=came, end=came + 400_000)
        before = run_of(alone, "ab", [true, true], untold=True, how="step")
        assert {row.uncertainty_ns for row in rows_of(aligned(before))} == {None}


def test_what_contradicts_itself_certifies_nothing() -> None:
    """Two jobs share groups and numbers: whatever the offset, some were done before others."""
    job = job_of(16, [(0, 1)])
    for seed in range(20):
        came = job.start + np.random.default_rng(seed).integers(0, 30 * MS, len(job.start))
        alone = job._replace(start=came, end=came + 400_000)
        rows = rows_of(aligned(run_of(alone, "ab", [true, true])))
        assert {row.uncertainty_ns for row in rows} == {None}


def test_a_step_of_which_a_rank_lacks_a_collective_matches_nothing() -> None:
    job = job_of(17, [(0, 1)])
    lost = np.flatnonzero((job.rank == 1) & (job.step == 3))[0]
    job = Job(*(np.delete(column, lost) for column in job[:5]), job.group[1:])
    clock, ahead = drifting(7)
    second = rows_of(aligned(run_of(job, "ab", [true, clock], how="step")))[1]
    assert second.exchanges == 50
    assert abs(second.off_ns - ahead) <= second.uncertainty_ns  # type: ignore[operator]


def test_without_groups_ranks_that_leave_together_met() -> None:
    job = job_of(11, [(0, 1)])
    clock, _ = drifting(4)
    run = aligned(run_of(job, "ab", [true, clock], untold=True, how="step"))
    second = rows_of(run)[1]
    assert second.uncertainty_ns is not None
    assert (abs(off(run, job, 1)) <= second.uncertainty_ns).all()


def test_kernels_of_nsight_systems_tell_of_clocks_by_their_names() -> None:
    job = job_of(15, [(0, 1)])
    clock, ahead = drifting(6)
    run = run_of(
        job, "ab", [true, clock], untold=True, how="step", operation="ncclDevKernel_AllReduce_f32"
    )
    table = run.table("collectives")
    columns = tuple(Column("kernel", "text") if c.name == "operation" else c for c in table.columns)
    keep = [at for at, column in enumerate(columns) if column.name not in {"group", "number"}]
    rows = [tuple(row[at] for at in keep) for row in table.rows]
    kernels = Table("kernels", tuple(columns[at] for at in keep), rows)
    headers = {rank: replace(each, versions={"nsys": "2025"}) for rank, each in run.headers.items()}
    second = rows_of(aligned(replace(run, headers=headers, tables={"kernels": lambda: kernels})))[1]
    assert abs(second.off_ns - ahead) <= second.uncertainty_ns  # type: ignore[operator]
    other = aligned(replace(run, tables={"kernels": lambda: kernels}))
    assert {row.uncertainty_ns for row in rows_of(other)} == {None}


def test_where_no_host_is_told_a_clock_stays_that_may_be_the_same() -> None:
    job = job_of(12, [(0, 1)])
    near = run_of(job, ["", ""], [true, lambda times: times + 20_000])
    run = aligned(near)
    assert (run.start_ns == near.start_ns).all()
    second = rows_of(run)[1]
    assert second.uncertainty_ns is not None
    assert 20_000 <= second.uncertainty_ns < 2 * MS
    edge = run_of(job, ["", ""], [true, lambda times: times + 150_000])
    assert (aligned(edge).start_ns == edge.start_ns).all()
    unsure = rows_of(aligned(edge))[1].uncertainty_ns
    assert unsure is not None
    assert unsure > second.uncertainty_ns + 100_000  # it may as well be that the guess is right
    far = run_of(job, ["", ""], [true, lambda times: times + 20 * MS])
    assert (abs(off(aligned(far), job, 1)) < MS).all()


def test_hosts_that_are_not_told_and_never_compared_are_a_problem() -> None:
    run = replace(run_of(job_of(13, [(0, 1)]), ["", ""], [true, true]), tables={})
    (problem,) = aligned(run).warnings
    assert problem.text.startswith("clocks of 2 hosts are unsynchronized")


def test_clocks_compared_by_ping_pong_stay_and_the_others_are_compared_with_them() -> None:
    job = job_of(14, [(0, 1, 2)])
    clock, _ = drifting(5)
    run = run_of(job, "abc", [true, true, clock])
    told = [
        ClockRow(0, "a", 0).is_reference(0),
        ClockRow(1, "b", 1, 0, "ping-pong", 7, 0, 50_000, 0.0, 0.1, 0),
        ClockRow(2, "c", 2),
    ]
    table = aligned(replace(run, tables={**run.tables, "clocks": lambda: _clocks(told)}))
    assert rows_of(table)[:2] == told[:2]
    assert rows_of(table)[2].method == "collectives"
    assert (abs(off(table, job, 2)) <= rows_of(table)[2].uncertainty_ns).all()  # type: ignore[operator]
    assert (off(table, job, 1) == 0).all()


def _clocks(rows: Sequence[ClockRow]) -> Table:
    run = run_of(job_of(0, [(0, 1)]), "ab", [true, true])
    return replace(aligned(run).table("clocks"), rows=rows)


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces in shared/data are not here")
@pytest.mark.parametrize("shift_us", [-70_000, 40_000, 3_000_000])
def test_a_real_rank_that_was_shifted_comes_back(tmp_path: Path, shift_us: int) -> None:
    shutil.copy(DATA / "rank-0.json.gz", tmp_path)
    text = gzip.decompress((DATA / "rank-1.json.gz").read_bytes()).decode()
    text = re.sub(r'("ts": )(\d+)', lambda at: f"{at[1]}{int(at[2]) + shift_us}", text)
    (tmp_path / "rank-1.json.gz").write_bytes(gzip.compress(text.encode(), 1))

    run, whole = load(tmp_path), load(DATA)

    second = rows_of(run)[1]
    assert second.uncertainty_ns is not None
    assert abs(second.off_ns - shift_us * 1000) <= second.uncertainty_ns  # type: ignore[operator]
    assert second.uncertainty_ns < 20 * MS
    for name in ("kernels", "collectives"):
        own, other = (np.array(each.table(name).column("start")) for each in (run, whole))
        rank = np.array(run.table(name).column("rank"))
        moved = (own - own[rank == 0][0]) - (other - other[rank == 0][0])
        assert (moved[rank == 0] == 0).all()
        assert (abs(moved[rank == 1]) <= second.uncertainty_ns).all()
        assert run.table(name).column("duration") == whole.table(name).column("duration")
