"""Read many span lines of a rank's file at once, straight into arrays.

`msgspec` makes an object of each line, and to get columns out of these takes four times as long as
to decode them. `parse` reads the form in which `TraceWriter` writes spans. It reads a block as a
whole or not at all, so that a line of any other form is decoded, or refused, as ever.
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.records.records import KINDS, Number
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.spans import NO_PARENT

_Words = np.ndarray[Any, np.dtype[np.uint64]]

_START = b'["span",'
_OTHERS = tuple(
    f'["{kind}",'.encode()
    for kind in ("thread", "count", "experts", "note", "sample", "metrics", "clock", "end")
)
_KINDS = {f'"{kind}",'.encode(): code for code, kind in enumerate(KINDS)}
_WIDTH = 8  # Bytes of a word.
_LONGEST_TEXT = 128  # Bytes of a name and a kind with their quotes.
_LONGEST_LINE = 1 << 16
_MOST_DIGITS = 18  # More may not fit into 64 bits.
_NULL = int.from_bytes(b"null", "little")
_NULL_END = int.from_bytes(b"null]", "little")
_FIELDS = ("step", "start_ns", "end_ns", "thread", "id", "parent")
_LOW = np.array([(1 << 8 * count) - 1 for count in range(_WIDTH + 1)], np.uint64)
_COUNTERS = msgspec.json.Decoder(list[dict[str, Number | None]])


class SpanBlock(NamedTuple):
    """Spans of a block of lines, in its order.

    Attributes:
        names: Distinct names, by their first line.
        name: Index into ``names``.
        kind: Index into `lightning_rlprof.records.records.KINDS`.
        numbers: A row each for step, start, end, thread, id and parent, or `NO_PARENT`.
        counted: Which spans have counters, ascending.
        counters: Those of each.
        others: The lines that are no spans.
    """

    names: list[str]
    name: Int64s
    kind: Int64s
    numbers: Int64s
    counted: Int64s
    counters: list[dict[str, Number | None]]
    others: list[bytes]


def parse(block: bytes) -> SpanBlock | None:
    r"""Return the spans of whole lines; None if some line is not as it is written.

    Args:
        block: Lines, without the newline of the last one.

    Example::

        >>> found = parse(b'["span","step","step",1,20,30,7,1,null,null]\n["thread",7,"Main"]')
        >>> found.names, found.numbers[:3, 0].tolist(), found.others
        (['step'], [1, 20, 30], [b'["thread",7,"Main"]'])
    """
    text = block + b"\n" + bytes(_LONGEST_TEXT)  # A word that begins in the last line ends here.
    read = np.frombuffer(text, np.uint8)
    words = np.ndarray((len(text) - _WIDTH + 1,), "<u8", text, strides=(1,))  # One at each byte.
    ends = np.flatnonzero(read == ord("\n"))
    starts = np.append(0, ends[:-1] + 1)
    is_span = words[starts] == int.from_bytes(_START, "little")
    others = [
        block[first:last]
        for first, last in zip(starts[~is_span].tolist(), ends[~is_span].tolist(), strict=True)
        if last > first
    ]
    escapes = np.flatnonzero(read == ord("\\"))
    if is_span[np.searchsorted(ends, escapes)].any():
        return None
    if not all(line.startswith(_OTHERS) for line in others):
        return None
    starts, ends = starts[is_span], ends[is_span]
    if not len(starts) or int((ends - starts).max()) > _LONGEST_LINE:
        return None
    quotes = np.append(np.flatnonzero(read == ord('"')), [len(text)] * 6)
    # Behind the two quotes of "span" are those of the name, and of the kind.
    at = np.searchsorted(quotes, starts) + 2
    name, kind = quotes[at], quotes[at + 2]
    commas = np.append(np.flatnonzero(read == ord(",")), [len(text)] * 7)
    first = np.searchsorted(commas, quotes[at + 3])  # The one behind the kind.
    behind = commas[first + 6]
    if (behind >= ends).any() or (quotes[at + 1] + 2 != kind).any():
        return None
    if (name != starts + len(_START)).any() or (read[kind - 1] != ord(",")).any():
        return None
    if (commas[first] != quotes[at + 3] + 1).any():
        return None
    coded = _texts(text, words, name, commas[first] + 1)
    numbers = _numbers(words, commas, first)
    counted = _with_counters(read, words, behind + 1, ends)
    if coded is None or numbers is None or counted is None:
        return None
    spans = zip((behind[counted] + 1).tolist(), (ends[counted] - 1).tolist(), strict=True)
    counters = _counters([block[low:high] for low, high in spans])
    if counters is None:
        return None
    return SpanBlock(*coded, numbers, counted, counters, others)


def _texts(
    text: bytes, words: _Words, first: Int64s, last: Int64s
) -> tuple[list[str], Int64s, Int64s] | None:
    """Return the names of texts such as ``"step","step",``, the code of each, and its kind."""
    size = last - first
    longest = int(size.max())
    if longest > _LONGEST_TEXT:
        return None
    parts = [
        words[first + skipped] & _LOW[(size - skipped).clip(0, _WIDTH)]
        for skipped in range(0, longest, _WIDTH)
    ]
    key = np.zeros(len(first), np.uint64)
    for part in parts:
        key = (key ^ part) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    known, where, code = np.unique(key, return_index=True, return_inverse=True)
    # Two texts may have one key.
    if any((part[where][code] != part).any() for part in parts):
        return None
    names: dict[str, int] = {}
    of_text, kind_of_text = np.zeros((2, len(known)), np.int64)
    for one in np.argsort(where).tolist():
        low, high = int(first[where[one]]), int(last[where[one]])
        name, _, kind = text[low + 1 : high].partition(b'",')
        try:
            decoded = name.decode()
        except UnicodeDecodeError:
            return None
        if kind not in _KINDS or min(name, default=ord(" ")) < ord(" "):
            return None
        of_text[one] = names.setdefault(decoded, len(names))
        kind_of_text[one] = _KINDS[kind]
    return [*names], of_text[code], kind_of_text[code]


def _numbers(words: _Words, commas: Int64s, first: Int64s) -> Int64s | None:
    """Return the whole numbers between seven commas in a row; None if some are none."""
    found = np.empty((len(_FIELDS), len(first)), np.int64)
    low = commas[first] + 1
    for at, field in enumerate(_FIELDS, start=1):
        high = commas[first + at]
        none: Mask | None = None
        if field == "parent":
            none = (high - low == 4) & (words[low] & np.uint64(0xFFFFFFFF) == _NULL)
        numbers = _whole(words, low, high, none)
        if numbers is None:
            return None
        found[at - 1] = numbers
        low = high + 1
    return found


def _whole(words: _Words, low: Int64s, high: Int64s, none: Mask | None) -> Int64s | None:
    """Return the numbers that some bytes stand for, and `NO_PARENT` where there is none.

    None if they are no whole numbers from 0 on. Eight digits become a number by three
    multiplications (https://johnnylee-sde.github.io/Fast-numeric-string-to-int/).
    """
    size = high - low
    longest = int(size.max())
    if longest > _MOST_DIGITS or int(size.min()) < 1:
        return None
    total = np.zeros(len(low), np.uint64)
    wrong = (size > 1) & (words[low] & np.uint64(0xFF) == ord("0"))
    for place in range(-(-longest // _WIDTH)):
        kept = (size - place * _WIDTH).clip(0, _WIDTH)
        digits = words[np.maximum(high - (place + 1) * _WIDTH, 0)] ^ np.uint64(0x3030303030303030)
        digits &= ~_LOW[_WIDTH - kept]
        above = (digits + np.uint64(0x0606060606060606)) | digits
        wrong |= above & np.uint64(0xF0F0F0F0F0F0F0F0) != 0
        digits = digits * np.uint64(2561) >> np.uint64(8) & np.uint64(0x00FF00FF00FF00FF)
        digits = digits * np.uint64(6553601) >> np.uint64(16) & np.uint64(0x0000FFFF0000FFFF)
        digits = digits * np.uint64(42949672960001) >> np.uint64(32)
        total += digits * np.uint64(10 ** (place * _WIDTH))
    found = total.view(np.int64)
    if none is not None:
        wrong &= ~none
        found[none] = NO_PARENT
    return None if wrong.any() else found


def _with_counters(
    read: np.ndarray[Any, np.dtype[np.uint8]], words: _Words, low: Int64s, ends: Int64s
) -> Int64s | None:
    """Return which lines end with counters and not with ``null``; None if some have neither."""
    none = (ends - low == 5) & (words[low] & _LOW[5] == _NULL_END)
    some = np.flatnonzero(~none)
    low, ends = low[some], ends[some]
    sound = (read[low] == ord("{")) & (read[ends - 1] == ord("]")) & (read[ends - 2] == ord("}"))
    return some if sound.all() else None


def _counters(texts: list[bytes]) -> list[dict[str, Number | None]] | None:
    try:
        found = _COUNTERS.decode(b"[" + b",".join(texts) + b"]")
    except NOT_JSON:
        return None
    return found if len(found) == len(texts) else None
