from collections import Counter

import numpy as np
from hypothesis import given, settings

from lightning_rlprof.analysis.lineup import MOST, Lineup, line_up, stage_rows
from lightning_rlprof.spans import Spans
from tests.analysis.oracle import labels, runs
from tests.runs import Row, loaded


def lined_up(*ranks: list[Row]) -> tuple[Spans, Lineup]:
    spans = loaded(*ranks)
    return spans, line_up(spans, stage_rows(spans), spans.ranks)


def names(spans: Spans, lineup: Lineup) -> list[str]:
    return [spans.names[code] for code in lineup.stage]


def step(number: int, *stages: tuple[str, int, int], **counters: int) -> list[Row]:
    start = (number - 1) * 100
    rows = [Row("step", "step", number, start, start + 100)]
    return rows + [
        Row(name, "stage", number, start + a, start + b, counters=counters or None)
        for name, a, b in stages
    ]


def test_slots_are_in_the_order_of_the_step_and_cells_hold_their_spans() -> None:
    first = step(1, ("gen", 5, 30), ("old", 40, 50)) + step(2, ("gen", 1, 20), ("old", 30, 60))
    second = step(1, ("gen", 6, 36), ("old", 41, 52))
    spans, lineup = lined_up(first, second)
    assert names(spans, lineup) == ["gen", "old"]
    assert lineup.ranks.tolist() == [0, 1]
    assert lineup.steps.tolist() == [1, 2]
    assert lineup.own_ns[0].tolist() == [[25.0, 10.0], [19.0, 30.0]]
    assert lineup.own_ns[1, 0].tolist() == [30.0, 11.0]
    assert np.isnan(lineup.own_ns[1, 1]).all()
    assert (lineup.start_ns[0, 1, 1], lineup.end_ns[0, 1, 1]) == (130.0, 160.0)


def test_time_inside_another_stage_is_not_the_outer_ones_own() -> None:
    spans, lineup = lined_up(step(1, ("update", 10, 60), ("sync", 20, 35)))
    assert dict(zip(names(spans, lineup), lineup.own_ns[0, 0].tolist(), strict=True)) == {
        "update": 35.0,
        "sync": 15.0,
    }


@settings(max_examples=80, deadline=None)
@given(runs())
def test_own_times_are_what_a_rasteriser_sees(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    found = stage_rows(spans)
    counted = set(found.steps.tolist())
    seen: Counter[tuple[int, str]] = Counter()
    for at, own in zip(found.rows.tolist(), found.own_ns.tolist(), strict=True):
        seen[int(spans.rank[at]), spans.names[spans.name[at]]] += own
    # A stage that starts in another step than its own number says is not compared.
    allowed = Counter(
        (one.rank, name) for one, _, name in labels(spans) if one.step in counted and name in "abc"
    )
    assert all(seen[key] <= allowed[key] for key in seen)


def test_occurrences_are_slots_of_their_own_up_to_a_limit() -> None:
    many = [("micro", 2 * at, 2 * at + 1) for at in range(MOST + 3)]
    spans, lineup = lined_up(step(1, *many), step(1, *many))
    assert names(spans, lineup) == ["micro"] * MOST
    assert (lineup.own_ns == 1.0).all()


def test_a_rank_that_lost_one_of_several_spans_has_no_cells_there() -> None:
    whole, less = ("a", 1, 9), ("a", 11, 19)
    _, lineup = lined_up(step(1, whole, less), step(1, less), step(1, whole, less))
    assert np.isnan(lineup.own_ns[1]).all()
    assert (lineup.own_ns[[0, 2]] == 8.0).all()


def test_a_stage_across_the_edge_of_a_lost_step_is_no_short_stage() -> None:
    rows = [
        *step(1, ("a", 10, 20)),
        Row("a", "stage", 2, 98, 150),
        *step(3, ("a", 10, 20)),
    ]
    spans = loaded(rows)
    assert stage_rows(spans).own_ns.tolist() == [10, 10]


def test_captured_and_interrupted_steps_are_left_out_and_said() -> None:
    captured = Row("step", "step", 2, 100, 200, counters={"capture": 1})
    rows = [*step(1, ("a", 1, 9)), captured, Row("a", "stage", 2, 110, 190)]
    found = stage_rows(loaded(rows))
    assert found.steps.tolist() == [1]
    assert found.note == "Steps left out: 1 under capture."


def test_counters_lie_in_the_cells_of_their_spans() -> None:
    rows = step(1, ("gen", 1, 9), tokens=5) + step(2, ("gen", 1, 9)) + step(3, ("gen", 1, 9))
    spans, lineup = lined_up(rows, step(1, ("gen", 2, 9), tokens=7))
    found = lineup.counter(spans, "tokens")
    assert found is not None
    assert (found[0, 0, 0], found[1, 0, 0], int(np.isnan(found).sum())) == (5.0, 7.0, 4)
    assert lineup.counter(spans, "tokens_sq") is None


def test_a_counter_of_other_spans_is_none_of_ours() -> None:
    rows = [Row("step", "step", 1, 0, 9, counters={"tokens": 3}), Row("a", "stage", 1, 1, 4)]
    spans, lineup = lined_up(rows)
    assert lineup.counter(spans, "tokens") is None


def test_some_steps_are_spread_from_the_first_to_the_last() -> None:
    cells = np.zeros((1_000, 500, 1))
    none = np.zeros(0, dtype=np.int64)
    steps = np.arange(500)
    lineup = Lineup(none, steps, none, cells, cells, cells, none, (none,) * 3, (none,) * 4)
    some = lineup.some_steps()
    assert (len(some), some[0], some[-1]) == (30, 0, 499)


def test_a_run_without_stages_has_no_slots() -> None:
    _, lineup = lined_up([Row("step", "step", 1, 0, 9)])
    assert lineup.own_ns.shape == (1, 1, 0)
