"""How processes begin and end: alone, told in words, and never left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.store import ingest as process_engine
from tests.builders.ingest_traces import write_traces
from tests.places import ROOT

SCRIPT = """
from lightning_rlprof.store.ingest import ingest
print("trains")
print(*ingest(["traces"], jobs=2).column("state"))
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [(3, "exit status 3"), (0, "exit status 0"), (-signal.SIGSEGV, "killed by SIGSEGV")],
)
def test_an_end_is_told_in_words(code: int, said: str) -> None:
    assert process_engine._end(code) == said


def test_a_process_that_does_not_hear_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "_PATIENCE_S", 0.1)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); signal.pause()"
    ours, _ = multiprocessing.Pipe()
    process = subprocess.Popen([sys.executable, "-uc", deaf], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
        process_engine._stop(process_engine._Worker(process, ours, 0))
    assert process.returncode == -signal.SIGKILL


@pytest.mark.deep
@pytest.mark.parametrize("piped", [False, True])
def test_a_script_without_a_guard_runs_once(tmp_path: Path, piped: bool) -> None:
    write_traces(tmp_path / "traces", 3)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-" if piped else "script.py"],
        input=SCRIPT if piped else "",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("trains\ncached cached cached\n", "")


@pytest.mark.deep
def test_processes_import_nothing_that_their_caller_would_not(tmp_path: Path) -> None:
    write_traces(tmp_path / "traces", 2)
    (tmp_path / "signal.py").write_text("raise SystemExit('not the one of Python')")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "bin/script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("trains\ncached cached\n", "")


def test_a_process_that_nobody_listens_to_ends_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    worker = process_engine._started()
    worker.pipe.send("no such trace")
    worker.pipe.close()
    assert worker.process.wait(60) == 0
    assert capfd.readouterr() == ("", "")
