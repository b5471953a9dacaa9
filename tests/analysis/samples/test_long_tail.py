"""The long tail beside a list schedule whose idle time is counted millisecond by millisecond."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.samples.long_tail import long_tail, tail_causes
from lightning_rlprof.analysis.whatif.rollout_requests import makespan
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import FIRST_ROLE_RANK
from tests.builders.runs import Row, header, loaded, write_rank

MS = 10**6
lists = st.lists(st.integers(1, 40), min_size=4, max_size=14)


def schedule(lengths: list[int], slots: int) -> list[tuple[int, int]]:
    """Start each request, in order, as soon as a slot is free."""
    free, found = [0] * slots, []
    for length in lengths:
        slot = free.index(min(free))
        found.append((free[slot], free[slot] + length))
        free[slot] += length
    return found


def rank(lengths: list[int], slots: int, first: int = 1, kind: str = "region") -> list[Row]:
    times = schedule(lengths, slots)
    end = max(stop for _, stop in times)
    rows = [
        Row("step", "step", 1, 0, 1000 * MS),
        Row("actor_generate", "stage", 1, 0, end * MS),
    ]
    for number, (start, stop) in enumerate(times, start=first):
        told = {"sample": number, "tokens": stop - start}
        rows.append(Row("generate", kind, 1, start * MS, stop * MS, thread=number, counters=told))
        what = {"sample": number}
        rows.append(Row("sample trained", "mark", 1, 900 * MS, 900 * MS, counters=what))
    return rows


@settings(max_examples=40, deadline=None)
@given(st.lists(lists, min_size=1, max_size=3), st.integers(1, 4))
def test_idle_time_is_that_of_the_list_schedule(jobs: list[list[int]], slots: int) -> None:
    ranks = [rank(own, slots, 1 + 100 * at) for at, own in enumerate(jobs)]
    table = long_tail(loaded(*ranks))
    times = [schedule(own, slots) for own in jobs]
    every = sorted(stop for own in times for _, stop in own)
    until = max(makespan(np.array(own), slots) for own in jobs)
    assert until == every[-1]
    for row in table.rows:
        last = int(np.ceil(float(row[0] or 0) * len(every))) - 1
        since = every[last]
        idle = 0.0
        for own in times:
            many = max(sum(start <= at < stop for start, stop in own) for at in range(until))
            for at in range(since, until):
                idle += 1 - sum(start <= at < stop for start, stop in own) / many
        assert row[1] == (until - since) * MS
        assert row[3] == pytest.approx(idle * MS, abs=len(jobs))
        assert row[5] == len(every) - last - 1


def test_a_cut_says_how_long_the_lost_ones_were() -> None:
    lengths = [10] * 9 + [100]
    row = long_tail(loaded(rank(lengths, 10))).rows[2]
    assert row[0] == 0.9
    assert row[1] == 90 * MS
    assert row[3] == 81 * MS  # nine of ten slots
    assert row[5:] == (1, 100 / 190, 100 / 19)


def test_phases_on_threads_of_their_own_are_responses_whatever_kind_of_span_they_are() -> None:
    lengths = [10] * 9 + [100]
    regions = long_tail(loaded(rank(lengths, 10)))
    assert long_tail(loaded(rank(lengths, 10, kind="stage"))).rows == regions.rows
    causes = tail_causes(loaded(rank(lengths, 4)))
    assert tail_causes(loaded(rank(lengths, 4, kind="stage"))).rows == causes.rows


def test_asynchronous_rollouts_end_each_for_itself() -> None:
    def server(at: int, first: int) -> list[Row]:
        rows = [Row("step", "step", 1, 0, 1000 * MS)]
        rows.append(Row("actor_generate", "stage", 1, at * MS, (at + 40) * MS))
        for number in range(first, first + 4):
            told = {"sample": number, "tokens": 40}
            times = at * MS, (at + 40) * MS
            rows.append(Row("generate", "region", 1, *times, thread=number, counters=told))
        return rows

    trainer = [Row("step", "step", 1, 0, 1000 * MS), Row("actor_update", "stage", 1, 0, 999 * MS)]
    table = long_tail(loaded(server(0, 1), server(500, 11), trainer))
    assert [row[3] for row in table.rows] == [0] * 5


def test_the_tool_that_delayed_the_tail_is_named_with_the_role_that_ran_it(tmp_path: Path) -> None:
    trainer = [Row("step", "step", 1, 0, 500 * MS), Row("actor_generate", "stage", 1, 0, 400 * MS)]
    requests = []
    for number in range(1, 21):
        told, tool = {"sample": number, "tokens": 5}, 104 if number == 20 else 4
        times = [(0, 5), (5, 6 + tool + 1), (7 + tool, 12 + tool)]
        own = {"sample": number}
        for name, (start, end) in zip(("generate", "env_step", "generate"), times, strict=True):
            counters = told if name == "generate" else own
            trainer.append(
                Row(name, "region", 1, start * MS, end * MS, thread=number, counters=counters)
            )
        end = (6 + tool) * MS
        requests.append(Row("env_step", "stage", 1, 6 * MS, end, thread=number, counters=own))
        trainer.append(Row("sample trained", "mark", 1, 450 * MS, 450 * MS, counters=own))
    write_rank(tmp_path, header(0, 1), trainer)
    write_rank(tmp_path, header(FIRST_ROLE_RANK, role="tools", open_world=True), requests)
    table = tail_causes(load(tmp_path))
    first = table.rows[0]
    # The last two samples ended 95 ms and -5 ms later than the mean; called and served is once.
    assert first == ("tools", 90 * MS, 1.0, 1, "env_step (tools)")
    assert [row[4] for row in table.rows[1:]] == [None] * 5


@pytest.mark.parametrize(
    "cause", ["long responses", "slow replica", "tools", "late start", "retry"]
)
def test_the_cause_of_a_tail_is_named_and_causes_add_up(cause: str) -> None:
    rows = [Row("step", "step", 1, 0, 1000 * MS), Row("actor_generate", "stage", 1, 0, 500 * MS)]
    names: list[int] = []
    for number in range(1, 21):
        bad = number == 20
        late = 100 if bad and cause in ("late start", "retry") else 0
        took = 110 if bad and cause in ("long responses", "slow replica") else 10
        tool = 105 if bad and cause == "tools" else 5
        tokens = 110 if bad and cause == "long responses" else 10
        told = {"sample": number, "tokens": tokens}
        at = late
        for name, length, counters in (
            ("generate", took, told),
            ("tool_call", tool, {"sample": number}),
            ("generate", 1, {"sample": number, "tokens": 1}),
        ):
            times = at * MS, (at + length) * MS
            rows.append(Row(name, "region", 1, *times, thread=number, counters=counters))
            at += length
        rows.append(Row("sample trained", "mark", 1, 900 * MS, 900 * MS, counters=told))
        names.append(number)
    spans = loaded(rows)
    if cause == "retry":
        from dataclasses import replace

        from lightning_rlprof.records.run_directory import SampleLine
        from lightning_rlprof.tables.rank_tables import sample_names

        lines = [SampleLine(each, "p", "g", int(each == 20)) for each in names]
        spans = replace(spans, tables={"sample_names": lambda: sample_names({0: lines})})
    table = tail_causes(spans)
    found = dict(zip(table.column("cause"), table.column("time"), strict=True))
    assert table.rows[0][0] == cause
    ends = [16 + (100 if each == 20 else 0) for each in names]
    late = sorted(ends)[18:]
    wanted = sum(late) - 2 * sum(ends) / 20
    assert sum(int(each or 0) for each in found.values()) == pytest.approx(wanted * MS, abs=20)
