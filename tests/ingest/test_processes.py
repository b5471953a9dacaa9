"""How processes end: told in words, and never left behind."""

import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from lightning_rlprof.ingest import processes


@pytest.mark.parametrize(
    ("code", "said"),
    [(3, "exit status 3"), (None, "exit status None"), (-signal.SIGSEGV, "killed by SIGSEGV")],
)
def test_an_end_is_told_in_words(code: int | None, said: str) -> None:
    assert processes._end(code) == said


def test_a_process_that_does_not_hear_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=deaf, args=(theirs,), daemon=True)
    process.start()
    assert ours.recv() == "deaf"
    processes._stop(processes._Worker(process, ours, 0))
    assert process.exitcode == -signal.SIGKILL


def deaf(pipe: "Connection[Any, Any]") -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send("deaf")
    signal.pause()
