"""The benchmark of the ledger: each bound can break, each control can fail, the sum is checked."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """Import the benchmark as it imports its neighbours when it is run as a file."""
    names = ("_measure", "_job", "_cost", "ledger")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield [importlib.import_module(name) for name in names][-1]
    for name in names:
        sys.modules.pop(name, None)


def cost_of(bench: ModuleType) -> ModuleType:
    """Return the neighbour that measures."""
    return sys.modules[bench.large.__module__]


def test_a_small_job_is_measured_and_adds_up(bench: ModuleType) -> None:
    cost = cost_of(bench).measure(bench.timed_ledger, 3, 4, 2)
    assert (cost.ranks, cost.spans, len(cost.seconds)) == (3, 3 * 4 * 20, 2)
    assert cost.megabytes > 10


def test_findings_are_measured_again_each_time_and_do_not_abstain(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, right, job = [], bench.findings, cost_of(bench).synthetic_job
    monkeypatch.setattr(bench, "findings", lambda spans: (asked.append(spans), right(spans))[1])
    cost_of(bench).measure(bench.found, 3, 4, 2)
    assert len({*map(id, asked)}) == len(asked) == 3

    monkeypatch.setattr(bench, "findings", lambda _: right(job(1, 0)))
    with pytest.raises(AssertionError, match="findings abstain"):
        bench.found(job(2, 3))


def test_a_sum_that_is_wrong_is_no_result(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, job = bench.ledger, cost_of(bench).synthetic_job
    monkeypatch.setattr(bench, "ledger", lambda spans: right(job(1, 1)))
    with pytest.raises(AssertionError, match="2 ranks: the categories do not add up"):
        bench.timed_ledger(job(2, 3))


@pytest.mark.parametrize(
    ("seconds", "megabytes", "broken"), [(2.0, 500, 0), (2.1, 500, 1), (2.0, 501, 1), (9.0, 900, 2)]
)
def test_each_bound_can_break(
    bench: ModuleType, seconds: float, megabytes: float, broken: int
) -> None:
    cost = cost_of(bench).Cost(64, 1, [seconds] * 2, megabytes, 1.0)
    assert sum(not bound.holds for bound in cost_of(bench).bounds([cost])) == broken


@pytest.mark.parametrize(
    ("seconds", "core", "quiet"), [([1, 1], 0.9, True), ([1, 2], 0.9, False), ([1, 1], 0.4, False)]
)
def test_each_control_can_fail(
    bench: ModuleType, seconds: list[float], core: float, quiet: bool
) -> None:
    assert cost_of(bench).Cost(64, 1, seconds, 100, core).quiet is quiet
