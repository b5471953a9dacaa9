"""The benchmark of shadow steps: what it simulates has the truth that it says."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.places import ROOT


@pytest.fixture
def shadow(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import shadow

    yield shadow
    for name in ("shadow", "_switch", "_contenders", "_measure"):
        sys.modules.pop(name, None)


def test_a_simulated_run_has_its_truth(
    shadow: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "_SCALE", 1e-6)
    found = shadow.simulated(tmp_path, 200, 0.05, 1)
    assert found.share == pytest.approx(0.05, abs=0.001)
    assert found.pairs == 200


def test_its_noise_is_what_the_interval_is_for(shadow: ModuleType, tmp_path: Path) -> None:
    found = shadow.simulated(tmp_path, 400, 0.0138, 2)
    assert found.low < 0.0138 < found.high
    assert 0.002 < (found.high - found.low) / 2 < 0.02
