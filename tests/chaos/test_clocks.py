"""The wall clock jumps, as NTP and suspended machines let it: no time of a span moves."""

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.testing import FakeClock
from tests.chaos.disks import train


def recorded(folder: Path) -> list[Any]:
    train(folder, FakeClock(1_000_000))
    spans = load(folder)
    assert spans.warnings == ()
    return [(span.name, span.step, span.start_ns, span.end_ns) for span in spans]


def test_a_wall_clock_that_jumps_moves_no_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = recorded(tmp_path / "steady")
    noise = Random(0)

    def jump() -> float:
        return time_before() + noise.choice([-1, 1]) * noise.choice([1, 3_600, 3e8, 3e9])

    time_before = time.time
    monkeypatch.setattr(time, "time", jump)
    monkeypatch.setattr(time, "time_ns", lambda: int(jump() * 1e9))
    assert recorded(tmp_path / "jumps") == steady
    assert len(steady) == 24
