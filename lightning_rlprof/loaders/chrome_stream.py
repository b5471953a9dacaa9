"""The events of a Chrome trace in batches, through one buffer that is used again and again."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from lightning_rlprof.loaders.chrome_bytes import Source

__all__ = ["LARGEST", "SIZE", "ChromeStream"]

T = TypeVar("T")

SIZE = 1 << 20
"""Bytes of the buffer: more leave the processor's cache, fewer pay more often for a batch."""

LARGEST = 1 << 25
"""An event, or what stands beside the events, cannot be larger; beyond it reading ends."""

# Where borders between events are looked for, and how many are tried: lists of objects in the last
# event's arguments look like them.
_NEAR, _GUESSES = 1 << 14, 3
_KEY = r'"(?:args|bp|cat|cname|dur|id|name|ph|pid|s|sf|tdur|tid|ts|tts)"\s*:'
_EVENT = r"\s*(?=\{\s*" + _KEY + ")"
_SEPARATOR = re.compile(rb"\}\s*," + _EVENT.encode())
_FOLLOWING = re.compile(r"," + _EVENT)
_FIRST = re.compile(rb"\[" + _EVENT.encode())
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")
_AFTER = re.compile(rb'\](?=\s*(?:,\s*"|\}\s*$))')
_TOP = {"baseTimeNanoseconds", "deviceProperties", "displayTimeUnit", "schemaVersion", "traceName"}
# What C++ and Python print for a number that JSON cannot write; only as the value of a key, so that
# names are left alone.
_NO_NUMBER = re.compile(rb'((?<!\\)"\s*:\s*)(-?(?:NaN|nan|Infinity|inf))(?=\s*[,}])')
# Places behind a broken event that are tried before the file is given up: each may cost a thousand
# brackets where somebody nests them on purpose.
_TRIES = 1_000
# The quickest way to find the end of one value: its numbers need not become numbers.
_PARSE = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode
_BAD = (ValueError, RecursionError)  # what both decoders raise for what they cannot read


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
        decoder: msgspec.json.Decoder[list[T]],
        size: int = SIZE,
        most: int = LARGEST,
    ) -> None:
        self.top: dict[str, msgspec.Raw] = {}
        self.events = False
        self.lost = 0
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
                large = self._high >= self._most
                reason = (
                    f"it holds an event above {self._most:,} bytes" if large else "it is cut off"
                )
                self.problems.append(f"{reason}: read up to the last complete event before")
                break
        if self._ended:
            self._read_rest()
        if self._source.problem:
            self.problems.append(self._source.problem)
        self.complete = self._ended and not self.problems

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
        sound, count = _NO_NUMBER.subn(lambda m: m[1] + b'""'.ljust(len(m[2])), window)
        self._buffer[self._low : self._high] = sound
        return count > 0

    def _one_by_one(self, *, last: bool) -> list[T]:
        """Decode each complete event by itself, over the ones that are broken; six times as slow.

        Args:
            last: Nothing follows: what cannot be read now, never can.
        """
        window = bytes(self._buffer[self._low : self._high])
        text = window.decode("latin-1")  # one character per byte
        pieces: list[bytes] = []
        at = _past_gap(text, 0)
        while at < len(text) and not self._ended:
            if text[at] == "]":
                self._ended, end = True, at + 1
            elif (end := _end(text, at)) > 0:
                pieces.append(window[at:end])
            elif (end := _next_event(text, at)) > 0 or (last and (end := _rest(window, at)) > 0):
                self.lost += 1
            else:
                break
            at = end if self._ended else _past_gap(text, end)
        self._low += at
        return self._sound(pieces)

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
            self.top |= msgspec.json.decode(
                _NO_NUMBER.sub(rb"\1null", top), type=dict[str, msgspec.Raw]
            )
        except _BAD:
            self.problems.append("what its file says beside the events cannot be read")


def _past_gap(text: str, at: int) -> int:
    found = _GAP.match(text, at)
    return found.end() if found else at


def _end(text: str, at: int) -> int:
    """Return where the value that begins here ends, -1 where it is broken or not complete."""
    try:
        return _PARSE(text, at)[1]
    except _BAD:
        return -1


def _next_event(text: str, at: int) -> int:
    """Return where the first event behind a broken one begins, -1 without any."""
    for found in itertools.islice(_FOLLOWING.finditer(text, at), _TRIES):
        try:
            value, _ = _PARSE(text, found.end())
        except _BAD:
            continue
        if isinstance(value, dict) and "ph" in value:
            return found.end()
    return -1


def _rest(window: bytes, at: int) -> int:
    """Return where the events end behind a broken last one, -1 if they do not."""
    for found in _AFTER.finditer(window, at):
        try:
            rest = msgspec.json.decode(b"{" + window[found.end() :].lstrip(b", \r\n\t"))
        except _BAD:
            continue
        if not _TOP.isdisjoint(rest):
            return found.start()
    return -1
