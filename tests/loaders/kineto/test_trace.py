"""Columns of what is kept, by kind: ids of every kind, and what is left out and counted."""

from typing import Any

import msgspec
import pytest

from lightning_rlprof.loaders.chrome_events import MAX_TIME, MISSING, Event
from lightning_rlprof.loaders.kineto import trace as event_kinds
from lightning_rlprof.loaders.kineto.trace import (
    EVERY,
    ChromeColumns,
    Kind,
)

DECODE = msgspec.json.Decoder(list[Event]).decode


def columns_of(*events: dict[str, Any] | str) -> ChromeColumns:
    columns = ChromeColumns()
    texts = [one if isinstance(one, str) else msgspec.json.encode(one).decode() for one in events]
    columns.add(DECODE(f"[{','.join(texts)}]"))
    return columns


def kernel(**changes: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": 1}
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7}
    return {**event, "args": args, **changes}


CATEGORIES = {
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "cuda_runtime": Kind.LAUNCH,
    "cuda_driver": Kind.LAUNCH,
    "hip_runtime": Kind.LAUNCH,
    "xpu_runtime": Kind.LAUNCH,
    "xpu_driver": Kind.LAUNCH,
    "Runtime": Kind.LAUNCH,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.DEVICE_ANNOTATION,
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), Kind.COPY),
    **dict.fromkeys(("cpu_op", "Operator"), Kind.OPERATOR),
    "python_function": Kind.PYTHON,
    "cuda_sync": None,
    "ac2g": None,
    None: None,
}


@pytest.mark.parametrize(("category", "kind"), CATEGORIES.items())
def test_categories_are_kept_as_what_they_are(category: str | None, kind: int | None) -> None:
    columns = columns_of(kernel(cat=category))

    found = [len(columns.grown(each)) for each in sorted(EVERY)]

    assert found == [int(each == kind) for each in sorted(EVERY)]


def test_a_kernel_is_one_row_of_numbers() -> None:
    columns = columns_of(kernel(), kernel(name="softmax", ts=4.5, dur=0.25, pid=1), kernel())

    rows = {name: column.tolist() for name, column in columns.grown(Kind.KERNEL).rows().items()}

    assert rows == {
        "start_ns": [1000, 4500, 1000],
        "end_ns": [3000, 4750, 3000],
        "lane": [0, 1, 0],
        "name": [0, 1, 0],
        "launch": [1, 1, 1],
        "device": [0, 0, 0],
        "stream": [7, 7, 7],
    }
    assert list(columns.names) == ["gemm", "softmax"]
    assert list(columns.lanes) == [(0, 7), (1, 7)]


IDS: list[tuple[Any, int]] = [
    (3, 3),
    (3.0, 3),
    ("3", 3),
    ("stream 3", MISSING),
    ("٣", MISSING),
    ("9" * 30, MISSING),
    (None, MISSING),
    (-5, MISSING),
    (0.5, MISSING),
    (2**70, MISSING),
    (-(2**70), MISSING),
    (1e30, MISSING),
]


@pytest.mark.parametrize(("written", "number"), IDS)
def test_ids_may_be_of_any_kind(written: Any, number: int) -> None:
    args = {"device": written, "stream": written, "correlation": written}

    rows = columns_of(kernel(args=args), kernel()).grown(Kind.KERNEL).rows()

    assert rows["device"].tolist() == [number, 0]
    assert rows["stream"].tolist() == [number, 7]
    assert rows["launch"].tolist() == [max(number, MISSING), 1]


def test_without_a_correlation_the_external_id_joins() -> None:
    external = kernel(args={"External id": 5})
    call = {**external, "cat": "cuda_runtime"}
    columns = columns_of(external, call, kernel(args={"correlation": 5, "External id": 9}))

    found, launch = (
        columns.grown(Kind.KERNEL).rows()["launch"],
        columns.grown(Kind.LAUNCH).rows()["launch"],
    )

    assert found[0] == launch[0] < MISSING
    assert found[1] == 5


@pytest.mark.parametrize("args", [None, {}])
def test_a_kernel_without_arguments_is_a_kernel(args: Any) -> None:
    rows = columns_of(kernel(args=args)).grown(Kind.KERNEL).rows()

    assert (rows["device"][0], rows["launch"][0]) == (MISSING, MISSING)


