"""Ended spans and notes of one rank on their way to its file."""

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.model import Header, Number, as_number
from lightning_rlprof.nodes import Node, number_of, rows
from lightning_rlprof.recorders.base import Late
from lightning_rlprof.tracefile import TraceWriter

__all__ = ["Buffer", "Totals", "open_writer"]

log = logging.getLogger(__name__)

# A stage of minutes is written when it ends, before its step does.
_STAGE_NS = 1_000_000_000
_TOTALLED = ("stage", "step")

Totals = dict[str, tuple[int, dict[str, Number]]]


def open_writer(run: Path, header: Header) -> TraceWriter:
    """Open the file of a rank.

    Raises:
        ConfigError: The run directory cannot be written.
    """
    try:
        return TraceWriter(run, header)
    except OSError as error:
        raise ConfigError(
            f"integrated.profile_save_path: {run} cannot be written ({error.strerror}); "
            "choose a directory that this process may write"
        ) from error


class Buffer:
    """Collect lines in memory, and append them to the file when a step or a long stage ends.

    Any thread may add spans with `append`, and flush.

    Args:
        writer: The file; a disk that takes nothing costs lines, never a run.
        clock: Monotonic nanoseconds.
    """

    def __init__(self, writer: TraceWriter, clock: Callable[[], int]) -> None:
        self._writer, self._clock = writer, clock
        self._spans: list[Node] = []
        self.append = self._spans.append
        self._others: list[tuple[Any, ...]] = []
        self.flush_at_ns = clock() + _STAGE_NS
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._lost = 0
        self._flushed: list[Node] = []  # of the step that goes on
        self._last: list[Node] = []
        self._late: list[tuple[Node, Late]] = []

    def end_step(self, now: int) -> None:
        """Write everything, and close the account of a step."""
        if self._late:
            self._ask_late()
        self._flush(now)
        self._last, self._flushed = self._flushed, []

    def flush(self) -> None:
        """Append everything to the file."""
        self._flush(self._clock())

    def add(self, line: tuple[Any, ...]) -> None:
        """Add a line that is no span."""
        self._others.append(line)

    def later(self, node: Node, asks: Iterable[Late]) -> None:
        """Write a span's further numbers once they are known: after its step, or at the end."""
        self._late += [(node, ask) for ask in asks]

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self._ask_late()
            self.flush()
        finally:
            self._writer.close()

    def totals(self, thread: int) -> Totals:
        """Return the last step's stages on one thread: nanoseconds (inclusive) and counters."""
        totals: Totals = {}
        for _, name, kind, _, start, end, ident, _, _, counters in rows(self._last):
            if kind in _TOTALLED and ident == thread:
                total, numbers = totals.get(name, (0, {}))
                for key, value in (counters or {}).items():
                    numbers[key] = numbers.get(key, 0) + (as_number(value) or 0)
                totals[name] = (total + end - start, numbers)
        return totals

    def _flush(self, now: int) -> None:
        with self._lock:
            self.flush_at_ns = now + _STAGE_NS
            spans, others = self._spans[:], self._others[:]
            del self._spans[: len(spans)], self._others[: len(others)]
            self._flushed += spans
            new = {node[4] for node in spans} - self._threads
            plain = not (new or others or self._lost)
            lines: list[Any] = rows(spans)
            if not plain:
                lines = self._with_news(new, lines, others)
            if lines:
                self._write(lines, len(spans) + len(others), new)

    def _ask_late(self) -> None:
        asked, self._late = self._late, []
        for node, ask in asked:
            try:
                numbers = ask()
            except Exception as error:
                log.warning("numbers of %r are lost: %s", node[2], error)
                continue
            if numbers is None:
                self._late.append((node, ask))
            elif numbers:
                self.add(("count", number_of(node), dict(numbers)))

    def _write(self, lines: list[Any], count: int, new: set[int]) -> None:
        try:
            self._writer.write(lines)
        except OSError as error:
            if not self._lost:
                log.warning("%s cannot be written, spans are lost: %s", self._writer.path, error)
            self._lost += count
        else:
            self._lost = 0
            self._threads |= new

    def _with_news(self, new: set[int], spans: list[Any], others: list[Any]) -> list[Any]:
        """Put names of new threads and the count of lost lines around the spans."""
        alive = {thread.ident: thread.name for thread in threading.enumerate()}
        lines: list[Any] = [("thread", i, alive.get(i, f"thread {i}")) for i in sorted(new)]
        if self._lost:
            text = f"{self._lost} lines could not be written and are lost"
            lines.append(("note", self._clock(), "error", text))
        return [*lines, *spans, *others]
