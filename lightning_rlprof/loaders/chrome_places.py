"""Where values in the text of a Chrome trace begin and end, the broken ones, too."""

import itertools
import json
import re
from typing import Any

import msgspec

from lightning_rlprof.errors import NOT_JSON

__all__ = [
    "EVENT",
    "Places",
    "end_of_events",
    "past_gap",
    "without_no_numbers",
]

_KEY = r'"(?:args|bp|cat|cname|dur|id|name|ph|pid|s|sf|tdur|tid|ts|tts)"\s*:'
EVENT = r"\s*(?=\{\s*" + _KEY + ")"
"""Stands before an event, with the blanks around it."""

_SHORT = 1 << 12  # most events are shorter
_FOLLOWING = re.compile(r"," + EVENT)
_GAP = re.compile(r"[\s,]*")
_AFTER = re.compile(
    r'\](?=\s*,\s*"(?:baseTimeNanoseconds|deviceProperties|displayTimeUnit|distributedInfo|INFO|'
    r'schemaVersion|traceName)"\s*:)'
)
# What C++ and Python print for a number that JSON cannot write: NaN, -nan, Infinity, inf. Only as
# the value of a key, so that names are left alone.
_NO_NUMBER = re.compile(rb'":[\s-]*[NnIi](?:aN|an|nfinity|nf)(?=\s*[,}])')
# Characters that are looked at in vain, which takes some seconds, and places behind a broken event
# where the next may begin.
_VAIN, _TRIES = 1 << 28, 1_000
# The quickest way to find the end of one value: its numbers need not become numbers.
_PARSE = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode


def past_gap(text: str, at: int) -> int:
    """Return where blanks and commas end that begin here."""
    found = _GAP.match(text, at)
    return found.end() if found else at


def without_no_numbers(text: bytes) -> bytes:
    """Return a text with empty texts for the numbers that JSON cannot write, as long as they are.

    Example::

        >>> without_no_numbers(b'{"dur": NaN, "name": "NaN"}')
        b'{"dur":""  , "name": "NaN"}'
    """
    return _NO_NUMBER.sub(_emptied, text)


def _emptied(found: re.Match[bytes]) -> bytes:
    """Return the same key with an empty text of the same length, unless it stands in a text."""
    before = found.string[max(found.start() - 1, 0) : found.start()]
    return found[0] if before == b"\\" else b'":' + b'""'.ljust(len(found[0]) - 2)


class Places:
    """Finds where values begin and end, in a time that grows with the text and no faster.

    Broken values may hold thousands that seem to begin another one, each as deep as the last:
    what is looked at in vain is counted, and beyond a bound nothing more is found behind one.

    Attributes:
        left: Characters that may still be looked at in vain.
    """

    def __init__(self) -> None:
        self.left = _VAIN

    def value(self, text: str, at: int) -> tuple[Any, int]:
        """Return the value that begins here and where it ends, -1 where it is broken or cut off.

        Looks at more and more of the text: json counts the lines before every error.
        """
        size = _SHORT
        while True:
            part = text[at : at + size]
            try:
                value, length = _PARSE(part)
                return value, at + length
            except RecursionError:
                self.left -= len(part)
                return None, -1
            except json.JSONDecodeError as error:
                self.left -= error.pos
                near = error.pos >= len(part) - _SHORT // 2 or error.msg.startswith("Unterminated")
                if not near or at + size >= len(text):
                    return None, -1
            size *= 16

    def behind(self, text: str, at: int) -> int:
        """Return where the next event behind a broken one begins, be it broken or not; else -1."""
        for found in itertools.islice(_FOLLOWING.finditer(text, at), _TRIES):
            if self.left <= 0:
                break
            start = found.end()
            value, end = self.value(text, start)
            if "ph" in value if isinstance(value, dict) else _has_phase(text, start):
                return start
            self.left -= max(end - start, 0)
        return -1


def _has_phase(text: str, at: int) -> bool:
    following = _FOLLOWING.search(text, at, at + _SHORT)
    return '"ph"' in text[at : following.start() if following else at + _SHORT]


def end_of_events(text: str, at: int) -> int:
    """Return where the events end behind a broken last one, -1 if they do not."""
    found = _AFTER.search(text, at)
    try:
        if found is not None:
            msgspec.json.decode("{" + text[found.end() :].lstrip(", \r\n\t"))
            return found.start()
    except NOT_JSON:
        pass
    return -1
