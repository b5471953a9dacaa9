"""Ended spans and notes of one rank on their way to its file."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from lightning_rlprof.marking import row
from lightning_rlprof.model import Number, as_number
from lightning_rlprof.tracefile import TraceWriter

__all__ = ["Buffer", "Totals"]

log = logging.getLogger(__name__)

# A write costs some 60 µs with cold caches. Steps of RL take seconds and are written one by one;
# only steps shorter than this share a write, and a kill costs them this much instead of one step.
_STEP_NS = 50_000_000
# A stage of minutes is written when it ends, before its step does.
_STAGE_NS = 1_000_000_000
_TOTALLED = ("stage", "step")

Totals = dict[str, tuple[int, dict[str, Number]]]


class Buffer:
    """Collect lines in memory, and append them to the file when a step or a long stage ends.

    Any thread may add lines, with `append`, and flush.

    Args:
        writer: The file; a disk that takes nothing costs lines, never a run.
        clock: Monotonic nanoseconds.
    """

    def __init__(self, writer: TraceWriter, clock: Callable[[], int]) -> None:
        self._writer, self._clock = writer, clock
        self._rows: list[Any] = []
        self.append = self._rows.append
        self.flush_at_ns = clock() + _STAGE_NS
        self._step_at_ns = 0
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._lost = 0
        self._flushed: list[Any] = []  # of the step that goes on
        self._counted = 0  # rows in front that belong to steps before it
        self._last: list[Any] = []

    def end_step(self, now: int) -> None:
        """Close the account of a step, and write if the last write is not just over."""
        self._last = self._flushed + self._rows[self._counted :]
        self._flushed, self._counted = [], len(self._rows)
        if now >= self._step_at_ns:
            self.flush()

    def flush(self) -> None:
        """Append everything to the file."""
        with self._lock:
            rows = self._rows[:]
            if rows:
                self._flushed += rows[self._counted :]
                self._write([row(one) if type(one) is list else one for one in rows])
                del self._rows[: len(rows)]
                self._counted = 0
            now = self._clock()
            self.flush_at_ns, self._step_at_ns = now + _STAGE_NS, now + _STEP_NS

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            self._writer.close()

    def totals(self, thread: int) -> Totals:
        """Return the last step's stages on one thread: nanoseconds (inclusive) and counters."""
        totals: Totals = {}
        for one in self._last:
            line = row(one) if type(one) is list else one
            if line[0] == "span" and line[2] in _TOTALLED and line[6] == thread:
                total, numbers = totals.get(line[1], (0, {}))
                for name, value in (line[9] or {}).items():
                    numbers[name] = numbers.get(name, 0) + (as_number(value) or 0)
                totals[line[1]] = (total + line[5] - line[4], numbers)
        return totals

    def _write(self, lines: list[tuple[Any, ...]]) -> None:
        named = {line[6] for line in lines if line[0] == "span"} - self._threads
        before = _thread_lines(named)
        if self._lost:
            text = f"{self._lost} lines could not be written and are lost"
            before.insert(0, ("note", self._clock(), "error", text))
        try:
            self._writer.write(before + lines)
        except OSError as error:
            if not self._lost:
                log.warning("%s cannot be written, spans are lost: %s", self._writer.path, error)
            self._lost += len(lines)
        else:
            self._lost = 0
            self._threads |= named


def _thread_lines(idents: set[int]) -> list[tuple[Any, ...]]:
    if not idents:
        return []
    alive = {thread.ident: thread.name for thread in threading.enumerate()}
    return [("thread", ident, alive.get(ident, f"thread {ident}")) for ident in sorted(idents)]
