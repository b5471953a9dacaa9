"""The benchmark of starting: it runs, and it refuses to time a command that fails."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    import start

    yield start
    for name in ("start", "_measure"):
        sys.modules.pop(name, None)


def test_it_prints_a_row_for_each_command() -> None:
    command = [sys.executable, str(FOLDER / "start.py"), "--quick", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| rlprof")]
    assert len(rows) == 7
    assert "--quick is too short to judge" in done.stderr


def test_a_command_that_fails_ends_the_benchmark(benchmark: ModuleType) -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        benchmark._answer(("-c", "raise SystemExit(3)"), {})
