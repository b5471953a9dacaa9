"""What a program did that no step was found in: how often it trained, and where its time went.

``rlprof run`` says it if no training was recorded.
"""

import atexit
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

from lightning_rlprof.records.records import SIGNS_VARIABLE

_FIRST_S, _LAST_S, _GROWTH = 0.05, 1.0, 1.01  # Seconds between two samples, and their growth.
_MAX_PLACES_TOLD = 3
_MAX_NAME = 80  # Characters.
_PASTE = (
    "Two lines around each turn of its loop show its steps:",
    "  from lightning_rlprof import step",
    "  with step():",
)


class Unrecorded:
    """Count what trains, and sample the main thread, until a step is recorded.

    Attributes:
        saw: Count something; tell of it now and then, as some processes are killed.
        end: Forget all: a step was recorded.

    Args:
        is_others: Whether a session that records, if there is one, is of another door.
    """

    def __init__(self, is_others: Callable[[], bool]) -> None:
        self.counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._pid, self._ended = os.getpid(), threading.Event()
        self._main = threading.main_thread().ident
        self._file, self._is_others = "", is_others
        # After a step they are a builtin, which costs the steps that follow no Python frame.
        self.saw: Callable[[str], object] = self._saw
        self.end: Callable[[], object] = self._end

    def begin(self) -> None:
        """Sample from now on, if ``rlprof run`` may ask."""
        if folder := os.environ.get(SIGNS_VARIABLE, ""):
            self._file = os.path.join(folder, f"seen-{self._pid}")
            threading.Thread(target=self._sample, name="rlprof-unrecorded", daemon=True).start()
            atexit.register(self.tell)

    def _saw(self, what: str) -> None:
        self.counts[what] += 1
        if (self.counts[what] & (self.counts[what] - 1)) == 0:
            self.tell()

    def _end(self) -> None:
        self._ended.set()
        self.saw = self.end = bool
        with suppress(OSError):
            os.remove(self._file)

    def tell(self) -> None:
        """Write what was seen, unless a step was recorded."""
        if self._file and not self._ended.is_set() and os.getpid() == self._pid:
            with suppress(OSError):  # The folder is on another host, or the command has ended.
                Path(self._file).write_text(json.dumps(self._said()), encoding="utf-8")

    def _said(self) -> dict[str, Any]:
        total = sum(self._seconds.values()) or 1.0
        longest = sorted(self._seconds.items(), key=lambda each: -each[1])[:_MAX_PLACES_TOLD]
        places = [(place, seconds / total) for place, seconds in longest]
        program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
        return {"program": program, "counts": dict(self.counts), "places": places}

    def _sample(self) -> None:
        wait_s, before = _FIRST_S, perf_counter()
        while not self._ended.wait(wait_s):
            module = sys.modules.get("lightning_rlprof.recording.session")
            is_recording = getattr(module, "is_recording", bool)  # It may be half imported.
            if is_recording() and self._is_others():
                self.end()
            now = perf_counter()
            if place := _place(sys._current_frames().get(self._main or 0)):
                self._seconds[place] = self._seconds.get(place, 0.0) + now - before
            wait_s, before = min(wait_s * _GROWTH, _LAST_S), now


def sentence(said: Mapping[str, Any]) -> str:
    """Say how often a program trained without a step.

    Args:
        said: What `Unrecorded.tell` wrote; empty if no process did.
    """
    counts = [f"{number:,} {name}" for name, number in said.get("counts", {}).items()]
    if not counts:
        return "no training reached its first step"
    return f"no step was found in {said['program']}, which made {' and '.join(counts)}"


def advice(said: Mapping[str, Any]) -> list[str]:
    """Return lines: what shows the steps of a program, and where its main thread was."""
    places = [f"{name} {share:.0%}" for name, share in said["places"]]
    where = [f"Its main thread was in {', '.join(places)}."] if places else []
    return [*_PASTE, *where]


def _place(frame: FrameType | None) -> str:
    """Return the innermost function of the program's own code, with its file."""
    from lightning_rlprof.records.hang_reports import own_frame

    if (frame := own_frame(frame)) is None:
        return ""
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    return f"{name} ({os.path.basename(frame.f_code.co_filename)})"[:_MAX_NAME]
