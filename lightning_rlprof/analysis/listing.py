"""Lists in sentences."""

from collections.abc import Iterable

_MOST = 5


def listed(items: Iterable[object], word: str = "") -> str:
    """Return the first five of some items as text, and how many more there are.

    Args:
        items: What is listed.
        word: What one of them is called, if the text begins with it.

    Example::

        >>> listed([3, 4], "rank"), listed(range(7))
        ('ranks 3, 4', '0, 1, 2, 3, 4 and 2 more')
    """
    texts = [*map(str, items)]
    more = f" and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    named = f"{word}{'s' * (len(texts) > 1)} " if word else ""
    return named + ", ".join(texts[:_MOST]) + more
