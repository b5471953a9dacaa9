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


def zst() -> tuple[bytes, int]:
    """Return a megabyte, and the 10 GB that it expands to; ten times as much is no different."""
    zstandard = pytest.importorskip("zstandard", reason="the zstandard package is not installed")
    frame = zstandard.compress(EVENTS, 19)
    return zstandard.compress(BEGIN) + frame * 400, len(EVENTS) * 400


def gz() -> tuple[bytes, int]:
    """Return a megabyte, and the most that gzip can make of it."""
    member = gzip.compress(EVENTS, 9)
    return gzip.compress(BEGIN) + member * 16, len(EVENTS) * 16


@pytest.mark.parametrize(("bomb", "least"), [(zst, 9.9e9), (gz, 3.9e8)])
def test_a_bomb_of_events_stops_at_the_limit_with_a_message(
    bomb: object, least: float, tmp_path: Path
) -> None:
    data, whole = bomb()  # type: ignore[operator]
    assert whole > least
    assert len(data) < 2_000_000
    path = tmp_path / "x.json.gz"
    path.write_bytes(data)
    text = r"x.json.gz: its [\d,]+ bytes expand to more than [\d,]+, 200 times as many; decompress"
    with bounded(seconds=60, megabytes=600), pytest.raises(TraceError, match=text) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("filling", [b" ", b"\0", b"[", b'{"a":'])
def test_a_bomb_of_anything_else_is_no_trace_at_once(filling: bytes, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the zstandard package is not installed")
    frame = zstandard.compress(filling * (SIZE // len(filling)))
    path = tmp_path / "x.json.zst"
    path.write_bytes(frame * 2_000)
    with bounded(seconds=20), pytest.raises(TraceError):
        load(path)


@pytest.mark.parametrize(("window", "taken"), [(0x88, True), (0x89, False), (0xA8, False)])
def test_a_zst_that_wants_a_window_above_128_megabytes_is_refused(
    window: int, taken: bool, tmp_path: Path
) -> None:
    """By its header; the bytes stand for 128 MiB, the next above that, and 2 GiB."""
    pytest.importorskip("zstandard", reason="the zstandard package is not installed")
    events = BEGIN + EVENT + b'{"ph":"M","name":"x"}]}'
    block = (len(events) << 3 | 1).to_bytes(3, "little") + events  # the last one, not packed
    path = tmp_path / "x.json.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + block)
    if taken:
        assert len(load(path).table("kernels").rows) == 1
        return
    text = r"x.json.zst: .*requires too much memory"
    with bounded(megabytes=60), pytest.raises(TraceError, match=text) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_trace_that_compresses_well_is_no_bomb(tmp_path: Path) -> None:
    """A megabyte of equal events is 1/1000 as .zst, and much less than what is refused."""
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(BEGIN + EVENT * 10_000 + b'{"ph":"M","name":"x"}]}', 9))
    assert len(load(path).table("kernels").rows) == 10_000
