"""Mark stages, regions and instants in training code; almost free while no session records.

A marker is one object per name and holds no state: what is open lives in a context variable, so one
marker nests in itself and serves every thread and asyncio task. While no session listens, entering
it runs no Python code at all; `listen` swaps the two methods in when a session starts.

A marker may also add up the seconds that its caller wants to have, recording or not, which can be
put together across the ranks of a torch.distributed job.
"""

import os
import sys
from _thread import get_ident
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from statistics import fmean
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from lightning_rlprof.recording import compiled_code, open_spans
from lightning_rlprof.recording.call_wrapping import name_of, within
from lightning_rlprof.recording.open_spans import (
    Span,
    counters_of,
    innermost,
    new_span,
    numbers,
    opened,
)
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import EXPERTS, Kind, Number
from lightning_rlprof.system.post_import import process_group

if TYPE_CHECKING:
    from lightning_rlprof.recording.session import Session

F = TypeVar("F", bound=Callable[..., Any])

_MIN_LONG_NS = 1_000_000  # Nanoseconds; a stage of this length is worth 2 µs more.
_MAX_NAME = 1_000  # Characters; the file repeats a name for every span.

_VERSION, _VERSION_END = "version", "version_end"

CHILD_MARKS = "RLPROF_CHILD_MARKS"
"""Variable by which a process that records tells its children where `tell_first` writes."""

_STILL_OPEN = (
    "{!r} was open when what lay around it ended, as `with` around a `yield` is: it counts what "
    "runs until it is left; put @stage or @annotate on the generator instead"
)
_WAYS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "max": max,
    "min": min,
    "sum": sum,
}

_timed: ContextVar[Any] = ContextVar("rlprof_timed", default=None)


