"""Mark stages, regions and instants in training code; costs almost nothing while nobody records.

A marker is one object per name and holds no state: what is open lives in a context variable, so one
marker nests in itself and serves every thread and asyncio task. While no session listens, entering
it runs no Python code at all; `listen` swaps the two methods in when a session starts.
"""

import itertools
from _thread import get_ident
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload

from lightning_rlprof.calls import within
from lightning_rlprof.model import Kind, Number

__all__ = ["Marker", "Sink", "annotate", "count", "listen", "mark", "next_id", "open_id", "stage"]

F = TypeVar("F", bound=Callable[..., Any])

# (parent, marker, step, id, start_ns, counters, token): tuples cost less than objects.
Node = tuple[Any, "Marker", int, int, int, dict[str, Number] | None, object]

_open: ContextVar[Node | None] = ContextVar("rlprof_open", default=None)
# Never restarted: a parent left open by an earlier session is unknown in a later run, not wrong.
next_id = itertools.count(1).__next__
"""Number a span; unique in the process."""


class Sink(Protocol):
    """What a session offers to markers: the clock, the step, and a place for completed spans."""

    step: int
    flush_at_ns: int

    @property
    def clock(self) -> Callable[[], int]:
        """The clock of the run, in nanoseconds."""

    @property
    def append(self) -> Callable[[tuple[Any, ...]], None]:
        """Where completed spans go."""

    def enter(self, name: str, kind: Kind) -> object:
        """Tell the recorders that a span begins; return what `exit` needs."""

    def exit(self, token: object) -> dict[str, Number] | None:
        """Tell the recorders that a span ended; return their counters."""

    def flush(self) -> None:
        """Bring completed spans to the disk."""


class Marker:
    """A name for stretches of time: use it as ``with`` or as ``@``; made by `stage` and `annotate`.

    As a decorator it serves functions, methods, coroutines and generators of both kinds. A
    generator gives a span per item: the time between two belongs to whoever asks for them.
    """

    __slots__ = ("counters", "kind", "name")

    def __init__(self, name: str, kind: Kind, counters: dict[str, Number] | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f'a name is needed, as in @stage("actor_update"); got {name!r}')
        self.name = name
        self.kind = kind
        self.counters = counters

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def __enter__(self) -> None:
        """Begin the span; replaced by `listen` while a session records."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the span, whatever happened in it; replaced by `listen` while a session records."""

    def __call__(self, function: F) -> F:
        """Return the function with every call of it, or every item of a generator, marked."""
        return within(self, function)


_stages: dict[str, Marker] = {}
_sink: Sink | None = None


def stage(name: str, /, **counters: Number) -> Marker:
    """Mark a stage of the RL step, in a ``with`` statement or as a decorator.

    Not recording, this costs 0.1 µs. Recording, a span is kept in memory until the step ends.

    Args:
        name: One of `STAGES` or a name of your own; keep step numbers out of it, names are kept.
        **counters: Numbers to store with the span, e.g. ``tokens=4096``; `count` adds what is known
            only later.

    Raises:
        TypeError: There is no name, e.g. in a bare ``@stage``.

    Example::

        >>> with stage("actor_generate", tokens=64):
        ...     pass
        >>> @stage("compute_reward")
        ... def reward(text: str) -> float:
        ...     return float(len(text))
        >>> reward("abc")
        3.0
    """
    if counters:
        return Marker(name, "stage", counters)
    try:
        return _stages[name]
    except KeyError:
        return _stages.setdefault(name, Marker(name, "stage"))


@overload
def annotate(function: F, /) -> F: ...
@overload
def annotate(name: str, /) -> Marker: ...
def annotate(target: Any, /) -> Any:
    """Mark a function or method as a region, by its qualified name or by a name that you give.

    Regions show what happens inside or between stages and take no share of the step themselves.

    Example::

        >>> class Worker:
        ...     @annotate
        ...     def offload(self) -> int:
        ...         return 1
        ...
        ...     @annotate("onload parameters")
        ...     def onload(self) -> int:
        ...         return 2
        >>> Worker().offload() + Worker().onload()
        3
    """
    if isinstance(target, str):
        return Marker(target, "region")
    return Marker(target.__qualname__, "region")(target)


