"""Parts of a Chrome trace as text, which keeps every nanosecond."""

import json
from typing import Any


def about(pid: int, tid: int, what: str, **args: Any) -> str:
    """Return the event that names a track or process, or gives it a place.

    Example::

        >>> about(1, 2, "thread_name", name="MainThread")
        '{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"MainThread"}}'
    """
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{what}","args":{encoded(args)}}}'


def micro(ns: int) -> str:
    """Return nanoseconds as microseconds with three decimals: a float would lose some.

    Example::

        >>> micro(2**60 + 7), micro(-5)
        ('1152921504606846.983', '-0.005')
    """
    return f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def encoded(value: Any) -> str:
    """Return a value as JSON without white space."""
    return json.dumps(value, separators=(",", ":"))
