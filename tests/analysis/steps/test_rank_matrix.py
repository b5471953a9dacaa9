"""Where ranks stand: Megatron's order against its own published definition, by brute force."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.steps.rank_matrix import (
    MAX_OCCURRENCES,
    RankMatrix,
    Replicas,
    build_rank_matrix,
    replicas,
    stage_rows,
)
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from tests.builders.oracle import labels, runs
from tests.builders.runs import Row, header, loaded, write_rank
from tests.builders.scripted import Script, play
from tests.effort import examples


def lined_up(*ranks: list[Row]) -> tuple[Spans, RankMatrix]:
    spans = loaded(*ranks)
    return spans, build_rank_matrix(spans, stage_rows(spans), spans.ranks)


def names(spans: Spans, lineup: RankMatrix) -> list[str]:
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


@settings(max_examples=examples(80), deadline=None)
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
    many = [("micro", 2 * at, 2 * at + 1) for at in range(MAX_OCCURRENCES + 3)]
    spans, lineup = lined_up(step(1, *many), step(1, *many))
    assert names(spans, lineup) == ["micro"] * MAX_OCCURRENCES
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
    assert found.note == "Excluded steps: 1 captured."


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
    lineup = RankMatrix(none, steps, none, cells, cells, cells, none, (none,) * 3, (none,) * 4)
    some = lineup.some_steps()
    assert (len(some), some[0], some[-1]) == (30, 0, 499)


def test_a_run_without_stages_has_no_slots() -> None:
    _, lineup = lined_up([Row("step", "step", 1, 0, 9)])
    assert lineup.own_ns.shape == (1, 1, 0)


def run(ranks: int, parallel: Any) -> Spans:
    spans = play(Script(ranks=ranks, steps=2), 1).spans
    heads = {
        rank: replace(head, config={"parallel": parallel}) for rank, head in spans.headers.items()
    }
    return replace(spans, headers=heads)


def found(ranks: int, parallel: Any) -> Replicas:
    return replicas(run(ranks, parallel), range(ranks))


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 2), (1, 2), (1, 2))))
def test_the_order_is_tp_cp_ep_copies_pp(sizes: tuple[int, int, int, int]) -> None:
    tp, cp, ep, pp = sizes
    here = found(16 * 3, dict(zip(("tp", "cp", "ep", "pp"), sizes, strict=True)))
    copies = 16 * 3 // (tp * cp * ep * pp)
    grid = itertools.product(range(pp), range(copies), range(ep), range(cp), range(tp))
    where: dict[int, tuple[int, int, int, int, int]] = dict(enumerate(grid))
    if tp * cp * ep * pp == 1:
        assert here.replica.tolist() == list(range(48))
        return
    for one, other in itertools.combinations(range(48), 2):
        (p, d, e, c, t), (q, f, g, h, u) = where[one], where[other]
        assert (here.replica[one] == here.replica[other]) == (d == f)
        assert (here.place[one] == here.place[other]) == ((p, e, c, t) == (q, g, h, u))
        assert (here.work[one] == here.work[other]) == ((p, e) == (q, g))


def test_lines_are_ranks_that_do_the_same() -> None:
    assert found(8, {"tp": 2}).lines() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found(8, {"pp": 2}).lines() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found(8, {"ep": 2, "pp": 2}).lines() == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("parallel", [None, 3, {}, {"tp": 3}, {"tp": "2"}, {"tp": 0}, {"tp": True}])
def test_without_sizes_that_fit_every_rank_is_a_copy(parallel: Any) -> None:
    here = found(8, parallel)
    assert here.replica.tolist() == list(range(8))
    assert here.lines() == [list(range(8))]


def test_ranks_that_disagree_are_copies_of_their_own() -> None:
    spans = run(4, {"tp": 2})
    heads = {**spans.headers, 3: replace(spans.headers[3], config={})}
    assert replicas(replace(spans, headers=heads), range(4)).lines() == [[0, 1, 2, 3]]


def test_what_a_rank_recorded_is_read_back(tmp_path: Path) -> None:
    config = ProfilerConfig.build({"parallel": {"tp": 2}}).dump()
    for rank in range(4):
        write_rank(tmp_path, header(rank, 4, config=config), [Row("step", "step", 1, 10, 20)])
    assert replicas(load(tmp_path), range(4)).members() == {0: [0, 1], 1: [2, 3]}
