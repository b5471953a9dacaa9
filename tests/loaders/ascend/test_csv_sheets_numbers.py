"""Decimals of Ascend's files are read to the last digit, however they are written."""

from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.loaders.ascend.csv_sheets import since_1970
from lightning_rlprof.loaders.chrome_events import MAX_TIME, scaled
from lightning_rlprof.tables.kernels import UNKNOWN

EPOCH = 1_736_408_883_000_000_000
SINCE_1970 = st.integers(1_600_000_000_000_000_000, MAX_TIME - 1)


def brute_force(text: str, factor: int) -> int:
    try:
        value = Decimal(text.strip(' \t\r\n"')) * factor
    except InvalidOperation:
        return UNKNOWN
    if not value.is_finite() or abs(value) >= MAX_TIME:
        return UNKNOWN
    return int(value.to_integral_value(ROUND_HALF_EVEN))


def written(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


@given(st.lists(SINCE_1970))
def test_times_since_1970_lose_nothing_where_doubles_lose_a_quarter_of_a_microsecond(
    times: list[int],
) -> None:
    texts = [written(ns) for ns in times]

    assert since_1970([f'"{text}"'.encode() for text in texts]).tolist() == times
    assert since_1970([f"{text}\t".encode() for text in texts]).tolist() == times


def test_a_double_would_have_lost_it() -> None:
    text = "1736408883688177.930"
    assert since_1970([text.encode()]).tolist() == [1_736_408_883_688_177_930]
    assert round(float(text) * 1000) != 1_736_408_883_688_177_930


@given(
    st.lists(st.one_of(SINCE_1970.map(written), st.text('0123456789.-+eE \t"Nai/A', max_size=9)))
)
def test_any_mixture_is_what_decimals_say(texts: list[str]) -> None:
    assert since_1970([text.encode() for text in texts]).tolist() == [
        brute_force(text, 1000) for text in texts
    ]


@given(st.integers(0, 2**45), st.sampled_from([2**10, 2**20]))
def test_bytes_survive_being_written_as_kilobytes_or_megabytes(size: int, unit: int) -> None:
    assert scaled([str(size / unit), size / unit], unit).tolist() == [size, size]


def test_what_is_no_number_is_unknown() -> None:
    texts = ["", "N/A", "nan", "inf", "1e400", None, "0x10", "12x"]
    assert scaled(texts, 1).tolist() == [UNKNOWN] * len(texts)