@pytest.mark.parametrize(
    "times",
    [
        {"ts": 1e300},
        {"ts": -(2**70)},
        {"ts": None},
        {"ts": "soon"},
        {"dur": None},
        {"dur": -1},
        {"dur": 1e300},
        {"ts": MAX_TIME // 1000 - 1, "dur": MAX_TIME // 1000 - 1},
    ],
)
def test_events_whose_times_cannot_be_true_are_counted(times: dict[str, Any]) -> None:
    columns = columns_of(kernel(), kernel(**times), kernel())

    assert len(columns.grown(Kind.KERNEL)) == 2
    assert columns.lost[Kind.KERNEL] == 1


def test_an_event_without_times_is_counted() -> None:
    columns = columns_of('{"ph": "X", "cat": "kernel", "name": "gemm"}')

    assert len(columns.grown(Kind.KERNEL)) == 0
    assert columns.lost[Kind.KERNEL] == 1


def test_threads_get_their_names() -> None:
    name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}}
    columns = columns_of(
        name,
        {**name, "tid": 3, "args": {"name": 5}},
        {**name, "tid": 4, "args": None},
        {**name, "tid": 5, "name": "process_name"},
    )

    assert columns.thread_names == {(1, 2): "main"}


def test_threads_beyond_the_bound_are_taken_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_kinds, "MAX_LANES", 3)
    columns = columns_of(*(kernel(tid=tid) for tid in (1, 2, 3, 4, 5, 1)))

    assert columns.lanes.merged == 2
    assert columns.grown(Kind.KERNEL).rows()["lane"].tolist() == [0, 1, 2, 3, 3, 0]


def test_batches_are_joined_in_order() -> None:
    columns = ChromeColumns()
    for number in range(5):
        columns.add(DECODE(msgspec.json.encode([kernel(ts=number), kernel(ts=number + 0.5)])))

    starts = columns.grown(Kind.KERNEL).rows()["start_ns"].tolist()

    assert starts == [500 * number for number in range(10)]


def test_what_is_not_wanted_is_counted_and_not_kept() -> None:
    columns = ChromeColumns(frozenset({Kind.LAUNCH}))
    events = [kernel(name="ncclKernel"), kernel(cat="cpu_op"), kernel(cat="cuda_runtime")]
    columns.add(DECODE(msgspec.json.encode([*events, {"ph": "C"}, {"ph": "M"}])))

    kinds = (Kind.KERNEL, Kind.COLLECTIVE, Kind.OPERATOR, Kind.LAUNCH, Kind.COUNTER, Kind.PYTHON)
    assert [columns.counts[kind] for kind in kinds] == [1, 0, 1, 1, 1, 0]
    assert [len(columns.grown(kind)) for kind in kinds] == [0, 0, 0, 1, 0, 0]
    assert list(columns.names) == ["gemm"]


def test_kernels_are_looked_through_for_collectives_that_alone_are_wanted() -> None:
    columns = ChromeColumns(frozenset({Kind.COLLECTIVE}))
    columns.add(DECODE(msgspec.json.encode([kernel(name="ncclKernel"), kernel()])))

    assert [len(columns.grown(kind)) for kind in (Kind.KERNEL, Kind.COLLECTIVE)] == [0, 1]


def test_columns_of_one_trace_share_their_codes() -> None:
    first = columns_of(kernel(name="a", tid=5))
    second = ChromeColumns(EVERY, first)
    second.add(DECODE(msgspec.json.encode([kernel(name="b", tid=6), kernel(name="a", tid=5)])))

    assert second.grown(Kind.KERNEL).rows()["name"].tolist() == [1, 0]
    assert second.grown(Kind.KERNEL).rows()["lane"].tolist() == [1, 0]
    assert list(first.names) == ["a", "b"]


@pytest.mark.parametrize("args", [7, [1], {"device": [1]}, {"stream": True}])
def test_a_kernel_whose_arguments_cannot_be_read_is_counted(args: Any) -> None:
    columns = columns_of(kernel(), kernel(args=args, name="lost"), kernel(name="b"))

    names = [*columns.names]
    assert [names[code] for code in columns.grown(Kind.KERNEL).rows()["name"].tolist()] == [
        "gemm",
        "b",
    ]
    assert (columns.unread[Kind.KERNEL], columns.lost[Kind.KERNEL]) == (1, 0)


def test_operators_without_a_number_of_autograd_are_kept_between_those_with_one() -> None:
    numbers = {"Sequence number": 5, "Fwd thread id": 1}
    columns = columns_of(*(kernel(cat="cpu_op", args=args) for args in ({}, numbers, {"a": [1]})))

    assert columns.grown(Kind.OPERATOR).rows()["sequence"].tolist() == [MISSING, 5, MISSING]
    assert columns.grown(Kind.OPERATOR).rows()["forward"].tolist() == [MISSING, 1, MISSING]
