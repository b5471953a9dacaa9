"""Which rank of a replica is slow, where all of them look slow."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.arrivals import Listed
from lightning_rlprof.analysis.replicas import Replicas
from lightning_rlprof.analysis.stragglers import stragglers
from lightning_rlprof.analysis.suspects import attendance
from lightning_rlprof.analysis.verdicts import (
    NOBODY,
    SLOW_GROUP,
    SLOW_HOST,
    SLOW_OR_UNEVEN,
    TRANSIENT,
)
from tests.analysis.scripted import Script, play
from tests.peers.harness import accused

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
    (lost,) = stragglers(spans).column("lost by others")
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
    assert told(script) == [(None, SLOW_GROUP, group)]


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
    came = attendance(who, Listed(*found), 1, 1_000.0)
    assert list(came.cause(range(4), (1, 12), 12, 10.0)) == [3]


def test_the_larger_part_of_a_pipeline_is_not_slow() -> None:
    for layers in ((1.0, 1.3), (1.3, 1.0)):
        assert told(replace(PIPELINE, layers=layers)) == [(None, NOBODY, "actor")]


def test_one_copy_of_the_model_is_compared_by_arrivals_alone() -> None:
    alone = replace(TENSOR, parallel={"tp": 8})
    assert told(replace(alone, slow={3: 0.1})) == [(3, SLOW_OR_UNEVEN, "actor")]
    table = stragglers(play(alone, 3_000).spans)
    assert table.abstained is not None
    assert "one copy of the model" in table.abstained
    experts = Script(parallel={"ep": 8}, experts=(1.4, 1.0), uneven=0.3, listed=True)
    assert stragglers(play(experts, 3_000).spans).abstained == table.abstained


def test_a_sibling_that_is_always_last_by_little_is_not_the_cause() -> None:
    script = replace(TENSOR, noise=0.0005, hiccups=0.0, slow={2: 0.005})
    assert told(script) == [(None, NOBODY, "actor")]


def test_a_rank_that_is_always_last_by_little_is_not_worth_a_word() -> None:
    script = Script(listed=True, noise=0.0005, hiccups=0.0, slow={2: 0.005})
    assert told(script) == [(None, NOBODY, "actor")]


def test_groups_that_cross_without_sizes_are_said() -> None:
    note = stragglers(play(replace(TENSOR, told=False), 3_000).spans).note
    assert "does not say parallel" in note
    assert "parallel" not in stragglers(play(TENSOR, 3_000).spans).note
    assert "parallel" not in stragglers(play(Script(listed=True), 3_000).spans).note
