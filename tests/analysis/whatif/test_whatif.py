"""Predictions beside what happens when the same seed is played with the change made."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.critical_path.step_graph import step_graph
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from tests.builders import scripted
from tests.builders.oracle import runs
from tests.builders.runs import Row, loaded
from tests.builders.scripted import STAGES, TYPICAL, Script, play
from tests.effort import examples

SEEDS = range(3_000, 3_010)


def predicted(spans: Spans, change: str, **asked: Any) -> float:
    table = whatif(spans, **asked)
    assert table.abstained is None
    return float({row[0]: row for row in table.rows}[change][2])  # type: ignore[arg-type]


def took(spans: Spans) -> float:
    graph = step_graph(spans)
    assert not isinstance(graph, str)
    return float(np.median(graph.wall_ns))


def error(of: Callable[[int], tuple[float, float]]) -> float:
    """Return the median error of (predicted, real) over the seeds."""
    return float(np.median([abs(guess / real - 1) for guess, real in map(of, SEEDS)]))


@pytest.mark.parametrize(
    "script",
    [
        {"listed": True},
        {"listed": True, "uneven": 0.3},
        {"listed": True, "ranks": 2},
        {"listed": True, "meets": STAGES},
        {"listed": True, "where": ("actor_generate",)},
        {"listed": True, "offsets_ms": {1: 5.0, 3: -4.0}},
        {},
        {"where": ("actor_update",)},
        {"offsets_ms": {1: 5.0, 3: -4.0}},
    ],
    ids=str,
)
def test_without_the_straggler_a_step_takes_what_was_predicted(script: dict[str, Any]) -> None:
    def one(seed: int) -> tuple[float, float]:
        slow, even = (play(Script(slow=who, **script), seed) for who in ({1: 0.2}, {}))
        return predicted(slow.spans, "no straggler"), took(even.spans)

    assert error(one) < 0.03


def test_a_straggler_on_the_path_costs_what_it_is_slower() -> None:
    table = whatif(play(Script(listed=True, slow={1: 0.2}), 1).spans)
    assert {row[0]: row for row in table.rows}["no straggler"][4] == pytest.approx(1 / 6, rel=0.2)


def test_a_healthy_run_has_no_straggler_to_gain_from() -> None:
    for seed in SEEDS:
        table = whatif(play(Script(listed=True), seed).spans)
        assert {row[0]: row for row in table.rows}["no straggler"][4] < 0.02


def test_balanced_work_takes_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    script, own = Script(listed=True, uneven=0.3), scripted._tokens

    def even(script: Script, random: np.random.Generator) -> tuple[Any, Any]:
        return tuple(np.broadcast_to(each.mean(axis=0), each.shape) for each in own(script, random))  # type: ignore[return-value]

    def one(seed: int) -> tuple[float, float]:
        guess = predicted(play(script, seed).spans, "balanced load")
        with monkeypatch.context() as patched:
            patched.setattr(scripted, "_tokens", even)
            return guess, took(play(script, seed).spans)

    assert error(one) < 0.03


def test_a_faster_stage_takes_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    typical, linear, square = TYPICAL["actor_generate"]

    def one(seed: int) -> tuple[float, float]:
        spans = play(Script(listed=True, uneven=0.2), seed).spans
        guess = predicted(spans, "actor_generate 2x faster", speedup={"actor_generate": 2})
        with monkeypatch.context() as patched:
            patched.setitem(scripted.TYPICAL, "actor_generate", (typical / 2, linear, square))
            return guess, took(play(Script(listed=True, uneven=0.2), seed).spans)

    assert error(one) < 0.01


def test_a_row_adds_up_and_says_what_it_is_worth() -> None:
    spans = play(Script(listed=True, slow={1: 0.2}), 1).spans
    for row in whatif(spans, remove=["compute_reward"]).rows:
        _, now, then, saving, share, hours, low, high = row
        assert saving == now - then
        assert share == pytest.approx(saving / now)
        assert hours == pytest.approx(saving * 8 * 23 / 3.6e12, rel=0.3, abs=1e-5)
        assert low <= then <= high


def test_nothing_is_predicted_where_the_step_itself_does_not_come_out() -> None:
    # Without a common clock, what ranks do after the first one has left a stage counts as waiting.
    apart = Script(meets=STAGES, uneven=0.3, offsets_ms={1: 5.0, 3: -40.0})
    table = whatif(play(apart, 7).spans)
    assert table.abstained is not None
    assert "The replay error of the unchanged step is" in table.abstained


def test_work_inside_of_stages_that_wait_is_not_balanced() -> None:
    table = whatif(play(Script(), 1).spans)
    assert "balanced load" not in table.column("change")
    assert '"balanced load" is not available' in table.note


def test_what_cannot_be_changed_is_an_error_that_says_what_can() -> None:
    spans = play(Script(listed=True), 1).spans
    with pytest.raises(
        TraceError, match=r"unknown stage 'nonsense'. Stages in this run: actor_generate"
    ):
        whatif(spans, remove=["nonsense"])
    with pytest.raises(TraceError, match="must be above 0"):
        whatif(spans, speedup={"actor_update": 0})


def test_without_its_straggler_a_run_takes_what_an_even_one_takes() -> None:
    slow, even = (whatif(play(Script(listed=True, slow=who), 5).spans) for who in ({1: 0.2}, {}))
    names = [column.name for column in slow.columns]
    (predicted,) = (row for row in slow.rows if row[0] == "no straggler")
    baseline = even.column("baseline")[0]
    assert predicted[names.index("predicted")] == pytest.approx(baseline, rel=0.03)


@settings(max_examples=examples(60), deadline=None)
@given(runs(overlapping_steps=True))
def test_odd_runs_do_no_harm(rows: list[list[Row]]) -> None:
    whatif(loaded(*rows))


def test_a_stage_may_be_overlapped_by_name() -> None:
    assert "actor_update overlapped" in whatif(
        play(Script(listed=True), 1).spans, overlap=["actor_update"]
    ).column("change")
