"""Code in an interpreter of its own: what it answers, and that nothing of it stays behind."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.system.subprocess_python import Interpreter, InterpreterError, ask

# A grandchild that would stay for a minute; its process id goes to a file.
FAMILY = """
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""


def gone(pid: int, timeout_s: float = 30) -> bool:
    """Wait until a process of somebody else has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], timeout_s)[0])
    finally:
        os.close(watched)


def family(path: Path) -> list[int]:
    """Wait for the process ids that FAMILY writes."""
    while not path.exists():
        select.select([], [], [], 0.01)
    return [int(word) for word in path.read_text().split()]


def test_it_returns_what_the_code_puts_into_answer() -> None:
    code = "answer['got'] = sys.argv[1:]; answer['deep'] = {'x': [1, None]}"
    assert ask(code, "a b", "ü") == {"got": ["a b", "ü"], "deep": {"x": [1, None]}}


def test_what_a_library_prints_does_not_disturb_the_answer() -> None:
    noise = "print('{\"answer\": 0}'); print('\\x1e', file=sys.stderr); "
    assert ask(noise + "answer['x'] = 1; print('after', end='')") == {"x": 1}


def test_the_environment_is_ours_with_what_is_laid_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "ours")
    monkeypatch.setenv("TWO", "ours")
    code = "answer['found'] = [os.environ['ONE'], os.environ['TWO']]"
    assert ask(code, environment={"TWO": "laid over"}) == {"found": ["ours", "laid over"]}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise ValueError", "ValueError"),
        ("raise ValueError('first\\nsecond')", "first"),
        ("try:\n 1/0\nexcept Exception as e: raise OSError('no') from e", "no (division by zero)"),
        ("sys.exit('enough')", "enough"),
        ("os._exit(4)", "it ended with status 4 without an answer"),
        ("os.kill(os.getpid(), 11)", "it ended by signal 11 without an answer"),
        ("1 +", "invalid syntax (<rlprof>, line 1)"),
    ],
)
def test_a_failure_is_one_line_that_says_why(code: str, reason: str) -> None:
    with pytest.raises(InterpreterError) as raised:
        ask(code)
    assert str(raised.value) == reason


def test_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    with Interpreter(FAMILY, str(path)) as child:
        pids = family(path)
        assert child.wait(0) is None
    assert all(map(gone, pids))


def test_no_answer_in_time_is_an_error() -> None:
    with pytest.raises(InterpreterError, match=r"^no answer within 0\.2 s$"):
        ask("import time; time.sleep(60)", timeout_s=0.2)


def test_nobody_waits_for_the_children_of_one_that_has_answered(tmp_path: Path) -> None:
    code = "import subprocess; answer['pid'] = subprocess.Popen(['sleep', '60']).pid"
    pid = ask(code, timeout_s=30)["pid"]
    os.kill(pid, signal.SIGKILL)  # it was alive


def test_it_ends_with_the_process_that_started_it_even_when_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    code = (
        "import sys, time; from lightning_rlprof.system.subprocess_python import Interpreter\n"
        "child = Interpreter(sys.argv[1], sys.argv[2]); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, FAMILY, str(path)]) as parent:
        pids = family(path)
        parent.kill()
    assert all(map(gone, pids))


def test_the_end_of_the_output_is_kept() -> None:
    with Interpreter("print('x' * 100_000 + 'the end')") as child:
        assert child.wait(30) == 0
        assert child.output(10).endswith("xxthe end\n"[-10:])
        assert len(child.output()) == 1 << 16


def test_what_this_process_has_imported_is_not_there() -> None:
    assert "pytest" in sys.modules
    assert ask("answer['there'] = 'pytest' in sys.modules") == {"there": False}


def test_without_groups_of_processes_the_child_alone_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "killpg")  # As on Windows.
    path = tmp_path / "family"
    with Interpreter(FAMILY, str(path)):
        child, grandchild = family(path)
    assert gone(child)
    os.kill(grandchild, signal.SIGKILL)
