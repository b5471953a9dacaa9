"""The events of a Chrome trace in batches, through one buffer that is used again and again.

Where values in the text of a Chrome trace begin and end, the broken ones, too.

What stands before the events of a Chrome trace, which are not read.
"""

import itertools
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.chrome.byte_source import Source

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


T = TypeVar("T")

SIZE = 1 << 20
"""Bytes of the buffer: more leave the processor's cache, fewer pay more often for a batch."""

LARGEST = 1 << 25
"""An event, or what stands beside the events, cannot be larger; beyond it reading ends."""

# Where borders between events are looked for, and how many are tried: lists of objects in the last
# event's arguments look like them.
_NEAR, _GUESSES = 1 << 14, 3
_SEPARATOR = re.compile(rb"\}\s*," + EVENT.encode())
_FIRST = re.compile(rb"\[" + EVENT.encode())
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_GRACE = 4  # characters that may be looked at in vain for each that is read


class Decoder(Protocol[T]):
    """What turns a JSON array of events into a list, as `msgspec.json.Decoder` does."""

    def decode(self, data: Any, /) -> list[T]:
        """Return the events; raises one of `NOT_JSON` for what it cannot read."""


class ChromeStream(Generic[T]):
    """Cut a trace into batches of whole events, whatever its layout.

    A batch is valid until the next one is asked for: `msgspec.Raw` in it points into the buffer.
    Takes a few times ``size`` of memory for any file whose events are smaller.

    Args:
        source: The bytes.
        decoder: Turns a JSON array of events into a list; an event that it refuses is left out.
        size: Bytes of the buffer.
        most: Bytes that it may grow to, where one event, or what is beside the events, needs more.

    Attributes:
        top: What stands beside the events by key, before and after them; complete at the end.
        events: Whether the array of events was found.
        lost: Events that could not be read.
        problems: How the file ended, where that was not its end.
        complete: Whether the end of the events was reached, and nothing was wrong behind it.
    """

    def __init__(
        self,
        source: Source,
        decoder: Decoder[T],
        size: int = SIZE,
        most: int = LARGEST,
    ) -> None:
        self.top: dict[str, msgspec.Raw] = {}
        self.events = False
        self.lost = 0
        self.problems: list[str] = []
        self.complete = False
        self._source, self._decode, self._most = source, decoder.decode, most
        self._places = Places()
        self._buffer = bytearray(max(size, 16))
        # What is not cut yet lies between; the byte before it is free for a bracket.
        self._low = self._high = 1
        self._ended = self._bare = False

    def open(self) -> bool:
        """Read on to the first event; False when there is no array of events."""
        while not self.events:
            more = self._fill()
            window = bytes(self._buffer[self._low : self._high])
            start = len(window) - len(window.removeprefix(b"\xef\xbb\xbf").lstrip())
            kind = window[start : start + 1]
            bare = kind == b"["
            found = _FIRST.match(window, start) if bare else _events(window, start, last=not more)
            if kind not in (b"[", b"{", b"") or (found is None and not more):
                return False
            if found is not None:
                if kind == b"{":
                    self._keep(window[start : found.start()].rstrip().removesuffix(b",") + b"}")
                self._low += found.end()
                self._bare, self.events = bare, True
        return True

    def __iter__(self) -> Iterator[list[T]]:
        """Yield the batches in the order of the file.

        Raises:
            TraceError: See `Source`.
        """
        while self.open() and not self._ended:
            more, low = self._fill(), self._low
            batch = self._at_once()
            if batch is None and self._repair():
                batch = self._at_once()
            if batch is None:
                batch = self._one_by_one(last=not more)
            yield batch
            if self._low == low and not more:
                self.problems.append(f"{self._why()}: read up to the last complete event before")
                break
        if self._ended:
            self._read_rest()
        if self._source.problem:
            self.problems.append(self._source.problem)
        self.complete = self._ended and not self.problems

    def _why(self) -> str:
        if self._places.left <= 0:
            return "it is broken in too many places"
        large = self._high >= self._most
        return f"it holds an event above {self._most:,} bytes" if large else "it is cut off"

    def _fill(self) -> bool:
        """Move what is left to the front and fill up the buffer; False when there is no more."""
        left = self._high - self._low
        self._buffer[1 : 1 + left] = self._buffer[self._low : self._high]
        self._low, self._high = 1, 1 + left
        if self._high == len(self._buffer):
            if self._high >= self._most:
                return False
            self._buffer = self._buffer + bytes(self._high)  # events of before may point into it
        with memoryview(self._buffer) as view:
            while self._high < len(view) and (count := self._source.readinto(view[self._high :])):
                self._high += count
            return self._high == len(view)

    def _at_once(self) -> list[T] | None:
        """Decode up to the last place that looks like a border; None if those that do are none.

        A list that decodes shows that the place was one: its brackets close there.
        """
        free = self._low - 1
        for cut in self._borders():
            self._buffer[free], self._buffer[cut] = b"[]"
            try:
                batch = self._decode(memoryview(self._buffer)[free : cut + 1])
            except NOT_JSON:
                self._buffer[cut] = ord(",")
                continue
            self._low = cut + 1
            return batch
        return None

    def _borders(self) -> list[int]:
        """Return the last commas that seem to stand between events, the last one first."""
        for first in (max(self._low, self._high - _NEAR), self._low):
            places = [m.start() for m in _SEPARATOR.finditer(self._buffer, first, self._high)]
            if places:
                return [self._buffer.index(b",", place) for place in places[: -_GUESSES - 1 : -1]]
        return []

    def _repair(self) -> bool:
        """Replace numbers that are none by empty texts of their length; False without any."""
        window = bytes(self._buffer[self._low : self._high])
        sound = without_no_numbers(window)
        self._buffer[self._low : self._high] = sound
        return sound != window

    def _one_by_one(self, *, last: bool) -> list[T]:
        """Decode each complete event by itself, over the ones that are broken; six times as slow.

        Args:
            last: Nothing follows: what cannot be read now, never can.
        """
        window = bytes(self._buffer[self._low : self._high])
        text = window.decode("latin-1")  # one character per byte
        pieces: list[bytes] = []
        at = past_gap(text, 0)
        while at < len(text) and not self._ended:
            if text[at] == "]":
                self._ended, end = True, at + 1
            elif (end := self._places.value(text, at)[1]) > 0:
                pieces.append(window[at:end])
            elif (end := self._behind(text, at, last=last)) > 0:
                self.lost += 1
            else:
                break
            at = end if self._ended else past_gap(text, end)
        self._low += at
        self._places.left += _GRACE * at
        return self._sound(pieces)

    def _behind(self, text: str, at: int, *, last: bool) -> int:
        """Return where to go on behind a broken event, -1 if nowhere."""
        end = self._places.behind(text, at)
        return end_of_events(text, at) if end < 0 and last else end

    def _sound(self, pieces: list[bytes]) -> list[T]:
        """Decode pieces, without those that the decoder refuses."""
        try:
            return self._decode(b"[" + b",".join(pieces) + b"]")
        except NOT_JSON:
            sound = []
            for piece in pieces:
                try:
                    sound += self._decode(b"[" + piece + b"]")
                except NOT_JSON:
                    self.lost += 1
            return sound

    def _read_rest(self) -> None:
        """Read what stands behind the events."""
        while self._fill():
            pass
        rest = bytes(self._buffer[self._low : self._high]).lstrip(b", \r\n\t")
        if not self._bare:
            rest = b"{" + rest
            end = self._places.value(rest.decode("latin-1"), 0)[1]
            end = len(rest) if end < 0 else end
            self._keep(rest[:end])
            rest = rest[end:]
            if self.top.pop("traceEvents", None) is not None:
                self.problems.append("it holds a second array of events: that is left out")
        if rest.strip(b"\0 \r\n\t"):
            self.problems.append(
                "something stands behind its end, as another trace: it is left out"
            )

    def _keep(self, top: bytes) -> None:
        found = _object(top)
        if found is None:
            self.problems.append("what its file says beside the events cannot be read")
        else:
            self.top |= found


