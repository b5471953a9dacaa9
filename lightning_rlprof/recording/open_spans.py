"""Spans in memory, as the file will hold them, and which of them are open where."""

import itertools
import sys
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from lightning_rlprof.records.records import EXPERTS, Kind, bin_name, bin_of


class Span:
    """A span in memory, and what is known of it while it is open.

    It has no ``__init__``, and markers set its fields one by one: that costs a span as much as a
    list and a tuple did, 7.2 µs after real work. A constructor of any kind costs 0.6 to 0.9 µs
    more. ``end_ns`` is set last: another thread that finds a span by it finds a whole one.

    Attributes:
        name: Of the stage or region.
        kind: As of `SpanLine`, like all fields up to ``counters``.
        step: RL step.
        start_ns: Start on the clock of the run.
        end_ns: End; None while it is open.
        thread: Identity of the thread.
        id: Its number.
        parent: Number of the span around it, or None.
        counters: Numbers, or None.
        around: The span around it that was open when it began, or None.
        marker: What began it.
        token: The token of the recorders, if they mirror it.
    """

    __slots__ = (
        "around",
        "counters",
        "end_ns",
        "id",
        "kind",
        "marker",
        "name",
        "parent",
        "start_ns",
        "step",
        "thread",
        "token",
    )

    tag: ClassVar[str] = "span"
    name: str
    kind: Kind
    step: int
    start_ns: int
    end_ns: int | None
    thread: int
    id: int
    parent: int | None
    counters: dict[str, Any] | None
    around: "Span | None"
    marker: Any
    token: Any

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds; 0 while it is open."""
        return 0 if self.end_ns is None else self.end_ns - self.start_ns


line_of: Callable[[Span], tuple[Any, ...]] = attrgetter(
    "tag", "name", "kind", "step", "start_ns", "end_ns", "thread", "id", "parent", "counters"
)
"""Return the line of a span in the file. `map` calls it without Python code per span."""

opened: ContextVar[Span | None] = ContextVar("rlprof_open", default=None)
"""The span that was opened last, made or not: look upwards for one that is still open. To end it
there costs less than to change the variable again."""

numbers = itertools.count(1)
"""Numbers of spans, by ``next``. Never restarted: a parent that an earlier session left open is
unknown in a later run, not wrong."""


# Spans whose surroundings have ended first, as a generator's that is suspended inside of one: they
# are around nothing that follows, and end when they are left.
_left: list[Span] = []
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


def innermost() -> Span | None:
    """Return the innermost open span of this thread or task."""
    around = opened.get()
    while around is not None and around.end_ns is not None:
        around = around.around
    return around


def new_span(
    marker: Named,
    step: int,
    start_ns: int,
    end_ns: int | None,
    counters: dict[str, Any] | None,
) -> Span:
    """Return a span inside the one that is open now; one without an end is open itself."""
    span = Span()
    span.around = around = innermost()
    span.parent = None if around is None else around.id
    span.name, span.kind, span.marker, span.token = marker.name, marker.kind, marker, None
    span.step, span.thread, span.id = step, get_ident(), next(numbers)
    span.counters, span.start_ns, span.end_ns = counters, start_ns, end_ns
    return span


def leave_open(span: Span) -> bool:
    """Keep an open span that no longer is around anything; return whether its name is a new one."""
    span.token = None  # The recorders were told that it ended.
    _left.append(span)
    del _left[:-_MOST_LEFT]
    new = len(_names) < _MOST_LEFT and span.name not in _names
    _names.add(span.name)
    return new


def left_open(marker: Named) -> Span | None:
    """Take back the last span of a marker that this thread left open; None without one."""
    for at in reversed(range(len(_left))):
        if _left[at].marker is marker and _left[at].thread == get_ident():
            return _left.pop(at)
    return None


def is_left(span: Span) -> bool:
    """Return whether `leave_open` keeps a span."""
    return any(each is span for each in _left)


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
        if name == EXPERTS:
            continue  # `later_experts` keeps them
        if isinstance(value, list | tuple) or getattr(value, "ndim", False):
            with suppress(Exception):  # of any kind: the training continues
                found.update(histogram_counters(name, value))
        elif not isinstance(value, str | dict):
            found[name] = value
    return found


class ExpertTokens(dict[int, list[int]]):
    """Tokens of each expert, by layer, which have a line of their own in the file."""


def later_experts(given: Any) -> Callable[[], ExpertTokens | None]:
    """Keep tokens per expert as they are now, and return what tells them once they are known.

    Takes some microseconds and waits for no device: a tensor of a device is copied in its stream.

    Args:
        given: By layer a list or a tensor; or one of layers and experts; or of the experts of one.

    Raises:
        TypeError: It is nothing of these.
    """
    layers = given.items() if isinstance(given, Mapping) else [(None, given)]
    kept = [(layer, _kept(tokens)) for layer, tokens in layers]
    ready = [done for _, tokens in layers if (done := _copied(tokens)) is not None]
    return partial(_expert_tokens, kept, ready)


def _kept(tokens: Any) -> Any:
    """Return a copy of a tensor, an array or a list: its owner may count on in it."""
    if hasattr(tokens, "detach"):
        tokens = tokens.detach()
        on_host = tokens.device.type == "cpu"
        return tokens.clone() if on_host else tokens.to("cpu", non_blocking=True)
    if hasattr(tokens, "tolist"):
        return tokens.copy()
    return [list(each) if isinstance(each, list | tuple) else each for each in tokens]


def _copied(tokens: Any) -> Callable[[], bool] | None:
    """Return what tells whether the copy of a tensor from its device is done; None on the host."""
    kind = getattr(getattr(tokens, "device", None), "type", "cpu")
    if kind == "cpu":
        return None
    event = getattr(sys.modules["torch"], kind).Event()
    event.record()
    query: Callable[[], bool] = event.query
    return query


def _expert_tokens(
    kept: list[tuple[int | None, Any]], ready: list[Callable[[], bool]]
) -> ExpertTokens | None:
    if not all(each() for each in ready):
        return None
    found = ExpertTokens()
    for layer, tokens in kept:
        listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        by_layer = {layer: listed} if layer is not None else dict(enumerate(listed))
        if layer is None and not any(isinstance(each, list) for each in listed):
            by_layer = {0: listed}
        for number, counts in by_layer.items():
            listed = counts.tolist() if hasattr(counts, "tolist") else counts
            whole = listed if {*map(type, listed)} <= {int} else [*map(round, listed)]
            if min(whole, default=0) < 0:
                raise ValueError("a number of tokens is below 0")
            found[int(number)] = whole
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
