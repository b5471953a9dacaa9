"""Trainings on a fake clock whose disk fails: at each system call, for a while or for good."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.records import run_directory
from lightning_rlprof.records.run_directory import read_trace
from lightning_rlprof.testing import FakeClock, make_header
from tests.chaos.outcomes import Outcome

STEPS = 12
STEP_NS = 40_000_000
"""Every third step is written when it ends."""

Fault = Literal["once", "for good", "half, once", "half, then for good"]
FAULTS: tuple[Fault, ...] = ("once", "for good", "half, once", "half, then for good")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)


class Disk:
    """Stands in for ``os`` in the module that writes rank files, and counts what it is asked for.

    Args:
        calls: What is counted, and may fail: ``write``, ``fstat``, and so on.
        call: Which one of these fails first.
        fault: How.
        error: With which number.
        on_write: Called before each write.
    """

    def __init__(
        self,
        calls: tuple[str, ...] = ("write",),
        call: int = -1,
        fault: Fault = "once",
        error: int = errno.ENOSPC,
        on_write: Callable[[], object] = bool,
    ) -> None:
        self.count, self._calls = 0, calls
        self._call, self._fault, self._error, self._on_write = call, fault, error, on_write

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in self._calls else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "write":
                self._on_write()
            number, self.count = self.count, self.count + 1
            if number == self._call and self._fault.startswith("half") and name == "write":
                file, data = arguments
                return real(file, data[: len(data) // 2])
            if number == self._call or (self._fault.endswith("good") and number > self._call >= 0):
                raise OSError(self._error, os.strerror(self._error))
            return real(*arguments)

        return call


@contextmanager
def on_disk(disk: Disk) -> Iterator[None]:
    """Let rank files be written to a disk."""
    with patch.object(run_directory, "os", disk):
        yield


def train(folder: Path, clock: FakeClock, steps: int = STEPS) -> Session:
    """Take steps of 40 ms on the fake clock, and close the session."""
    session = Session(ProfilerConfig(), folder, make_header(), (), clock)
    for step in range(1, steps + 1):
        session.begin_step(step)
        with stage("actor_update", tokens=8):
            clock.advance(STEP_NS)
        session.end_step()
    session.close()
    return session


def count_calls(calls: tuple[str, ...] = ("write",)) -> int:
    """Return how many system calls a training on a good disk takes."""
    disk = Disk(calls)
    with tempfile.TemporaryDirectory() as folder, on_disk(disk):
        train(Path(folder), FakeClock())
    return disk.count


def trained_on(disk: Disk, *, may_lose: bool, says: bool = True) -> Outcome:
    """Train on a disk, and read what it has taken.

    Args:
        disk: The one that fails.
        may_lose: Whether what the disk refuses at the end is lost.
        says: Whether the run has to say so: it cannot if the file cannot even be opened again.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with on_disk(disk):
                train(folder, FakeClock())
        except ConfigError:  # before the first step
            return Outcome()
        except Exception as error:
            if session := current():
                session.discard()
            return Outcome(f"the training ended: {error!r}", STEPS)
        trace = read_trace(folder / "rank-00000.jsonl")
        steps = [span.step for span in trace.spans if span.kind == "step"]
        lost = STEPS - len(steps)
        broken = []
        if steps != [*range(1, len(steps) + 1)]:
            broken.append(f"not all steps from the first one on: {steps}")
        if trace.lost_lines > may_lose:
            broken.append(f"{trace.lost_lines} torn lines")
        if lost and not may_lose:
            broken.append(f"{lost} steps are lost")
        if lost and says and not any("lines were lost" in note.text for note in trace.notes):
            broken.append("the run does not say what it lost")
        return Outcome("; ".join(broken), STEPS, lost, lost * STEP_NS / 1e6)
