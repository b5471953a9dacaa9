"""Readers beside a writer: at any moment of a write the run can be read, and never shrinks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records import run_directory
from lightning_rlprof.testing import FakeClock
from tests.chaos.disks import STEPS, train
from tests.effort import DEEP

Run = Callable[..., tuple[int, str, str]]


class Watched:
    """Stands in for ``os``: takes a write in parts, and calls a function between them."""

    def __init__(self, look: Callable[[], object], parts: int) -> None:
        self._look, self._parts = look, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        size = max(len(data) // self._parts, 1)
        written = os.write(file, data[:size])
        self._look()
        return written


def test_a_run_can_be_loaded_at_any_moment_and_never_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look() -> None:
        if (tmp_path / "rank-00000.jsonl").read_bytes().count(b"\n"):
            spans = load(tmp_path)
            steps = spans.step[spans.rows(kind="step")].tolist()
            assert steps == [*range(1, len(steps) + 1)]
            seen.append(len(steps))

    monkeypatch.setattr(run_directory, "os", Watched(look, 40 if DEEP else 10))
    train(tmp_path, FakeClock())
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, STEPS)
    assert len(set(seen)) > STEPS // 2


COMMANDS = [
    ["summary", "RUN"],
    ["sql", "RUN", "select count(*), max(step) from spans"],
    ["report", "RUN", "-o", "OUT"],
    ["findings", "RUN", "--json"],
]


@pytest.mark.parametrize("words", COMMANDS if DEEP else COMMANDS[:2], ids=lambda words: words[0])
def test_a_command_at_any_moment_answers(
    words: list[str], rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or says in one line that no step has ended."""
    run, out = tmp_path / "run", tmp_path / "out.html"
    command = [{"RUN": str(run), "OUT": str(out)}.get(word, word) for word in words]
    codes: list[int] = []

    def look() -> None:
        if not (run / "rank-00000.jsonl").read_bytes().count(b"\n"):
            return
        out.unlink(missing_ok=True)
        code, _, said = rlprof(*command)
        codes.append(code)
        assert code == 0 or said.startswith("rlprof: error: "), said

    monkeypatch.setattr(run_directory, "os", Watched(look, 2))
    train(run, FakeClock(), STEPS if DEEP else 4)
    assert codes[-1] == 0
    assert len(codes) > 4
