"""The benchmark of hostile clients: it attacks both servers, and its bound can break."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType

import pytest

from lightning_rlprof.report.perfetto import perfetto_ui
from tests.places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    import serve_attack

    yield serve_attack
    for name in ("serve_attack", "_measure"):
        sys.modules.pop(name, None)


@pytest.mark.deep
def test_it_runs_and_prints_a_row_for_each_server() -> None:
    command = [sys.executable, str(FOLDER / "serve_attack.py"), "--quick", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "| rlprof serve |" in done.stdout
    assert ("| rlprof open " in done.stdout) == (perfetto_ui() is not None)


@pytest.mark.deep
@pytest.mark.parametrize(("slowest", "status"), [(1_999.0, 0), (2_001.0, 1)])
def test_a_page_that_takes_two_seconds_breaks_the_bound(
    slowest: float, status: int, bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measured", lambda *_: (5.0, slowest, "/", 100))
    assert bench.main(Namespace(quick=False, markdown=False, json=None)) == status
