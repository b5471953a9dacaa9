"""Freed memory goes back to the machine, or stays for what comes next."""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.system.memory_trim import give_back, keep_freed


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


FAULTS = """
import resource, sys
from lightning_rlprof.system.memory_trim import keep_freed
if sys.argv[1] == "keep":
    keep_freed()
several = [bytearray(1 << 22) for _ in range(4)]  # what is freed last is not all that there is
del several
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    bytearray(1 << 23).replace(b"1", b"2")
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_what_is_kept_is_not_asked_of_the_machine_again() -> None:
    pages = 50 * (1 << 23) // resource.getpagesize()
    assert _faults("keep") < pages / 10 < _faults("give")


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    give_back()
    keep_freed()
