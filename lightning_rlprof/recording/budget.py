"""A rank's file within its budget: fewer kinds of lines per step, and at last only the newest ones.

Over `budget.step_bytes`, regions are not written from the next step on; then samples; then
counters. Steps and stages always are. Over `budget.total_bytes`, the newest lines stay in memory.
"""

from collections import deque
from copy import copy

import msgspec

from lightning_rlprof.recording.open_spans import Span
from lightning_rlprof.records.notes import Code, Fact, Remark
from lightning_rlprof.records.records import VALIDATIONS
from lightning_rlprof.records.run_directory import (
    CountLine,
    ExpertsLine,
    MetricsLine,
    SampleLine,
)

_PARTS = ("regions", "marks and names of samples", "counters of stages and tokens of experts")
_OWN = "rlprof "  # regions that show when a capture was opened or closed
_PATIENCE = 100  # steps of at most half of what is allowed, before a part is written again
_SHARE = 8  # of the total is kept for the newest lines, and for notes
_MOST_KEPT = 8 << 20  # bytes of the file; half of it in memory
_LAST_NOTES = 4_096  # bytes for how the run ended
_STEP = b'["span","step","step",'
_SAMPLES: set[type] = {SampleLine}
_NUMBERS: set[type] = {CountLine, ExpertsLine}
_OF_STEPS: set[type] = {*_SAMPLES, *_NUMBERS, MetricsLine}


class Budget:
    """What of a rank's lines is written; everything, without limits.

    Attributes:
        is_full: Whether the newest lines stay in memory, as the file has all that it may.
        rung: How many of the parts of a step are not written: regions, samples, counters.
        steps: How many have ended since `after_step`.

    Args:
        step_bytes: What the lines of a step may take.
        total_bytes: What the file may take.
    """

    def __init__(self, step_bytes: int | None = None, total_bytes: int | None = None) -> None:
        self._step_bytes, self._total = step_bytes, total_bytes
        self._reserve = min((total_bytes or 0) // _SHARE, _MOST_KEPT)
        self.is_full, self.rung, self.steps = False, 0, 0
        self._encoded = 0  # bytes, at the last look
        self._calm, self._patience, self._climbed = 0, _PATIENCE, False
        self._omitted = [0] * len(_PARTS)  # lines
        self._bare_stages = 0  # without their counters
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._lost_lines = self._lost_steps = 0
        self._told_full = self._ends = False
        self._fills = True  # whether a part of what comes next is still written

    @property
    def is_limited(self) -> bool:
        """Whether the file must not grow for ever."""
        return self._total is not None

    @property
    def was_exceeded(self) -> bool:
        """Whether something was not written, or is only in memory."""
        return self.is_full or self._bare_stages > 0 or any(self._omitted)

    # ---- bytes per step

    def kept(self, spans: list[Span]) -> list[Span]:
        """Return the spans that are written: at once the same list, unless parts are left out."""
        if not self.rung:
            return spans
        return [part for span in spans if (part := self._part(span)) is not None]

    def _part(self, span: Span) -> Span | None:
        kind = span.kind
        if kind == "region":
            name = str(span.name)  # without these, other spans are misread
            if name.startswith(_OWN) or name in VALIDATIONS:
                return span
            self._omitted[0] += 1
            return None
        if kind == "mark" and self.rung > 1:
            self._omitted[1] += 1
            return None
        if kind == "stage" and self.rung > 2 and span.counters:
            self._bare_stages += 1
            bare = copy(span)  # The totals of the step need the counters.
            bare.counters = None
            return bare
        return span

    def kept_others(self, lines: list[msgspec.Struct]) -> list[msgspec.Struct]:
        """Return the lines that are written of those that aren't spans."""
        omitted = (set(), set(), _SAMPLES, _SAMPLES | _NUMBERS)[self.rung]
        for line in lines:
            if type(line) in omitted:
                self._omitted[1 if type(line) in _SAMPLES else 2] += 1
        return [line for line in lines if type(line) not in omitted] if omitted else lines

    def after_step(self, encoded: int, step: int) -> Remark | None:
        """Look at what the last steps wrote; return what to note of a change.

        Args:
            encoded: Bytes of lines so far, those in memory included.
            step: The step that ended.
        """
        if self.is_full and not self._told_full:
            self._told_full = True
            text = (
                f"over budget: the file has all of budget.total_bytes={self._total:,} but what is "
                f"kept for its end; after step {step}, only the newest lines stay in memory"
            )
            return Remark(Code.OVER_BUDGET, text, {"step": step})
        steps, self.steps = self.steps, 0
        wrote, self._encoded = encoded - self._encoded, encoded
        allowed = (self._step_bytes or 0) * steps
        if self._step_bytes is None or not steps:
            return None
        if wrote > allowed:
            return self._go_down(wrote // steps, step)
        if not self.rung:
            return None
        self._calm = self._calm + steps if 2 * wrote <= allowed else 0
        return self._go_up(step) if self._calm >= self._patience else None

    def _go_down(self, each: int, step: int) -> Remark | None:
        self._calm = 0
        if self.rung == len(_PARTS):
            return None
        part = _PARTS[self.rung]
        self.rung += 1
        if self._climbed:  # each attempt takes twice as long as the one before
            self._patience, self._climbed = 2 * self._patience, False
        text = (
            f"over budget: a step wrote {each:,} bytes up to step {step}, more than "
            f"budget.step_bytes={self._step_bytes:,}: {part} are not written from there on"
        )
        return Remark(Code.OVER_BUDGET, text, {"step": step})

    def _go_up(self, step: int) -> Remark:
        self.rung -= 1
        calm, self._calm, self._climbed = self._calm, 0, True
        text = (
            f"within budget: {calm} steps up to step {step} took at most half of "
            f"budget.step_bytes={self._step_bytes:,}: {_PARTS[self.rung]} are written again"
        )
        return Remark(Code.WITHIN_BUDGET, text, {"step": step})

    # ---- bytes in all

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
            self._encoded += len(data)
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
        regions, samples, numbers = self._omitted
        texts = []
        if self._bare_stages or any(self._omitted):
            texts.append(
                f"{regions:,} regions, {samples:,} marks and names of samples, and {numbers:,} "
                f"lines of counters were left out; {self._bare_stages:,} stages lack their "
                f"counters: raise budget.step_bytes={self._step_bytes:,}"
            )
        if self._lost_lines:
            texts.append(
                f"{self._lost_lines:,} lines, {self._lost_steps:,} steps among them, were not "
                f"kept: raise budget.total_bytes={self._total:,}"
            )
        if not texts:
            return None
        facts: dict[str, Fact] = {
            "regions": regions,
            "marks": samples,
            "counters": numbers,
            "bare_stages": self._bare_stages,
            "lines": self._lost_lines,
            "steps": self._lost_steps,
        }
        return Remark(Code.BUDGET_SUMMARY, "over budget: " + "; ".join(texts), facts)
