"""A marker that also adds up the seconds that its caller wants to have, recording or not."""

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar

from lightning_rlprof.calls import within

__all__ = ["Timed"]

F = TypeVar("F", bound=Callable[..., Any])


_timed: ContextVar[Any] = ContextVar("rlprof_timed", default=None)


class Timed:
    """A marker that also adds up seconds; made by ``stage(name, into=timings)``."""

    __slots__ = ("_into", "_marker", "_name")

    def __init__(
        self, marker: AbstractContextManager[None], name: str, into: MutableMapping[str, float]
    ) -> None:
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

    # torch.compile is not to trace them; see `marking.listen`.
    __enter__._torchdynamo_disable = __exit__._torchdynamo_disable = True  # type: ignore[attr-defined]