def mark(name: str, /, **counters: Number) -> None:
    """Record one instant, e.g. ``mark("weights published", version=3)``.

    Example::

        >>> mark("weights published", version=3)
    """
    sink = _sink
    if sink is not None:
        now = sink.clock()
        parent = _open.get()
        above = None if parent is None else parent[3]
        span = ("span", name, "mark", sink.step, now, now, get_ident(), next_id(), above)
        sink.append((*span, counters or None))


def count(**numbers: Number) -> None:
    """Add numbers to the innermost open span of this thread or task; outside of spans do nothing.

    Example::

        >>> with stage("actor_generate"):
        ...     count(tokens=4096)
        ...     count(tokens=1024, samples=2)
    """
    node = _open.get()
    if node is not None and _sink is not None:
        total = dict(node[5] or {})
        for name, number in numbers.items():
            total[name] = total.get(name, 0) + number
        _open.set((*node[:5], total, node[6]))


def open_id() -> int | None:
    """Return the number of the innermost open span of this thread or task, or None."""
    node = _open.get()
    return None if node is None else node[3]


def listen(sink: Sink | None, *, mirrored: bool = False) -> None:
    """Send every marker's spans to a session, or to nobody with None.

    Args:
        sink: The session.
        mirrored: Also call its `enter` and `exit` around each span, for recorders.
    """
    global _sink
    if _sink is None:
        _open.set(None)  # what an earlier session left open is not around the spans of this one
    _sink = sink
    # Builtins that accept these calls and return None: no Python frame while nobody records.
    enter: Any = ContextVar("rlprof_off", default=None).get
    leave: Any = memoryview(b"").__exit__
    if sink is not None:
        enter = _mirrored_enter(sink) if mirrored else _enter(sink)
        leave = _exit(sink)
    Marker.__enter__ = enter  # type: ignore[method-assign]
    Marker.__exit__ = leave  # type: ignore[method-assign]


# Made anew per session, so that what a span needs is bound and not looked up. A thread that is just
# inside one of them when its session ends finishes on that session and harms nobody.


def _enter(sink: Sink) -> Callable[[Marker], None]:
    clock, get, put = sink.clock, _open.get, _open.set

    def enter(self: Marker) -> None:
        put((get(), self, sink.step, next_id(), clock(), self.counters, None))

    return enter


def _mirrored_enter(sink: Sink) -> Callable[[Marker], None]:
    def enter(self: Marker) -> None:
        token = sink.enter(self.name, self.kind)
        node = (_open.get(), self, sink.step, next_id(), sink.clock(), self.counters, token)
        _open.set(node)

    return enter


def _exit(sink: Sink) -> Callable[[Marker, object, object, object], None]:
    clock, append, get, put = sink.clock, sink.append, _open.get, _open.set

    def leave(self: Marker, kind: object, error: object, trace: object) -> None:
        now = clock()
        node = get()
        if node is None or node[1] is not self or node[6] is not None:
            _exit_rarely(sink, self, now)
            return
        parent, _, step, span_id, start, counters, _ = node
        put(parent)
        above = parent and parent[3]
        ident = get_ident()
        row = ("span", self.name, self.kind, step, start, now, ident, span_id, above, counters)
        append(row)
        if parent is None and now > sink.flush_at_ns:
            sink.flush()

    return leave


def _exit_rarely(sink: Sink, marker: Marker, now: int) -> None:
    """End a mirrored span, or one whose inner spans were never ended; ignore one never begun."""
    node = _open.get()
    while node is not None and node[1] is not marker:
        node = node[0]
    if node is None:
        return
    parent, _, step, span_id, start, counters, token = node
    _open.set(parent)
    if token is not None:
        counters = {**(counters or {}), **(sink.exit(token) or {})} or None
    ends = (start, now, get_ident())
    above = parent and parent[3]
    sink.append(("span", marker.name, marker.kind, step, *ends, span_id, above, counters))


listen(None)
