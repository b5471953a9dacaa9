"""Samples and versions of the weights as edges of the graph, beside scripts played anew."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.critical_path.critical_path import critical_path
from lightning_rlprof.analysis.critical_path.replay import longest_path, replay
from lightning_rlprof.analysis.critical_path.step_graph import StepGraph, find_timeline, step_graph
from lightning_rlprof.analysis.steps.weight_updates import weight_updates
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.tables.spans import Spans
from tests.builders.fed import MS, Fed, feed, with_roles
from tests.builders.runs import Row, header, loaded
from tests.effort import examples

Draw = Any


def graph(spans: Spans) -> StepGraph:
    found = step_graph(spans)
    assert not isinstance(found, str), found
    return found


def took(job: Fed) -> float:
    return float(np.median(graph(feed(job)).wall_ns))


def test_a_step_goes_from_rollout_to_reward_to_trainer_and_adds_up() -> None:
    table = critical_path(feed(Fed()))

    on = {(row[0], row[1], row[3]): row[5] for row in table.rows if row[7]}
    assert on == {
        ("outside stages", "work", 1): MS,  # the weights on their way
        ("actor_generate", "work", 1): 70 * MS,
        ("actor_generate", "handoff", 1): MS,
        ("compute_reward", "work", 2): 10 * MS,
        ("compute_reward", "handoff", 2): MS,
        ("actor_update", "work", 3): 40 * MS,
        ("weight_sync", "work", 3): 8 * MS,
    }
    assert sum(on.values()) == took(Fed()) == 131 * MS  # type: ignore[arg-type]
    assert "Synchronization points: samples and weight versions." in (table.note or "")


def test_the_shorter_rollout_has_as_much_slack_as_it_may_take_longer() -> None:
    rows = {(row[0], row[1], row[3]): row for row in critical_path(feed(Fed()), per_rank=True).rows}
    slack = int(rows["actor_generate", "work", 0][6]) // MS  # type: ignore[arg-type]

    assert slack == 9  # generated at 51, scored until 62; the other is there at 71
    assert took(Fed(generate=(50 + slack, 70))) == took(Fed())
    assert took(Fed(generate=(50, 70 + slack))) == took(Fed()) + slack * MS


@pytest.mark.parametrize(
    ("change", "asked", "after"),
    [
        ("actor_generate 2x faster", {"speedup": {"actor_generate": 2}}, {"generate": (25, 35)}),
        ("compute_reward 2x faster", {"speedup": {"compute_reward": 2}}, {"reward": 5}),
        ("compute_reward 0.25x faster", {"speedup": {"compute_reward": 0.25}}, {"reward": 40}),
        ("actor_update 2x faster", {"speedup": {"actor_update": 2}}, {"train": 20}),
        ("weight_sync removed", {"remove": ["weight_sync"]}, {"sync": 0}),
        ("weight_sync overlapped", {"overlap": ["weight_sync"]}, {"sync": 0}),
    ],
)
def test_a_change_takes_what_was_predicted(
    change: str, asked: dict[str, Any], after: dict[str, Any]
) -> None:
    rows = {row[0]: row for row in whatif(feed(Fed()), **asked).rows}
    assert rows[change][2] == pytest.approx(took(replace(Fed(), **after)), abs=2 * MS)


def test_a_weight_sync_is_overlapped_by_default() -> None:
    assert "weight_sync overlapped" in whatif(feed(Fed())).column("change")


def test_without_samples_and_versions_there_is_no_path() -> None:
    table = critical_path(feed(Fed(tell=False)))
    assert "no synchronization between ranks" in (table.abstained or "")


SIDES: dict[str, tuple[str, ...]] = {
    "none": (),
    "sender": ("sender",),
    "receiver": ("receiver",),
    "both": ("sender", "receiver"),
}


@pytest.mark.parametrize("counts", SIDES)
@pytest.mark.parametrize("marks", SIDES)
def test_weights_come_from_the_trainer_whoever_marks_and_whoever_counts(
    marks: str, counts: str
) -> None:
    spans = feed(Fed(marks=SIDES[marks], counts=SIDES[counts]))
    handoffs = find_timeline(spans).handoffs
    table = critical_path(spans)

    pairs = zip(handoffs.producer, handoffs.chain[handoffs.wait], strict=True)
    weights = {(int(sender), int(chain)) for sender, chain in pairs if chain < 2}
    if "receiver" not in SIDES[marks] + SIDES[counts]:
        assert not weights
        assert "When new weights reached ranks 0, 1 is unknown." in table.note
        return
    assert weights == {(3, 0), (3, 1)}
    on = {(row[0], row[1], row[3]): row[5] for row in table.rows if row[7]}
    assert on == {
        ("outside stages" if "receiver" not in SIDES[marks] else "weight_sync", "work", 1): MS,
        ("actor_generate", "work", 1): 70 * MS,
        ("actor_generate", "handoff", 1): MS,
        ("compute_reward", "work", 2): 10 * MS,
        ("compute_reward", "handoff", 2): MS,
        ("actor_update", "work", 3): 40 * MS,
        ("outside stages" if "sender" not in SIDES[marks] else "weight_sync", "work", 3): 8 * MS,
    }
    guessed = "sender" not in SIDES[marks] + SIDES[counts]
    assert ("new weights count as sent after actor_update" in table.note) == guessed


def _unnamed(*syncs: tuple[int, int]) -> Spans:
    """Return ranks of unknown work, each with one weight sync per step of the same version."""
    ranks = []
    for start, end in syncs:
        rows = [Row("step", "step", n, n * 100, n * 100 + 100) for n in range(1, 6)]
        rows += [Row("work", "stage", each.step, each.start_ns, each.start_ns + 5) for each in rows]
        rows += [
            Row("weight_sync", "stage", n, n * 100 + start, n * 100 + end, counters={"version": n})
            for n in range(1, 6)
        ]
        ranks.append(("worker", rows))
    return with_roles(ranks)


def test_where_the_direction_cannot_be_known_that_is_said() -> None:
    found = weight_updates(_unnamed((20, 60), (10, 50)))
    assert found.ranks.tolist() == []
    assert "The direction of weight syncs is unknown on ranks 0, 1" in found.note


def test_a_sender_that_returns_from_the_transfer_last_has_sent_before() -> None:
    def rank(name: str, length: int) -> list[Row]:
        rows = []
        for step in range(1, 6):
            now = step * 100
            rows.append(Row("step", "step", step, now, now + 100))
            rows.append(Row(name, "stage", step, now, now + length))
            end = now + (93 if name == "actor_update" else 90)
            told = {"version": step}
            rows.append(Row("weight_sync", "stage", step, now + length, end, counters=told))
        return rows

    spans = with_roles([("a", rank("actor_update", 80)), ("b", rank("actor_generate", 30))])
    handoffs = find_timeline(spans).handoffs

    assert handoffs.producer.tolist() == [0] * 5
    assert (handoffs.produced_ns - handoffs.end_ns[handoffs.wait]).tolist() == [0] * 5
    assert (handoffs.end_ns - handoffs.start_ns).tolist() == [60] * 5


@pytest.mark.parametrize("more", [2**61, 2**64, 2**120])
def test_samples_are_told_apart_however_large_their_numbers_are(more: int) -> None:
    spans = feed(Fed())
    own = spans.counters["sample"]
    values = own.values.astype(object) + more
    large = own._replace(values=values.astype(np.int64) if more < 2**63 else values)
    found = critical_path(replace(spans, counters={**spans.counters, "sample": large}))
    assert [*found.rows] == [*critical_path(spans).rows]


def test_with_a_join_of_all_clocks_may_be_off() -> None:
    def rank(at: int, off: int, ready: int, sample: bool) -> list[Row]:
        rows = []
        for step in range(1, 6):
            now, told = 100 * step + off, {"sample": step}
            work = [Row("actor_generate", "stage", step, now, now + 60, counters=told)]
            if sample:  # waits until 62 and works for 28
                work = [
                    Row("wait_for_samples", "stage", step, now + 5, now + ready),
                    Row("actor_update", "stage", step, now + ready, now + 90, counters=told),
                ]
            meet = now + (90 if sample else 60)
            rows += [Row("step", "step", step, now, now + 100), *work]
            rows.append(Row("barrier", "region", step, meet, now + 100))
        return rows

    runs = [loaded(rank(0, 9, 0, False), rank(1, 9 + off, 62, True)) for off in (0, 7, -9)]
    heads = {at: header(at, 2, host=f"node-{at}") for at in range(2)}
    runs[1:] = [replace(spans, headers=heads) for spans in runs[1:]]
    want = [("actor_generate", 60), ("actor_update", 28), ("barrier", 10), ("actor_generate", 2)]
    for spans in runs:
        on = [(row[0], row[5]) for row in critical_path(spans).rows if row[7]]
        assert on == want


def test_of_some_samples_the_last_ends_the_wait_and_versions_may_be_passed_over() -> None:
    spans = with_roles(
        [
            ("rollout", [
                Row("step", "step", 1, 0, 100),
                Row("generate", "region", 1, 0, 10, counters={"sample": 1, "version": 0}),
                Row("generate", "region", 1, 10, 30, counters={"sample": 2, "version": 0}),
                Row("generate", "region", 1, 70, 90, counters={"version": 3}),
            ]),
            ("trainer", [
                Row("step", "step", 1, 0, 100),
                Row("other", "region", 1, 0, 4),
                Row("take", "mark", 1, 12, 12, counters={"sample": 1}),
                Row("take", "mark", 1, 35, 35, counters={"sample": 2}),
                Row("weight_sync", "stage", 1, 36, 40, counters={"version": 2}),
                Row("published", "mark", 1, 50, 50, counters={"version": 3}),
                Row("weight_sync", "stage", 1, 55, 60, counters={"version": 4}),
            ]),
        ]
    )  # fmt: skip
    handoffs = find_timeline(spans).handoffs

    assert list(zip(handoffs.chain, handoffs.start_ns, handoffs.end_ns, strict=True)) == [
        (0, 30, 70),
        (1, 4, 35),
    ]
    assert list(zip(handoffs.wait, handoffs.producer, handoffs.produced_ns, strict=True)) == [
        (0, 1, 50),
        (1, 0, 30),
    ]


@st.composite
def jobs(draw: Draw) -> list[list[Row]]:
    """Draw ranks with stages one after another, some of which carry samples and versions."""
    ranks = []
    for _ in range(draw(st.integers(2, 3))):
        rows, now = [], 0
        for step in range(1, draw(st.integers(3, 5)) + 1):
            begin, own = now, []
            for _ in range(draw(st.integers(0, 3))):
                now += draw(st.integers(0, 9))
                name = draw(st.sampled_from(["generate", "weight_sync", "wait_for_samples", "x"]))
                told = draw(
                    st.dictionaries(st.sampled_from(["sample", "version"]), st.integers(0, 4))
                )
                end = now + draw(st.integers(0, 9))
                own.append(Row(name, "stage", step, now, end, counters=told or None))
                now = end
            now += draw(st.integers(1, 9))
            rows += [Row("step", "step", step, begin, now), *own]
        ranks.append(rows)
    return ranks


@settings(max_examples=examples(150), deadline=None)
@given(jobs())
def test_whatever_was_handed_over_laps_are_tiled_and_play_again_no_later(
    ranks: list[list[Row]],
) -> None:
    found = step_graph(loaded(*ranks))
    if isinstance(found, str):
        return
    count = len(found.steps)
    tiled = np.bincount(found.schedule.run, found.ns, found.schedule.runs).reshape(-1, count)
    measured = (found.schedule, found.ns, found.transfer_ns, found.offset_ns)
    played = replay(*measured)
    ends = found.offset_ns.reshape(-1, count) + tiled
    assert (played.end.reshape(-1, count) <= ends).all()
    on = longest_path(*measured)
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, found.schedule.run[on.on] % count, on.weight[on.on])
    assert (total <= played.interval_ns).all()
    assert (on.slack >= 0).all()
