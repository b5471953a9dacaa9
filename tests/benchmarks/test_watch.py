"""The benchmark of watching: it runs, its ranks write what is read, and its bounds can break."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    import watch

    yield watch
    for name in ("watch", "_measure"):
        sys.modules.pop(name, None)


def test_it_runs_and_prints_a_row_per_size() -> None:
    command = [sys.executable, str(FOLDER / "watch.py"), "--quick", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("2 ranks", "16 ranks", "again (A/A)"):
        assert f"| {name}" in done.stdout


def test_the_view_reads_what_the_ranks_write(bench: ModuleType, tmp_path) -> None:
    writer = bench.TraceWriter(tmp_path, bench.make_header(0))
    with writer.path.open("ab") as file:
        file.write(bench.steps_of(0, 1, 3))
    live = bench.LiveRun(tmp_path)
    live.refresh()
    assert live.ranks[0].last_step == 3
    stages = {span.name for span in live.spans if span.kind == "stage"}
    assert len(stages) == bench.STAGES


@pytest.mark.parametrize(
    ("cores", "megabytes", "status"), [(0.9, 400, 0), (1.1, 400, 1), (0.9, 501, 1)]
)
def test_each_bound_can_break(
    cores: float, megabytes: float, status: int, bench: ModuleType, monkeypatch
) -> None:
    found = dict.fromkeys(("cores", "refresh_ms", "worst_ms", "first_ms", "mb"), 1.0)
    found |= {"cores": cores, "mb": megabytes, "refreshes": 20.0}
    monkeypatch.setattr(bench, "measured", lambda ranks, seconds: found)
    assert bench.main(Namespace(quick=False, markdown=False, json=None)) == status


def test_a_machine_that_was_too_busy_is_not_judged(bench: ModuleType, monkeypatch, capsys) -> None:
    found = dict.fromkeys(("cores", "refresh_ms", "worst_ms", "first_ms", "mb"), 0.5)
    monkeypatch.setattr(bench, "measured", lambda ranks, seconds: {**found, "refreshes": 7.0})
    assert bench.main(Namespace(quick=False, markdown=False, json=None)) == 1
    assert "too noisy to judge" in capsys.readouterr().out
