"""The benchmark of the verdicts: it runs, and each promise can break."""

import subprocess
import sys

import pytest

from tests.peers.formulas import FORMULAS
from tests.peers.harness import CASES, OURS, TOO_SHORT, Score, scores
from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


def test_it_prints_ours_beside_every_formula() -> None:
    command = [sys.executable, str(FOLDER / "verdicts.py"), "--quick", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stderr
    heads = next(line for line in done.stdout.splitlines() if line.startswith("| case"))
    assert [each.strip() for each in heads.split("|")[2:-1]] == [OURS, *FORMULAS]
    assert all(f"| {case} " in done.stdout for case in CASES)


@pytest.fixture
def promises(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(FOLDER)
    import verdicts

    yield verdicts.bounds
    for name in ("verdicts", "_cost", "_job", "_measure"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("own", "broken"),
    [
        (Score(200, 198, 200, 2), 0),
        (Score(200, 197, 200, 3), 1),
        (Score(200, 189, 189, 0), 1),
        (Score(200, 0, 0, 200), 2),
    ],
)
def test_each_bound_can_break(promises: object, own: Score, broken: int) -> None:
    silent = scores(TOO_SHORT, range(2))[OURS]
    found = promises({"one 10 % slow": {OURS: own}}, silent)  # type: ignore[operator]
    assert sum(not bound.holds for bound in found) == broken


def test_an_accusation_from_too_little_breaks_the_last(promises: object) -> None:
    bounds = promises({}, Score(200, 1, 1, 0))  # type: ignore[operator]
    assert not bounds[-1].holds
