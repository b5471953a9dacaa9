"""Requests of rollouts: which they are, and what rollouts save with other ones."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.whatif.rollout_requests import (
    RolloutRequests,
    find_requests,
    makespan,
    replicas_added,
    slots,
    stopped_at,
)
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, loaded

MS = 10**6
LENGTHS = (10, 20, 30, 40, 50, 100)


def rank(*, tokens: bool = True) -> list[Row]:
    """Return five steps: six requests on two slots, then an update."""
    rows = []
    for step in range(1, 6):
        at = step * 300 * MS
        rows += [
            Row("step", "step", step, at, at + 300 * MS, id=step * 100),
            Row("actor_generate", "stage", step, at, at + 200 * MS, id=step * 100 + 1),
        ]
        free = [0, 0]
        for number, length in enumerate(LENGTHS):
            slot = free.index(min(free))
            begin, free[slot] = free[slot], free[slot] + length
            counted = {"tokens": length} if tokens else None
            times = (at + begin * MS, at + free[slot] * MS)
            own = {"thread": 9 + slot, "id": step * 100 + 10 + number}
            rows.append(Row("generate", "region", step, *times, counters=counted, **own))
        rows.append(Row("actor_update", "stage", step, at + 200 * MS, at + 300 * MS))
    return [row._replace(id=row.id or row.step * 100 + 50) for row in rows]


def found(spans: Spans) -> RolloutRequests:
    their = find_requests(spans, spans.rows(kind="stage"))
    assert their is not None
    return their


def test_requests_are_the_innermost_rollout_spans_of_whatever_thread() -> None:
    their = found(loaded(rank()))
    assert np.diff(their.first).tolist() == [6] * 5
    assert (their.end_ns - their.start_ns).tolist() == [length * MS for length in LENGTHS] * 5
    assert their.tokens.tolist() == [*LENGTHS] * 5
    assert slots(their.start_ns[:6], their.end_ns[:6]) == 2


def test_rollouts_without_requests_have_none() -> None:
    spans = loaded([row for row in rank() if row.kind != "region"])
    assert find_requests(spans, spans.rows(kind="stage")) is None


def test_what_is_saved_is_what_the_schedule_says() -> None:
    their = found(loaded(rank()))
    # Two slots: 10 + 30 + 50 = 90 and 20 + 40 + 100 = 160.
    assert stopped_at(their, 0.8).tolist() == [70 * MS] * 5
    assert stopped_at(their, 1.0).tolist() == [0] * 5
    # Four slots: 10 + 50, 20 + 100, 30 and 40.
    assert replicas_added(their, np.arange(5), 1).tolist() == [40 * MS] * 5


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_list_scheduling_gives_each_request_to_the_slot_that_is_free_first(
    ns: list[int], many: int
) -> None:
    assert makespan(np.array(ns), many) == max(_ends(ns, many))


def _ends(ns: list[int], many: int) -> list[int]:
    ends = [0] * many
    for each in ns:
        ends[ends.index(min(ends))] += each
    return ends


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_no_schedule_is_twice_as_long_as_the_best_one(ns: list[int], many: int) -> None:
    best = min(
        max(
            sum(each for each, slot in zip(ns, way, strict=True) if slot == at)
            for at in range(many)
        )
        for way in itertools.product(range(many), repeat=len(ns))
    )
    assert best <= makespan(np.array(ns), many) <= 2 * best


def test_predictions_about_rollouts() -> None:
    table = whatif(loaded(rank()), stop_rollout_at=0.8, add_replicas=1)
    saved = {row[0]: row[3] for row in table.rows}
    assert saved["rollout stopped at 80%"] == 70 * MS
    assert saved["+1 rollout replicas"] == 40 * MS


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"stop_rollout_at": 1.5}, "stop_rollout_at 1.5 must be above 0 and at most 1"),
        ({"add_replicas": -1}, "add_replicas -1 must be 1 or more"),
    ],
)
def test_what_cannot_be_asked_is_an_error(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceError, match=text):
        whatif(loaded(rank()), **asked)


def test_what_the_run_does_not_hold_is_an_error_that_says_how_to_record_it() -> None:
    bare = [row for row in rank() if row.kind != "region"]
    with pytest.raises(TraceError, match="Mark each request"):
        whatif(loaded(bare), stop_rollout_at=0.9)