def _events(window: bytes, start: int, *, last: bool) -> "re.Match[bytes] | None":
    """Find where the array of events begins: behind what is whole, not in a text or an object.

    Args:
        window: The beginning of the file, as far as it is known.
        start: Where its object begins.
        last: No more of it will be: what is before the array may be damaged.
    """
    places = [*islice(_EVENTS.finditer(window, start), _GUESSES)]
    for place in places:
        if _object(window[start : place.start()].rstrip().removesuffix(b",") + b"}") is not None:
            return place
    return places[0] if places and last else None


def _object(text: bytes) -> dict[str, msgspec.Raw] | None:
    """Return a JSON object by key, None for what is none."""
    try:
        found: dict[str, msgspec.Raw] = msgspec.json.decode(
            without_no_numbers(text), type=dict[str, msgspec.Raw]
        )
    except NOT_JSON:
        return None
    return found


# What stands before the events grows with the process groups: 17 kB for 300 ranks.
_SIZE, _CHROME_HEAD_NEAR = 1 << 16, 1 << 23


def read_head(path: Path) -> ChromeStream[Any]:
    """Read up to the first event: ``top`` has what stands there, ``events`` whether it is a trace.

    Raises:
        TraceError: See `Source`.
    """
    with Source(path) as source:
        stream = ChromeStream(source, msgspec.json.Decoder(list[Any]), _SIZE, _CHROME_HEAD_NEAR)
        stream.open()
    return stream
