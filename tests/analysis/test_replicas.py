"""Where ranks stand: Megatron's order against its own published definition, by brute force."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.replicas import Replicas, replicas
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.spans import Spans
from tests.analysis.scripted import Script, play
from tests.runs import Row, header, write_rank


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
