"""Batches of whole events, wherever the buffer ends, and whatever is broken."""

import gzip
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders import chrome_events
from lightning_rlprof.loaders.chrome_events import Source
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.table import Damage
from tests.builders.chrome import ChromeTrace, Layout, read_bytes, stream_of

NAMES = [
    "plain",
    'quote " and \\ and \\" at the end\\',
    '}, {"ph": "X"',
    '"}},{\\"ph\\":\\"X\\"},{"ts":1}, [{]}',
    "at::native::{lambda()#1}, {lambda(float)#2}",
    "ünïcode 雪 \U0001f600 \x7f",
    "line\nbreak\ttab\x00",
    'x": NaN, "y": inf',
    "",
    '"traceEvents": [',
]
NOISE = np.random.default_rng(5).integers(97, 123, 300_000, dtype=np.uint8).tobytes()
FORMS = {
    "plain": NOISE,
    "gz": gzip.compress(NOISE),
    "two members": gzip.compress(NOISE[:1000]) + gzip.compress(NOISE[1000:]),
    "padded": gzip.compress(NOISE) + b"\0" * 500,
}


def trace(count: int = 30) -> ChromeTrace:
    written = ChromeTrace({"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}]})
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        more = {"grid": [1, 1, 1], "list": [{"name": 1}, {"name": [2, {}]}], "deep": {"a": {}}}
        written.kernel(number, number, number + 1, name, **more, text=NAMES[-number % len(NAMES)])
    return written


def names(events: list[dict[str, Any]]) -> list[Any]:
    return [event["name"] for event in events if event["ph"] == "X"]


def expected(written: ChromeTrace) -> list[Any]:
    return [event["name"] for event in written.events if isinstance(event, dict)]


@pytest.mark.parametrize("layout", ["torch", "spaced", "compact"])
@pytest.mark.parametrize("size", [16, 64, 100, 333, 1_000, 4_096, 1 << 20])
def test_events_are_whole_wherever_the_buffer_ends(
    size: int, layout: Layout, tmp_path: Path
) -> None:
    written = trace()

    events, stream = read_bytes(written.encode(layout), tmp_path, size)

    assert names(events) == expected(written)
    assert (stream.lost, stream.problems, stream.complete) == (0, [], True)
    assert {key: json.loads(bytes(value)) for key, value in stream.top.items()} == {
        **written.before,
        **written.after,
    }


@pytest.mark.parametrize("offset", range(0, 400, 7))
def test_a_border_may_fall_on_any_byte(offset: int, tmp_path: Path) -> None:
    written = trace(12)
    written.before = {"pad": "x" * offset}

    events, stream = read_bytes(written.encode("compact"), tmp_path, 1_000)

    assert names(events) == expected(written)
    assert stream.complete


def test_many_events_are_cut_without_being_taken_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = []
    one_by_one = chrome_events.ChromeStream._one_by_one

    def counted(self: Any, more: bool) -> Any:
        slow.append(more)
        return one_by_one(self, more)

    monkeypatch.setattr(chrome_events.ChromeStream, "_one_by_one", counted)
    written = trace(3_000)

    events, _ = read_bytes(written.encode(), tmp_path, 100_000)

    assert len(events) == 3_000
    assert slow == [False]  # the end of the file


def test_what_is_beside_the_events_may_stand_on_either_side(tmp_path: Path) -> None:
    top = {"baseTimeNanoseconds": 5, "distributedInfo": {"rank": 3}}
    for before, after in ((top, {}), ({}, top)):
        written = ChromeTrace(before, after)
        written.kernel(1, 0, 5)
        events, stream = read_bytes(written.encode(), tmp_path)
        assert len(events) == 1
        assert set(stream.top) == set(top)


@pytest.mark.parametrize("data", [b"[%s, %s]", b" [\n%s,%s]\n", b"\xef\xbb\xbf[%s,%s ]"])
def test_events_may_stand_in_an_array_of_their_own(data: bytes, tmp_path: Path) -> None:
    event = b'{"ph":"X","name":"gemm"}'

    events, stream = read_bytes(data % (event, event), tmp_path)

    assert names(events) == ["gemm", "gemm"]
    assert stream.complete


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("most", [chrome_events.MAX_EVENT_BYTES, 600])
def test_what_stands_behind_the_end_is_left_out_and_said(
    bare: bool, most: int, tmp_path: Path
) -> None:
    written = ChromeTrace({}, {"baseTimeNanoseconds": 5})
    written.kernel(1, 0, 5)
    data = written.encode(bare=bare)
    for behind in (data, b"\n" + data * 9, b" killed", b"\0" * 99 + b"}"):
        events, stream = read_bytes(data + behind, tmp_path, 16, most)
        assert names(events) == ["gemm"]
        assert list(stream.top) == ([] if bare else ["baseTimeNanoseconds"])
        assert "data after its end, such as a second trace, is left out" in stream.problems[0]
        assert len(stream.problems) == 1
    for nothing in (b"", b"\n \r\n", b"\0" * 99):
        events, stream = read_bytes(data + nothing, tmp_path, 16, most)
        assert (names(events), stream.problems, stream.complete) == (["gemm"], [], True)


def test_a_trailing_empty_event_is_no_event(tmp_path: Path) -> None:
    data = b'{"traceEvents": [{"ph":"X","name":"gemm"}, {}]}'

    events, stream = read_bytes(data, tmp_path)

    assert names(events) == ["gemm"]
    assert stream.lost == 0


WRONG_TYPES = [
    b'{"ph": "X", "name": "a", "pid": [1]}',  # a pid is not a list
    b'{"ph": "X", "pid": 1e400}',
    b'{"ph": "X", "cat": 7}',
    b"null",
    b'"text"',
]
BROKEN = [
    b'{"ph": "X", "name": "a}',  # no closing quote
    b'{"ph": "X", "name": a}',
    b'{"ph": "X", "name": "a" "ts": 1}',
    b'{"ph": "X", "name": "\\q"}',
    b'{"ph": "X", "name": "a", "ts": [1, 2}',
    b'{"ph": "X", "deep": ' + b"[" * 100_000,
    b'{"ph": "X"',
]


EVENTS = [f"e{number}" for number in range(9)]


def around(event: bytes, at: int = 4) -> bytes:
    """Return a trace of nine events with one of these bytes after the first four."""
    sound = [b'{"ph": "X", "name": "%b"}' % name.encode() for name in EVENTS]
    events = b",\n ".join([*sound[:at], event, *sound[at:]])
    return b'{"traceEvents": [' + events + b'], "baseTimeNanoseconds": 5}'


@pytest.mark.parametrize("event", WRONG_TYPES, ids=range(len(WRONG_TYPES)))
@pytest.mark.parametrize("size", [64, 1 << 20])
def test_an_event_with_values_of_wrong_types_is_left_out(
    event: bytes, size: int, tmp_path: Path
) -> None:
    events, stream = read_bytes(around(event), tmp_path, size)

    assert names(events) == EVENTS
    assert stream.lost == 1
    assert "baseTimeNanoseconds" in stream.top
    assert stream.complete


@pytest.mark.parametrize("name", [b"5", b"-1.5e3", b'"\xff\xfe"'])
@pytest.mark.parametrize("size", [64, 1 << 20])
def test_a_name_that_is_a_number_or_no_utf_8_costs_nothing(
    name: bytes, size: int, tmp_path: Path
) -> None:
    events, stream = read_bytes(around(b'{"ph": "X", "name": %b}' % name), tmp_path, size)

    text = name.decode("utf-8", "replace").strip('"')
    assert names(events) == [*EVENTS[:4], text, *EVENTS[4:]]
    assert (stream.lost, stream.problems) == (0, [])


@pytest.mark.parametrize("event", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("size", [64, 1 << 20])
def test_reading_goes_on_at_the_event_after_a_broken_one(
    event: bytes, size: int, tmp_path: Path
) -> None:
    events, stream = read_bytes(around(event), tmp_path, size)

    assert names(events) == EVENTS
    assert "baseTimeNanoseconds" in stream.top
    assert (stream.damaged, stream.damaged_bytes) == (1, len(event) + len(b",\n "))
    assert [each.facts for each in stream.problems if isinstance(each, Damage)] == [
        {"events": 1, "bytes": stream.damaged_bytes}
    ]
    assert stream.complete


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_broken_events_that_follow_one_another_are_counted(size: int, tmp_path: Path) -> None:
    events, stream = read_bytes(around(b",".join(BROKEN[:4])), tmp_path, size)

    assert names(events) == EVENTS
    assert stream.damaged == 4


@pytest.mark.parametrize("event", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("size", [64, 1 << 20])
@pytest.mark.parametrize("at", [0, 9])
def test_the_first_and_the_last_event_may_be_broken(
    event: bytes, size: int, at: int, tmp_path: Path
) -> None:
    events, stream = read_bytes(around(event, at), tmp_path, size)

    assert names(events) == EVENTS
    assert stream.damaged == 1
    assert stream.complete


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damage_inside_an_event_costs_that_event_alone(data: st.DataObject) -> None:
    """Bytes are removed, put in or replaced within the braces of one event."""
    written = trace(12)
    for number, event in enumerate(written.events):
        event["name"] = f"e{number} {event['name']}"
    layout = data.draw(st.sampled_from(["torch", "spaced", "compact"]))
    whole = written.encode(layout)
    hit = data.draw(st.integers(0, 11))
    first = whole.index(b'"e%d ' % hit)
    start = whole.rindex(b'{"' if layout == "compact" else b"{", 0, first) + 1
    last = whole.index(b'"e%d ' % (hit + 1)) if hit < 11 else whole.rindex(b"]")
    stop = whole.rindex(b"}", 0, whole.rindex(b"{", 0, last) if hit < 11 else last)
    low = data.draw(st.integers(start, stop))
    high = data.draw(st.integers(low, min(low + 40, stop)))
    noise = data.draw(st.sampled_from([b"", b'"', b"\\", b"\x01", b"\xff", b'"x": "{', b"\n"]))
    damaged = whole[:low] + noise + whole[high:]

    with tempfile.TemporaryDirectory() as folder:
        size = data.draw(st.sampled_from([64, 500, 1 << 20]))
        events, stream = read_bytes(damaged, Path(folder), size)

    kept = [name.split()[0] for name in names(events) if re.match(r"e\d+ ", str(name))]
    others = [f"e{number}" for number in range(12) if number != hit]
    assert [name for name in kept if name != f"e{hit}"] == others
    assert stream.damaged + stream.lost <= 1


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "inf", "-nan", "Infinity"])
def test_numbers_that_json_cannot_write_cost_nothing(number: str, tmp_path: Path) -> None:
    name = f"f({number}), {number}"
    data = '{"a": %s, "traceEvents": [{"ph":"X","args":{"bandwidth": %s, "x":%s},"name":"%s"}]}'

    events, stream = read_bytes((data % (number, number, number, name)).encode(), tmp_path)

    assert names(events) == [name]
    assert stream.lost == 0
    assert stream.complete


@pytest.mark.parametrize("size", [64, 1 << 20])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_at_any_byte_is_read_to_its_last_event(
    size: int, packed: bool, tmp_path: Path
) -> None:
    written = trace(3)
    data = written.encode("compact")
    begin = b'"traceEvents":['
    inside = range(data.index(begin) + len(begin), data.rindex(b"]") + 1)
    for cut in range(len(data)):
        part = gzip.compress(data, 1)[:-cut] if packed and cut else data[:cut]
        events, stream = read_bytes(part, tmp_path, size)
        assert names(events) == expected(written)[: len(names(events))]
        assert stream.lost == 0
        if not packed and cut in inside:
            text = f"it is truncated: {len(events)} events were read, the rest is missing"
            assert stream.problems == [text]
        assert stream.complete == (cut == len(data) or part == gzip.compress(data, 1))


def test_an_event_beyond_all_bounds_ends_the_reading(tmp_path: Path) -> None:
    written = ChromeTrace()
    written.kernel(1, 0, 1, "before")
    written.kernel(2, 0, 1, "x" * 100_000)
    written.kernel(3, 0, 1, "behind")

    events, stream = read_bytes(written.encode(), tmp_path, 1_024, 4_096)

    assert names(events) == ["before"]
    assert stream.problems == [
        "an event is larger than 4,096 bytes: 1 events were read, the rest is left out"
    ]


NO_TRACES = [
    b"",
    b"   ",
    b"{}",
    b"[]",
    b"[1, 2, 3]",
    b'[{"name": [1]}',
    b'["span", "actor_update"]',
    b'{"traceEvents": null}',
    b'{"format": 1, "run_id": "r"}\n["span", "a"]',
    b"SQLite format 3\x00" + b"\x00" * 500,
    b"\x1f\x8b",
    b"\x1f\x8b\x08\x00" + b"\x00" * 50,
    b"\x80\x81\x82",
]


@pytest.mark.parametrize("data", NO_TRACES)
def test_what_is_no_trace_yields_nothing(data: bytes, tmp_path: Path) -> None:
    events, stream = read_bytes(data, tmp_path)

    assert events == []
    assert not stream.events or data.startswith(b"[")


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_an_answer_never_a_crash(seed: int, tmp_path: Path) -> None:
    noise = random.Random(seed)
    data = bytearray(trace(40).encode(noise.choice(["torch", "spaced", "compact"])))
    for _ in range(noise.randint(1, 12)):
        at, length = noise.randrange(len(data)), noise.randint(1, 40)
        with_what = noise.choice(
            [b"", b'"', b"}", b"]", b"{", b"\\", b"\x00", b"[[", b",", b'"ph"']
        )
        data[at : at + length] = with_what
    if noise.random() < 0.5:
        data = bytearray(gzip.compress(data)[: noise.randrange(20, 3_000)])

    path = tmp_path / "x"
    path.write_bytes(data)
    events, stream = stream_of(path, noise.choice([64, 500, 1 << 20]))

    assert len(events) + stream.lost <= 120


def read(path: Path, size: int = 10_000) -> tuple[bytes, str | None]:
    view, found = memoryview(bytearray(size)), b""
    with Source(path) as source:
        while count := source.readinto(view):
            found += view[:count]
        assert source.readinto(view) == 0
        return found, source.problem


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_the_first_bytes_tell_how_to_read_the_rest(form: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "any-name").write_bytes(FORMS[form])

    assert read(tmp_path / "any-name", size) == (NOISE, None)


def test_an_empty_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "x.json.gz").touch()

    assert read(tmp_path / "x.json.gz") == (b"", None)


@pytest.mark.parametrize("kept", [2, 5, 12, 100, 50_000, -9, -1])
def test_a_cut_gz_gives_what_comes_before_the_cut(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(FORMS["gz"][:kept])

    found, problem = read(path)

    assert NOISE.startswith(found)
    assert kept > 0 or found == NOISE
    assert problem == "its compressed data is truncated"


@pytest.mark.parametrize(("form", "at"), [("gz", 100_000)])
def test_damage_ends_the_stream_with_a_problem(form: str, at: int, tmp_path: Path) -> None:
    data = bytearray(FORMS[form])
    data[at : at + 60] = b"\xff" * 60
    path = tmp_path / "x"
    path.write_bytes(data)

    found, problem = read(path)

    assert found[:600] == NOISE[:600]
    assert problem is not None
    assert problem.startswith("its compressed data is damaged")


def test_something_behind_a_gz_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(FORMS["gz"] + b"more")

    assert read(path) == (NOISE, "its compressed data is followed by other data")


def test_a_bomb_is_refused_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_events, "BOMB_BYTES", 100_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))

    with pytest.raises(TraceError, match="200 times as many; decompress it yourself") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_small_file_may_expand_by_any_ratio(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))

    assert len(read(path, 1 << 20)[0]) == 10_000_000


