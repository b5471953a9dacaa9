"""Freed memory goes back to the machine."""

import ctypes
from pathlib import Path

import pytest

from lightning_rlprof.heap import give_back


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096


def test_what_was_freed_before_something_that_stays_goes_back() -> None:
    held = [bytes(1_000) for _ in range(50_000)]
    behind = [bytes(1_000) for _ in range(100)]
    before = _resident()
    held.clear()
    give_back()
    assert before - _resident() > 40_000_000
    assert len(behind) == 100


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    give_back()
