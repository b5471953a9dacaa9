"""Copies and collectives: what they are, and what is known of them."""

from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.kineto import read_kineto
from lightning_rlprof.loaders.kineto_device import copy_kind, operation_of
from lightning_rlprof.table import Table
from tests.loaders.chrome import PID, ChromeTrace

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
        "launch duration",
    ]  # fmt: skip
    assert table.columns[4].unit == "bytes"
    assert list(table.rows) == [
        (2, 1, 9, "memset", None, 250, 10, None, None, None, None),
        (2, 1, 9, "HtoD", 4096, 300, 50, "weight_sync", 3, 200, 5),
    ]
    assert table.note == (
        "1 copies: their launch was not recorded, and little is known of their stage"
    )


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
    assert table.note.startswith("1 events are left out: they cannot be read; 1 collectives: their")
