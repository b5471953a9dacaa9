"""What the threads and the child processes of this process are doing."""

import linecache
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType

from lightning_rlprof.records.hang_reports import ChildProcess, Frame, ThreadStack
from lightning_rlprof.system.files import write_inside
from lightning_rlprof.system.process import child_states

_MOST_THREADS, _MOST_FRAMES, _MOST_CHILDREN = 100, 64, 64
_LONGEST_TEXT = 200
_LOOK_S = 0.5
_DEBUGGERS = {"pdb", "bdb", "pydevd", "debugpy", "ipdb"}
_NATIVE_TIMEOUT_S = 20
_MOST_NATIVE = 1 << 20


def thread_stacks(training: int, end: threading.Event) -> tuple[ThreadStack, ...]:
    """Return the stack of each thread but the calling one, that of the training first.

    It takes half a second, in which the CPU time of the training thread is measured.
    """
    names = {each.ident: each.name for each in threading.enumerate()}
    own = threading.get_ident()
    found = [
        ThreadStack(names.get(ident, "?"), _frames(frame), ident == training)
        for ident, frame in sys._current_frames().items()
        if ident != own or ident == training
    ]
    found.sort(key=lambda each: not each.is_training)
    if not found or not found[0].is_training:
        return tuple(found[:_MOST_THREADS])
    return (replace(found[0], cpu_share=_cpu_share(training, end)), *found[1:_MOST_THREADS])


def _cpu_share(thread: int, end: threading.Event) -> float | None:
    """Return how much of a CPU a thread uses within half a second, or until ``end`` is set.

    Its stack does not tell: Python hands over between threads at the same line of a loop each time.
    """
    try:
        clock = time.pthread_getcpuclockid(thread)
        start, used = time.perf_counter(), time.clock_gettime(clock)
        end.wait(_LOOK_S)
        used, passed = time.clock_gettime(clock) - used, time.perf_counter() - start
    except (AttributeError, OSError):  # not Linux, or the thread has ended
        return None
    return round(min(used / max(passed, 1e-9), 1.0), 3)


def _frames(frame: FrameType) -> tuple[Frame, ...]:
    found = []
    for code, line in _calls(frame):
        text = linecache.getline(code.co_filename, line).strip()[:_LONGEST_TEXT]
        name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
        found.append(Frame(code.co_filename, line, name, text))
    return tuple(found)


def _calls(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return code and line of each frame: the frames themselves keep tensors alive."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        line: int | None = frame.f_lineno
        found.append((frame.f_code, line or frame.f_code.co_firstlineno))
        frame = frame.f_back
    return found


def in_debugger(thread: int) -> bool:
    """Return whether a thread stands in a debugger."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if isinstance(module, str) and module.split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def child_processes() -> tuple[ChildProcess, ...]:
    """Return the processes that this one started, with their states; none off Linux."""
    found = child_states(_MOST_CHILDREN)
    return tuple(ChildProcess(pid, name, state) for pid, name, state in found)


def write_native_stacks(run: Path, path: Path, mode: int = 0o600) -> None:
    """Write the stacks of all threads with native frames to a run, if py-spy is installed."""
    program = shutil.which("py-spy")
    if program is None:
        return
    for options in (["--native"], ["--nonblocking"]):  # the second needs fewer permissions
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [program, "dump", *options, "--pid", str(os.getpid())],
                capture_output=True,
                timeout=_NATIVE_TIMEOUT_S,
                check=False,
            )
            if done.returncode == 0:
                # The first line is the command line, which may hold secrets.
                stacks = done.stdout.partition(b"\n")[2][:_MOST_NATIVE]
                write_inside(run, path, stacks, mode)
                return
