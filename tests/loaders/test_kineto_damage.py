"""Damaged and hostile traces: what is lost is counted, memory and time are bounded."""

import gzip
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rlprof.loaders.kineto import read_kineto
from lightning_rlprof.spans import Spans
from tests.loaders.chrome import BASE, PID, ChromeTrace


def read(trace: ChromeTrace, folder: Path) -> Spans:
    return read_kineto(trace.write(folder / "t.json"))


def test_what_is_lost_is_counted(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("sound", 0, 5)
    trace.events.append(msgspec.Raw(b'{"ph": "X", "cat": "kernel", "name": 5}'))
    trace.mark("backwards", 9, 5)
    trace.event("user_annotation", "open", 0, 1, PID, 1)["ph"] = "B"

    spans = read(trace, tmp_path)

    assert [problem.text for problem in spans.problems] == [
        "1 events are left out: they cannot be read",
        "1 events are left out: their times cannot be true",
        "1 events are left out: begin and end stand apart",
    ]
    assert spans.names == ("sound",)


def test_a_cut_file_is_read_up_to_the_cut(tmp_path: Path) -> None:
    trace = ChromeTrace({"baseTimeNanoseconds": BASE})
    trace.mark("actor_update", 0, 5)
    trace.launched(1, 2)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(trace.encode())[:-60])

    spans = read_kineto(path)

    assert spans.names == ("actor_update",)
    assert spans.statuses == {0: None}
    assert "its compressed data is cut off" in {problem.text for problem in spans.problems}


HOSTILE = [1e300, -1e300, 2**62, -(2**62), 2**63, 2**70, -(2**70), None, "x", True, 0.5, [], {}]


@pytest.mark.parametrize("seed", range(60))
def test_hostile_values_anywhere_are_an_answer_never_a_crash(seed: int, tmp_path: Path) -> None:
    noise, trace = random.Random(seed), ChromeTrace()
    for number in range(12):
        trace.mark(noise.choice(["ProfilerStep#99999999999999", "actor_update", "x"]), 0, 50)
        trace.shadow("x", 0, 50)
        trace.launched(number, 10, name="x")
    events: list[Any] = trace.events
    for _ in range(noise.randint(1, 20)):
        where = noise.choice(events)
        where = where["args"] if noise.random() < 0.4 and isinstance(where["args"], dict) else where
        if where:
            where[noise.choice(list(where))] = noise.choice(HOSTILE)
    trace.before = {
        "distributedInfo": noise.choice(HOSTILE),
        "deviceProperties": noise.choice(HOSTILE),
    }
    trace.after = {"baseTimeNanoseconds": noise.choice(HOSTILE), "trace_id": noise.choice(HOSTILE)}

    spans = read(trace, tmp_path)
    table = spans.table("kernels")

    assert len(spans) <= 12
    assert len(table.rows) <= 12
    assert all(row[4] >= 0 and row[5] >= 0 for row in table.rows)
    assert (spans.start_ns >= 0).all()
    assert (spans.end_ns >= spans.start_ns).all()


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


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_made_to_be_slow_is_answered_soon(attack: str, tmp_path: Path) -> None:
    """The third and the fifth took 15 s for every MB before their bounds were there."""
    path = tmp_path / "t.json"
    path.write_bytes(ATTACKS[attack])

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
    assert spans.problems[0].text == ("of more than 4,096 threads, those beyond are taken as one")


_MEASURE = """
import resource, sys, time
from pathlib import Path
from lightning_rlprof.loaders.kineto import read_kineto
small, large = map(Path, sys.argv[1:])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
read_kineto(small).table("kernels")
before = peak()
table = read_kineto(large).table("kernels")
print(len(table.rows), peak() - before)
"""


def test_memory_stays_far_below_the_size_of_the_file(tmp_path: Path) -> None:
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

    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, small, large], capture_output=True, text=True, check=True
    )

    kernels, grown_mb = map(int, done.stdout.split())
    assert kernels == 1_000 * copies
    assert grown_mb < 20, f"{grown_mb} MB for a file of {large.stat().st_size // 10**6} MB"
