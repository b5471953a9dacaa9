"""Signals reach the training once: nsys drops its reports when one of them comes twice."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.doubles.nsys.on_path import FakeNsys
from tests.places import ROOT

# Says when it can be interrupted, and ends a moment after that: a second signal would get through.
TARGET = """
import signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got:
    time.sleep(0.05)  # not pause(): a signal just before it would be waited for in vain
time.sleep(0.3)
print("got", *got, flush=True)
sys.exit(9)
"""
# Makes its input the terminal that signals come from.
AT_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
RLPROF = [
    *(sys.executable, "-m", "lightning_rlprof", "nsys", "run"),
    *("-o", "x", "--capture-range", "nvtx"),
]
COMMAND = [*RLPROF, "--", sys.executable, "-c", TARGET]


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNsys:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return FakeNsys(tmp_path, monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_rlprof_alone_reaches_the_training(number: signal.Signals) -> None:
    started = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    with started.stdout as output:
        for line in output:
            if line == "ready\n":
                started.send_signal(number)
                break
        rest = output.read()
    assert started.wait() == 9
    assert rest.startswith(f"got {number.value}\n")
    assert "Wrote x.1.nsys-rep\n" in rest


def _read(terminal: int, until: bytes = b"") -> bytes:
    """Read what is shown until a word, or until the last process has gone."""
    seen = b""
    while not (until and until in seen):
        try:
            seen += os.read(terminal, 1024)
        except OSError:  # Linux has an error for the end
            break
    return seen


@contextmanager
def at_terminal() -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """Start on a terminal, and go on when the training can be interrupted."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", AT_TERMINAL, *COMMAND]
    started = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    _read(ours, until=b"\nready\r")
    yield ours, started
    os.close(ours)


def test_ctrl_c_on_a_terminal_reaches_the_training_and_the_report_is_kept() -> None:
    with at_terminal() as (terminal, started):
        os.write(terminal, b"\x03")
        seen = _read(terminal)
        assert started.wait() == 9
    assert b"got 2\r\n" in seen
    assert b"Wrote x.1.nsys-rep" in seen


def test_what_a_terminal_sends_is_not_passed_on(fake: FakeNsys) -> None:
    program = fake.bin / "nsys"  # away from the terminal: it gets only what is passed on
    program.write_text(program.read_text().replace("exec ", "exec setsid "))
    with at_terminal() as (terminal, started):
        os.write(terminal, b"\x03")
        _read(terminal, until=b"^C")
        started.send_signal(signal.SIGTERM)  # comes after the other: that one has a lower number
        seen = _read(terminal)
        assert started.wait() == 9
    assert b"got 15\r\n" in seen


def test_a_nsys_that_is_killed_ends_rlprof_as_a_shell_tells_it() -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    done = subprocess.run(
        [*RLPROF, "--", sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGKILL
    said = "warning: no report was written, and nsys or the training ended with status 137. "
    assert said in done.stdout


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2])
def test_what_a_scheduler_sends_goes_to_nsys_and_its_status_stays(
    number: signal.Signals, fake: FakeNsys
) -> None:
    catching = TARGET.replace("SIGINT, signal.SIGTERM", f"{number.name},")
    ask = "import sys\nif '--version' in sys.argv: sys.exit()\n"  # rlprof waits for the answer
    (fake.bin / "nsys").write_text(f"#!{sys.executable}\n{ask}{catching}")
    started = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    with started.stdout as output:
        said = [output.readline() for _ in range(3)]
        assert said[0].startswith("RLPROF__TOOLS=")
        assert said[2] == "ready\n", said
        started.send_signal(number)
        assert f"got {number.value}\n" in output.read()
    assert started.wait() == 9
