"""Run code in an interpreter of its own, whose crash, hang or broken library costs nothing here."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MARK = "\x1e"
_ROOT = str(Path(__file__).parents[1])
# The child's standard input ends when this process does, even if killed. The child then ends with
# its whole process group. Windows has none: what the child has started stays.
_FRAME = """
import os, signal, sys, threading

def end_with_parent():
    os.read(0, 1)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.path.append(sys.argv.pop())
exec(compile(sys.argv.pop(), "<rlprof>", "exec"))
"""
# Libraries print while they are imported, so the answer comes after a mark.
_QUESTION = """
import json
answer = {}
try:
    exec(compile(sys.argv.pop(), "<rlprof>", "exec"))
    said = {"answer": answer}
except BaseException as error:
    said = {"failed": []}
    while error is not None:
        lines = str(error).strip().splitlines()
        said["failed"].append(lines[0] if lines else type(error).__name__)
        error = error.__cause__ or error.__context__
os.write(1, ("\\n\\x1e" + json.dumps(said) + "\\n").encode())
"""


class InterpreterError(Exception):
    """The interpreter did not answer; the text says why, in one line."""


class Interpreter:
    """Start code at once; where it still runs at the end of the block, it is killed.

    So are then the processes that it has started, and all of them when this process is killed. The
    code finds this package, its ``arguments`` in ``sys.argv[1:]``, and the modules os and sys; it
    inherits no import of this process. What it prints goes to a file: nothing waits for children
    that outlive it.

    Args:
        code: Python.
        arguments: Texts for it.
        environment: Variables to lay over those of this process.
    """

    def __init__(
        self, code: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FRAME, *arguments, code, _ROOT],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )

    def __enter__(self) -> "Interpreter":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what still runs."""
        self.stop()

    def wait(self, timeout_s: float) -> int | None:
        """Return the status that it ended with, negative for a signal; None if it still runs."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def output(self, last_bytes: int = 1 << 16) -> str:
        """Return the end of what it has printed on both streams."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - last_bytes))
        return self._said.read().decode(errors="replace")

    def stop(self) -> None:
        """Kill it and what it has started, if it still runs, and forget what it printed."""
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._said.close()


def ask(
    code: str,
    *arguments: str,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run code as `Interpreter` does, wait for it, and return the dict ``answer`` that it fills.

    It may hold what JSON can. A second or two where torch is imported, up to ten with torch_npu;
    after ``timeout_s`` it is killed.

    Raises:
        InterpreterError: It raised, crashed, did not answer, or took too long.

    Example::

        >>> ask("answer['sum'] = int(sys.argv[1]) + 2", "3")
        {'sum': 5}
    """
    with Interpreter(_QUESTION, *arguments, code, environment=environment) as child:
        status = child.wait(timeout_s)
        _, mark, said = child.output().rpartition(_MARK)
    if status is None:
        raise InterpreterError(f"no answer within {timeout_s:g} s")
    if not mark:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise InterpreterError(f"it ended {how} without an answer")
    found: dict[str, Any] = json.loads(said.partition("\n")[0])
    if "failed" in found:  # The list begins with the error, and ends with its cause.
        first, last = found["failed"][0], found["failed"][-1]
        raise InterpreterError(first if first == last else f"{first} ({last})")
    answer: dict[str, Any] = found["answer"]
    return answer
