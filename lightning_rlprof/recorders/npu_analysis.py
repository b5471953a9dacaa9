"""Analyse Ascend captures once training is over, in a process that can be stopped."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["analyse_captures"]

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "lightning_rlprof", "analyse")


def analyse_captures(
    captures: Sequence[Path],
    timeout_s: float,
    note: Callable[[str, str], None],
    command: Sequence[str] = _COMMAND,
) -> None:
    """Run ``rlprof analyse`` on capture directories and wait; what goes wrong becomes a note.

    Not in this process: torch_npu's analysis forks, changes how multiprocessing starts processes,
    may wait for ever, and takes about a minute per captured step. What it prints is logged.

    Args:
        captures: Directories ``…_ascend_pt``.
        timeout_s: After this it is stopped with all that it started.
        note: Takes a level and a text.
        command: The command line before the directories.
    """
    note("info", f"analysing {len(captures)} captures, for at most {timeout_s:g} s")
    try:
        status, last = _run([*command, *map(str, captures)], timeout_s)
    except OSError as error:
        note("warning", f"the analysis could not be started ({error}); {_LATER}")
        return
    if status == -signal.SIGKILL:
        note("warning", f"the analysis was stopped, its limit is {timeout_s:g} s; {_LATER}")
    elif status:
        note("warning", f"the analysis failed with status {status} ({last}); {_LATER}")


_LATER = "rlprof analyse does it at any later time"


def _run(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Log what a command says as it comes; return its status and its last words."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(timeout_s, _kill, [process])
    timer.daemon = True
    timer.start()
    said = deque(["it said nothing"], maxlen=1)
    assert process.stdout is not None
    try:
        with process.stdout as output:
            for line in filter(str.strip, output):
                log.info("analyse: %s", line.rstrip())
                said.append(line.strip())
        return process.wait(), said[0]
    finally:  # Ctrl-C, too
        timer.cancel()
        if process.poll() is None:
            _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    with suppress(OSError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
