"""Run something on the main thread soon, wherever in its Python code that thread is."""

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache

__all__ = ["soon"]

_actions: deque[Callable[[], object]] = deque()


def soon(action: Callable[[], object]) -> None:
    """Have the main thread call ``action`` between two of its instructions; from any thread.

    It is called once, however often it was asked for until then, and not before the main thread is
    back from a call into C. That thread may hold any lock at that moment, as a signal handler's
    may: the action must take none, and must not log. What it raises is dropped. It is not called
    while a debugger or a coverage tool traces that thread: CPython 3.11 then hangs in such calls.
    """
    if action not in _actions:
        _actions.append(action)
    # A signal would do the same, but signals belong to the training.
    ctypes.pythonapi.Py_AddPendingCall(_runner(), None)


@cache
def _runner() -> Callable[..., int]:
    """Return what the interpreter calls; it lives as long as the process, as such calls may."""

    def run(_: object) -> int:
        if sys.gettrace() is not None:
            _actions.clear()
        while _actions:
            with suppress(Exception):
                _actions.popleft()()
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)
