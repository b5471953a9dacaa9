"""The benchmark of path, what-if and compare: it runs, and each promise can break."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from lightning_rlprof.analysis.critical_path.step_graph import step_graph
from tests.builders.scripted import Script, play
from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


def test_it_prints_every_verdict_at_both_sizes() -> None:
    command = [sys.executable, str(FOLDER / "pipeline.py"), "--quick", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stderr
    for name in ("critical_path", "whatif", "compare"):
        for ranks in ("64", "1,024"):
            assert f"| {name}, {ranks} ranks " in done.stdout


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    import pipeline

    yield pipeline
    for name in ("pipeline", "_cost", "_job", "_measure"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("seconds", "megabytes", "found", "broken"),
    [
        (2.0, 500, (1.0, 100.0, 10.0), 0),
        (2.1, 501, (1.0, 100.0, 10.0), 2),
        (1.0, 100, (1.1, 100.0, 10.0), 1),
        (1.0, 100, (0.0, 99.9, 10.0), 1),
        (1.0, 100, (0.0, 100.0, 10.1), 1),
    ],
)
def test_each_bound_can_break(
    bench: ModuleType,
    seconds: float,
    megabytes: float,
    found: tuple[float, float, float],
    broken: int,
) -> None:
    import _cost

    costs = {"path": [_cost.Cost(64, 1, [seconds] * 2, megabytes, 1.0)]}
    report = bench.reported("pipeline", costs, [], bench.bounds(bench.Right(*found)))
    assert sum(not bound.holds for bound in report.bounds) == broken


def test_a_piece_that_moves_the_step_otherwise_is_seen(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = step_graph(play(Script(listed=True), 1).spans)
    assert bench.moved(graph, 1, 20) == 100
    longest_path = bench.longest_path

    def wrong(*measured: object) -> object:
        found = longest_path(*measured)
        found.slack[:] += 1
        return found

    monkeypatch.setattr(bench, "longest_path", wrong)
    assert bench.moved(graph, 1, 20) < 100
