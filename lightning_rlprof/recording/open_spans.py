"""Spans in memory, as the file will hold them, whose they are, and which of them are open where."""

import itertools
import sys
import threading
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_rlprof.records.records import EXPERTS, LENGTHS, Kind, bin_name, bin_of

if TYPE_CHECKING:
    from lightning_rlprof.recording.annotations import Marker

_MAX_LEFT = 1_000
_PLAIN = {int, float}
_PARENT, _OWNS, _APART = "rlprof_parent", "rlprof_owns", "rlprof_apart"  # Attributes of threads.
_HOOK = "rlprof_follows"


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

# Spans that are still open after the span around them, such as those of a suspended generator.
# They are not around later spans, and end when they are left.
_left: list[Span] = []
_names: set[str] = set()


class OwnName(str):
    """The name of a row in a profiler's trace that shows a span of rlprof's own."""

    __slots__ = ()


def innermost() -> Span | None:
    """Return the innermost open span of this thread or task."""
    around = opened.get()
    while around is not None and around.end_ns is not None:
        around = around.around
    return around


def new_span(
    marker: "Marker",
    step: int,
    start_ns: int,
    end_ns: int | None,
    counters: dict[str, Any] | None,
) -> Span:
    """Return a span inside the one that is open now; one without an end is open itself."""
    around = opened.get()  # A call of `innermost` would cost each span a frame.
    while around is not None and around.end_ns is not None:
        around = around.around
    span = Span()
    span.around = around
    span.parent = None if around is None else around.id
    span.name, span.kind, span.marker, span.token = marker.name, marker.kind, marker, None
    span.step, span.thread, span.id = step, get_ident(), next(numbers)
    span.counters, span.start_ns, span.end_ns = counters, start_ns, end_ns
    return span


def leave_open(span: Span) -> bool:
    """Keep an open span that no longer is around anything; return whether its name is a new one."""
    span.token = None  # The recorders know that it ended.
    _left.append(span)
    del _left[:-_MAX_LEFT]
    new = len(_names) < _MAX_LEFT and span.name not in _names
    _names.add(span.name)
    return new


def left_open(marker: "Marker") -> Span | None:
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


def counters_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return what may be numbers: the given ones themselves, if all are.

    A line with what JSON takes for something else cannot be read.

    A list, or a tensor with dimensions, becomes a histogram: a counter per bin of its values.
    ``lengths`` also say how much work there was, see `work_of`.
    """
    for value in given.values():  # A span pays for this: the questions below take 0.4 µs.
        if type(value) not in _PLAIN:
            break
    else:
        if EXPERTS not in given:
            return given
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == EXPERTS:
            continue  # `later_experts` keeps them.
        if type(value) in _PLAIN:
            found[name] = value
        elif isinstance(value, list | tuple) or getattr(value, "ndim", False):
            with suppress(Exception):  # The training continues after any error.
                listed = value.tolist() if hasattr(value, "tolist") else value
                found.update(histogram_counters(name, listed))
                if name == LENGTHS:
                    found = work_of([*_flat(listed)]) | found
        elif not isinstance(value, str | dict):
            found[name] = value
    return found


class TokensOfLengths(int):
    """A number of tokens that follows from lengths: one that is counted takes its place."""


def added(have: Any, number: Any) -> Any:
    """Return a counter after one more number; None: it is the first."""
    if isinstance(number, TokensOfLengths):
        if have is None or isinstance(have, TokensOfLengths):
            return TokensOfLengths((have or 0) + number)
        return have
    return 0 + number if have is None or isinstance(have, TokensOfLengths) else have + number


def work_of(lengths: list[float]) -> dict[str, int]:
    """Return tokens, the sum of their squares, and those of the longest.

    A rollout lasts as long as its longest response, and attention grows with the squares.
    """
    whole = [*map(round, lengths)]
    return {
        "tokens": TokensOfLengths(sum(whole)),
        "tokens_sq": sum(each * each for each in whole),
        "tokens_max": max(whole, default=0),
    }


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


def histogram_counters(name: str, listed: Any) -> dict[str, int]:
    """Return how many values lie in each bin, by the name of its counter; see `bin_of`.

    All but numbers from zero on are left out.
    """
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


class Owner:
    """The thread that makes this object, with the threads that it has started or will start.

    What is known of a thread decides, in this order:

    - It is the owner's, or was started by one of the owner's: it belongs to the owner.
    - It trains something else, or was started by a thread that does: it does not belong.
    - No Python code started it, such as a thread of autograd or of a Ray worker: it belongs.
    - The main thread started it, as all others in the end: it belongs to an owner that is the main
      thread, and to no other.

    Attributes:
        thread: The owner.
        ident: Its identity.
        is_training: Whether a framework's training is recorded. A training inside of what the
            program itself records belongs to that, in each of the owner's threads.
        has_process: Whether all threads belong to it, but those of other trainings: no object says
            which thread trains.
    """

    def __init__(self, *, is_training: bool = True, has_process: bool = False) -> None:
        self.thread, self.ident = threading.current_thread(), get_ident()
        self.is_training, self.has_process = is_training, has_process
        self._known = threading.local()

    def begin(self) -> None:
        """Know of threads that start from now on which one started them."""
        _follow_starts()
        vars(self.thread)[_OWNS] = True
        rejoin()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the owner itself."""
        return get_ident() == self.ident

    def has_thread(self) -> bool:
        """Return whether the calling thread belongs to the owner."""
        if get_ident() == self.ident:
            return True
        known: tuple[int, bool] | None = getattr(self._known, "answer", None)
        if known is None or known[0] != _Apart.changes:
            known = self._known.answer = _Apart.changes, self._look(threading.current_thread())
        return known[1]

    def _look(self, thread: threading.Thread) -> bool:
        while thread is not self.thread:
            if _APART in vars(thread):
                return False
            parent = vars(thread).get(_PARENT)
            if parent is None:
                is_pythons = not isinstance(thread, threading._DummyThread)
                return self.has_process or not is_pythons or self.thread is threading.main_thread()
            thread = parent
        return True


class _Apart:
    """How often a thread was set apart, or joined the others again: answers hold until then."""

    changes = 0


def set_apart() -> None:
    """Let the calling thread, and those that it starts, belong to no owner but itself."""
    vars(threading.current_thread())[_APART] = True
    _Apart.changes += 1


def rejoin() -> None:
    """Let the calling thread belong to those around it again: its own training has ended."""
    vars(threading.current_thread()).pop(_APART, None)
    _Apart.changes += 1


def _follow_starts() -> None:
    """Let each thread know from now on which one started it."""
    theirs: Any = threading.Thread.start
    if getattr(theirs, _HOOK, False):
        return

    def start(self: threading.Thread) -> None:
        with suppress(Exception):  # A thread of the program may refuse it.
            vars(self)[_PARENT] = threading.current_thread()
            each: threading.Thread | None = vars(self)[_PARENT]
            while each is not None:
                each = _forget_ended(vars(each))
        theirs(self)

    setattr(start, _HOOK, True)
    start.__doc__ = theirs.__doc__
    threading.Thread.start = start  # type: ignore[method-assign]


def _forget_ended(own: dict[str, Any]) -> threading.Thread | None:
    """Let a thread forget those above it that have ended, as of timers that start timers.

    Returns the one that is above it then, if any.
    """
    above: threading.Thread | None = own.get(_PARENT)
    while above is not None and not above.is_alive() and not {_OWNS, _APART} & vars(above).keys():
        above = vars(above).get(_PARENT)
    if above is None:
        own.pop(_PARENT, None)
    else:
        own[_PARENT] = above
    return above