def test_a_trace_compressed_by_zstd_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "x.json.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00")

    with pytest.raises(TraceError, match="compressed with zstd; decompress it first"):
        load(path)


@pytest.mark.parametrize("name", ["", "missing"])
def test_what_cannot_be_opened_is_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        Source(tmp_path / name)


@pytest.mark.parametrize("size", [100, 1_000_000])
@pytest.mark.parametrize("form", ["gz", "two members"])
def test_a_wrong_check_sum_costs_one_block_at_most(form: str, size: int, tmp_path: Path) -> None:
    data = bytearray(FORMS[form])
    data[-8] ^= 1
    path = tmp_path / "x"
    path.write_bytes(data)

    found, problem = read(path, size)

    assert NOISE.startswith(found)
    assert len(found) > len(NOISE) - chrome_events._STEP
    assert problem is not None
    assert problem.startswith("its compressed data is damaged")


def test_damage_costs_what_lies_behind_it(tmp_path: Path) -> None:
    data = bytearray(FORMS["gz"])
    data[150_000:150_060] = b"\xff" * 60
    path = tmp_path / "x"
    path.write_bytes(data)

    found, _ = read(path, 1 << 20)

    kept = round(len(NOISE) * 150_000 / len(data)) - 5_000 - chrome_events._STEP
    assert len(found) >= kept
    assert found[:kept] == NOISE[:kept]
