"""`rlprof nsys` with a real nsys, where RLPROF_NSYS names one: its command lines are accepted."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from lightning_rlprof.recording.nsys import installed_version
from tests.places import ROOT

NSYS = os.environ.get("RLPROF_NSYS", "")
TRAIN = """
import sys, time
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.start import start_session
session = start_session(ProfilerConfig.build("rl.yaml"))
for step in (1, 2, 3, 4):
    session.begin_step(step)
    with stage("actor_update"):
        time.sleep(0.01)
    session.end_step()
session.close()
sys.exit(7)
"""

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not NSYS, reason="opt-in: RLPROF_NSYS=/path/to/nsys, a real one"),
]


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the real nsys on PATH and go to an empty directory."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").symlink_to(Path(NSYS).resolve())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def rlprof(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lightning_rlprof", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def recorded(steps: str) -> str:
    """Record a training that ends with status 7, and return what was printed."""
    Path("rl.yaml").write_text(f"{{steps: {steps}, integrated: {{profile_save_path: runs}}}}")
    words = ("-o", "x-%p", "--config", "rl.yaml", "--", sys.executable, "-c", TRAIN)
    done = rlprof("nsys", "run", *words)
    assert done.returncode == 7, done.stdout + done.stderr
    return done.stdout


def exported(report: Path) -> Path:
    """Let nsys export a report."""
    command = ["nsys", "export", "--type=sqlite", "--output=x.sqlite", str(report)]
    subprocess.run(command, capture_output=True, check=True)
    return Path("x.sqlite")


def test_a_whole_run_is_recorded() -> None:
    out = recorded("[]")
    (report,) = Path().glob("x-*.nsys-rep")
    assert f"Wrote {report}\n" in out


def test_each_capture_is_a_report_that_holds_its_ranges() -> None:
    out = recorded("[2, 3]")
    if (installed_version("nsys") or (9999, 0)) <= (2023, 4):
        assert "nsys 2023.4 and older hears nothing from the package nvtx 0.2.12" in out
        pytest.skip("this nsys hears nothing from the installed nvtx, and rlprof says so")
    reports = sorted(Path().glob("x-*.nsys-rep"))
    assert [f"Wrote {report}\n" in out for report in reports] == [True, True]
    with closing(sqlite3.connect(exported(reports[0]))) as database:
        sql = "SELECT COALESCE(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id"
        names = {name for (name,) in database.execute(sql)}
    assert {"step", "actor_update"} <= names
