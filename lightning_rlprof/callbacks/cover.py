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
        self._mine = self._own[name] = _Covering(mine)
        # By its name it is found in the class: a copy has nothing of its own yet when it is asked.
        ours = self._before is _ABSENT
        self._mine.stands_for = (getattr, (owner, name)) if ours else (_same, (self._before,))

    def remove(self) -> None:
        """Uncover the method, unless somebody has covered it since."""
        if self._own.get(self._name) is not self._mine:
            return
        if self._before is _ABSENT:
            del self._own[self._name]
        else:
            self._own[self._name] = self._before


class _Covering(partial[Any]):
    """Calls ours without a Python frame, and is what it stands for wherever it is copied."""

    stands_for: tuple[Callable[..., Any], tuple[Any, ...]]

    def __reduce__(self) -> Any:
        return self.stands_for


def _same(before: Any) -> Any:
    return before
