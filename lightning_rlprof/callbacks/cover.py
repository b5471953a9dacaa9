"""Replace a method on one object for a while."""

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["Cover"]

_ABSENT = object()


class Cover:
    """A method of one object that is ours until `remove`; its class and its equals stay untouched.

    A copy of the object, and what is pickled of it, has its own method again: workers of a data
    loader that are spawned get the whole Trainer, as soon as their dataset knows it.

    Args:
        owner: The object.
        name: The method.
        mine: What is called instead.
    """

    def __init__(self, owner: Any, name: str, mine: Callable[..., Any]) -> None:
        self._own, self._name = vars(owner), name
        self._before = self._own.get(name, _ABSENT)
        self._mine = _Covering(mine)
        self._mine.covers = getattr(owner, name)
        self._own[name] = self._mine

    def remove(self) -> None:
        """Uncover the method, unless somebody has covered it since."""
        if self._own.get(self._name) is not self._mine:
            return
        if self._before is _ABSENT:
            del self._own[self._name]
        else:
            self._own[self._name] = self._before


class _Covering(partial[Any]):
    """Calls ours without a Python frame; its copy is one of the method that it covers."""

    covers: Callable[..., Any]

    def __reduce__(self) -> Any:
        return _itself, (self.covers,)


def _itself(copied: Any) -> Any:
    return copied
