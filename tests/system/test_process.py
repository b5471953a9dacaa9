"""Freed memory goes back to the machine, or stays for what comes next."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.system import process
from lightning_rlprof.system.process import check_records, cores, give_back, keep_freed


def _asked(script: str, *words: str) -> int:
    """Return the number that a script prints, in a process of its own: its heap has no holes."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


FREED = """
import os
from pathlib import Path
from lightning_rlprof.system.process import give_back

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

held = [bytes(1_000) for _ in range(50_000)]
behind = [bytes(1_000) for _ in range(100)]
before = resident()
held.clear()
give_back()
print(before - resident())
assert len(behind) == 100
"""


def test_what_was_freed_before_something_that_stays_goes_back() -> None:
    assert _asked(FREED) > 40_000_000


FAULTS = """
import ctypes, resource, sys
from lightning_rlprof.system.process import keep_freed
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would be one fault
if sys.argv[1] == "keep":
    keep_freed()
several = [bytearray(1 << 22) for _ in range(4)]  # what is freed last is not all that there is
del several
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    bytearray(1 << 23).replace(b"1", b"2")
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_what_is_kept_is_not_asked_of_the_machine_again() -> None:
    pages = 50 * (1 << 23) // resource.getpagesize()
    assert _asked(FAULTS, "keep") < pages / 10 < _asked(FAULTS, "give")


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    give_back()
    keep_freed()


def test_a_system_whose_c_library_has_no_name_keeps_and_gives_back_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(name: str | None) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")  # As on Windows.

    monkeypatch.setattr(ctypes, "CDLL", refused)
    give_back()
    keep_freed()


def test_cores_are_those_of_the_process_or_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # As on macOS and Windows.
    assert cores() == 7


def test_windows_is_refused_before_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    check_records("recording")
    monkeypatch.setattr(process, "IS_POSIX", False)
    with pytest.raises(ConfigError, match="recording needs Linux, macOS or WSL"):
        check_records("recording")
