"""Decode the events of a Chrome trace: exact times, ids as integers, and codes for texts."""

import decimal
import itertools
import operator
from collections.abc import Iterator, Sequence
from sys import getsizeof
from typing import Any, cast

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.tables.arrays import Int64s

MISSING = -1
"""Stands for an id that an event does not have."""

LARGEST_TIME = 2**62
"""Times beyond it, in nanoseconds, are damage: the year 2116. Sums of two fit into 64 bits."""

NO_TIME = -(2**63)
"""Stands for an invalid time, or one beyond `LARGEST_TIME`."""

Id = int | float | str | None
"""As ids are found in real traces: 7, "stream 7", "PyTorch Profiler", null."""


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


# Below it, in microseconds (101 days), neighbouring doubles are less than 0.001 apart.
_DOUBLES = 2.0**43
_ABSENT = -(2.0**42)
# Events of a batch that tell whether its times are below: the first ones, and some in between.
_FEW, _SAMPLES = 8, 32
_time = operator.attrgetter("ts")


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
        if found.dtype == np.int64 and found.min() >= MISSING and found.max() < LARGEST_TIME:
            return found
    except (OverflowError, ValueError):
        pass
    return np.array([_integer(value) for value in values], np.int64)


def _integer(value: Id) -> int:
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
    known = value is not None and 0 <= value < LARGEST_TIME and value == int(value)
    return int(value) if known else MISSING  # type: ignore[arg-type]


_INTS = msgspec.json.Decoder(list[int])
_EXACT = decimal.Context(prec=40, traps=[])


def nanoseconds(times: Sequence[msgspec.Raw] | Sequence[float]) -> Int64s:
    """Turn microseconds into nanoseconds, exactly; `NO_TIME` for anything else.

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
        return _of_texts(cast("Sequence[msgspec.Raw]", times))
    try:
        floats = np.array(times, np.float64)
    except (TypeError, ValueError):  # of a damaged batch: as they are written from some event on
        cut = next(at for at, time in enumerate(times) if not isinstance(time, float))
        return np.concatenate([nanoseconds(times[:cut]), nanoseconds(times[cut:])])
    sound = (floats > _ABSENT) & (floats < _DOUBLES)
    floats = np.where(sound, floats, 0)
    whole = np.floor(floats)
    rest = np.rint((floats - whole) * 1000).astype(np.int64)
    return np.where(sound, whole.astype(np.int64) * 1000 + rest, NO_TIME)


def _of_texts(texts: Sequence[msgspec.Raw]) -> Int64s:
    joined = b"[" + b",".join(texts) + b"]"
    try:
        integers = _INTS.decode(joined)
        if max(map(abs, integers)) < LARGEST_TIME // 1000:
            return np.array(integers, np.int64) * 1000
    except NOT_JSON:
        pass
    if (split := _split(texts)) is not None:
        return split
    return np.fromiter((_exactly(bytes(text)) for text in texts), np.int64, len(texts))


def _split(texts: Sequence[msgspec.Raw]) -> Int64s | None:
    """Read times since 1970, which doubles cannot hold; None where one is written otherwise."""
    parts = [bytes(text).partition(b".") for text in texts]
    try:
        whole = np.array(_INTS.decode(b"[%b]" % b",".join([part[0] for part in parts])), np.int64)
        # A one before them: JSON has no numbers that begin with 0.
        digits = b",".join([b"1" + part[2].ljust(3, b"0") for part in parts])
        rest = np.array(_INTS.decode(b"[%b]" % digits), np.int64) - 1000
    except (*NOT_JSON, OverflowError):
        return None
    if b"e" in digits.lower():
        return None
    sound = (rest >= 0) & (rest < 1000) & (abs(whole) < LARGEST_TIME // 1000)
    if len(whole) != len(texts) or len(rest) != len(texts) or not sound.all():
        return None
    minus = [part[0].lstrip().startswith(b"-") for part in parts]
    return whole * 1000 + np.where(minus, -rest, rest)


def _exactly(text: bytes) -> int:
    value = _EXACT.multiply(_EXACT.create_decimal(text.decode("latin-1")), 1000)
    if not value.is_finite() or abs(value) >= LARGEST_TIME:
        return NO_TIME
    return int(_EXACT.to_integral_value(value))


MOST_NAMES = 1 << 18
"""Most distinct texts; a day of a large job has some ten thousand names."""

MOST_BYTES = 1 << 25
"""Most memory of distinct texts; names of kernels have up to some thousand characters."""


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
            # Past this method: a dict's own way to a key would come back here.
            self[self._other] = other = self.get(self._other, code)
            return other
        self[value] = code
        self._left -= size
        return code
