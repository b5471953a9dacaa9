"""Chrome-trace JSON as batches of whole events, through one buffer of a fixed size.

The stream knows events, not the profiler that wrote them. A file that is cut off is read up to the
cut. After an event that can't be parsed, reading continues at the next one. `read_head` reads only
what a trace contains before its events. Times are exact, ids integers, and texts have codes.
"""

import decimal
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from sys import getsizeof
from typing import Any, BinaryIO, Generic, TypeVar, cast

import msgspec
import numpy as np
from isal import isal_zlib

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN
from lightning_rlprof.tables.table import Cut, Damage, Loss

MISSING = -1
"""Stands for an id that an event does not have."""

MAX_TIME = 2**62
"""Times beyond it, in nanoseconds, are damage: the year 2116. Sums of two fit into 64 bits."""

Id = int | float | str | None
"""As ids are found in real traces: 7, "stream 7", "PyTorch Profiler", null."""

# Below this number of microseconds (101 days), neighboring doubles are less than 0.001 apart.
_DOUBLES = 2.0**43
_ABSENT = -(2.0**42)

# The first events of a batch, and some in between, show whether all its times are below that.
_FEW, _SAMPLES = 8, 32
_time = operator.attrgetter("ts")
_INTS = msgspec.json.Decoder(list[int])
_TENS = 10 ** np.arange(4)
_EXACT = decimal.Context(prec=40, traps=[])
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
MOST_NAMES = 1 << 18
"""Most distinct texts; a day of a large job has some ten thousand names."""

MOST_BYTES = 1 << 25
"""Most memory of distinct texts; names of kernels have up to some thousand characters."""

_KEY = r'"(?:args|bp|cat|cname|dur|id|name|ph|pid|s|sf|tdur|tid|ts|tts)"\s*:'
_EVENT = r"\s*(?=\{\s*" + _KEY + ")"  # It matches the blanks before an event.
_GAP = re.compile(r"[\s,]*")

# Where an event may begin, and how a broken one is recognized: lists of objects in its arguments
# begin alike, and only an event has a phase.
_BEGIN = re.compile(r"\{\s*" + _KEY)
_LAST = re.compile(r"\]\s*,?\s*(?=[\"}])")  # Where all events may end.
_MAX_ENDS_TRIED = 64
_NUMBER_AS_NAME = re.compile(rb'("name"\s*:\s*)(-?\d[\d.eE+-]*)')

# JSON cannot write NaN, -nan, Infinity and inf, but C++ and Python do. They match only as the value
# of a key, so that names stay as they are.
_NON_FINITE = re.compile(rb'":[\s-]*[NnIi](?:aN|an|nfinity|nf)(?=\s*[,}])')

# This finds the end of a value fastest, because its numbers stay texts.
_PARSE = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode
_BROKEN, _INCOMPLETE = -1, -2
_TOO_DEEP = object()
_MANY_BRACKETS = 500  # Fewer make no value too deep, so none of these begins an event.
_PIECE = 1 << 12  # Characters; most events are shorter.
_LITERAL = 16  # Characters; the longest escape or literal that a cut may split is shorter.
BOMB_RATIO = 200
"""Real traces are 10 to 22 times as long as their .gz."""

BOMB_BYTES = 1 << 28
"""Up to here a compressed file may expand by any ratio: two seconds of work."""

_CHUNK, _STEP = 1 << 14, 1 << 16  # Bytes that are read, and decompressed, at once.
_GZIP_MEMBER = 31  # It asks zlib for gzip's header, and its checksum at the end.
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
T = TypeVar("T")
SIZE = 1 << 20
"""Bytes of the buffer: more leave the processor's cache, fewer pay more often for a batch."""

MAX_EVENT_BYTES = 1 << 25
"""Reading ends at an event, or at metadata, that is larger."""

# Bytes in which borders between events are searched for, and how many borders are tried. Lists of
# objects in the arguments of the last event look like borders.
_NEAR, _GUESSES = 1 << 14, 3
_SEPARATOR = re.compile(rb"\}\s*," + _EVENT.encode())
_FIRST = re.compile(rb"\[" + _EVENT.encode())
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')

