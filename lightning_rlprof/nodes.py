"""Open and ended spans as they live in memory: lists, and which one is open in which context."""

import itertools
from _thread import get_ident
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from lightning_rlprof.model import Kind, Number

__all__ = ["Named", "Node", "ended", "innermost", "number_of", "opened", "rows"]

# An open or ended span: [end_ns, parent, marker, step, thread, id, counters, start_ns], and behind
# it the token of the recorders where they mirror it. A list costs less than an object; ending a
# span inside it costs less than changing the context variable twice.
Node = list[Any]

opened: ContextVar[Node | None] = ContextVar("rlprof_open", default=None)
"""The span that was opened last, ended or not: look upwards for one that is still open."""

# Never restarted: a parent left open by an earlier session is unknown in a later run, not wrong.
_next_id = itertools.count(1).__next__


class Named(Protocol):
    """What a span is an instance of."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def kind(self) -> Kind:
        """Its kind."""


def innermost() -> Node | None:
    """Return the innermost open span of this thread or task."""
    node = opened.get()
    while node is not None and node[0] is not None:
        node = node[1]
    return node


def ended(
    marker: Named, step: int, start_ns: int, end_ns: int, counters: Mapping[str, Number] | None
) -> Node:
    """Return a span that is over, inside the one that is open now."""
    return [end_ns, innermost(), marker, step, get_ident(), 0, counters, start_ns]


def number_of(node: Node) -> int:
    """Return the number of a span, which it gets when it is first asked for."""
    number: int = node[5] or _next_id()
    node[5] = number
    return number


def rows(nodes: Iterable[Node]) -> list[tuple[Any, ...]]:
    """Return ended spans as the lines that the trace file holds.

    A span is numbered when its line is made, or that of a span inside it, which ends earlier.
    """
    lines = []
    for node in nodes:
        end, parent, marker, step, thread, number, counters, start = node[:8]
        if not number:
            number = node[5] = _next_id()
        above = None if parent is None else number_of(parent)
        kind = marker.kind
        lines.append(("span", marker.name, kind, step, start, end, thread, number, above, counters))
    return lines
