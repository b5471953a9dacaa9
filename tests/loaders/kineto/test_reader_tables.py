"""Kernels joined to their launches, and to the stage, step and range of the launch.

Calls of the host: kinds, parents, what lies around them, and forward operators.

Copies and collectives: what they are, and what is known of them.

Changes of memory and samples of counters.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.loaders.host_calls import Nesting
from lightning_rlprof.loaders.kineto.reader import (
    copy_kind,
    operation_of,
    read_kineto,
)
from lightning_rlprof.tables.intervals import SLACK_NS
from lightning_rlprof.tables.table import Table
from tests.builders.chrome import PID, ChromeTrace, microseconds

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
        "1 events are left out: their times are out of range: aten::mm"
    )


Call = tuple[int, int, int, bool]  # lane, start, length, alone
call = st.tuples(st.integers(0, 1), st.integers(0, 9_000), st.integers(0, 5_000), st.booleans())


def kineto_calls_brute(rows: Sequence[Call]) -> list[int]:
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

        assert found == kineto_calls_brute(rows)


TOLD = {
    "Collective name": "allreduce",
    "In msg nelems": 100,
    "Out msg nelems": 100,
    "Group size": 8,
    "dtype": "BFloat16",
    "Process Group Name": "3",
    "Process Group Description": "mesh_tp",
    "Seq": 17,
}
KERNEL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def collectives(trace: ChromeTrace, folder: Path) -> Table:
    return read_kineto(trace.write(folder / "t.json")).table("collectives")


def told(table: Table) -> list[tuple[Any, ...]]:
    names = ("operation", "group", "group size", "number", "bytes", "dtype")
    return list(zip(*map(table.column, names), strict=True))


def test_a_copy_is_a_row_with_its_launch_and_what_that_lay_in(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 0, 1_000)
    trace.mark("weight_sync", 100, 500)
    trace.call(1, 200, name="cudaMemcpyAsync")
    args = {"device": 1, "stream": 9, "correlation": 1, "bytes": 4096}
    trace.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 300, 350, 1, 9, **args)
    args = {"device": 1, "stream": 9, "correlation": 2}
    trace.event("Memset", "Memset (Device)", 250, 260, 1, 9, **args)

    table = read_kineto(trace.write(tmp_path / "rank-2.json")).table("memcpy")

    assert [column.name for column in table.columns] == [
        "rank", "device", "stream", "kind", "bytes", "start", "duration", "stage", "step", "launch",
        "launch duration", "thread", "graph",
    ]  # fmt: skip
    assert table.columns[4].unit == "bytes"
    assert list(table.rows) == [
        (2, 1, 9, "memset", None, 250, 10, None, None, None, None, None, None),
        (2, 1, 9, "HtoD", 4096, 300, 50, "weight_sync", 3, 200, 5, 1, None),
    ]
    assert table.note == ("1 copies have no recorded launch: their stage may be unknown")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy PtoP (Device -> Device)", "PtoP"),
        ("Memcpy DtoH (Device -> Pageable)", "DtoH"),
        ("CopyHostToDevice", "HtoD"),
        ("zeCommandListAppendMemoryCopy(M2D)", "HtoD"),
        ("Memcpy D2M(Device -> Host)", "DtoH"),
        ("FillBuffer", "memset"),
        ("Stream Sync", None),
        ("", None),
    ],
)
def test_copies_have_one_name_whoever_recorded_them(name: str, kind: str | None) -> None:
    assert copy_kind(name) == kind


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("reduce", "reduce"),
        ("all_to_allv", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("send 0->1", "send"),
        ("recv", "recv"),
        ("barrier", "barrier"),
        ("SendRecv", "send_recv"),
    ],
)
def test_operations_have_one_name_however_torch_spells_them(text: str, operation: str) -> None:
    assert operation_of(text) == operation


def test_what_a_kernel_tells_of_its_collective_is_its_row(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.kernel(1, 500, 900, KERNEL, **TOLD)
    trace.kernel(2, 1_000, 1_100)

    table = collectives(trace, tmp_path)

    assert [column.name for column in table.columns] == [
        "rank", "device", "stream", "operation", "group", "group size", "number", "bytes", "dtype",
        "start", "duration", "stage", "step", "launch",
    ]  # fmt: skip
    row = (0, 0, 7, "all_reduce", "3 mesh_tp", 8, 17, 200, "BFloat16", 0, 400, None, None, None)
    assert list(table.rows) == [row]


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ({"In msg nelems": 10, "Out msg nelems": 80}, 160),
        ({"In msg nelems": 0, "Out msg nelems": 0}, 0),
        ({"dtype": "Float8_e4m3fn"}, 100),
        ({"dtype": "Mystery"}, None),
        ({"dtype": None}, None),
        ({"In msg nelems": None, "Out msg nelems": None}, None),
        ({"In msg nelems": 2**61, "Out msg nelems": 1}, None),
        ({"In msg nelems": -5, "Out msg nelems": -7}, None),
        *(({"In msg nelems": each}, None) for each in ("x", None, -5, 1e30, 2**63)),
    ],
)
def test_bytes_are_the_larger_message_times_the_size_of_its_type(
    args: dict[str, Any], size: int | None, tmp_path: Path
) -> None:
    trace = ChromeTrace()
    trace.kernel(1, 0, 5, KERNEL, **{**TOLD, **args})

    assert collectives(trace, tmp_path).column("bytes") == [size]


def test_a_silent_kernel_is_told_by_the_operator_that_launched_it(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for external in (5, 6, 6):
        args = {**TOLD, "External id": external, "Process Group Name": str(external)}
        trace.event("cpu_op", "record_param_comms", 0, 5, PID, 1, **args)
    for external in (5, 6, 7, None):
        trace.kernel(1, 0, 5, KERNEL, **{"External id": external})
    trace.kernel(1, 0, 5, KERNEL, **{**TOLD, "External id": 5})

    found = told(collectives(trace, tmp_path))

    nothing = ("all_reduce", None, None, None, None, None)
    assert found == [
        ("all_reduce", "5 mesh_tp", 8, 17, 200, "BFloat16"),
        nothing,  # two operators have that id
        nothing,
        nothing,
        ("all_reduce", "3 mesh_tp", 8, 17, 200, "BFloat16"),
    ]


@pytest.mark.parametrize(
    ("name", "mark", "operation"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "nccl:all_to_all", "all_to_all"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "pipeline", "send_recv"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "pipeline", None),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "nccl:send 0->1", "send"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "a", "reduce_scatter"),
        ("void vllm::cross_device_reduce_1stage<half, 8>()", "a", "all_reduce"),
    ],
)
def test_else_the_annotation_around_the_launch_or_the_name_tells_the_operation(
    name: str, mark: str, operation: str | None, tmp_path: Path
) -> None:
    trace = ChromeTrace()
    trace.mark(mark, 0, 100)
    trace.launched(1, 50, name=name)

    assert collectives(trace, tmp_path).column("operation") == [operation]


def test_a_kernel_of_any_name_is_a_collective_where_it_says_so(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.kernel(1, 0, 5, "my_fused_kernel", **{**TOLD, "Process Group Description": ""})
    trace.kernel(2, 10, 15, "ampere_sgemm")

    assert told(collectives(trace, tmp_path)) == [("all_reduce", "3", 8, 17, 200, "BFloat16")]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.kernel(1, 0, 5, KERNEL, **TOLD)
    trace.kernel(2, 0, 5, KERNEL, **{**TOLD, "dtype": ["Float"]})

    table = collectives(trace, tmp_path)

    assert len(table.rows) == 1
    assert table.note.startswith("1 events are left out: they cannot be read; 1 collectives have")


NAMED = ("stage", "region")


def places(path: Path) -> list[tuple[Any, Any, Any]]:
    table = read_kineto(path).table("kernels")
    columns = [table.column(name) for name in ("stage", "step", "range")]
    return list(zip(*columns, strict=True))


def test_a_kernel_belongs_to_what_its_launch_lies_in(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 0, 1_000)
    trace.mark("actor_update", 100, 500)
    trace.mark("micro_batch", 200, 300)
    trace.call(1, 250)
    trace.kernel(1, 2_000, 2_500)  # runs long after its step
    trace.launched(2, 400)
    trace.launched(3, 600)
    trace.launched(4, 1_100)

    assert places(trace.write(tmp_path / "t.json")) == [
        ("actor_update", 3, "actor_update"),
        (None, 3, None),
        (None, None, None),
        ("actor_update", 3, "micro_batch"),
    ]


def test_rows_come_by_start_with_device_stream_and_times(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.kernel(1, 5_000_000_000_000_007, 5_000_000_000_000_009, "b", device=3, stream=20)
    trace.kernel(2, 5_000_000_000_000_002, 5_000_000_000_000_008, "a", device=None)
    path = trace.write(tmp_path / "rank-5.json")

    table = read_kineto(path).table("kernels")

    assert [row[:6] for row in table.rows] == [(5, None, 7, "a", 0, 6), (5, 3, 20, "b", 5, 2)]


def test_autograd_borrows_from_the_thread_that_trains(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 0, 1_000)
    trace.mark("actor_update", 100, 500)
    trace.mark("backward", 200, 400)
    trace.mark("nccl:all_reduce", 300, 310, tid=AUTOGRAD)
    trace.launched(1, 250, tid=AUTOGRAD)
    trace.launched(2, 305, tid=AUTOGRAD)
    path = trace.write(tmp_path / "t.json")

    assert places(path) == [
        ("actor_update", 3, "backward"),
        ("actor_update", 3, "nccl:all_reduce"),
    ]
    assert read_kineto(path).table("kernels").note.startswith("2 kernels were launched by threads")


def test_another_process_lends_nothing(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 100, 500)
    trace.call(1, 250, tid=5, pid=PID + 1)
    trace.kernel(1, 260, 270)

    assert places(trace.write(tmp_path / "t.json")) == [(None, None, None)]


def test_without_a_launch_the_device_tells(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("ProfilerStep#3", 0, 1_000)
    trace.mark("actor_update", 0, 1_000)
    trace.shadow("ProfilerStep#2", 0, 900)
    trace.shadow("compute_reward", 100, 900)
    trace.shadow("score", 100, 300)
    trace.kernel(1, 200, 250)
    trace.kernel(2, 400, 450, stream=8)
    path = trace.write(tmp_path / "t.json")

    assert places(path) == [("compute_reward", 2, "score"), (None, None, None)]
    assert read_kineto(path).table("kernels").note == (
        "2 kernels have no recorded launch: their stage may be unknown"
    )


def test_replays_of_graphs_are_counted(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number, at in ((1, 0), (2, 100)):
        trace.call(number, at, name="cudaGraphLaunch")
        for node in range(3):
            trace.kernel(number, at + 10 * node, at + 10 * node + 5)
    trace.launched(3, 200)

    note = read_kineto(trace.write(tmp_path / "t.json")).table("kernels").note

    assert note == ("6 kernels ran in 2 CUDA graph replays: idle time inside a replay is unknown")


def test_copies_and_kernels_of_a_replay_have_its_number(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.call(1, 50, name="cudaGraphLaunch")  # of a graph that only sets memory
    trace.event("gpu_memset", "Memset (Device)", 60, 65, 0, 7, correlation=1)
    trace.call(2, 100, name="cudaGraphLaunch")
    trace.kernel(2, 110, 120)
    trace.event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 125, 130, 0, 7, correlation=2)

    spans = read_kineto(trace.write(tmp_path / "t.json"))

    assert spans.table("memcpy").column("graph") == [1, 2]
    assert spans.table("kernels").column("graph") == [2]


def test_a_number_used_twice_means_the_last_call_before_the_kernel(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number, name in enumerate(("first", "second", "third")):
        trace.mark(name, 100 * number, 100 * number + 50)
        trace.call(1, 100 * number + 10)
    for at in (5, 60, 150, 250):
        trace.kernel(1, at, at + 1)

    found = [place[2] for place in places(trace.write(tmp_path / "t.json"))]

    assert found == ["first", "first", "second", "third"]


def test_a_missing_number_joins_nothing(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 100)
    trace.event("cuda_runtime", "cudaLaunchKernel", 10, 15, PID, 1, correlation=None)
    trace.event("kernel", "gemm", 20, 30, 0, 7, device=0, stream=7, correlation=None)

    assert places(trace.write(tmp_path / "t.json")) == [(None, None, None)]


def test_no_kernels_are_said_not_shown_as_none(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 10)

    table = read_kineto(trace.write(tmp_path / "t.json")).table("kernels")

    assert (len(table.rows), table.note) == (0, "no kernels: no device was profiled")


def written_at_random(seed: int) -> ChromeTrace:
    noise, trace = random.Random(seed), ChromeTrace()
    moments = iter(noise.sample(range(1, 20_000), 400))  # all differ: no two begin at once
    names = ["ProfilerStep#1", "ProfilerStep#2", "actor_update", "weight_sync", "a", "b"]
    for _ in range(25):
        begin, end = sorted((next(moments), next(moments)))
        trace.mark(noise.choice(names), begin, end, tid=noise.choice([1, 1, 2]))
    for number in range(60):
        if noise.random() < 0.8:
            trace.call(number, next(moments), tid=noise.choice([1, 2, AUTOGRAD]))
        trace.kernel(number, (at := next(moments)), at + 5, stream=noise.choice([7, 8]))
    for _ in range(8):
        begin, end = sorted((next(moments), next(moments)))
        trace.shadow(noise.choice(names), begin, end, noise.choice([7, 8]))
    noise.shuffle(trace.events)
    return trace


def ns(raw: Any) -> int:
    return round(float(bytes(raw)) * 1000)


def kind(event: Any) -> str:
    if "#" in event["name"]:
        return "step"
    return "stage" if event["name"] in ("actor_update", "weight_sync") else "region"


def around(events: list[Any], lane: Any, at: int, *kinds: str) -> Any:
    """Return the last begun event of a lane around a moment."""
    found = [
        event
        for event in events
        if (event["pid"], event["tid"]) == lane
        and ns(event["ts"]) <= at < ns(event["ts"]) + ns(event["dur"])
        and kind(event) in kinds
    ]
    return max(found, key=lambda event: ns(event["ts"]), default={"name": None, "step": None})


def number_steps(events: list[Any], trains: int) -> None:
    """Give each event its step: its own number, or that of the step in which it began."""
    counting = {event["tid"] for event in events if kind(event) == "step"}
    for event in sorted(events, key=lambda event: kind(event) != "step"):
        if kind(event) == "step":
            event["step"] = int(event["name"][-1])
        else:
            lane = (event["pid"], event["tid"] if event["tid"] in counting else trains)
            event["step"] = around(events, lane, ns(event["ts"]), "step")["step"]


def brute(trace: ChromeTrace) -> list[tuple[Any, Any, Any]]:
    of: dict[str, list[Any]] = {}
    for event in trace.events:
        of.setdefault(event["cat"], []).append(event)
    marks, shadows = of["user_annotation"], of["gpu_user_annotation"]
    calls = {event["args"]["correlation"]: event for event in of["cuda_runtime"]}
    owned = [(kind(mark), mark["tid"]) for mark in marks]
    trains = max((2, 1), key=lambda tid: [owned.count((k, tid)) for k in ("step", "stage")])
    number_steps(marks, trains)
    rows = []
    for kernel in sorted(of["kernel"], key=lambda event: ns(event["ts"])):
        call = calls.get(kernel["args"]["correlation"], kernel)
        at, own = ns(call["ts"]), (call["pid"], call["tid"])
        lent = (PID, trains) if own == (PID, AUTOGRAD) else own
        if call is kernel:
            step = str(around(shadows, own, at, "step")["name"])[-1:]
            stage, name = (around(shadows, own, at, *k)["name"] for k in (["stage"], NAMED))
            rows.append((stage, int(step) if step.isdigit() else None, name))
        else:
            step = around(marks, lent, at, "step", "stage")["step"]
            name = around(marks, own, at, *NAMED)["name"] or around(marks, lent, at, *NAMED)["name"]
            rows.append((around(marks, lent, at, "stage")["name"], step, name))
    return rows


@pytest.mark.parametrize("seed", range(25))
def test_the_join_agrees_with_brute_force(seed: int, tmp_path: Path) -> None:
    trace = written_at_random(seed)

    assert places(trace.write(tmp_path / "t.json", "compact")) == brute(trace)


def test_kernels_that_cannot_be_read_do_not_say_that_there_were_none(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 0, 10)
    trace.events.append(msgspec.Raw(b'{"ph": "X", "cat": "kernel", "name": "op"x"", "ts": 1}'))
    trace.mark("actor_update", 20, 30)
    path = tmp_path / "t.json"
    events = b",".join(
        bytes(e) if isinstance(e, msgspec.Raw) else msgspec.json.encode(e) for e in trace.events
    )
    path.write_bytes(b'{"traceEvents": [' + events + b"]}")

    note = read_kineto(path).table("kernels").note

    assert note == "no readable kernels: some events are damaged or lost"


def change(trace: ChromeTrace, at: int, **args: Any) -> None:
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": PID}
    trace.events.append({**event, "tid": 1, "ts": microseconds(at), "args": args})


def sample(trace: ChromeTrace, at: int, pid: Any = 0, name: str = "power", **args: Any) -> None:
    event = {"ph": "C", "name": name, "pid": pid, "ts": microseconds(at), "args": args}
    trace.events.append(event)


def table_of(trace: ChromeTrace, name: str, folder: Path) -> Table:
    return read_kineto(trace.write(folder / "rank-1.json")).table(name)


def test_changes_of_memory_come_by_time_with_what_is_held_after_them(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("actor_update", 1_000, 2_000)
    totals = {"Total Allocated": 2**40, "Total Reserved": 2**41}
    change(trace, 1_600, **{"Device Type": 1, "Device Id": 3, "Bytes": -512, **totals})
    change(trace, 1_500, **{"Device Type": 0, "Device Id": -1, "Bytes": 5, **totals})
    change(trace, 1_700, **{"Device Type": 99, "Device Id": 0})
    change(trace, 1_800, Bytes=7)
    trace.events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[other]", "ts": 5})

    table = table_of(trace, "memory", tmp_path)

    assert [column.name for column in table.columns] == [
        "rank", "device", "component", "time", "allocated", "reserved",
    ]  # fmt: skip
    assert list(table.rows) == [
        (1, None, "CPU", 500, 2**40, 2**41),
        (1, 3, "CUDA", 600, 2**40, 2**41),
        (1, 0, "device type 99", 700, None, None),
        (1, None, None, 800, None, None),
    ]
    assert table.note == ""


def test_samples_of_counters_come_by_time_with_their_device(tmp_path: Path) -> None:
    trace = ChromeTrace()
    label = {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 5"}}
    trace.events.append(label)
    sample(trace, 300, value=250.5)
    sample(trace, 200, pid="host", name="memory", used=7, free=3, unit="GB", power=True)

    assert list(table_of(trace, "counters", tmp_path).rows) == [
        (1, None, "memory used", 200, 7.0),
        (1, None, "memory free", 200, 3.0),
        (1, None, "memory power", 200, 1.0),
        (1, 5, "power", 300, 250.5),
    ]


def test_samples_and_changes_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    trace = ChromeTrace()
    sample(trace, 300, value=250.5)
    sample(trace, 300, value=1e305)
    sample(trace, 300, value=10**400)
    sample(trace, 300)
    sample(trace, 300, value="12")
    sample(trace, 300, value=None)
    trace.events.append({"ph": "C", "name": "power", "ts": 1, "args": [5]})
    trace.events.append({"ph": "C", "name": "power", "ts": None, "args": {"value": 5}})
    change(trace, 1, **{"Total Allocated": {}})
    change(trace, 2**63)

    counters, memory = (table_of(trace, name, tmp_path) for name in ("counters", "memory"))

    assert counters.column("value") == [250.5]
    assert len(memory.rows) == 0
    assert memory.note == (
        "1 events are left out: they cannot be read; "
        "1 events are left out: their times are out of range: [memory]"
    )
    assert counters.note == (
        "6 events are left out: they cannot be read; "
        "1 events are left out: their times are out of range: power"
    )


@pytest.mark.parametrize("by_time", [False, True])
def test_work_belongs_to_the_launch_of_its_own_process(tmp_path: Path, *, by_time: bool) -> None:
    trace = ChromeTrace()
    for process in range(2):
        for number in range(6):
            at = 1_000 * number + 100 * process
            trace.call(number, at, pid=9 + process)
            trace.kernel(number, at + 50_000, at + 50_900, device=process)
    if by_time:
        trace.events.sort(key=lambda event: bytes(event["ts"]).zfill(20))
    kernels = read_kineto(trace.write(tmp_path / "merged.json")).table("kernels")
    found = columns(kernels, "device", "start", "launch")
    delays = {(device, start - launch) for device, start, launch in found}
    assert delays == {(0, 50_000), (1, 50_000)}
    assert len({launch for _, _, launch in found}) == 12


def test_a_process_that_launched_more_owns_the_device_with_more(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for process, count in ((9, 8), (10, 3)):  # The device of the second is seen first.
        for number in range(count):
            trace.call(number, 1_000 * number + process, pid=process)
    for device, process, count in ((1, 10, 3), (0, 9, 8)):
        for number in range(count):
            at = 1_000 * number + process
            trace.kernel(number, at + 50_000, at + 50_900, device=device)
    kernels = read_kineto(trace.write(tmp_path / "merged.json")).table("kernels")
    starts = columns(kernels, "start", "launch")
    assert {start - launch for start, launch in starts} == {50_000}


def test_processes_of_one_device_keep_the_numbers_that_only_one_of_them_has(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for process in (9, 10):
        for number in range(4):
            trace.call(10 * process + number, 1_000 * number + process, pid=process)
            trace.kernel(10 * process + number, 50_000 + 1_000 * number + process, 59_000)
    kernels = read_kineto(trace.write(tmp_path / "shared.json")).table("kernels")
    starts = columns(kernels, "start", "launch")
    assert {start - launch for start, launch in starts} == {50_000}
