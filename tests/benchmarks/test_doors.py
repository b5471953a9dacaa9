"""The benchmark of doors: it times the steps of any command that prints a line for each."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"
PRINTS = """
import time
for step in range(6):
    time.sleep(0.02)
    print(f"step {2 * step}")
"""
WHEN_SEEN = """
import os, sys, time
for step in range(6):
    print(f"step {2 * step}")
    until = time.monotonic() + 60
    while not os.path.exists(f"{sys.argv[1]}/{step}"):
        assert time.monotonic() < until, "the line was not seen"
        time.sleep(0.01)
"""
"""Prints a line only when the one before was seen: none waits in a buffer."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    import doors

    yield doors
    for name in ("doors", "_measure"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("line", "per", "steps"), [("^step ", 1, 1), (r"^step (\d+)", 4, 2)])
def test_a_step_lasts_from_line_to_line_or_as_its_number_counts(
    benchmark: ModuleType,
    line: str,
    per: int,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clock() -> float:
        """Return that 20 ms have passed since it was asked before."""
        seen = len(list(tmp_path.iterdir()))
        (tmp_path / str(seen)).touch()
        return 0.02 * seen

    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=clock))
    command = [sys.executable, "-c", WHEN_SEEN, str(tmp_path)]
    assert benchmark.step_ms(command, line, per) == pytest.approx(20 * steps)


def test_a_command_without_such_lines_is_refused(benchmark: ModuleType) -> None:
    with pytest.raises(SystemExit, match="status 0, 0 lines match iteration"):
        benchmark.step_ms([sys.executable, "-c", "print('step 1')"], "iteration", 1)


def test_it_prints_the_overhead_next_to_its_control() -> None:
    command = [sys.executable, str(FOLDER / "doors.py"), "--quick", "--markdown"]
    words = ["--", sys.executable, "-c", PRINTS]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "| rlprof run " in done.stdout
    assert "| plain again (A/A) " in done.stdout
