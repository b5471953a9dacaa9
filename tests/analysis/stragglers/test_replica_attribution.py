"""Who comes last to collectives, by durations alone, against a brute force.

Which rank of a replica is slow, where all of them look slow.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.steps.rank_matrix import Replicas, replicas
from lightning_rlprof.analysis.stragglers.replica_attribution import (
    Arrivals,
    ListedCollectives,
    arrival_evidence,
    between_replicas,
    count_last_arrivals,
    last_arrivals,
    listed_collectives,
    within_replicas,
)
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.stragglers.verdicts import (
    NO_STRAGGLER,
    SLOW_HOST,
    SLOW_REPLICA,
    SLOW_UNCOUNTED,
    TRANSIENT,
)
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.scripted import Script, play
from tests.peers.harness import accused


def last_of_steps(spans: Spans, ranks: Iterable[int], every: int = 1) -> Arrivals:
    who = replicas(spans, list(ranks))
    return last_arrivals(between_replicas(listed_collectives(spans, who), who), every)


rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 6)),
    max_size=30,
    unique_by=lambda row: row[:2],
)


@given(rows)
def test_counts_chances_and_cost_are_those_of_a_brute_force(table: list) -> None:
    found = count_last_arrivals(*np.array(table, dtype=np.int64).reshape(-1, 3).T)

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
    assert found.ranks[np.argmin(found.chance)] == 5
    assert found.trials[5] == 24
    assert found.last[5] >= 22  # a hiccup of another rank may come between
    assert found.cost_ns[5] > 7 * 22 * 0.1e9


def test_only_every_so_many_th_step_is_asked_where_ranks_keep_their_pace() -> None:
    found = last_of_steps(play(Script(listed=True), 3).spans, range(8), every=5)
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
        assert not len(last_of_steps(told, range(8)).ranks), name
    assert not len(last_of_steps(replace(spans, tables={}), range(8)).ranks)
    kineto = replace(spans, tables={"collectives": lambda: replace(whole, columns=named)})
    assert str(last_of_steps(kineto, range(8))) == str(last_of_steps(spans, range(8)))
    assert not len(last_of_steps(spans, [0, 1]).ranks), "groups with other ranks are left out"


def of_groups(*groups: tuple[int, ...]) -> ListedCollectives:
    """One collective per group, the n-th rank of it n-th to come."""
    rows = [
        (at, at, 1, rank, 9 - nth) for at, own in enumerate(groups) for nth, rank in enumerate(own)
    ]
    return ListedCollectives(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


def groups_of(found: ListedCollectives) -> list[int]:
    return sorted(set(found.one.tolist()))


def test_only_ranks_of_equal_work_are_asked_who_was_last() -> None:
    pipeline = Replicas(np.arange(4), *np.array([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1]]))
    found = of_groups((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))
    assert groups_of(between_replicas(found, pipeline)) == [0, 1]
    assert groups_of(within_replicas(found, pipeline)) == []

    tensor = Replicas(np.arange(4), *np.array([[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]))
    assert groups_of(within_replicas(found, tensor)) == [0, 1]
    across = between_replicas(found, tensor)
    assert groups_of(across) == [2, 3, 4]
    assert across.rank[across.one == 4].tolist() == [0, 1], "a replica comes with its last rank"
    assert across.took[across.one == 4].tolist() == [8, 6]


def test_a_group_in_which_copies_have_different_numbers_of_ranks_is_not_asked() -> None:
    tensor = Replicas(np.arange(4), *np.array([[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]))
    assert groups_of(between_replicas(of_groups((0, 1, 2)), tensor)) == []


@pytest.mark.parametrize(("operator", "asked"), [("hcom_receive_1", False), ("allreduce", True)])
def test_sends_and_receives_are_no_collectives(operator: str, asked: bool) -> None:
    names = ("rank", "step", "operator", "group", "start", "duration")
    columns = tuple(Column(name, "count") for name in names)
    rows = [(rank, 1, operator, "pipeline", 5, 3 + rank) for rank in (0, 1)]
    spans = play(Script(ranks=2, steps=2), 3).spans
    told = replace(spans, tables={"communication": lambda: Table("communication", columns, rows)})
    assert (len(listed_collectives(told, replicas(spans, [0, 1])).one) > 0) == asked


def test_groups_of_one_name_that_are_several_are_not_asked() -> None:
    spans = play(Script(ranks=4, steps=2), 3).spans
    names = ("rank", "step", "operation", "group", "start", "duration", "group size")
    columns = tuple(Column(name, "count") for name in names)
    for size, asked in ((2, False), (4, True), (None, True)):
        rows = [(rank, 1, "all_reduce", "tp", 5, 3 + rank, size) for rank in range(4)]
        table = Table("collectives", columns, rows)
        told = replace(spans, tables={"collectives": lambda table=table: table})
        assert (len(listed_collectives(told, replicas(spans, range(4))).one) > 0) == asked


SEEDS = range(3_000, 3_010)
TENSOR = Script(parallel={"tp": 2}, uneven=0.3, listed=True)
PIPELINE = Script(parallel={"pp": 2}, layers=(1.3, 1.0), uneven=0.3, listed=True)


def told(script: Script, seed: int = 3_000) -> list[tuple[Any, ...]]:
    table = stragglers(play(script, seed).spans)
    names = ("rank", "verdict", "group")
    return list(zip(*(table.column(name) for name in names), strict=True))


def test_a_slow_rank_is_named_and_not_its_sibling_that_waits_for_it() -> None:
    for seed in SEEDS:
        assert accused(play(replace(TENSOR, slow={3: 0.1}), seed)) == {3}


def test_two_slow_ranks_of_two_replicas_are_both_named() -> None:
    for seed in SEEDS:
        assert accused(play(replace(TENSOR, ranks=16, slow={3: 0.1, 4: 0.1}), seed)) == {3, 4}


def test_a_rank_that_is_slow_for_a_while_is_named() -> None:
    ((rank, verdict, _),) = told(replace(TENSOR, slow={3: 0.1}, when=(7, 16)))
    assert (rank, verdict) == (3, TRANSIENT)


def test_all_others_of_the_role_wait_for_it() -> None:
    spans = play(replace(TENSOR, slow={3: 0.2}, uneven=0.0), 3_000).spans
    (lost,) = stragglers(spans).column("peer time lost")
    assert lost == pytest.approx(24 * 7 * 0.2 * 1.2e9, rel=0.25)


@pytest.mark.parametrize(
    ("script", "group"),
    [
        (replace(TENSOR, slow={3: 0.1}, listed=False), "actor ranks 2, 3"),
        (replace(PIPELINE, slow={1: 0.1}), "actor ranks 1, 5"),  # the second stage waits for it
    ],
)
def test_where_nobody_tells_which_one_it_is_the_replica_is_charged(
    script: Script, group: str
) -> None:
    assert told(script) == [(None, SLOW_REPLICA, group)]


def test_a_rank_that_is_slower_in_one_stage_than_as_a_whole_is_named_or_its_replica() -> None:
    both = ("actor_generate", "actor_update")
    script = replace(TENSOR, counters=False, slow={0: 0.2}, steps=50, layers=(1.0, 1.3))
    assert told(script, 133) == [(0, SLOW_UNCOUNTED, "actor")]
    unlisted = replace(TENSOR, counters=False, slow={0: 0.2}, meets=both, listed=False)
    assert told(unlisted, 100) == [(None, SLOW_REPLICA, "actor ranks 0, 1")]


def test_of_a_copy_that_does_not_wait_for_it_only_the_slow_rank_is_charged() -> None:
    script = replace(PIPELINE, layers=(1.0, 1.3), slow={5: 0.1}, listed=False)
    assert told(script) == [(5, SLOW_HOST, "actor")]


def test_who_is_late_for_waiting_elsewhere_is_not_the_cause() -> None:
    tensor, context = [(0, 0), (0, 1), (1, 2), (1, 3)], [(2, 0), (2, 2), (3, 1), (3, 3)]
    rows = [
        (4 * step + group, group, step, rank, 100 if rank in (2, 3) and group != 1 else 900)
        for step in range(1, 13)
        for group, rank in (*tensor, *context)
    ]
    found = np.array(rows, dtype=np.int64).T
    found[4] += np.arange(len(rows)) % 7  # nobody is exactly as short as another
    found[4, (found[1] == 1) & (found[3] == 3)] = 100
    zero = np.zeros(4, dtype=np.int64)
    who = Replicas(np.arange(4), zero, np.arange(4), zero)
    came = arrival_evidence(who, ListedCollectives(*found), 1, 1_000.0)
    assert list(came.cause(range(4), (1, 12), 12, 10.0)) == [3]


def test_the_larger_part_of_a_pipeline_is_not_slow() -> None:
    for layers in ((1.0, 1.3), (1.3, 1.0)):
        assert told(replace(PIPELINE, layers=layers)) == [(None, NO_STRAGGLER, "actor")]


def test_one_copy_of_the_model_is_compared_by_arrivals_alone() -> None:
    alone = replace(TENSOR, parallel={"tp": 8})
    assert told(replace(alone, slow={3: 0.1})) == [(3, SLOW_UNCOUNTED, "actor")]
    table = stragglers(play(alone, 3_000).spans)
    assert table.abstained is not None
    assert "one model replica" in table.abstained
    experts = Script(parallel={"ep": 8}, experts=(1.4, 1.0), uneven=0.3, listed=True)
    assert stragglers(play(experts, 3_000).spans).abstained == table.abstained


def test_a_sibling_that_is_always_last_by_little_is_not_the_cause() -> None:
    script = replace(TENSOR, noise=0.0005, hiccups=0.0, slow={2: 0.005})
    assert told(script) == [(None, NO_STRAGGLER, "actor")]


def test_a_rank_that_is_always_last_by_little_is_not_worth_a_word() -> None:
    script = Script(listed=True, noise=0.0005, hiccups=0.0, slow={2: 0.005})
    assert told(script) == [(None, NO_STRAGGLER, "actor")]


def test_groups_that_cross_without_sizes_are_said() -> None:
    note = stragglers(play(replace(TENSOR, told=False), 3_000).spans).note
    assert "has no `parallel` key" in note
    assert "parallel" not in stragglers(play(TENSOR, 3_000).spans).note
    assert "parallel" not in stragglers(play(Script(listed=True), 3_000).spans).note
