"""Damaged and hostile traces: what is lost is counted, memory and time are bounded."""

import gzip
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders import chrome_events, spill
from lightning_rlprof.loaders.kineto import trace as kineto_trace
from lightning_rlprof.loaders.kineto.reader import read_kineto
from lightning_rlprof.tables.spans import Spans
from tests.builders.chrome import BASE, PID, ChromeTrace, microseconds, written_of_all_kinds
from tests.fuzz.bounds import bounded


def read(trace: ChromeTrace, folder: Path) -> Spans:
    return read_kineto(trace.write(folder / "t.json"))


def test_what_is_lost_is_counted(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("sound", 0, 5)
    trace.events.append(msgspec.Raw(b'{"ph": "X", "cat": "kernel", "pid": [5]}'))
    trace.mark("backwards", 9, 5)

    spans = read(trace, tmp_path)

    assert [problem.text for problem in spans.warnings] == [
        "1 events are left out: they cannot be read",
        "1 events are left out: their times are out of range: backwards",
    ]
    assert spans.names == ("sound",)


@pytest.mark.parametrize("odd", [b"null", b'"x"', b"[5]"])
def test_a_time_that_is_none_after_a_broken_event_of_the_same_batch(
    tmp_path: Path, odd: bytes
) -> None:
    """Of such a batch some times are numbers and some are texts."""
    trace = ChromeTrace()
    for at in range(9):  # more than there are looked for borders
        trace.mark("before", at, at + 4)
    broken = b'{"ph":"X","cat":"kernel","name":"\x9b"}'
    head = b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"dur":1,"ts":'
    trace.events.append(msgspec.Raw(head + odd + b"}"))
    for at in range(9):
        trace.mark("behind", 7_000 + at, 9_001 + at)
    path = tmp_path / "t.json"
    whole = trace.encode("compact")
    cut = whole.index(head)
    path.write_bytes(whole[:cut] + broken + b"," + whole[cut:])

    spans = read_kineto(path)

    assert spans.names == ("before", "behind")
    assert (spans.end_ns - spans.start_ns).tolist() == [4] * 9 + [2_001] * 9
    assert (spans.start_ns - spans.start_ns[0]).tolist() == [*range(9), *range(7_000, 7_009)]


def test_a_cut_file_is_read_up_to_the_cut(tmp_path: Path) -> None:
    trace = ChromeTrace({"baseTimeNanoseconds": BASE})
    trace.mark("actor_update", 0, 5)
    trace.launched(1, 2)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(trace.encode())[:-60])

    spans = read_kineto(path)

    assert spans.names == ("actor_update",)
    assert spans.statuses == {0: None}
    assert spans.headers[0].device == "unknown"  # what tells it comes last
    assert spans.warnings[0].text == (
        "its compressed data is truncated: 2 events were read, the rest is missing "
        "(no kernel was read)"
    )


HOSTILE = [1e300, -1e300, 2**62, -(2**62), 2**63, 2**70, -(2**70), None, "x", True, 0.5, [], {}]


TABLES = {"kernels", "memcpy", "collectives", "calls", "memory", "counters", "shapes"}


def hostile(noise: random.Random) -> ChromeTrace:
    """Return a trace of every kind of event with odd values anywhere."""
    trace = written_of_all_kinds()
    events: list[Any] = trace.events
    events[0]["name"] = "ProfilerStep#99999999999999"
    for _ in range(noise.randint(1, 40)):
        where = noise.choice(events)
        where = where["args"] if noise.random() < 0.5 and isinstance(where["args"], dict) else where
        if where:
            where[noise.choice(list(where))] = noise.choice(HOSTILE)
    trace.before = {
        "distributedInfo": noise.choice(HOSTILE),
        "deviceProperties": noise.choice(HOSTILE),
    }
    trace.after = {"baseTimeNanoseconds": noise.choice(HOSTILE), "trace_id": noise.choice(HOSTILE)}
    return trace


