"""Read many span lines of a rank's file at once, straight into arrays.

`msgspec` makes an object of each line, and to get columns out of these takes four times as long as
to decode them. `parse` reads the form in which `TraceWriter` writes spans. It reads a block as a
whole or not at all, so that a line of any other form is decoded, or refused, as ever.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.join_ranks import merge
from lightning_rlprof.records.records import KINDS, Number
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.spans import NO_PARENT, Counter

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]

_START = b'["span",'
_OTHERS = tuple(
    f'["{kind}",'.encode()
    for kind in ("thread", "count", "experts", "note", "sample", "metrics", "clock", "end")
)
_KINDS = {f'"{kind}",'.encode(): code for code, kind in enumerate(KINDS)}
_WIDTH = 8  # Bytes of a word.
_LONGEST_TEXT = 128  # Bytes of a name and a kind with their quotes.
_LACKED = b'"' * 7 + b"," * 7  # As many as are looked for from one of a line on.
_LONGEST_LINE = 1 << 16
_AT_ONCE = 1 << 21  # Bytes; more do not stay in the cache of a core, and take longer.
_SLOT_BITS = 12  # Names are few, so that each mostly has a slot of its own.
_ODD = 0x9E3779B97F4A7C15  # Times an odd number, different keys stay different.
_MOST_DIGITS = 18  # More may not fit into 64 bits.
_NULL = int.from_bytes(b"null", "little")
_NULL_END = int.from_bytes(b"null]", "little")
_FIELDS = ("step", "start_ns", "end_ns", "thread", "id", "parent")
_LOW = np.array([(1 << 8 * count) - 1 for count in range(_WIDTH + 1)], np.uint64)
_NUMBERS = msgspec.json.Decoder(list[Number | None])


class SpanBlock(NamedTuple):
    """Spans of a block of lines, in its order.

    Attributes:
        names: Distinct names, by their first line.
        name: Index into ``names``.
        kind: Index into `lightning_rlprof.records.records.KINDS`.
        numbers: A row each for step, start, end, thread, id and parent, or `NO_PARENT`.
        counters: Those of all spans by name; their rows count the spans of the block.
        others: The lines that are no spans.
    """

    names: list[str]
    name: Int64s
    kind: Int64s
    numbers: Int64s
    counters: dict[str, Counter]
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
    found, low = [], 0
    while low <= len(block):
        high = block.find(b"\n", low + _AT_ONCE)
        high = len(block) if high < 0 else high
        own = _parse(block[low:high])
        if own is None:
            return None
        found.append(own)
        low = high + 1
    return found[0] if len(found) == 1 else _joined(found)


def _joined(found: Sequence[SpanBlock]) -> SpanBlock:
    """Return blocks that follow one another as one."""
    names: dict[str, int] = {}
    codes = [[names.setdefault(name, len(names)) for name in own.names] for own in found]
    name = [np.array(each, np.int64)[own.name] for each, own in zip(codes, found, strict=True)]
    return SpanBlock(
        [*names],
        np.concatenate(name),
        np.concatenate([own.kind for own in found]),
        np.concatenate([own.numbers for own in found], axis=1),
        merge([own.counters for own in found], [len(own.name) for own in found]),
        [line for own in found for line in own.others],
    )


def _parse(block: bytes) -> SpanBlock | None:
    # The last word of the last line ends there, and what a line of another form lacks is there.
    text = b"".join((block, b"\n", _LACKED, bytes(_LONGEST_TEXT)))
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
    if b"\\" in block:
        escapes = np.flatnonzero(read == ord("\\"))
        if is_span[np.searchsorted(ends, escapes)].any():
            return None
    if not all(line.startswith(_OTHERS) for line in others):
        return None
    starts, ends = starts[is_span], ends[is_span]
    if not len(starts) or int((ends - starts).max()) > _LONGEST_LINE:
        return None
    quotes = np.flatnonzero(read == ord('"'))
    # Behind the two quotes of "span" are those of the name, and of the kind.
    at = np.searchsorted(quotes, starts) + 2
    name, kind = quotes[at], quotes[at + 2]
    commas = np.flatnonzero(read == ord(","))
    first = np.searchsorted(commas, quotes[at + 3])  # The one behind the kind.
    behind = commas[first + 6]
    if (behind >= ends).any() or (quotes[at + 1] + 2 != kind).any():
        return None
    if (name != starts + len(_START)).any() or (read[kind - 1] != ord(",")).any():
        return None
    if (commas[first] != quotes[at + 3] + 1).any():
        return None
    coded = _texts(text, words, name, commas[first] + 1)
    numbers = _numbers(read, words, commas, first)
    counters = _counters(text, read, words, quotes, at + 4, behind + 1, ends)
    if coded is None or numbers is None or counters is None:
        return None
    return SpanBlock(*coded, numbers, counters, others)


def _texts(
    text: bytes, words: _Words, first: Int64s, last: Int64s
) -> tuple[list[str], Int64s, Int64s] | None:
    """Return the names of texts such as ``"step","step",``, the code of each, and its kind."""
    found = _distinct(words, first, last)
    if found is None:
        return None
    where, code = found
    names: dict[str, int] = {}
    of_text, kind_of_text = np.zeros((2, len(where)), np.int64)
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


def _distinct(words: _Words, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s] | None:
    """Return where each distinct text is first, and which of them each is; None if one is long."""
    size = last - first
    longest = int(size.max(initial=0))
    if longest > _LONGEST_TEXT:
        return None
    parts = [
        words[first + skipped] & _LOW[(size - skipped).clip(0, _WIDTH)]
        for skipped in range(0, longest, _WIDTH)
    ]
    key = np.zeros(len(first), np.uint64)
    for part in parts:
        key = (key ^ part) * np.uint64(_ODD)
        key ^= key >> np.uint64(29)
    where, code = groups(key)
    # Two texts may have one key.
    if any((part[where][code] != part).any() for part in parts):
        return None
    return where, code


def groups(key: Int64s | _Words) -> tuple[Int64s, Int64s]:
    """Return where each distinct key is first, in any order, and which of them each is.

    Example::

        >>> where, code = groups(np.array([7, 3, 7]))
        >>> sorted(where.tolist()), where[code].tolist()
        ([0, 1], [0, 1, 0])
    """
    key = key.view(np.uint64) * np.uint64(_ODD)
    slot = (key >> np.uint64(64 - _SLOT_BITS)).view(np.int64)
    first = np.full(1 << _SLOT_BITS, -1)
    first[slot[::-1]] = np.arange(len(key))[::-1]
    if (key[first[slot]] != key).any():  # Two share a slot, so that keys are sorted.
        _, where, code = np.unique(key, return_index=True, return_inverse=True)
        return where, code
    used = np.flatnonzero(first >= 0)
    place = np.empty_like(first)
    place[used] = np.arange(len(used))
    return first[used], place[slot]


def _numbers(read: _Bytes, words: _Words, commas: Int64s, first: Int64s) -> Int64s | None:
    """Return the whole numbers between seven commas in a row; None if some are none."""
    found = np.empty((len(_FIELDS), len(first)), np.int64)
    low = commas[first] + 1
    for at, field in enumerate(_FIELDS, start=1):
        high = commas[first + at]
        none: Mask | None = None
        if field == "parent":
            none = (high - low == 4) & (words[low] & np.uint64(0xFFFFFFFF) == _NULL)
        numbers = _whole(read, words, low, high, none)
        if numbers is None:
            return None
        found[at - 1] = numbers
        low = high + 1
    return found


def _whole(
    read: _Bytes, words: _Words, low: Int64s, high: Int64s, none: Mask | None = None
) -> Int64s | None:
    """Return the numbers that some bytes stand for, and `NO_PARENT` where there is none.

    None if they are no whole numbers from 0 on. Eight digits become a number by three
    multiplications (https://johnnylee-sde.github.io/Fast-numeric-string-to-int/).
    """
    size = high - low
    longest = int(size.max(initial=0))
    if longest > _MOST_DIGITS or int(size.min(initial=1)) < 1:
        return None
    total, wrong, room = np.zeros((3, len(low)), np.uint64)
    for place in range(-(-longest // _WIDTH)):
        # The word begins with the first of its digits, and what follows the last is shifted out.
        kept = np.minimum(size - place * _WIDTH, _WIDTH)
        np.maximum(kept, 0, out=kept)
        digits = words[np.maximum(high - (place + 1) * _WIDTH, low)]
        digits ^= np.uint64(0x3030303030303030)
        digits <<= np.uint64(64) - (kept << 3).view(np.uint64)
        np.add(digits, np.uint64(0x0606060606060606), out=room)
        wrong |= room
        wrong |= digits
        digits *= np.uint64(2561)
        digits >>= np.uint64(8)
        digits &= np.uint64(0x00FF00FF00FF00FF)
        digits *= np.uint64(6553601)
        digits >>= np.uint64(16)
        digits &= np.uint64(0x0000FFFF0000FFFF)
        digits *= np.uint64(42949672960001)
        digits >>= np.uint64(32)
        if place:
            digits *= np.uint64(10 ** (place * _WIDTH))
        total += digits
    is_wrong = wrong & np.uint64(0xF0F0F0F0F0F0F0F0) != 0
    is_wrong |= (size > 1) & (read[low] == ord("0"))
    found = total.view(np.int64)
    if none is not None:
        is_wrong &= ~none
        found[none] = NO_PARENT
    return None if is_wrong.any() else found


def _counters(
    text: bytes,
    read: _Bytes,
    words: _Words,
    quotes: Int64s,
    at: Int64s,
    low: Int64s,
    ends: Int64s,
) -> dict[str, Counter] | None:
    """Return the counters of all lines by name; None if some line does not end with any or null.

    Args:
        text: All lines.
        read: Its bytes.
        words: The word at each.
        quotes: Where its quotes are.
        at: Index into ``quotes`` of the first one behind the kind of each line.
        low: Where the last field of each line begins.
        ends: Where each line ends.
    """
    none = (ends - low == 5) & (words[low] & _LOW[5] == _NULL_END)
    line = np.flatnonzero(~none)
    at, low, last = at[line], low[line], ends[line] - 2
    count, odd = np.divmod(np.searchsorted(quotes, last) - at, 2)
    sound = (read[low] == ord("{")) & (read[last] == ord("}")) & (read[last + 1] == ord("]"))
    sound &= (odd == 0) & np.where(count > 0, quotes[at] == low + 1, last == low + 1)
    if not sound.all():
        return None
    # From here on there is an entry for each counter.
    line, last, behind = (np.repeat(each, count) for each in (line, last, np.cumsum(count)))
    nth = np.arange(len(line)) - behind + np.repeat(count, count)
    opened = np.repeat(at, count) + 2 * nth
    name, name_end, following = quotes[opened] + 1, quotes[opened + 1], quotes[opened + 2] - 1
    is_last = nth + 1 == np.repeat(count, count)
    end = np.where(is_last, last, following)
    if (read[name_end + 1] != ord(":")).any() or (read[end[~is_last]] != ord(",")).any():
        return None
    return _by_name(text, read, words, line, (name, name_end), (name_end + 2, end))


def _by_name(
    text: bytes,
    read: _Bytes,
    words: _Words,
    line: Int64s,
    names: tuple[Int64s, Int64s],
    values: tuple[Int64s, Int64s],
) -> dict[str, Counter] | None:
    """Return counters, given the line of each, and where its name and value begin and end."""
    distinct = _distinct(words, *names)
    if distinct is None:
        return None
    where, code = distinct
    found: dict[str, Counter] = {}
    for one in np.argsort(where).tolist():
        mine = np.flatnonzero(code == one) if len(where) > 1 else slice(None)
        rows, low, high = line[mine], values[0][mine], values[1][mine]
        name = text[int(names[0][where[one]]) : int(names[1][where[one]])]
        if min(name, default=ord(" ")) < ord(" ") or (rows[1:] == rows[:-1]).any():
            return None
        told = _values(text, read, words, rows, low, high)
        if told is None:
            return None
        try:
            found |= {name.decode(): told} if len(told.rows) else {}
        except UnicodeDecodeError:
            return None
    return found


def _values(
    text: bytes, read: _Bytes, words: _Words, rows: Int64s, low: Int64s, high: Int64s
) -> Counter | None:
    """Return the numbers that rows count, without those that are null."""
    whole = _whole(read, words, low, high)
    if whole is not None:
        return Counter(rows, whole)
    texts = [text[first:last] for first, last in zip(low.tolist(), high.tolist(), strict=True)]
    try:
        told = _NUMBERS.decode(b"[" + b",".join(texts) + b"]")
    except NOT_JSON:
        return None
    if len(told) != len(rows):
        return None
    known = [number for number in told if number is not None]
    return Counter(rows[[number is not None for number in told]], exact(known))


def exact(values: list[Number]) -> np.ndarray[Any, Any]:
    """Return an array that holds every value as it is: no integer becomes a float."""
    kinds = set(map(type, values))
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return np.array(values, dtype=np.int64)
    return np.array(values, dtype=np.float64 if kinds == {float} else object)
