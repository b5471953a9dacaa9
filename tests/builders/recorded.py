"""Spans as a session has them in memory."""

from typing import Any

from lightning_rlprof.recording.open_spans import Span
from lightning_rlprof.records.records import Kind


def recorded(
    name: str,
    kind: Kind,
    step: int,
    start_ns: int,
    end_ns: int | None,
    thread: int,
    number: int,
    parent: int | None = None,
    counters: dict[str, Any] | None = None,
) -> Span:
    """Return a span; the arguments are those of its line in the file."""
    span = Span()
    span.name, span.kind, span.step, span.start_ns = name, kind, step, start_ns
    span.thread, span.id, span.parent, span.counters = thread, number, parent, counters
    span.around = span.marker = span.token = None
    span.end_ns = end_ns
    return span
