"""Calls of the host: kinds, parents, what lies around them, and forward operators."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.loaders.kineto import read_kineto
from lightning_rlprof.loaders.nesting import SLACK_NS, Nesting
from lightning_rlprof.table import Table
from tests.loaders.chrome import PID, ChromeTrace

AUTOGRAD = 99


def operator(trace: ChromeTrace, name: str, start: int, end: int, tid: Any = 1, **args: Any) -> Any:
    return trace.event("cpu_op", name, start, end, PID, tid, **args)


def function(trace: ChromeTrace, name: str, start: int, end: int, tid: Any = 1) -> Any:
    args = {"Python parent id": None, "Python id": 1}
    return trace.event("python_function", name, start, end, PID, tid, **args)


def calls(trace: ChromeTrace, folder: Path) -> Table:
    return read_kineto(trace.write(folder / "rank-3.json")).table("calls")


def columns(table: Table, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*map(table.column, names), strict=True))


def test_all_that_the_host_called_is_there_by_thread_and_start(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#2", 100_000, 900_000)
    trace.mark("actor_update", 200_000, 600_000)
    operator(trace, "aten::mm", 300_000, 400_000, tid=7)
    trace.call(1, 500_000)
    operator(trace, "aten::add", 450_000, 550_000)
    function(trace, "nn.Module: Linear_0", 400_000, 580_000)
    function(trace, "model.py(3): forward", 390_000, 590_000)
    trace.event("overhead", "Resource", 0, 10, PID, 1)

    assert list(calls(trace, tmp_path).rows) == [
        (
            3,
            1,
            "model.py(3): forward",
            "python",
            290_000,
            200_000,
            1,
            None,
            "actor_update",
            2,
            None,
        ),
        (3, 1, "Linear_0", "module", 300_000, 180_000, 2, 1, "actor_update", 2, None),
        (3, 1, "aten::add", "operator", 350_000, 100_000, 3, 2, "actor_update", 2, None),
        (3, 1, "cudaLaunchKernel", "runtime", 400_000, 5, 4, 3, "actor_update", 2, None),
        (3, 7, "aten::mm", "operator", 200_000, 100_000, 5, None, "actor_update", 2, None),
    ]


def test_calls_of_the_driver_are_never_parents(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.event("cuda_runtime", "cudaMalloc", 0, 100, PID, 1, correlation=1)
    operator(trace, "aten::empty", 10, 20)

    assert calls(trace, tmp_path).column("parent") == [None, None]


def test_a_call_may_end_a_microsecond_later_than_the_one_around_it(tmp_path: Path) -> None:
    trace = ChromeTrace()
    function(trace, "outer", 0, 50_000)
    operator(trace, "inner", 10_000, 50_000 + SLACK_NS)
    operator(trace, "innermost", 20_000, 49_000)
    operator(trace, "next", 50_000, 60_000)
    operator(trace, "overlaps", 59_000, 60_000 + SLACK_NS + 1)

    found = columns(calls(trace, tmp_path), "name", "parent")

    assert found == [
        ("outer", None), ("inner", 1), ("innermost", 2), ("next", None), ("overlaps", None),
    ]  # fmt: skip


def test_of_two_that_begin_and_end_at_once_python_called_the_operator(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.call(1, 100)
    operator(trace, "aten::mm", 100, 105)
    function(trace, "model.py(3): forward", 100, 105)

    found = columns(calls(trace, tmp_path), "kind", "parent")

    assert found == [("python", None), ("operator", 1), ("runtime", 2)]


def test_texts_as_threads_are_threads_of_their_own(tmp_path: Path) -> None:
    trace = ChromeTrace()
    operator(trace, "a", 0, 100, tid="worker")
    operator(trace, "b", 10, 20, tid="worker")
    operator(trace, "c", 10, 20, tid=2**64 - 1)
    operator(trace, "d", 10, 20, tid=5)

    found = columns(calls(trace, tmp_path), "name", "thread", "parent")

    assert found == [("a", -1, None), ("b", -1, 1), ("c", -1, None), ("d", 5, None)]


def test_threads_of_two_processes_with_one_number_are_told_apart(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.event("cpu_op", "a", 0, 100, 10, 1)
    trace.event("cpu_op", "b", 10, 20, 11, 1)

    assert calls(trace, tmp_path).column("parent") == [None, None]


def backward(trace: ChromeTrace, number: int, start: int, end: int, tid: int = AUTOGRAD) -> None:
    args = {"Sequence number": number, "Fwd thread id": 1}
    operator(trace, "MmBackward0", start, end, tid, **args)


def forward(trace: ChromeTrace, name: str, number: int, start: int, end: int, tid: int = 1) -> None:
    args = {"Sequence number": number, "Fwd thread id": 0}
    operator(trace, name, start, end, tid, **args)


def test_the_forward_operator_is_the_last_with_the_number_before_the_backward(
    tmp_path: Path,
) -> None:
    trace = ChromeTrace()
    forward(trace, "aten::linear", 5, 0, 100)
    forward(trace, "aten::addmm", 5, 10, 90)
    backward(trace, 5, 200, 300)
    backward(trace, 5, 210, 290)
    forward(trace, "aten::mm", 5, 400, 500)
    backward(trace, 5, 600, 700)
    backward(trace, 6, 800, 900)
    operator(trace, "aten::empty", 220, 230, AUTOGRAD)
    found = columns(calls(trace, tmp_path), "id", "name", "forward")

    assert found == [
        (1, "aten::linear", None),
        (2, "aten::addmm", None),
        (3, "aten::mm", None),
        (4, "MmBackward0", 2),
        (5, "MmBackward0", 2),
        (6, "aten::empty", None),
        (7, "MmBackward0", 3),
        (8, "MmBackward0", None),
    ]


def test_a_number_of_two_forward_threads_is_not_told_apart(tmp_path: Path) -> None:
    trace = ChromeTrace()
    forward(trace, "aten::mm", 5, 0, 100, tid=1)
    forward(trace, "aten::mm", 5, 0, 100, tid=2)
    backward(trace, 5, 200, 300)
    forward(trace, "aten::mm", 6, 0, 100, tid=2)
    backward(trace, 6, 400, 500)

    assert calls(trace, tmp_path).column("forward") == [None, None, None, None, 3]


def test_without_marks_the_step_is_the_one_in_the_files_name(tmp_path: Path) -> None:
    trace = ChromeTrace()
    operator(trace, "aten::mm", 0, 100)

    table = read_kineto(trace.write(tmp_path / "step-000007.json")).table("calls")

    assert (table.column("step"), table.column("stage")) == ([7], [None])


def test_what_cannot_be_true_is_left_out_and_said(tmp_path: Path) -> None:
    trace = ChromeTrace()
    operator(trace, "aten::mm", 0, 100)
    operator(trace, "aten::mm", 100, 0)
    trace.events.append({**operator(trace, "aten::mm", 0, 100), "args": {"Sequence number": [1]}})

    table = calls(trace, tmp_path)

    assert len(table.rows) == 2
    assert table.note == (
        "1 events are left out: they cannot be read; "
        "1 events are left out: their times cannot be true"
    )


Call = tuple[int, int, int, bool]  # lane, start, length, alone
call = st.tuples(st.integers(0, 1), st.integers(0, 9_000), st.integers(0, 5_000), st.booleans())


def brute(rows: Sequence[Call]) -> list[int]:
    """Look through all calls before each one for the last that holds it."""
    found = []
    for at, (lane, start, length, _) in enumerate(rows):
        around = [
            number + 1
            for number, (where, begin, size, alone) in enumerate(rows[:at])
            if (where, alone) == (lane, False)
            and begin <= start < begin + size
            and start + length <= begin + size + SLACK_NS
        ]
        found.append(around)
    return [max(around, default=0) for around in found]


def nest(rows: list[Call]) -> list[Call]:
    """Cut calls to the length of what they lie in, as those of one thread are."""
    rows = sorted(rows, key=lambda row: (row[0], row[1], -row[2]))
    sound: list[Call] = []
    for lane, start, length, alone in rows:
        ends = [s + n for where, s, n, a in sound if where == lane and not a and s <= start < s + n]
        room = min(ends, default=10**6) - start
        sound.append((lane, start, min(length, room), alone))
    return sorted(sound, key=lambda row: (row[0], row[1], -row[2]))


@given(st.lists(call, max_size=12).map(nest))
def test_parents_agree_with_brute_force(rows: list[Call]) -> None:
    columns = [np.array([row[at] for row in rows], np.int64) for at in range(4)]
    lane, start, length, alone = columns

    for size in (1, 3, 12):
        nesting, found = Nesting(), []
        for low in range(0, len(rows), size):
            part = (each[low : low + size] for each in (lane, start, start + length))
            found += nesting.parents(*part, alone[low : low + size].astype(bool)).tolist()

        assert found == brute(rows)
