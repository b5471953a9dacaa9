"""Replace a method on one object for a while."""

from collections.abc import Callable
from typing import Any

__all__ = ["Cover"]

_ABSENT = object()


class Cover:
    """A method of one object that is ours until `remove`; its class and its equals stay untouched.

    Args:
        owner: The object.
        name: The method.
        mine: What is called instead.
    """

    def __init__(self, owner: Any, name: str, mine: Callable[..., Any]) -> None:
        self._own, self._name, self._mine = vars(owner), name, mine
        self._before = self._own.get(name, _ABSENT)
        self._own[name] = mine

    def remove(self) -> None:
        """Uncover the method, unless somebody has covered it since."""
        if self._own.get(self._name) is not self._mine:
            return
        if self._before is _ABSENT:
            del self._own[self._name]
        else:
            self._own[self._name] = self._before
