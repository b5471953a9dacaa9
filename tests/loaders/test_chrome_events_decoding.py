"""Times as they are written become nanoseconds, exactly; ids of any kind become numbers.

Codes of texts stay in bounded memory, whatever the texts.
"""

import random
from decimal import Decimal

import msgspec
import pytest

from lightning_rlprof.loaders import chrome_events
from lightning_rlprof.loaders.chrome_events import (
    MAX_TIME,
    Codes,
    EventDecoder,
    nanoseconds,
)
from lightning_rlprof.tables.kernels import UNKNOWN


def test_texts_beyond_the_number_are_taken_as_one_and_counted() -> None:
    codes = Codes("others", most=3)

    found = [codes[text] for text in "abcdeaf"]

    assert (found, codes.merged) == ([0, 1, 2, 3, 3, 0, 3], 3)
    assert list(codes) == ["a", "b", "c", "others"]


def test_texts_beyond_the_memory_are_taken_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_events, "MOST_BYTES", 3_000)
    codes = Codes("others")

    found = [codes[text] for text in ("a" * 1_000, "雪" * 1_000, "b" * 1_000, "a" * 1_000)]

    assert (found, codes.merged) == ([0, 1, 2, 0], 1)
    assert list(codes)[1] == "others"


def test_a_text_that_is_called_like_the_others_is_one_of_them() -> None:
    codes = Codes("others", most=2)

    assert [codes[text] for text in ("others", "a", "b", "c")] == [0, 1, 0, 0]


def test_threads_count_by_the_length_of_both_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_events, "MOST_BYTES", 3_000)
    codes = Codes((None, "others"))

    found = [codes[pair] for pair in ((1, 2), ("x" * 2_000, 1), (1, "y" * 2_000), (3, 4))]

    assert (found, codes.merged) == ([0, 1, 2, 3], 1)
    assert list(codes)[2] == (None, "others")


def raws(texts: list[str]) -> list[msgspec.Raw]:
    return [msgspec.Raw(text.encode()) for text in texts]


@pytest.mark.parametrize("digits", range(1, 17))
def test_microseconds_with_three_decimals_are_exact_at_any_size(digits: int) -> None:
    noise = random.Random(digits)
    wholes = [noise.randrange(10 ** (digits - 1), 10**digits) for _ in range(3_000)]
    texts = [f"{noise.choice(['', '-'])}{whole}.{noise.randrange(1000):03d}" for whole in wholes]
    exact = [int(Decimal(text) * 1000) for text in texts]

    found = nanoseconds(raws(texts)).tolist()

    assert found == [ns if abs(ns) < MAX_TIME else UNKNOWN for ns in exact]


def test_times_near_every_power_of_two_are_exact() -> None:
    texts = [
        f"{2**power + off}.{milli:03d}"
        for power in range(30, 44)
        for off in (-2, -1, 0, 1)
        for milli in range(0, 1000, 3)
        if 2**power + off < 2**43
    ]

    assert nanoseconds(raws(texts)).tolist() == [int(Decimal(text) * 1000) for text in texts]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1695835542481129", 1695835542481129000),
        ("1712195495406752.8", 1712195495406752800),
        ("1.5e3", 1_500_000),
        ("-0.001", -1),
        ("0.0004", 0),
        ("0.0006", 1),
        ("0", 0),
        ("1e400", UNKNOWN),
        ("-1e30", UNKNOWN),
        (str(2**70), UNKNOWN),
        ("9" * 5_000, UNKNOWN),
        ("1e999999999999", UNKNOWN),
        ("1e-999999999999", 0),
        ("null", UNKNOWN),
        ('"12"', UNKNOWN),
        ("[1]", UNKNOWN),
        ('"NaN"', UNKNOWN),
        ("", UNKNOWN),
        (str(MAX_TIME // 1000 + 1), UNKNOWN),
    ],
)
def test_a_time_is_what_is_written_or_none(text: str, ns: int) -> None:
    assert nanoseconds(raws([text])).tolist() == [ns]
    assert nanoseconds(raws(["7", text, "1.001"])).tolist() == [7000, ns, 1001]


TIMES_1970 = ["1712195495406752.8", "1712195495406752.08", "-1712195495406752.008", "0.5", "-0.5"]


@pytest.mark.parametrize(
    "odd", ["1", "1.00e1", "1e3", "1.0005", "1.5e0", "-0", "null", '"5"', str(2**62), "9" * 40]
)
def test_times_since_1970_are_exact_whatever_stands_beside_them(odd: str) -> None:
    noise = random.Random(1)
    texts = [f"17{noise.randrange(10**14):014}.{noise.randrange(1000)}" for _ in range(300)]
    texts = [*texts, odd, *TIMES_1970]
    odds = {"null": UNKNOWN, '"5"': UNKNOWN, str(2**62): UNKNOWN, "9" * 40: UNKNOWN}

    found = nanoseconds(raws(texts)).tolist()

    assert found == [odds[text] if text in odds else round(Decimal(text) * 1000) for text in texts]


def test_times_of_a_batch_may_be_numbers_and_texts() -> None:
    times = [1.5, *raws(["null", "2.001"])]

    assert nanoseconds(times).tolist() == [1500, UNKNOWN, 2001]


def test_no_times_are_no_times() -> None:
    assert nanoseconds([]).tolist() == []


@pytest.mark.parametrize("odd", ['"ts": 0, ', '"ts": 17, ', ""])
@pytest.mark.parametrize("count", [1, 7, 500])
def test_times_since_1970_are_exact_behind_an_event_without(odd: str, count: int) -> None:
    first = f'{{{odd}"ph": "X"}}'
    rest = ['{"ph": "X", "ts": 1712195495406752.008}'] * 500

    events = EventDecoder().decode(f"[{','.join([first] * count + rest)}]".encode())

    assert nanoseconds([each.ts for each in events])[count:].tolist() == [1712195495406752008] * 500
