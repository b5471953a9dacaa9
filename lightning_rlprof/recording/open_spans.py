"""Open and made spans as they live in memory: the lines of the file, and which is open where."""

import itertools
from _thread import get_ident
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from math import inf
from typing import Any, Protocol

from lightning_rlprof.records.histograms import bin_name, bin_of
from lightning_rlprof.records.records import Kind, Number

# A span is the list that the file will hold, so that no code of rlprof runs per span when it is
# written: ["span", name, kind, step, start_ns, end_ns, thread, id, parent, counters]. Its end is
# None while it is open.
Line = list[Any]
"""A span as its line in the file, which it becomes once it has an end."""

Open = tuple[Line, Any, Any, Any]
"""A span and what the file does not hold of it: the `Open` around it or None, its marker, and the
token of the recorders where they mirror it."""

opened: ContextVar[Open | None] = ContextVar("rlprof_open", default=None)
"""The span that was opened last, made or not: look upwards for one that is still open. To end it
there costs less than to change the variable again."""

numbers = itertools.count(1)
"""Numbers of spans, by ``next``. Never restarted: a parent that an earlier session left open is
unknown in a later run, not wrong."""


# Spans whose surroundings have ended first, as a generator's that is suspended inside of one: they
# are around nothing that follows, and end when they are left.
_left: list[Open] = []
_names: set[str] = set()
_MOST_LEFT = 1_000


class OwnName(str):
    """The name of a row in a profiler's trace that shows a span of rlprof's own."""

    __slots__ = ()


class Named(Protocol):
    """What a span is an instance of."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def kind(self) -> Kind:
        """Its kind."""


def innermost() -> Open | None:
    """Return the innermost open span of this thread or task."""
    around = opened.get()
    while around is not None and around[0][5] is not None:
        around = around[1]
    return around


def made(
    marker: Named,
    step: int,
    start_ns: int,
    end_ns: int | None,
    counters: Mapping[str, Number] | None,
) -> Line:
    """Return a span inside the one that is open now; one without an end is open itself."""
    around = opened.get()
    while around is not None and around[0][5] is not None:
        around = around[1]
    parent = None if around is None else around[0][7]
    name, kind, number = marker.name, marker.kind, next(numbers)
    return ["span", name, kind, step, start_ns, end_ns, get_ident(), number, parent, counters]


def leave_open(span: Open) -> bool:
    """Keep an open span that no longer is around anything; return whether its name is a new one."""
    line, around, marker, _ = span
    _left.append((line, around, marker, None))
    del _left[:-_MOST_LEFT]
    new = len(_names) < _MOST_LEFT and marker.name not in _names
    _names.add(marker.name)
    return new


def left_open(marker: Named) -> Open | None:
    """Take back the last span of a marker that this thread left open; None without one."""
    for at in reversed(range(len(_left))):
        if _left[at][2] is marker and _left[at][0][6] == get_ident():
            return _left.pop(at)
    return None


def is_left(span: Open) -> bool:
    """Return whether `leave_open` keeps a span."""
    return any(each[0] is span[0] for each in _left)


def forget_left() -> None:
    """Forget all of them: another session begins."""
    _left.clear()
    _names.clear()


def counters_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may be numbers; a line with what JSON takes for something else cannot be read.

    A list, or a tensor with dimensions, becomes a histogram: a counter per bin of its values.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, list | tuple) or getattr(value, "ndim", False):
            with suppress(Exception):  # of any kind: the training continues
                found.update(histogram_counters(name, value))
        elif not isinstance(value, str | dict):
            found[name] = value
    return found


def histogram_counters(name: str, values: Any) -> dict[str, int]:
    """Return how many values lie in each bin, by the name of its counter; see `bin_of`.

    All but numbers from zero on are left out.
    """
    listed = values.tolist() if hasattr(values, "tolist") else values
    found: dict[str, int] = {}
    for value, times in Counter(_flat(listed)).items():
        key = bin_name(name, bin_of(value))
        found[key] = found.get(key, 0) + times
    return found


def _flat(values: Any) -> Iterator[float]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        elif isinstance(value, int | float) and 0 <= value < inf:
            yield value
