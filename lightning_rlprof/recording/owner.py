"""Whose spans a session records: the thread that trains and those that it starts, and no others.

Another training in the same process, such as a second trial of a sweep, runs in a thread of its
own. Python does not keep which thread started another, so this does from the first session on.
"""

import threading
from _thread import get_ident
from contextlib import suppress
from typing import Any

_PARENT, _OWNS, _APART = "rlprof_parent", "rlprof_owns", "rlprof_apart"  # attributes of threads
_HOOK = "rlprof_follows"


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
                return self.has_process or not is_pythons or _is_main(self.thread)
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


def _is_main(thread: threading.Thread) -> bool:
    return thread is threading.main_thread()


def _follow_starts() -> None:
    """Let each thread know from now on which one started it."""
    theirs: Any = threading.Thread.start
    if getattr(theirs, _HOOK, False):
        return

    def start(self: threading.Thread) -> None:
        with suppress(Exception):  # of a thread of the program, too
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