# The part before the events grows with the process groups: 17 kB for 300 ranks.
_HEAD_SIZE, _LARGEST_HEAD = 1 << 16, 1 << 23


class Event(msgspec.Struct, gc=False):
    """What is decoded of one event; times and arguments stay as they are written."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Id = None
    tid: Id = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Quick(Event, gc=False):
    """An event whose times are numbers that doubles hold."""

    ts: float = _ABSENT  # type: ignore[assignment]
    dur: float = _ABSENT  # type: ignore[assignment]


class EventDecoder:
    """Decode events with their times as numbers where those are exact, else as they are written.

    Where they were not, it is not tried again: such a trace counts from 1970, or is damaged.
    """

    def __init__(self) -> None:
        self._quick: Any = msgspec.json.Decoder(list[_Quick]).decode
        self._decode = msgspec.json.Decoder(list[Event]).decode

    def decode(self, data: Any) -> list[Event]:
        """Return the events of a JSON array; raises as msgspec does for what is none."""
        if self._quick is not None:
            try:
                events = self._quick(data)
                if max(map(_time, _some(events)), default=0) < _DOUBLES:
                    return cast("list[Event]", events)
            except msgspec.ValidationError:
                pass
            self._quick = None
        return self._decode(data)


def _some(events: list[_Quick]) -> Iterator[_Quick]:
    """Yield a few slices of time: a trace counts from one beginning, but one may be damaged."""
    slices = (each for each in events if each.ph == "X")
    yield from itertools.islice(slices, _FEW)
    yield from (each for each in events[:: len(events) // _SAMPLES + 1] if each.ph == "X")


def integers(values: list[Any]) -> Int64s:
    """Return ids and sizes as integers: a whole number or its text, `MISSING` for anything else.

    Example::

        >>> integers([7, "8", None, 9.0, "stream 7", 2**70, -5, 0.5]).tolist()
        [7, 8, -1, 9, -1, -1, -1, -1]
    """
    try:
        found = np.array(values)
        if found.dtype == np.int64 and found.min() >= MISSING and found.max() < MAX_TIME:
            return found
    except (OverflowError, ValueError):
        pass
    return np.array([_integer(value) for value in values], np.int64)


def _integer(value: Id) -> int:
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
    known = value is not None and 0 <= value < MAX_TIME and value == int(value)
    return int(value) if known else MISSING  # type: ignore[arg-type]


def nanoseconds(times: Sequence[bytes] | Sequence[float]) -> Int64s:
    """Turn microseconds into nanoseconds, exactly; `UNKNOWN` for anything else.

    Args:
        times: As they are written, or as `EventDecoder` read them. Below 2**43 µs, neighbouring
            doubles are less than 0.001 apart; torch counts from the beginning of a quarter. So
            the whole part is exact, and the nearest thousandth of the rest is the one that was
            written. Multiplying first would not do: x * 1000 rounds wrongly near 2**42.

    Example::

        >>> nanoseconds([msgspec.Raw(b"4398046511104.001"), msgspec.Raw(b"null")]).tolist()[0]
        4398046511104001
        >>> nanoseconds([4398046511104.001]).tolist()
        [4398046511104001]
    """
    if not times or not isinstance(times[0], float):
        return _of_texts(cast("Sequence[bytes]", times))
    try:
        floats = np.array(times, np.float64)
    except (TypeError, ValueError):
        # A damaged batch has other values than floats from some event on.
        cut = next(at for at, time in enumerate(times) if not isinstance(time, float))
        return np.concatenate([nanoseconds(times[:cut]), nanoseconds(times[cut:])])
    sound = (floats > _ABSENT) & (floats < _DOUBLES)
    floats = np.where(sound, floats, 0)
    whole = np.floor(floats)
    rest = np.rint((floats - whole) * 1000).astype(np.int64)
    return np.where(sound, whole.astype(np.int64) * 1000 + rest, UNKNOWN)


def _of_texts(texts: Sequence[bytes]) -> Int64s:
    """Read all at once where all are whole numbers, or all have a point, as those since 1970."""
    joined = b",".join(texts)
    between = joined.translate(None, b"0123456789")
    with suppress(*NOT_JSON, OverflowError):
        if between == b"," * (len(texts) - 1):
            numbers = np.array(_INTS.decode(b"[%b]" % joined), np.int64)
            if numbers.max() < MAX_TIME // 1000:
                return numbers * 1000
        elif between == b",".join([b"."] * len(texts)):
            # JSON has no numbers that begin with 0, so a 1 is put before the digits.
            numbers = np.array(_INTS.decode(b"[%b]" % joined.replace(b".", b",1")), np.int64)
            whole, digits = numbers[::2], numbers[1::2]
            unit = _TENS[np.searchsorted(_TENS, digits, "right") - 1]
            if whole.max() < MAX_TIME // 1000 and digits.max() < 2000:
                return whole * 1000 + (digits - unit) * 1000 // unit
    return scaled([bytes(text).decode("latin-1") for text in texts], 1000)


def scaled(texts: Sequence[str | float | int | None], factor: int) -> Int64s:
    """Multiply decimals by a factor and round them to integers; other texts become `UNKNOWN`.

    A float counts as its shortest decimal.

    Example::

        >>> scaled(["2109.6015625", 8903.431, None], 2**20)[:2].tolist()
        [2212077568, 9335924064]
    """
    return np.fromiter((_scaled(text, factor) for text in texts), np.int64, len(texts))


def _scaled(value: str | float | int | None, factor: int) -> int:
    text = "" if value is None else str(value).strip()
    if "," in text and _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    number = _EXACT.multiply(_EXACT.create_decimal(text or "NaN"), factor)
    if not number.is_finite() or abs(number) >= MAX_TIME:
        return UNKNOWN
    return int(_EXACT.to_integral_value(number))


class Codes(dict[Any, int]):
    """Numbers for texts, or tuples of them, in the order in which they come.

    ``codes[text]`` is its number, a new one where the text is new. Beyond the bounds all new texts
    have one number, that of ``other``.

    Args:
        other: What stands for all texts beyond the bounds.
        most: Most distinct texts.

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
            # Reading `self[self._other]` would call this method again.
            self[self._other] = other = self.get(self._other, code)
            return other
        self[value] = code
        self._left -= size
        return code