@pytest.mark.parametrize("seed", range(80))
def test_hostile_values_anywhere_are_an_answer_never_a_crash(seed: int, tmp_path: Path) -> None:
    spans = read(hostile(random.Random(seed)), tmp_path)
    tables = {name: spans.table(name) for name in spans.tables}

    assert len(spans) <= 13
    assert set(tables) == TABLES
    for name, table in tables.items():
        assert len(list(table.rows)) <= 48 or name == "counters"
        if name in ("kernels", "calls", "memcpy", "collectives"):
            assert all(length >= 0 for length in table.column("duration"))
    assert min(tables["kernels"].column("start"), default=0) >= 0
    assert (spans.start_ns >= 0).all()
    assert (spans.end_ns >= spans.start_ns).all()


def test_what_is_lost_of_a_table_is_said_in_its_note(tmp_path: Path) -> None:
    trace = written_of_all_kinds()
    for event in trace.events:
        event["dur"], event["ts"] = msgspec.Raw(b'"soon"'), msgspec.Raw(b"null")

    spans = read(trace, tmp_path)

    for name in set(spans.tables) - {"kernels"}:
        table = spans.table(name)
        assert len(table.rows) == 0
        assert "events are left out: their times are out of range" in table.note


def test_names_beyond_the_bound_are_taken_as_one_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome_events, "MOST_BYTES", 20_000)
    trace = ChromeTrace()
    for number in range(100):
        trace.kernel(number, number, number + 1, f"{number}" * 500)
        trace.event("cpu_op", f"o{number}" * 500, number, number + 1, PID, 1)

    spans = read(trace, tmp_path)
    table = spans.table("calls")

    assert spans.warnings[0].text.endswith(
        "events share one name: the trace has too many different names"
    )
    assert set(spans.table("kernels").column("kernel")) > {"0" * 500, "(other names)"}
    assert set(table.column("name")) == {"(other names)"}
    assert table.note.endswith("events share one name: the trace has too many different names")


