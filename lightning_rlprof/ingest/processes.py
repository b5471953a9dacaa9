"""The engine of one machine: processes that take one file each, and may die of it."""

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from lightning_rlprof.ingest.one import Outcome, ingest_one, lost

__all__ = ["in_processes"]

_PATIENCE_S = 5


class _Worker(NamedTuple):
    """A process, the end of its pipe that is ours, and which path it is at."""

    process: SpawnProcess
    pipe: "Connection[Any, Any]"
    at: int


def in_processes(paths: Sequence[str], jobs: int) -> Generator[tuple[int, Outcome], None, None]:
    """Yield what came of each path, with its number, as soon as it is known.

    A process that dies costs the path that it was at; another one takes its place. To leave early
    ends the processes; what they were at is not made.

    Args:
        paths: What `lightning_rlprof.ingest.one.ingest_one` takes.
        jobs: So many processes at once, each of one thread.
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
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # theirs alone: so its end is the end of the pipe
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
        worker.process.join()
        worker.pipe.close()
        return lost(path, f"its process ended: {_end(worker.process.exitcode)}"), False


def _end(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    memory = ", as the system does where memory is short" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{memory}"


def _dismiss(worker: _Worker) -> None:
    """Let an idle process end: it does at the end of its pipe."""
    worker.pipe.close()
    worker.process.join()


def _stop(worker: _Worker) -> None:
    worker.pipe.close()
    if worker.process.is_alive():
        worker.process.terminate()
    worker.process.join(_PATIENCE_S)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _work(pipe: "Connection[Any, Any]") -> None:
    """Take paths until the pipe ends; Ctrl-C is for the process that reads the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # cleans up what is half made
    while True:
        try:
            path = pipe.recv()
        except EOFError:
            return
        pipe.send(ingest_one(path))
