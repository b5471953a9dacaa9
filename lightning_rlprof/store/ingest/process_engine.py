"""The engine of one machine: processes that take one file each, and may die of it."""

import contextlib
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from lightning_rlprof.store.ingest.make_cache import Outcome, ingest_one, lost

_PATIENCE_S = 5
# Not by multiprocessing: its processes run the program that called us once more. Ctrl-C is for the
# process that reads the other end of the pipe.
_START = """
import sys
pipe, *sys.path = sys.argv[1:]
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from lightning_rlprof.store.ingest.process_engine import _work
_work(int(pipe))
"""


class _Worker(NamedTuple):
    """A process, the end of its pipe that is ours, and which path it is at."""

    process: "subprocess.Popen[bytes]"
    pipe: "Connection[Any, Any]"
    at: int


def in_processes(paths: Sequence[str], jobs: int) -> Generator[tuple[int, Outcome], None, None]:
    """Yield what came of each path, with its number, as soon as it is known.

    A process that dies costs the path that it was at; another one takes its place. To leave early
    ends the processes; what they were at is not made.

    Args:
        paths: What `lightning_rlprof.store.ingest.make_cache.ingest_one` takes.
        jobs: Processes at once, each of one thread.
    """
    left = iter(enumerate(paths))
    workers: dict[Any, _Worker] = {}
    try:
        for at, path in left:
            workers |= _given(_started(), at, path)
            if len(workers) == jobs:
                break
        while workers:
            for pipe in wait(list(workers)):
                worker = workers.pop(pipe)
                outcome, alive = _answer(worker, paths[worker.at])
                following = next(left, None)
                if following is not None:
                    workers |= _given(worker if alive else _started(), *following)
                elif alive:
                    _dismiss(worker)
                yield worker.at, outcome
    finally:
        for worker in workers.values():
            _stop(worker)


def _started() -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    with theirs:  # theirs alone: so its end is the end of the pipe
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return _Worker(process, ours, -1)


def _given(worker: _Worker, at: int, path: str) -> dict[Any, _Worker]:
    with contextlib.suppress(OSError):  # it is dead already; the answer tells how
        worker.pipe.send(path)
    return {worker.pipe: worker._replace(at=at)}


def _answer(worker: _Worker, path: str) -> tuple[Outcome, bool]:
    """Return what a process says of its path, or how it died of it."""
    try:
        return worker.pipe.recv(), True
    except (EOFError, OSError):
        worker.pipe.close()
        return lost(path, f"its process died: {_end(worker.process.wait())}"), False


def _end(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    memory = ", probably because memory ran out" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{memory}"


def _dismiss(worker: _Worker) -> None:
    """Let an idle process end: it does at the end of its pipe."""
    worker.pipe.close()
    worker.process.wait()


def _stop(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.terminate()
    try:
        worker.process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()


def _work(handle: int) -> None:
    """Take paths until the pipe ends, also where the process at its other end was killed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # cleans up what is half made
    pipe: Connection[Any, Any] = Connection(handle)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(ingest_one(pipe.recv()))
