"""Small files that expand to gigabytes: a message, in seconds, and no such memory."""

import gzip
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from tests.fuzz.bounds import bounded

EVENT = (
    b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1.0,"dur":1.0,'
    b'"args":{"device":0,"stream":7,"correlation":1,"External id":1}},'
)
BEGIN = b'{"schemaVersion":1,"traceEvents":['
SIZE = 25_000_000
EVENTS = EVENT * (SIZE // len(EVENT))


def gz() -> tuple[bytes, int]:
    """Return a megabyte, and the most that gzip can make of it."""
    member = gzip.compress(EVENTS, 9)
    return gzip.compress(BEGIN) + member * 16, len(EVENTS) * 16


def test_a_bomb_of_events_stops_at_the_limit_with_a_message(tmp_path: Path) -> None:
    data, whole = gz()
    assert whole > 3.9e8
    assert len(data) < 2_000_000
    path = tmp_path / "x.json.gz"
    path.write_bytes(data)
    text = r"x.json.gz: its [\d,]+ bytes expand to more than [\d,]+, 200 times as many; decompress"
    with bounded(seconds=60, megabytes=600), pytest.raises(TraceError, match=text) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("filling", [b" ", b"\0", b"[", b'{"a":'])
def test_a_bomb_of_anything_else_is_no_trace_at_once(filling: bytes, tmp_path: Path) -> None:
    member = gzip.compress(filling * (SIZE // len(filling)), 9)
    path = tmp_path / "x.json.gz"
    path.write_bytes(member * 2_000)
    with bounded(seconds=20), pytest.raises(TraceError):
        load(path)


def test_a_trace_that_compresses_well_is_no_bomb(tmp_path: Path) -> None:
    """A megabyte of equal events is 1/400 as .gz, and much less than what is refused."""
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(BEGIN + EVENT * 10_000 + b'{"ph":"M","name":"x"}]}', 9))
    assert len(load(path).table("kernels").rows) == 10_000
