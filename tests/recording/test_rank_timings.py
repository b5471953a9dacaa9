"""Timings across ranks: real gloo processes that know different names."""

import pytest
import torch
from torch import distributed, multiprocessing

from lightning_rlprof.recording.annotations import Tail, gather_timings, reduce_timings, tail_ratio

KNOWN = (
    {"actor_update": 1.0, "actor_generate": 4.0},
    {"critic_update": 8.0, "actor_update": 3.0},
)


def _rank(rank, file, found):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    own = KNOWN[rank]
    found[rank] = (
        gather_timings(own),
        {how: reduce_timings(own, how) for how in ("mean", "max", "min", "sum")},
        tuple(tail_ratio(own["actor_update"])),
    )
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        found = manager.dict()
        file = tmp_path_factory.mktemp("store") / "store"
        processes = [context.Process(target=_rank, args=(rank, file, found)) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        return [found[0], found[1]]


@pytest.mark.deep
def test_ranks_with_different_names_gather_all_of_them_on_gloo(ranks):
    expected = {
        "actor_update": [1.0, 3.0],
        "actor_generate": [4.0, None],
        "critic_update": [None, 8.0],
    }
    assert [found[0] for found in ranks] == [expected, expected]


def test_a_name_is_reduced_over_the_ranks_that_have_it_on_gloo(ranks):
    both, only = (1.0, 3.0), {"actor_generate": 4.0, "critic_update": 8.0}
    expected = {
        "mean": {"actor_update": 2.0, **only},
        "max": {"actor_update": max(both), **only},
        "min": {"actor_update": min(both), **only},
        "sum": {"actor_update": sum(both), **only},
    }
    assert [found[1] for found in ranks] == [expected, expected]


def test_the_tail_is_the_slowest_ranks_share_on_gloo(ranks):
    assert [found[2] for found in ranks] == [(0.75, 1.0, 3.0)] * 2


def test_one_process_is_its_own_world():
    assert gather_timings({"a": 1.0}) == {"a": [1.0]}
    assert reduce_timings({"a": 1.0}) == {"a": 1.0}
    assert tail_ratio(0.0) == Tail(0.0, 0.0, 0.0)


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="how='avg' is not one of mean, max, min, sum"):
        reduce_timings({}, how="avg")
    with pytest.raises(ValueError, match="k=0 is not a number of ranks; give 1 or more"):
        tail_ratio(1.0, k=0)
