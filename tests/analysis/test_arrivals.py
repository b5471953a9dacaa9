"""Who comes last to collectives, by durations alone, against a brute force."""

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.arrivals import came_last, last_of_steps
from lightning_rlprof.table import Table
from tests.analysis.scripted import Script, play

rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 6)),
    max_size=30,
    unique_by=lambda row: row[:2],
)


@given(rows)
def test_counts_chances_and_cost_are_those_of_a_brute_force(table: list) -> None:
    found = came_last(*np.array(table, dtype=np.int64).reshape(-1, 3).T)

    groups = [list(each) for _, each in itertools.groupby(sorted(table), key=lambda row: row[0])]
    groups = [group for group in groups if len(group) > 1]
    ranks = sorted({rank for group in groups for _, rank, _ in group})
    assert found.ranks.tolist() == ranks
    for at, rank in enumerate(ranks):
        own = [group for group in groups if any(row[1] == rank for row in group)]
        last, cost = 0, 0
        for group in own:
            took = sorted((duration, who) for _, who, duration in group)
            if took[0][1] == rank and took[0][0] < took[1][0]:
                last += 1
                cost += sum(duration - took[0][0] for duration, _ in took)
        chance = 1 / min(map(len, own))
        tail = [
            math.comb(len(own), k) * chance**k * (1 - chance) ** (len(own) - k)
            for k in range(last, len(own) + 1)
        ]
        assert (found.last[at], found.trials[at]) == (last, len(own))
        assert found.cost_ns[at] == cost
        assert math.isclose(found.chance[at], sum(tail), rel_tol=1e-9)


def test_the_slow_rank_comes_last_whatever_the_clocks_say() -> None:
    script = Script(slow={5: 0.2}, listed=True, offsets_ms={2: 50.0, 5: -50.0})
    found = last_of_steps(play(script, 3).spans, range(8))
    assert found is not None
    assert found.ranks[np.argmin(found.chance)] == 5
    assert found.trials[5] == 24
    assert found.last[5] >= 22  # a hiccup of another rank may come between
    assert found.cost_ns[5] > 7 * 22 * 0.1e9


def test_only_every_so_many_th_step_is_asked_where_ranks_keep_their_pace() -> None:
    found = last_of_steps(play(Script(listed=True), 3).spans, range(8), every=5)
    assert found is not None
    assert found.trials.tolist() == [4] * 8


def test_a_table_that_lists_nothing_or_abstains_is_no_evidence() -> None:
    spans = play(Script(listed=True), 3).spans
    whole = spans.table("communication")
    named = tuple(
        replace(column, name="operation" if column.name == "operator" else column.name)
        for column in whole.columns
    )
    tables = {
        "abstained": replace(whole, rows=(), abstained="lost"),
        "empty": replace(whole, rows=()),
        "without groups": Table("communication", whole.columns[:3], [(0, 1, "allreduce")]),
    }
    for name, table in tables.items():
        told = replace(spans, tables={"communication": lambda table=table: table})
        assert last_of_steps(told, range(8)) is None, name
    assert last_of_steps(replace(spans, tables={}), range(8)) is None
    kineto = replace(spans, tables={"collectives": lambda: replace(whole, columns=named)})
    assert str(last_of_steps(kineto, range(8))) == str(last_of_steps(spans, range(8)))
    assert last_of_steps(spans, [0, 1]) is None, "groups with other ranks are left out"
