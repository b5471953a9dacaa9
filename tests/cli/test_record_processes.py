"""Which processes of a program under `rlprof run` record, and why others cannot."""

import os
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.cli.record import INJECT, Processes

Run = Callable[..., tuple[int, str, str]]

WAITS = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
REPLACES = "which replaces that of rlprof run."
EXTEND = "Extend it in the script: PYTHONPATH=FOLDER:$PYTHONPATH"


def test_the_folder_that_programs_get_opens_the_doors() -> None:
    assert (INJECT / "sitecustomize.py").is_file()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs wait until they have been looked at."""
    monkeypatch.chdir(tmp_path)
    look = Processes.look

    def look_and_go(self: Processes, pid: int) -> None:
        look(self, pid)
        if self._why:
            Path("go").touch()

    monkeypatch.setattr(Processes, "look", look_and_go)


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("PYTHONPATH=/opt {}", f"was started with PYTHONPATH=/opt, {REPLACES} {EXTEND}"),
        ("PYTHONPATH= {}", f"was started with an empty PYTHONPATH, {REPLACES} {EXTEND}"),
        ("env -i {}", "was started without the variables of rlprof run. Pass them on"),
        ("{} -I", "ignores PYTHONPATH: leave that option out"),
        ("{} -sE", "ignores PYTHONPATH: leave that option out"),
        ("{} -S", "ignores PYTHONPATH: leave that option out"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_script_that_keeps_rlprof_out_is_named(before: str, why: str, rlprof: Run) -> None:
    Path("wait.py").write_text(WAITS)
    Path("job.sh").write_text(f"{before.format(sys.executable)} wait.py\nexit 0\n")
    code, _, err = rlprof("run", "--", "sh", "job.sh")
    assert code == 0
    name = sys.executable + (f" {before.split()[1]}" if before.startswith("{}") else " wait.py")
    assert err.splitlines() == [
        "warning: no training reached its first step, so profiler_data has no new run. "
        f"'{name}' {why}"
    ]


def test_a_python_without_rlprof_is_named(rlprof: Run, tmp_path: Path) -> None:
    venv.create("other", symlinks=True)
    python = tmp_path / "other/bin/python"
    Path("job.sh").write_text(f"{python} -c ''\n")
    _, _, err = rlprof("run", "--", "sh", "job.sh")
    text = f"{python} has no lightning-rlprof. Install it there: {python} -m pip install "
    assert text in err


def test_a_program_without_python_is_told_what_python_needs(rlprof: Run) -> None:
    code, _, err = rlprof("run", "--", "true")
    assert code == 0
    assert "No Python that it started has loaded rlprof" in err
    assert EXTEND in err


def test_processes_are_left_alone_once_one_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run-7", "run-8"):
        (tmp_path / name).write_text("/b/2\n/a/1\n" if name == "run-7" else "/b/2\n")
    processes = Processes(tmp_path)
    monkeypatch.setattr("lightning_rlprof.cli.record._family", lambda pid: 1 / 0)
    processes.look(os.getpid())
    assert processes.runs() == [Path("/a/1"), Path("/b/2")]


def test_a_process_that_has_ended_is_left_out(tmp_path: Path) -> None:
    Processes(tmp_path).look(2**22 + 1)


def test_a_python_that_heard_of_rlprof_needs_no_reason(rlprof: Run) -> None:
    _, _, err = rlprof(
        "run", "--", "sh", "-c", f"PYTHONPATH=/opt:$PYTHONPATH {sys.executable} -c ''"
    )
    assert "A loop of your own needs with step()" in err
    assert str(INJECT) not in err