def replace_non_finite(text: bytes) -> bytes:
    """Replace numbers that JSON cannot write by empty texts of the same length.

    Example::

        >>> replace_non_finite(b'{"dur": NaN, "name": "NaN"}')
        b'{"dur":""  , "name": "NaN"}'
    """
    return _NON_FINITE.sub(_emptied, text)


def _emptied(found: re.Match[bytes]) -> bytes:
    """Return the same key with an empty text of the same length, unless it stands in a text."""
    before = found.string[max(found.start() - 1, 0) : found.start()]
    return found[0] if before == b"\\" else b'":' + b'""'.ljust(len(found[0]) - 2)


def _value_at(text: str, at: int, size: int = _PIECE) -> tuple[Any, int]:
    """Return the JSON value that begins here, and its end, else `_BROKEN` or `_INCOMPLETE`.

    Of what has too many brackets for a value, the value is `_TOO_DEEP`.
    """
    # An error counts the lines before it, so a short piece is tried first.
    part = text[at : at + size]
    try:
        value, end = _PARSE(part)
    except RecursionError:
        return _TOO_DEEP, _BROKEN
    except json.JSONDecodeError as error:
        cut = error.pos >= len(part) - _LITERAL or error.msg.startswith("Unterminated")
        if cut and len(text) > at + size:
            return _value_at(text, at, len(text))
        return None, _INCOMPLETE if cut else _BROKEN
    return value, at + end


