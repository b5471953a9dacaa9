"""The benchmark of faults: one trial that does not keep the promise makes it fail."""

import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.chaos.mutants import Mutants
from tests.chaos.outcomes import Outcome
from tests.places import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import chaos

    yield chaos
    for name in ("chaos", "_measure"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("broken", "failed"), [("", {}), ("torn", {}), ("", {"x": "torn"})])
def test_it_fails_if_anything_was_not_survived(
    broken: str, failed: dict[str, str], benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    outcomes = [Outcome("", 9, 2, 80.0, 0.1), Outcome(broken, 9, 5, 30.0, 0.2)]
    monkeypatch.setattr(benchmark, "faults", lambda *_: {"SIGKILL": lambda: outcomes})
    one = Mutants(10, 9, 1, failed, 0.5)
    damaged = {"native": one, "x": one}
    monkeypatch.setattr(benchmark.chaos["mutants"], "all_damaged", lambda _: damaged)
    monkeypatch.setattr(logging, "disable", bool)  # for the other tests of this process
    monkeypatch.setattr(sys, "argv", ["chaos.py"])
    assert benchmark.main() == bool(broken or failed)
    out = capsys.readouterr().out
    assert f"| SIGKILL                      |     2 |        {1 if broken else 2} |" in out
    assert "5 |   80.00 |      0.20 |" in out
    assert ("torn" in out) == bool(broken or failed)
