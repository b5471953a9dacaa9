"""Numbers that stand for texts which come again and again, in bounded memory."""

from sys import getsizeof
from typing import Any

__all__ = ["MOST_BYTES", "MOST_NAMES", "Codes"]

MOST_NAMES = 1 << 18
"""Texts that are told apart; a day of a large job has some ten thousand names."""

MOST_BYTES = 1 << 25
"""Memory of the texts that are told apart; names of kernels have up to some thousand characters."""


class Codes(dict[Any, int]):
    """Numbers for texts, or tuples of them, in the order in which they come.

    ``codes[text]`` is its number, a new one where the text is new. Beyond the bounds all new texts
    have one number, that of ``other``.

    Args:
        other: What stands for all texts beyond the bounds.
        most: Texts that are told apart.

    Attributes:
        merged: How many times ``other`` stood for a text.

    Example::

        >>> codes = Codes("(other)", most=2)
        >>> [codes[text] for text in ("a", "b", "a", "c", "d")], codes.merged, list(codes)
        ([0, 1, 0, 2, 2], 2, ['a', 'b', '(other)'])
    """

    def __init__(self, other: Any, most: int = MOST_NAMES) -> None:
        super().__init__()
        self.merged = 0
        self._other, self._most, self._left = other, most, MOST_BYTES

    def __missing__(self, value: Any) -> int:
        """Number a new text."""
        code = len(self)
        size = sum(map(getsizeof, value)) if isinstance(value, tuple) else getsizeof(value)
        if code >= self._most or size > self._left:
            self.merged += 1
            # Past this method: a dict's own way to a key would come back here.
            self[self._other] = other = self.get(self._other, code)
            return other
        self[value] = code
        self._left -= size
        return code
