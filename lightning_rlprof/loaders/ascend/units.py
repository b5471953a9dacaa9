"""Exact numbers from the decimals of Ascend's profilers: microseconds and bytes."""

import decimal
import re
from collections.abc import Sequence

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.kernels import UNKNOWN

LARGEST_TIME = 2**62
"""Larger numbers are damage: in nanoseconds it is the year 2116. Sums of two fit into 64 bits."""

_INTEGERS = msgspec.json.Decoder(list[int])
_LONGEST_NS = 7 * 86_400 * 10**9  # captures last minutes
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_AROUND = ' \t\r\n"'
_EXACT = decimal.Context(prec=40, traps=[])
_PRIME = 2**62 - 57


def units(texts: Sequence[bytes]) -> Int64s:
    r"""Convert decimals to thousandths (microseconds to nanoseconds), other texts to `UNKNOWN`.

    A double is not exact enough: at 1.7e15 microseconds since 1970 its steps are 0.25.

    Example::

        >>> units([b'"1736408883688177.930"', b"1736408883643.212\t", b"N/A"])[:2].tolist()
        [1736408883688177930, 1736408883643212]
        >>> units([b"1."]).tolist()
        [1000]
    """
    # Times of a batch have the same number of digits, so their points are at equal distances. A tab
    # in CSV keeps spreadsheets from rounding.
    joined = b",".join(texts).replace(b'","', b",").replace(b"\t,", b",").strip(b'"\t') + b","
    width, rest = divmod(len(joined), max(len(texts), 1))
    points = b"." * len(texts)
    aligned = not rest and width > 4 and joined[width - 5 :: width] == points
    if aligned and joined.count(b".") == len(texts):
        try:
            whole = _INTEGERS.decode(b"[" + joined[:-1].translate(None, b".") + b"]")
        except NOT_JSON:
            whole = []
        if len(whole) == len(texts) and max(map(abs, whole)) < LARGEST_TIME:
            return np.array(whole, np.int64)
    return scaled([text.decode("latin-1") for text in texts], 1000)


def plausible(start_ns: Int64s, end_ns: Int64s) -> Mask:
    """Return which rows have possible times: neither longer nor further apart than a capture.

    Example::

        >>> start = np.array([10**18, 1_000, 10**18 + 9])
        >>> plausible(start, np.array([10**18 + 5, 1_005, 10**18])).tolist()
        [True, False, False]
    """
    sound = (start_ns > 0) & (start_ns < LARGEST_TIME) & (end_ns >= start_ns)
    sound &= end_ns - start_ns < _LONGEST_NS
    starts = np.sort(start_ns[sound])
    middle = starts[len(starts) // 2] if len(starts) else 0
    sound &= np.abs(np.where(sound, start_ns, 0) - middle) < _LONGEST_NS
    return sound


def scaled(texts: Sequence[str | float | int | None], factor: int) -> Int64s:
    """Multiply decimals by a factor and round them to integers; other texts become `UNKNOWN`.

    A float counts as its shortest decimal.

    Example::

        >>> scaled(["2109.6015625", 8903.431, None], 2**20)[:2].tolist()
        [2212077568, 9335924064]
    """
    return np.fromiter((_whole(text, factor) for text in texts), np.int64, len(texts))


def _whole(value: str | float | int | None, factor: int) -> int:
    text = "" if value is None else str(value).strip(_AROUND)
    if "," in text and _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    number = _EXACT.multiply(_EXACT.create_decimal(text or "NaN"), factor)
    if not number.is_finite() or abs(number) >= LARGEST_TIME:
        return UNKNOWN
    return int(_EXACT.to_integral_value(number))


def whole_number(value: object) -> int:
    """Return an integer, also of a text; `UNKNOWN` if it is not an integer of 0 or more.

    Connections of the exporter have up to 68 bits. Modulo a prime they stay distinct.

    Example::

        >>> whole_number("937"), whole_number(7.0), whole_number("-1") == UNKNOWN
        (937, 7, True)
    """
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 40 else None
    if not isinstance(value, int | float) or not 0 <= value < 1e39:
        return UNKNOWN
    return int(value) % _PRIME