def _legible(event: bytes) -> bytes:
    r"""Return an event whose name is a text: numbers in quotes, bytes that are no UTF-8 replaced.

    Example::

        >>> _legible(b'{"name": 5, "ts": 1}'), _legible(b'{"name": "\xff"}').decode()
        (b'{"name": "5", "ts": 1}', '{"name": "\ufffd"}')
    """
    return _NUMBER_AS_NAME.sub(rb'\1"\2"', event.decode("utf-8", "replace").encode())


class ChromeStream(Generic[T]):
    """Cut a trace into batches of whole events, whatever its layout.

    A batch is valid until the next one is asked for: `msgspec.Raw` in it points into the buffer.
    Takes a few times ``size`` of memory for any file whose events are smaller.

    Args:
        source: The bytes.
        decode: Turns a JSON array of events into a list; an event that it refuses is left out.
        size: Bytes of the buffer.
        most: Bytes that the buffer may grow to for one large event, or for large metadata.

    Attributes:
        top: What the file contains besides the events, by key; complete after the last batch.
        events: Whether the array of events was found.
        read: Events that were read.
        lost: Events that were left out because their values have wrong types.
        damaged: Events that can't be parsed, at least; reading continued at the next event.
        damaged_bytes: Bytes that were left out there.
        problems: Why the file was not read to its end, or what is wrong in it.
        complete: Whether the end of the events was reached, and nothing was wrong behind it.
    """

    def __init__(
        self,
        source: "Source",
        decode: Callable[[Any], list[T]],
        size: int = SIZE,
        most: int = MAX_EVENT_BYTES,
    ) -> None:
        self.top: dict[str, msgspec.Raw] = {}
        self.events = False
        self.read = self.lost = self.damaged = self.damaged_bytes = 0
        self.problems: list[str] = []
        self.complete = False
        self._source, self._decode, self._most = source, decode, most
        self._buffer = bytearray(max(size, 16))
        # The bytes in between are not yet cut into events; the byte before them is free for a
        # bracket.
        self._low = self._high = 1
        self._ended = self._bare = self._in_damage = False

    def open(self) -> bool:
        """Read on to the first event; False if the file has no array of events."""
        while not self.events:
            more = self._fill()
            window = bytes(self._buffer[self._low : self._high])
            start = len(window) - len(window.removeprefix(b"\xef\xbb\xbf").lstrip())
            kind = window[start : start + 1]
            bare = kind == b"["
            found = _FIRST.match(window, start) if bare else _EVENTS.search(window, start)
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
            if batch is None:
                window = self._buffer[self._low : self._high]
                self._buffer[self._low : self._high] = replace_non_finite(bytes(window))
                batch = self._at_once()
            if batch is None:
                batch = self._one_by_one(more)
            else:
                self._in_damage = False
            self.read += len(batch)
            yield batch
            if self._low == low and not more:
                self.problems.append(self._end())
                break
        if self._ended:
            self._read_rest()
            if self._source.problem:
                self.problems.append(self._source.problem)
        self.complete = self._ended and not self.problems
        if self.damaged:
            text = f"{self.damaged:,} damaged events are left out, {self.damaged_bytes:,} bytes"
            facts = {"events": self.damaged, "bytes": self.damaged_bytes}
            self.problems.append(Damage(text, **facts))

    @property
    def truncated(self) -> bool:
        """Whether reading ended before the last event; the first problem is then why."""
        return self.events and not self._ended

    def _end(self) -> str:
        """Say why reading ended before the last event."""
        if self._high >= self._most:
            why, rest = f"an event is larger than {self._most:,} bytes", "the rest is left out"
        else:
            why, rest = self._source.problem or "it is truncated", "the rest is missing"
        return Cut(f"{why}: {self.read:,} events were read, {rest}")

    def _fill(self) -> bool:
        """Move what is left to the front and fill up the buffer; False when there is no more."""
        left = self._high - self._low
        self._buffer[1 : 1 + left] = self._buffer[self._low : self._high]
        self._low, self._high = 1, 1 + left
        if self._high == len(self._buffer):
            if self._high >= self._most:
                return False
            # Earlier events may point into the old buffer.
            self._buffer = self._buffer + bytes(self._high)
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

    def _one_by_one(self, more: bool) -> list[T]:
        """Decode each event on its own, and leave out broken ones; six times as slow.

        Args:
            more: Whether the file, and the buffer, may have more of the last event.
        """
        window = bytes(self._buffer[self._low : self._high])
        text = window.decode("latin-1")  # Latin-1 has one character per byte.
        events: list[T] = []
        at = 0
        while (at := _GAP.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            if text[at] == "]" and not self._in_damage:
                self._ended, at = True, at + 1
                break
            value, end = _value_at(text, at)
            is_event = end == _INCOMPLETE or (isinstance(value, dict) and "ph" in value)
            if self._in_damage and (text[at] != "{" or not is_event):
                end = _BROKEN  # It is a part of the broken event.
            if end < 0:
                if end == _INCOMPLETE and more:
                    break
                deep = value is _TOO_DEEP
                following = self._next(text, at + (_MANY_BRACKETS if deep else 1), more, end)
                if following < 0:
                    break
                begun = text.count('"ph"', at, following)  # Each event has one phase.
                self.damaged += max(begun, not self._in_damage)
                self.damaged_bytes += following - at
                # At the end of the file, a bracket is where all events end.
                self._in_damage, at = more or text[following : following + 1] != "]", following
                continue
            self._in_damage = False
            try:
                events += self._decode(b"[%b]" % window[at:end])
            except NOT_JSON:
                events += self._repaired(window[at:end])
            at = end
        self._low += at
        return events

    def _repaired(self, event: bytes) -> list[T]:
        """Decode an event that was refused with its name as a text; it is lost if that fails."""
        try:
            return self._decode(b"[%b]" % _legible(event))
        except NOT_JSON:
            self.lost += 1
            return []

    def _next(self, text: str, begin: int, more: bool, end: int) -> int:
        """Return where reading continues behind an event that is broken, or never ends.

        That is the next event, else the end of all events, else the end of the text. It is -1 if
        more of the text decides that, or if nothing follows an event that never ends: it was cut.
        """
        last = -1
        while found := _BEGIN.search(text, begin):
            last = found.start()
            value, over = _value_at(text, last)
            if (over > 0 and "ph" in value) or (over == _INCOMPLETE and more):
                return last
            begin = last + (_MANY_BRACKETS if value is _TOO_DEEP else 1)
        if more or end == _INCOMPLETE:
            return last if more else -1
        for found in itertools.islice(_LAST.finditer(text, begin), _MAX_ENDS_TRIED):
            rest = "{" + text[found.end() :].rstrip(" \0\r\n\t")
            if not self._bare and _value_at(rest, 0)[1] == len(rest):
                return found.start()
        return len(text)

    def _read_rest(self) -> None:
        """Read what stands behind the events."""
        while self._fill():
            pass
        rest = bytes(self._buffer[self._low : self._high]).lstrip(b", \r\n\t")
        if not self._bare:
            rest = b"{" + rest
            end = _value_at(rest.decode("latin-1"), 0)[1]
            end = len(rest) if end < 0 else end
            self._keep(rest[:end])
            rest = rest[end:]
        if rest.strip(b"\0 \r\n\t"):
            self.problems.append(Loss("data after its end, such as a second trace, is left out"))

    def _keep(self, top: bytes) -> None:
        try:
            self.top |= msgspec.json.decode(replace_non_finite(top), type=dict[str, msgspec.Raw])
        except NOT_JSON:
            self.problems.append("the data outside of the events can't be read")


def read_batches(
    path: Path, decode: Callable[[Any], list[T]], take: Callable[[list[T]], None]
) -> ChromeStream[T]:
    """Hand all batches of a file to a function; they are valid until it returns.

    Raises:
        TraceError: See `Source`; also of a file without an array of events.
    """
    with Source(path) as source:
        stream = ChromeStream(source, decode, SIZE)
        if not stream.open():
            why = f" ({source.problem})" if source.problem else ""
            raise TraceError(f'{path}: not a Chrome trace, no array "traceEvents"{why}')
        for batch in stream:
            take(batch)
    return stream


def read_head(path: Path) -> ChromeStream[Any]:
    """Read up to the first event: ``top`` has what stands there, ``events`` whether it is a trace.

    Raises:
        TraceError: See `Source`.
    """
    with Source(path) as source:
        stream = ChromeStream(source, msgspec.json.decode, _HEAD_SIZE, _LARGEST_HEAD)
        stream.open()
    return stream


def read_first(
    path: Path, decode: Callable[[Any], list[T]]
) -> tuple[dict[str, msgspec.Raw], list[T]]:
    """Return what stands before the first events of a trace, and those; none of any other file.

    Raises:
        TraceError: See `Source`.
    """
    with Source(path) as source:
        stream = ChromeStream(source, decode, _HEAD_SIZE, _LARGEST_HEAD)
        return stream.top, next(iter(stream), [])


class _DamagedError(Exception):
    """The compressed data ends early or is broken; the text says how."""


class Source(AbstractContextManager["Source"]):
    """Read a plain or gzip file as one stream; which of them, its first bytes tell.

    ``problem`` says why the stream ended before the file's end, None if it did not.

    Args:
        path: The file.

    Raises:
        TraceError: It cannot be opened or read, expands beyond `BOMB_RATIO`, or is compressed in
            another way.
    """

    def __init__(self, path: Path) -> None:
        self.problem: str | None = None
        self._path = path
        self._read = 0
        try:
            self._file = path.open("rb")
            magic = self._file.read(len(_ZSTD))
            self._file.seek(0)
            self._size = path.stat().st_size
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
        if magic == _ZSTD:
            self._file.close()
            raise TraceError(f"{path}: compressed with zstd; decompress it first (zstd -d)")
        self._limit: int | None = None
        self._stream: BinaryIO | _Gzip = self._file
        if magic.startswith(_GZIP):
            self._limit = max(BOMB_BYTES, BOMB_RATIO * self._size)
            self._stream = _Gzip(self._file)

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()

    def readinto(self, view: memoryview) -> int:
        """Fill the beginning of ``view`` (not empty) and return how much; 0 when all is read."""
        if self.problem is not None:
            return 0
        try:
            count = self._stream.readinto(view) or 0  # type: ignore[union-attr]
        except _DamagedError as damage:
            self.problem = str(damage)
            return 0
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read ({error.strerror})") from error
        self._read += count
        if self._limit is not None and self._read > self._limit:
            raise TraceError(
                f"{self._path}: its {self._size:,} bytes expand to more than {self._limit:,}, "
                f"{BOMB_RATIO} times as many; decompress it yourself if it is a trace"
            )
        return count


class _Gzip:
    """Gzip members, one after the other.

    Everything before a cut is returned, where `isal.igzip` loses what one call has decompressed.
    Damage costs what follows, and up to `_STEP` bytes before it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rest = b""
        self._member: Any = isal_zlib.decompressobj(_GZIP_MEMBER)

    def readinto(self, view: memoryview, /) -> int:
        while not self._member.eof or self._next_member():
            data = self._member.unconsumed_tail or self._rest or self._file.read(_CHUNK)
            self._rest = b""
            try:
                out = self._member.decompress(data, min(len(view), _STEP))
            except isal_zlib.error as error:  # type: ignore[misc]  # Its stub says Exception().
                raise _DamagedError(f"its compressed data is damaged ({error})") from error
            if out:
                view[: len(out)] = out
                return len(out)
            if not data and not self._member.eof:
                raise _DamagedError("its compressed data is truncated")
        return 0

    def _next_member(self) -> bool:
        """Begin the next member, after zeros that only fill up a block; False without one."""
        rest = self._member.unused_data.lstrip(b"\0")
        while not rest and (more := self._file.read(_CHUNK)):
            rest = more.lstrip(b"\0")
        if rest and not rest.startswith(_GZIP[:1]):
            raise _DamagedError("its compressed data is followed by other data")
        if rest:
            self._rest, self._member = rest, isal_zlib.decompressobj(_GZIP_MEMBER)
        return bool(rest)
