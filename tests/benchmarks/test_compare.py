"""The benchmark of comparisons: it runs, and each promise can break."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.peers.diffs import DIFFS
from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    import compare

    yield compare
    for name in ("compare", "_cost", "_job", "_measure"):
        sys.modules.pop(name, None)


def test_it_prints_ours_beside_every_formula() -> None:
    command = [sys.executable, str(FOLDER / "compare.py"), "--quick", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    heads = next(line for line in done.stdout.splitlines() if line.startswith("| case"))
    assert [each.strip() for each in heads.split("|")[2:-1]] == ["lightning_rlprof", *DIFFS]


@pytest.mark.parametrize(
    ("own", "broken"), [((95.0, 1.0), 0), ((94.0, 0.0), 1), ((100.0, 1.5), 1), ((0.0, 9.0), 2)]
)
def test_each_bound_can_break(benchmark: ModuleType, own: tuple[float, float], broken: int) -> None:
    found = benchmark.bounds({"5 % slower": {benchmark.OURS: own}})
    assert sum(not bound.holds for bound in found) == broken


def test_ours_is_right_where_the_others_are_not(benchmark: ModuleType) -> None:
    """Thirty pairs of seeds of its own, so that a step back shows in every run of the tests."""
    seeds = range(500, 530)
    longer = benchmark.played(benchmark.CASES["A/A, answers 30 % longer"], seeds)
    hidden = benchmark.played(benchmark.CASES["5 % slower, answers 30 % shorter"], seeds)
    assert longer[benchmark.OURS] == (0.0, 0.0)
    assert hidden[benchmark.OURS][0] >= 95.0
    assert longer["mean > 5 %"][1] > 90
    assert hidden["mean > 5 %"][0] < 10
