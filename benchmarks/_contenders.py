"""Who is compared: this package, the floor below it, and the timers that people use today."""

import importlib.util
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch
from codetiming import Timer
from pytorch_lightning.profilers import SimpleProfiler

from lightning_rlprof.recording import annotations
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import Session

__all__ = [
    "AGAIN",
    "FLOOR",
    "OFF",
    "OURS",
    "SIMPLE",
    "VERL",
    "Contender",
    "Floor",
    "Span",
    "TimerSums",
    "TreeFloor",
    "contenders",
    "idle_stage",
]

FLOOR, AGAIN = "floor", "floor again (A/A)"
OFF, OURS = "stage(), not recording", "stage(), recording"
SIMPLE, VERL = "Lightning SimpleProfiler", "verl marked_timer formula"

Span = Callable[..., AbstractContextManager[object]]


@dataclass(frozen=True)
class Contender:
    """One way to mark a stretch of time.

    Attributes:
        name: As the table says it.
        span: Makes a context manager from a name.
        drop: Throws away what was kept, or writes it, outside of every measurement.
        counted: Spans get a counter, too.
    """

    name: str
    span: Span
    drop: Callable[[], object] = lambda: None
    counted: bool = False


class Floor:
    """The least that records a span in Python: two clock readings and a tuple in a list."""

    __slots__ = ("name", "start")
    kept: list[tuple[str, int, int]] = []  # noqa: RUF012 - one buffer is the point

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.start = perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kept.append((self.name, self.start, perf_counter_ns()))


class TreeFloor:
    """The least that records a tree of spans, also under asyncio: the open one in a ContextVar."""

    __slots__ = ("name",)
    around: ContextVar[list[Any] | None] = ContextVar("floor", default=None)
    kept: list[list[Any]] = []  # noqa: RUF012 - one buffer is the point

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.around.set([self.name, perf_counter_ns(), None, self.around.get()])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        span = self.around.get()
        assert span is not None
        span[2] = perf_counter_ns()
        self.around.set(span[3])
        self.kept.append(span)


class TimerSums:
    """The formula of verl's ``marked_timer``: a codetiming Timer in a generator, summed by name.

    verl has a second generator around it; this one has not, which is in verl's favour.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block and add it to its name's sum."""
        with Timer(name=name, logger=None) as timer:
            yield
        self.sums[name] = self.sums.get(name, 0) + timer.last


def idle_stage() -> Span:
    """Return the ``stage`` of a second copy of the module, for which no session ever listens.

    Switching one copy on and off between contenders would charge each with the switch.
    """
    spec = importlib.util.spec_from_file_location("idle_marking", annotations.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Span = module.stage
    return found


def contenders(session: Session) -> list[Contender]:
    """Return all contenders; the session must record as long as they are in use."""
    simple: Any = SimpleProfiler()
    floors = [Contender(name, Floor, Floor.kept.clear) for name in (FLOOR, AGAIN)]
    return [
        *floors,
        Contender(OFF, idle_stage()),
        Contender(OURS, stage, session.flush),
        Contender("stage(tokens=…), recording", stage, session.flush, counted=True),
        Contender(SIMPLE, simple.profile, simple.recorded_durations.clear),
        Contender(VERL, TimerSums().span),
        Contender("torch record_function, off", torch.profiler.record_function),
        *_nvtx(),
    ]


def _nvtx() -> Generator[Contender, Any, None]:
    if importlib.util.find_spec("nvtx") is not None:
        import nvtx

        yield Contender("nvtx.annotate, no tool", nvtx.annotate)