class Timed:
    """A marker that also adds up seconds; made by ``stage(name, into=timings)``."""

    __slots__ = ("_into", "_marker", "_name")

    def __init__(
        self, marker: AbstractContextManager[None], name: str, into: MutableMapping[str, float]
    ) -> None:
        if not (hasattr(into, "get") and hasattr(into, "__setitem__")):
            raise TypeError(f"into={into!r} cannot hold seconds by name; give it a dict")
        self._marker, self._name, self._into = marker, name, into

    def __enter__(self) -> None:
        self._marker.__enter__()
        _timed.set((self, perf_counter(), _timed.get()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Add the seconds, also of a stage that raised."""
        now, entry = perf_counter(), _timed.get()
        while entry is not None and entry[0] is not self:
            entry = entry[2]
        self._marker.__exit__(kind, error, trace)
        if entry is not None:
            _timed.set(entry[2])
            self._into[self._name] = self._into.get(self._name, 0.0) + now - entry[1]

    def __call__(self, function: F) -> F:
        """Return the function with every call of it, or every item of a generator, marked."""
        return within(self, function)

    # Without this, torch.compile would trace them; see `listen`.
    __enter__._torchdynamo_disable = __exit__._torchdynamo_disable = True  # type: ignore[attr-defined]


class Marker:
    """A name for stretches of time: use it as ``with`` or as ``@``; made by `stage` and `annotate`.

    As a decorator it serves functions, methods, coroutines and generators of both kinds. A
    generator gives a span per item: the time between two belongs to the consumer.
    """

    __slots__ = ("counters", "kind", "last", "name")

    def __init__(self, name: str, kind: Kind, counters: dict[str, Number] | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f'a name is required, as in @stage("actor_update"); got {name!r}')
        self.name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
        self.kind = kind
        self.counters = counters
        self.last: Span | None = None  # Any thread may have begun it.

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


class OwnMarker(Marker):
    """A stage that rlprof marks, neither the user's code nor configuration.

    Attributes:
        ended: How many spans of all such markers have ended.
    """

    ended = 0

    def __init__(self, name: str) -> None:
        super().__init__(name, "stage")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the span, and count it."""
        Marker.__exit__(self, kind, error, trace)
        OwnMarker.ended += 1

    __exit__._torchdynamo_disable = True  # type: ignore[attr-defined]


class LoopMarker(OwnMarker):
    """A stage that stands for what the training loop runs.

    Attributes:
        yields: Whether a call that configuration marks is a stage inside of it, not a region.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.yields = True


_stages: dict[str, Marker] = {}
_new = Marker.__new__
_sink: "Session | None" = None
_hook: Callable[[Marker], object] | None = None
_said: set[str] = set()


@overload
def stage(name: str, /, **counters: Number) -> Marker: ...


@overload
def stage(name: str, /, *, into: MutableMapping[str, float], **counters: Number) -> Timed: ...


def stage(name: str, /, *, into: Any = None, **counters: Number) -> Any:
    """Mark a stage of the RL step, in a ``with`` statement or as a decorator.

    Not recording, this costs 0.1 µs. Recording, a span is kept in memory until the step ends.

    Args:
        name: One of `STAGES` or a name of your own; keep step numbers out of it, names are kept.
        into: Add the stage's seconds to ``into[name]``, too, whether or not anybody records.
        **counters: Numbers to store with the span; `count` adds what is known only later.

    Raises:
        TypeError: The name is missing, e.g. in a bare ``@stage``, or ``into`` isn't a dict.

    Example::

        >>> with stage("actor_generate", tokens=64):
        ...     pass
        >>> @stage("compute_reward")
        ... def reward(text: str) -> float:
        ...     return 3.0
    """
    if into is not None:
        return Timed(Marker(name, "stage", counters_of(counters) or None), name, into)
    try:
        known = _stages[name]
    except KeyError:
        known = _stages.setdefault(name, Marker(name, "stage"))
    if not counters:
        return known
    own = _new(Marker)  # The name was checked once: `__init__` would cost 0.1 µs.
    own.name, own.kind, own.last = known.name, "stage", None
    own.counters = counters_of(counters)
    return own


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
    return Marker(name_of(target), "region")(target)


def in_stage() -> bool:
    """Return whether a stage is open in this thread or task, other than one that yields."""
    span = opened.get()
    while span is not None:
        is_open = span.kind == "stage" and span.end_ns is None
        if is_open and not getattr(span.marker, "yields", False):
            return True
        span = span.around
    return False


def mark(name: str, /, **counters: Number) -> None:
    """Record one instant, e.g. ``mark("weights published", version=3)``.

    Example::

        >>> mark("weights published", version=3)
    """
    marker, sink = Marker(name, "mark"), listener()
    if sink is not None:
        now = sink.clock()
        sink.append(new_span(marker, sink.step, now, now, counters_of(counters) or None))
        sink.mark(name)


def record(
    name: str, start_ns: int, end_ns: int, *, step: int | None = None, **counters: Number
) -> None:
    """Record a stage whose two ends are known, such as one that a timer of your own measured.

    It may cross others, and be of any thread. Not recording, this does nothing.

    Args:
        name: As in `stage`.
        start_ns: Start by ``time.perf_counter_ns()``.
        end_ns: End by the same clock, not before the start.
        step: Its step; unset, the one in which it starts.
        **counters: Numbers to store with it.

    Example::

        >>> import time
        >>> start = time.perf_counter_ns()
        >>> record("compute_reward", start, time.perf_counter_ns(), samples=8)
    """
    sink = listener()
    if sink is None:
        return
    marker, start, end = Marker(name, "stage"), int(start_ns), int(end_ns)
    number = sink.step_at(start) if step is None else int(step)
    if sink.silent_thread and number == sink.step:
        return
    span = new_span(marker, number, start, max(start, end), counters_of(counters) or None)
    span.parent = None  # The span that is open now need not be around it.
    sink.append(span)
    if end > sink.flush_at_ns:
        sink.flush()


def count(**numbers: Any) -> None:
    """Add numbers to the innermost open span of this thread or task; outside of spans do nothing.

    A list or a tensor of several numbers is kept as a histogram, four bins per doubling. From
    ``lengths`` follow ``tokens``, unless you count them, ``tokens_sq`` and ``tokens_max``: work by
    which runs, ranks and steps are compared.
    ``tokens_per_expert``, a list or tensor of layers and experts, or by layer, keeps every number:
    the tokens that each expert of this rank computed. It is copied, and read after the step. A
    ``version`` of the weights is not added up: the first one stays, and the last one that differs
    is ``version_end``, as of a response that was continued after a weight sync.

    Example::

        >>> with stage("actor_generate", version=3):
        ...     count(tokens=4096)
        ...     count(tokens=1024, samples=2)
        ...     count(lengths=[900, 124])  # kept as a histogram
    """
    span = innermost()
    if span is not None:
        if EXPERTS in numbers and _sink is not None:
            _keep_experts(_sink, span, numbers[EXPERTS])
        total = dict(span.counters or {})  # All spans of a marker share the marker's counters.
        for name, number in counters_of(numbers).items():
            try:
                if name == _VERSION and name in total:
                    if number != total[name]:
                        total[_VERSION_END] = number
                    continue
                total[name] = open_spans.added(total.get(name), number)
            except Exception:  # Tensors may not fit together; the training continues.
                total[name] = number
        span.counters = total


def _keep_experts(sink: "Session", span: Span, given: Any) -> None:
    """Let a session read the tokens of experts after the step, and say what they cannot be."""
    try:
        sink.buffer.later_experts(span, open_spans.later_experts(given))
    except Exception as error:  # The training continues after any error.
        text = f"count({EXPERTS}=…) takes a list or tensor of layers and experts: {error!r}"
        if text not in _said:
            _said.add(text)
            sink.note(Code.EXPERTS_UNREADABLE, text)


def listen(
    sink: "Session | None",
    *,
    mirrored: bool = False,
    shadows: bool = False,
    told: Callable[[], object] | None = None,
) -> None:
    """Send every marker's spans to a session, or stop with None.

    Args:
        sink: The session.
        mirrored: Also call its `enter` and `exit` around each span, for recorders.
        shadows: Whether it may have a `Session.silent_thread`; if not, spans cost no more.
        told: Called after a stage has begun or ended; without it, stages cost no more.
    """
    global _sink, _hook
    _hook = None
    if _sink is None:
        opened.set(None)  # Spans of an earlier session are not around those of this one.
        open_spans.forget_left()
    _sink = sink
    # These builtins accept the calls and return None: no Python frame while no session records.
    enter: Any = ContextVar("rlprof_off", default=None).get
    leave: Any = memoryview(b"").__exit__
    if sink is not None:
        enter, leave = _mirrored(sink) if mirrored else _recording(sink)
        if shadows:
            enter, leave = _in_shadow(enter, leave, sink)
        if told is not None:
            enter, leave = _telling(enter, leave, told)
        # Since 2.15, torch.compile looks into context managers, and warns about their code.
        enter._torchdynamo_disable = leave._torchdynamo_disable = True
    Marker.__enter__ = enter  # type: ignore[method-assign]
    Marker.__exit__ = leave  # type: ignore[method-assign]


def listener() -> "Session | None":
    """Return the session that gets the spans of the calling thread, or None."""
    sink = _sink
    return sink if sink is not None and sink.owner.has_thread() else None


def when_begun(hook: Callable[[Marker], object]) -> None:
    """Record nothing, but call a hook with each marker whose span begins, until a session listens.

    Args:
        hook: It may start that session, which then has the span.
    """
    global _hook

    def enter(self: Marker) -> None:
        hook(self)
        if _sink is not None:
            self.__enter__()

    def leave(self: Marker, *error: Any) -> None:
        if _sink is not None:  # `with` has this method from before its span began.
            self.__exit__(*error)

    enter._torchdynamo_disable = leave._torchdynamo_disable = True  # type: ignore[attr-defined]
    listen(None)
    Marker.__enter__, Marker.__exit__ = enter, leave  # type: ignore[method-assign]
    _hook = hook


def has_begun(marker: Marker) -> None:
    """Call the hook of `when_begun` for what no marker begins, such as a step."""
    if _hook is not None:
        _hook(marker)


def tell_first(path: str, where: str) -> None:
    """Record nothing, but write the first span that begins to a file, as in a child process.

    The first of the children makes the file; the others write nothing.
    """

    def write(marker: Marker) -> None:
        listen(None)
        data = sys.modules.get("torch.utils.data")
        worker = data is not None and data.get_worker_info() is not None
        text = f"{marker.name} in a {'DataLoader worker' if worker else where}\n"
        with suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(file, text.encode("utf-8", "replace"))
            os.close(file)

    when_begun(write)


# They are made per session. Default arguments contain what a span needs, as they are the fastest
# to read. A thread that is inside one when its session ends finishes on that session.
def _recording(sink: "Session") -> tuple[Any, Any]:
    def enter(  # type: ignore[no-untyped-def]
        self,
        get=opened.get,
        put=opened.set,
        ident=get_ident,
        new_id=numbers.__next__,
        clock=sink.clock,
        new=Span,
        own=sink.owner.ident,
        sink=sink,
    ):
        thread = ident()
        if thread != own and not sink.owner.has_thread():
            return
        above, parent = get(), None
        while above is not None:
            if above.end_ns is None:
                parent = above.id
                break
            above = above.around
        self.last = span = new()
        span.name, span.kind, span.step = self.name, self.kind, sink.step
        span.thread, span.id = thread, new_id()  # Four at once would make a tuple.
        span.parent, span.counters = parent, self.counters
        span.around, span.marker, span.token = above, self, None
        span.start_ns = clock()
        span.end_ns = None
        put(span)

    def leave(  # type: ignore[no-untyped-def]
        self,
        kind,
        error,
        trace,
        get=opened.get,
        put=sink.append,
        clock=sink.clock,
        long_ns=_MIN_LONG_NS,
        sink=sink,
    ):
        now, span = clock(), get()
        while span is not None:
            if span.end_ns is None:
                if span.marker is not self:
                    break
                span.end_ns = now
                if now - span.start_ns > long_ns and self.kind == "stage":
                    sink.stage_ended(span)
                put(span)
                if span.around is None and now > sink.flush_at_ns:
                    sink.flush()
                return
            span = span.around
        _end_around(sink, self, now)

    return enter, leave


def _mirrored(sink: "Session") -> tuple[Any, Any]:
    owner = sink.owner

    def enter(self: Marker) -> None:
        if not owner.has_thread():
            return
        token = sink.enter(self.name, self.kind)
        self.last = span = new_span(self, sink.step, sink.clock(), None, self.counters)
        span.token = token
        opened.set(span)

    def leave(self: Marker, kind: object, error: object, trace: object) -> None:
        _end_around(sink, self, sink.clock())

    return enter, leave


def _in_shadow(begin: Any, end: Any, sink: "Session") -> tuple[Any, Any]:
    """Do nothing on the silent thread, but inside of and at the end of what it had begun before.

    Both kinds of steps pay for the question, so that it is not part of what is measured.
    """

    def enter(self: Marker) -> None:
        if sink.silent_thread and sink.silent_thread == get_ident() and innermost() is None:
            return
        begin(self)

    def leave(self: Marker, kind: object, error: object, trace: object) -> None:
        if sink.silent_thread and sink.silent_thread == get_ident() and innermost() is None:
            return
        end(self, kind, error, trace)

    return enter, leave


def _telling(begin: Any, end: Any, told: Callable[[], object]) -> tuple[Any, Any]:
    def enter(self: Marker) -> None:
        begin(self)
        if self.kind == "stage":
            told()

    def leave(self: Marker, kind: object, error: object, trace: object) -> None:
        end(self, kind, error, trace)
        if self.kind == "stage":
            told()

    return enter, leave


def _end_around(sink: "Session", marker: Marker, now: int) -> None:
    """End a span of any sort, also around others that are still open; ignore one never begun."""
    if not sink.owner.has_thread():
        return
    span, inside = innermost(), []
    while span is not None and (span.marker is not marker or span.end_ns is not None):
        if span.end_ns is None:
            inside.append(span)
        span = span.around
    if span is not None:
        opened.set(span)
        for each in inside:
            _leave_open(sink, each)
    else:
        span = open_spans.left_open(marker) or _of_another_thread(marker)
        if span is None:
            return
    span.end_ns = now
    if span.token is not None:
        sink.exit(span)
    elif now - span.start_ns > _MIN_LONG_NS and marker.kind == "stage":
        sink.stage_ended(span)
    sink.append(span)
    if span.around is None and now > sink.flush_at_ns:
        sink.flush()


def _of_another_thread(marker: Marker) -> Span | None:
    """Return the open span that another thread began last: this one ends it."""
    span = marker.last
    if span is None or span.end_ns is not None or span.thread == get_ident():
        return None
    return None if open_spans.is_left(span) else span


def _leave_open(sink: "Session", span: Span) -> None:
    if span.token is not None:
        sink.exit(span)  # Profilers can only record nested spans.
    if open_spans.leave_open(span):
        sink.note(Code.SPAN_LEFT_OPEN, _STILL_OPEN.format(span.marker), span=span.name)


class Tail(NamedTuple):
    """How a duration spreads over the ranks.

    Attributes:
        ratio: Share of the ``k`` slowest ranks in the sum over all ranks, 0 to 1.
        min: Shortest, in the unit given.
        max: Longest.
    """

    ratio: float
    min: float
    max: float


def gather_timings(timings: Mapping[str, float]) -> dict[str, list[float | None]]:
    """Return every name that some rank knows with the values by rank, None where it has none.

    Without a process group this process is the only rank.

    Example::

        >>> gather_timings({"actor_update": 1.5})
        {'actor_update': [1.5]}
    """
    ranks = _gather(dict(timings))
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [rank.get(name) for rank in ranks] for name in names}


def reduce_timings(
    timings: Mapping[str, float], how: Literal["mean", "max", "min", "sum"] = "mean"
) -> dict[str, float]:
    """Return one value per name, over the ranks that have it; the same on every rank.

    Raises:
        ValueError: ``how`` is none of the four.

    Example::

        >>> reduce_timings({"actor_update": 1.5}, how="max")
        {'actor_update': 1.5}
    """
    if how not in _WAYS:
        raise ValueError(f"how={how!r} is not one of {', '.join(_WAYS)}")
    gathered = gather_timings(timings)
    known = {name: [one for one in ranks if one is not None] for name, ranks in gathered.items()}
    return {name: float(_WAYS[how](values)) for name, values in known.items()}


def tail_ratio(seconds: float, k: int = 1) -> Tail:
    """Return what share of all ranks' time the ``k`` slowest take, and the extremes.

    With n even ranks the ratio is k / n; it nears 1 when few ranks take nearly all of the time.

    Raises:
        ValueError: ``k`` is below 1.

    Example::

        >>> tail_ratio(2.0)
        Tail(ratio=1.0, min=2.0, max=2.0)
    """
    if k < 1:
        raise ValueError(f"k={k} is not a number of ranks; give 1 or more")
    values = sorted(_gather(float(seconds)), reverse=True)
    total = sum(values)
    return Tail(sum(values[:k]) / total if total else 0.0, values[-1], values[0])


def _gather(value: Any) -> Sequence[Any]:
    distributed = process_group()
    if distributed is None:
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


compiled_code.when_traced(stage, compiled_code.no_marker("stage()"))
compiled_code.when_traced(annotate, compiled_code.no_marker("annotate()"))
for _writes in (mark, count, record):
    compiled_code.when_traced(_writes, compiled_code.nothing)

listen(None)
IS_CHILD = CHILD_MARKS in os.environ
"""Whether a process that records has started this one, which is not a fork of it."""
if IS_CHILD:
    tell_first(os.environ[CHILD_MARKS], "child process")
