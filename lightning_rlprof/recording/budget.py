"""A rank's file within its limit: when it is full, the newest lines stay in memory till the end."""

from collections import deque

import msgspec

from lightning_rlprof.records.notes import Code, Remark
from lightning_rlprof.records.run_directory import (
    CountLine,
    ExpertsLine,
    MetricsLine,
    SampleLine,
)

_SHARE = 8  # of the total is kept for the newest lines, and for notes
_MOST_KEPT = 8 << 20  # bytes of the file; half of it in memory
_LAST_NOTES = 4_096  # bytes for how the run ended
_STEP = b'["span","step","step",'
_OF_STEPS: set[type] = {SampleLine, CountLine, ExpertsLine, MetricsLine}


class Budget:
    """What of a rank's lines is written; everything, without a limit.

    Attributes:
        is_full: Whether the newest lines stay in memory, as the file has all that it may.

    Args:
        total_bytes: What the file may take.
    """

    def __init__(self, total_bytes: int | None = None) -> None:
        self._total = total_bytes
        self._reserve = min((total_bytes or 0) // _SHARE, _MOST_KEPT)
        self.is_full = False
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._lost_lines = self._lost_steps = 0
        self._told_full = self._ends = False
        self._fills = True  # whether a part of what comes next is still written

    @property
    def is_limited(self) -> bool:
        """Whether the file must not grow for ever."""
        return self._total is not None

    def after_step(self, step: int) -> Remark | None:
        """Return what to note of a step that ended; None but for the first that did not fit.

        Args:
            step: The step that ended.
        """
        if not self.is_full or self._told_full:
            return None
        self._told_full = True
        text = (
            f"over budget: the file has all of max_file_bytes={self._total:,} but what is "
            f"kept for its end; after step {step}, only the newest lines stay in memory"
        )
        return Remark(Code.OVER_BUDGET, text, {"step": step})

    def to_write(self, data: bytes, used: int, *, always: bool) -> bytes:
        """Return what of encoded lines may be written; those of steps else stay in memory.

        What makes it full is not kept: its steps have to come again, without the rest.

        Args:
            data: Whole lines.
            used: Bytes of the file, and of what waits for it.
            always: Whether they are few, and not of steps: the reserve is for them, too.
        """
        room = (self._total or 0) - used
        if always:
            if len(data) <= room - (0 if self._ends else _LAST_NOTES):
                return data
            self._lose(data)
            return b""
        if not self.is_full:
            if len(data) <= room - self._reserve:
                return data
            self.is_full = True
            return b""
        head = b""
        if self._fills:  # many steps may come at once
            self._fills = False
            head = data[: data.rfind(b"\n", 0, max(room - self._reserve, 0)) + 1]
        self._keep(data[len(head) :])
        return head

    def _keep(self, data: bytes) -> None:
        most = self._reserve // 2
        if len(data) > most:
            start = data.find(b"\n", len(data) - most - 1) + 1
            self._lose(data[:start])
            data = data[start:]
        self._ring.append(data)
        self._ring_bytes += len(data)
        while self._ring_bytes > most:
            self._lose(self._oldest())

    def _oldest(self) -> bytes:
        data = self._ring.popleft()
        self._ring_bytes -= len(data)
        return data

    def _lose(self, data: bytes) -> None:
        self._lost_lines += data.count(b"\n")
        self._lost_steps += data.count(_STEP)

    @staticmethod
    def is_of_steps(line: msgspec.Struct) -> bool:
        """Return whether a line that isn't a span comes with every step."""
        return type(line) in _OF_STEPS

    def newest(self, used: int, *, last: bool) -> bytes:
        """Return the newest lines that stayed in memory, to be written; the others are lost.

        Args:
            used: Bytes of the file, and of what waits for it.
            last: Whether no more will come. Else they take half of the room at most.
        """
        self._ends = self._ends or last
        room = (self._total or 0) - used - _LAST_NOTES
        room = room if last else room // 2
        while self._ring_bytes > max(room, 0):
            self._lose(self._oldest())
        data = b"".join(self._ring)
        self._ring.clear()
        self._ring_bytes = 0
        return data

    def summary(self) -> Remark | None:
        """Return how much was not written; None if everything was."""
        if not self._lost_lines:
            return None
        text = (
            f"over budget: {self._lost_lines:,} lines, {self._lost_steps:,} steps among them, "
            f"were not kept: raise max_file_bytes={self._total:,}"
        )
        facts = {"lines": self._lost_lines, "steps": self._lost_steps}
        return Remark(Code.BUDGET_SUMMARY, text, facts)