@pytest.mark.parametrize(
    ("every", "passes"), [(False, [1, 1, 2, 2, 2, 2]), (True, [1, 1, 1, 1, 1, 1])]
)
def test_a_file_is_read_twice_at_most(
    every: bool, passes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    path = written_of_all_kinds().write(tmp_path / "t.json")
    source = chrome_events.Source
    counted = lambda path: (opened.append(path), source(path))[1]  # noqa: E731
    monkeypatch.setattr(chrome_events, "Source", counted)

    spans = read_kineto(path, every=every)

    found = [len(opened)]
    for name in ("kernels", "calls", "memory", "collectives", "calls"):
        spans.table(name)
        found.append(len(opened))
    assert found == passes


def test_a_file_that_changed_since_is_not_read_on(tmp_path: Path) -> None:
    trace = written_of_all_kinds()
    spans = read(trace, tmp_path)
    trace.mark("another", 0, 5)
    trace.write(tmp_path / "t.json")

    with pytest.raises(TraceError, match="changed since it was loaded; load it again"):
        spans.table("calls")
    assert len(spans.table("kernels").rows) == 12


def test_a_file_that_is_gone_since_is_said_each_time(tmp_path: Path) -> None:
    spans = read(written_of_all_kinds(), tmp_path)
    (tmp_path / "t.json").unlink()

    for _ in range(2):
        with pytest.raises(TraceError, match="cannot be read"):
            spans.table("memory")


def test_tables_are_the_same_where_all_columns_lie_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written_of_all_kinds().write(tmp_path / "t.json")
    spans = read_kineto(path)
    expected = {name: list(spans.table(name).rows) for name in spans.tables}
    for room in (kineto_trace, spill):
        monkeypatch.setattr(room, "HELD", 0)
    monkeypatch.setattr(chrome_events, "SIZE", 2_000)

    for every in (True, False):
        spans = read_kineto(path, every=every)
        assert {name: list(spans.table(name).rows) for name in spans.tables} == expected


BEGIN = b'{"traceEvents": ['
ATTACKS = {
    "nested arrays": BEGIN + b'[{},{"ph":' * 100_000,
    "nested objects": BEGIN + b'{"ph":[1,' * 100_000,
    "nested events": BEGIN + b'{"ph":[1,{"ph":1},' * 60_000,
    "broken events": BEGIN + b'{"ph":1 "a"},' * 100_000,
    "every other one broken": BEGIN + b'{"ph":"X" "a"},{"ph":"X","name":"b"},' * 30_000,
    "one text": BEGIN + b'{"ph":"' + b"x" * 2_000_000,
    "backslashes": BEGIN + b'{"ph":"' + b"\\" * 2_000_000,
    "spaces": BEGIN + b"}" + b" " * 2_000_000,
    "ends of arrays": BEGIN + b'{"ph":1 ' + b'], "traceName":' * 100_000,
    "no numbers": BEGIN + b'{"ph":"X","a":' + b'": NaN' * 300_000,
    "keys before the events": b"{" + b'"traceEvents" ' * 150_000 + BEGIN[1:],
}


@pytest.mark.deep
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_made_to_be_slow_is_answered_soon(attack: str, tmp_path: Path) -> None:
    """The first three took up to a minute for every MB before their bounds were there."""
    path = tmp_path / "t.json"
    path.write_bytes(ATTACKS[attack])

    with bounded(seconds=15):
        spans = read_kineto(path)

    assert len(spans) == 0
    assert spans.statuses == {0: None}


def test_as_many_threads_as_events_are_read(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number in range(6_000):
        trace.mark("actor_update", number, number + 1, tid=number, pid=number)
        trace.launched(number, number, tid=number)

    spans = read(trace, tmp_path)

    assert len(spans) == len(spans.table("kernels").rows) == 6_000
    assert spans.warnings[0].text == (
        "of more than 4,096 threads, the rest are counted as one thread"
    )


# Not by ru_maxrss, which begins with the peak of the process that starts this one.
_MEASURE = """
import sys
from pathlib import Path
from lightning_rlprof.loaders.kineto.reader import read_kineto
def rows(path, names):
    spans = read_kineto(path)
    return [len(spans.table(name).rows) for name in names]
small, large, *names = sys.argv[1:]
status = Path("/proc/self/status")
peak = lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) // 1024
rows(Path(small), names)
before = peak()
print(*rows(Path(large), names), peak() - before)
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux' /proc")
@pytest.mark.parametrize(
    ("tables", "rows", "most_mb"), [(["kernels"], [1_000], 20), (["calls"], [3_000], 60)]
)
def test_memory_stays_far_below_the_size_of_the_file(
    tables: list[str], rows: list[int], most_mb: int, tmp_path: Path
) -> None:
    trace = ChromeTrace()
    for number in range(1_000):
        trace.event("cpu_op", "aten::mm", number, number + 1, PID, 1, shapes=[[8, 9]] * 20)
        trace.event("python_function", f"model.py({number}): forward", 0, 1, PID, 1)
        trace.launched(number, number)
    small = trace.write(tmp_path / "small.json")
    data = small.read_bytes()
    begin, end = data.index(b"[", data.index(b'"traceEvents"')) + 1, data.rindex(b"]")
    copies = 60_000_000 // (end - begin)
    large = tmp_path / "large.json"
    large.write_bytes(data[:begin] + b",".join([data[begin:end]] * copies) + data[end:])

    command = [sys.executable, "-c", _MEASURE, small, large, *tables]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    *found, grown_mb = map(int, done.stdout.split())
    assert found == [count * copies for count in rows]
    assert grown_mb < most_mb, f"{grown_mb} MB for {large.stat().st_size // 10**6} MB"


MS = 1_000_000


def in_order(written: int | None = None, start: int | None = None) -> ChromeTrace:
    """Return 20 kernels of 1 ms in one stream, of which the sixth has other times."""
    trace = ChromeTrace()
    trace.mark("ProfilerStep#1", 0, 40 * MS)
    for at in range(20):
        trace.call(at, at * 2 * MS)
        began, took = (at * 2 + 1) * MS, MS
        if at == 5:
            began, took = (began if start is None else start), (written or MS)
        trace.kernel(at, began, began + took, "odd" if at == 5 else "gemm")
    return trace


@pytest.mark.parametrize("written", [3_400 * 1_000 * MS, 100 * 3_600 * 1_000 * MS])
@pytest.mark.parametrize("every", [True, False])
def test_a_kernel_that_runs_past_the_next_of_its_stream_lasts_at_most_until_then(
    written: int, every: bool, tmp_path: Path
) -> None:
    spans = read_kineto(in_order(written).write(tmp_path / "t.json"), every=every)

    assert spans.table("kernels").column("duration") == [MS] * 5 + [2 * MS] + [MS] * 14
    assert [(each.code, each.facts) for each in spans.warnings] == [
        ("times-impossible", {"bounded": 1})
    ]
    assert "odd" in spans.warnings[0].text


@pytest.mark.parametrize("start", [-BASE // 1000 * 1000, 0, -30 * 365 * 86_400 * 1_000 * MS])
@pytest.mark.parametrize("written", [1, -1])
def test_a_kernel_without_a_true_start_is_in_no_sum(
    start: int, written: int, tmp_path: Path
) -> None:
    """The device's zero is 1970, or that of the trace; the end may be true."""
    trace = in_order(MS if written > 0 else 11 * MS - start, start)
    trace.events = [
        {**each, "ts": microseconds(5 * MS + ns_of(each["ts"]))}
        if isinstance(each, dict) and each["name"] != "odd"
        else each
        for each in trace.events
    ]

    spans = read(trace, tmp_path)

    assert spans.table("kernels").column("duration") == [MS] * 19
    assert spans.unix_ns == BASE + 5 * MS
    assert spans.warnings[0].code == "times-impossible"
    assert spans.warnings[0].facts == {"untimed": 1}


def ns_of(written: bytes) -> int:
    return round(float(bytes(written)) * 1_000)


@pytest.mark.parametrize("name", ["ProfilerStep#2", "actor_update"])
@pytest.mark.parametrize("years", [-30, 30])
def test_a_range_of_another_date_is_in_no_wall(name: str, years: int, tmp_path: Path) -> None:
    trace = in_order()
    far = years * 365 * 86_400 * 1_000 * MS
    trace.mark(name, far, far + MS)
    trace.mark(name, MS, MS + abs(far))  # and one that never ends

    spans = read(trace, tmp_path)

    assert (spans.start_ns.tolist(), spans.end_ns.tolist()) == ([0], [40 * MS])
    assert spans.warnings[0].facts == {"untimed": 2}


def test_a_collective_and_a_copy_end_where_their_stream_goes_on(tmp_path: Path) -> None:
    trace = in_order()
    for event in trace.events:
        if isinstance(event, dict) and event["name"] == "odd":
            event |= {
                "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                "dur": microseconds(10**12),
            }
    for at in range(12):
        name, start = "Memcpy DtoD (Device -> Device)", (at * 2 + 2) * MS
        end = start + (10**12 if at == 3 else MS // 2)
        trace.event("gpu_memcpy", name, start, end, 0, 7, device=0, stream=7, correlation=50 + at)

    spans = read(trace, tmp_path)

    assert spans.table("collectives").column("duration") == [2 * MS]
    copies = spans.table("memcpy")
    assert copies.column("duration") == [MS // 2] * 3 + [MS] + [MS // 2] * 8
    assert any("copies" in each for each in copies.losses)
