"""The events of a Chrome trace in batches, through one buffer that is used again and again."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from lightning_rlprof.loaders.chrome_bytes import Source

__all__ = ["LARGEST", "SIZE", "ChromeStream", "Decoder"]

T = TypeVar("T")

SIZE = 1 << 20
"""Bytes of the buffer: more leave the processor's cache, fewer pay more often for a batch."""

LARGEST = 1 << 25
"""An event, or what stands beside the events, cannot be larger; beyond it reading ends."""

# Where borders between events are looked for, and how many are tried: lists of objects in the last
# event's arguments look like them.
_NEAR, _GUESSES = 1 << 14, 3
_SHORT = 1 << 12  # most events are shorter
_KEY = r'"(?:args|bp|cat|cname|dur|id|name|ph|pid|s|sf|tdur|tid|ts|tts)"\s*:'
_EVENT = r"\s*(?=\{\s*" + _KEY + ")"
_SEPARATOR = re.compile(rb"\}\s*," + _EVENT.encode())
_FOLLOWING = re.compile(r"," + _EVENT)
_FIRST = re.compile(rb"\[" + _EVENT.encode())
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")
_AFTER = re.compile(
    r'\](?=\s*,\s*"(?:baseTimeNanoseconds|deviceProperties|displayTimeUnit|distributedInfo|INFO|'
    r'schemaVersion|traceName)"\s*:)'
)
# What C++ and Python print for a number that JSON cannot write: NaN, -nan, Infinity, inf. Only as
# the value of a key, so that names are left alone.
_NO_NUMBER = re.compile(rb'":[\s-]*[NnIi](?:aN|an|nfinity|nf)(?=\s*[,}])')
# Broken events that are passed over, and places behind one where the next may begin: each may cost
# a thousand nested brackets where somebody means harm.
_MOST_BROKEN, _TRIES = 10_000, 1_000
# The quickest way to find the end of one value: its numbers need not become numbers.
_PARSE = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode
_BAD = (ValueError, RecursionError)  # what both decoders raise for what they cannot read


class Decoder(Protocol[T]):
    """What turns a JSON array of events into a list, as `msgspec.json.Decoder` does."""

    def decode(self, data: Any, /) -> list[T]:
        """Return the events; ValueError or RecursionError for what it cannot read."""


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
        self.lost = self._broken = 0
        self.problems: list[str] = []
        self.complete = False
        self._source, self._decode, self._most = source, decoder.decode, most
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
            found = (_FIRST.match if kind == b"[" else _EVENTS.search)(window, start)
            if kind not in (b"[", b"{", b"") or (found is None and not more):
                return False
            if found is not None:
                if kind == b"{":
                    self._keep(window[start : found.start()].rstrip().removesuffix(b",") + b"}")
                self._low += found.end()
                self._bare, self.events = kind == b"[", True
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
        if self._broken >= _MOST_BROKEN:
            return f"it is broken in {_MOST_BROKEN:,} places"
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
            except _BAD:
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
        sound = _NO_NUMBER.sub(_emptied, window)
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
        at, gap = _past_gap(text, 0), -1
        while at < len(text) and not self._ended:
            if text[at] == "]":
                self._ended, end = True, at + 1
            elif (end := _value(text, at)[1]) > 0:
                pieces.append(window[at:end])
            elif (end := self._behind(text, at, last=last)) > 0:
                self._broken += gap != len(pieces)  # a row of them is one place
                self.lost, gap = self.lost + 1, len(pieces)
            else:
                break
            at = end if self._ended else _past_gap(text, end)
        self._low += at
        return self._sound(pieces)

    def _behind(self, text: str, at: int, *, last: bool) -> int:
        """Return where to go on behind a broken event, -1 if nowhere."""
        if self._broken >= _MOST_BROKEN:
            return -1
        end = _next_event(text, at)
        return _rest(text, at) if end < 0 and last else end

    def _sound(self, pieces: list[bytes]) -> list[T]:
        """Decode pieces, without those that the decoder refuses."""
        try:
            return self._decode(b"[" + b",".join(pieces) + b"]")
        except _BAD:
            sound = []
            for piece in pieces:
                try:
                    sound += self._decode(b"[" + piece + b"]")
                except _BAD:
                    self.lost += 1
            return sound

    def _read_rest(self) -> None:
        """Read what stands behind the events."""
        while self._fill():
            pass
        rest = bytes(self._buffer[self._low : self._high]).lstrip(b", \r\n\t")
        if not self._bare:
            self._keep(b"{" + rest)

    def _keep(self, top: bytes) -> None:
        try:
            sound = _NO_NUMBER.sub(_emptied, top)
            self.top |= msgspec.json.decode(sound, type=dict[str, msgspec.Raw])
        except _BAD:
            self.problems.append("what its file says beside the events cannot be read")


def _past_gap(text: str, at: int) -> int:
    found = _GAP.match(text, at)
    return found.end() if found else at


def _emptied(found: re.Match[bytes]) -> bytes:
    """Return the same key with an empty text of the same length, unless it stands in a text."""
    before = found.string[max(found.start() - 1, 0) : found.start()]
    return found[0] if before == b"\\" else b'":' + b'""'.ljust(len(found[0]) - 2)


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins here and where it ends, -1 where it is broken or not complete.

    Looks at more and more of the text: json counts the lines before every error.
    """
    size = _SHORT
    while True:
        part = text[at : at + size]
        try:
            value, length = _PARSE(part)
            return value, at + length
        except RecursionError:
            return None, -1
        except json.JSONDecodeError as error:
            sure = error.pos < len(part) - _SHORT // 2 and not error.msg.startswith("Unterminated")
            if sure or at + size >= len(text):
                return None, -1
        size *= 16


def _next_event(text: str, at: int) -> int:
    """Return where the next event behind a broken one begins, be it broken or not; else -1."""
    for found in itertools.islice(_FOLLOWING.finditer(text, at), _TRIES):
        value, _ = _value(text, found.end())
        if "ph" in value if isinstance(value, dict) else _has_phase(text, found.end()):
            return found.end()
    return -1


def _has_phase(text: str, at: int) -> bool:
    following = _FOLLOWING.search(text, at, at + _SHORT)
    return '"ph"' in text[at : following.start() if following else at + _SHORT]


def _rest(text: str, at: int) -> int:
    """Return where the events end behind a broken last one, -1 if they do not."""
    found = _AFTER.search(text, at)
    try:
        if found is not None:
            msgspec.json.decode("{" + text[found.end() :].lstrip(", \r\n\t"))
            return found.start()
    except _BAD:
        pass
    return -1
