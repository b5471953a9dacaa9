"""Launches without a kernel are counted exactly, per rank, and not guessed."""

from pathlib import Path

import pytest

from lightning_rlprof.analysis.unpaired import unpaired
from lightning_rlprof.loaders.load import load
from tests.analysis.device_trace import Feed, feed, thinned, traced

TRACES = Path(__file__).parents[3] / "shared" / "data" / "kineto"


def test_in_a_whole_trace_each_launch_has_its_kernel() -> None:
    assert unpaired(traced(*feed(Feed(pieces=300)))) == (300, 0)


def test_what_is_lost_is_counted_and_a_lost_launch_is_no_lost_kernel() -> None:
    kernels, calls = feed(Feed(pieces=300))
    kept = thinned(kernels, 0.2, 1)
    assert unpaired(traced(kept, calls)) == (300, 300 - len(kept))
    less = thinned(calls, 0.2, 1)
    assert unpaired(traced(kernels, less)) == (len(less), 0)


def test_a_launch_of_another_rank_at_the_same_time_is_another_one() -> None:
    kernels, calls = feed(Feed(pieces=300))
    others = [{**call, "rank": 1} for call in calls]
    assert unpaired(traced(kernels, [*calls, *others])) == (600, 300)


def test_copies_and_other_calls_are_no_launches_of_kernels() -> None:
    kernels, calls = feed(Feed(pieces=300))
    more = [{**call, "name": name} for call in calls[:9] for name in ("cudaMemcpyAsync", "aten::a")]
    assert unpaired(traced(kernels, [*calls, *more])) == (300, 0)
    assert unpaired(traced(kernels, more)) is None
    assert unpaired(traced(kernels)) is None


@pytest.mark.parametrize(
    "name", ["nccl", "h100_qwen1.5-0.5b", "mi300_bert-small", "alexnet", "ns_resolution_rank-0"]
)
def test_real_traces_are_whole(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"NO TRACES: {path} is not here")
    found = unpaired(load(path))
    assert found is not None
    assert found.launches > 50
    assert found.alone == 0
