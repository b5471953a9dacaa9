"""The ledger made finer by kernels, by copies and by collectives that match across ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.ledger.ledger import accounts_of, ledger
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.kernels import COLUMNS, distinct
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.kernels import Kernels, kernel_table
from tests.builders.raster import Kernel
from tests.builders.runs import Row, loaded


def stage(name: str, start: int, end: int, **changes: object) -> Row:
    return Row(name, "stage", 1, start, end, **changes)  # type: ignore[arg-type]


def kernels_of(kernels: Sequence[Kernel]) -> Table:
    """Return the table as a loader makes it: columns of codes."""
    names, stages = [k.name for k in kernels], [k.stage or "" for k in kernels]
    zeros = np.zeros(len(kernels), np.int64)
    return kernel_table(
        Kernels(
            np.array([k.rank for k in kernels]),
            zeros,
            np.arange(len(kernels)),
            distinct(np.arange(len(kernels)), names),
            np.array([k.start_ns for k in kernels]),
            np.array([k.end_ns for k in kernels]),
            (np.where([k.stage is None for k in kernels], -1, np.arange(len(kernels))), stages),
            np.array([k.step or 0 for k in kernels]),
            (zeros - 1, []),
        )
    )


def with_kernels(spans: Spans, *kernels: Kernel, note: str = "") -> Spans:
    table = replace(kernels_of(kernels), note=note)
    return replace(spans, tables={"kernels": lambda: table})


def totals_of(spans: Spans) -> dict[str, int]:
    table = ledger(spans)
    pairs = zip(table.column("category"), table.column("total"), strict=True)
    return {str(category): int(total) for category, total in pairs if total}


def sources(spans: Spans) -> dict[object, object]:
    table = ledger(spans)
    return dict(zip(table.column("category"), table.column("source"), strict=True))


def test_kernels_divide_the_stages_that_compute() -> None:
    spans = with_kernels(
        loaded([stage("actor_update", 0, 100), stage("actor_generate", 100, 200)]),
        Kernel(0, "gemm", 10, 40, "actor_update"),
        Kernel(0, "gemm_on_another_stream", 20, 50, "actor_update"),  # counts once
        Kernel(0, "ncclDevKernel_AllReduce", 45, 70, "actor_update"),  # hidden up to 50
        Kernel(0, "Memcpy DtoH (Device -> Pinned)", 65, 75, "actor_update"),
        Kernel(0, "gemm", 95, 110, "actor_update"),  # runs on while the host is further
        Kernel(0, "decode", 120, 130, "actor_generate"),
        Kernel(0, "ncclDevKernel_AllReduce", 125, 150, "actor_generate"),
    )
    assert totals_of(spans) == {
        "compute": 10 + 40 + 15,
        "exposed communication": 20,
        "exposed memcpy": 5,
        "unattributed idle": 20,  # no launch is recorded
        "rollout": 90,
    }
    found = sources(spans)
    assert [found[name] for name in ("compute", "rollout")] == ["both", "both"]
    assert found["unattributed idle"] == found["exposed memcpy"] == "kernels"
    assert accounts_of(spans).unknown_transfers == 1


def test_before_the_first_kernel_nothing_is_known_of_the_device() -> None:
    spans = with_kernels(loaded([stage("actor_update", 0, 50)]), Kernel(0, "gemm", 20, 30))
    assert totals_of(spans) == {"compute": 50}


def test_between_two_captures_nothing_is_known_of_the_device() -> None:
    opened, closed = "rlprof open capture", "rlprof close capture"
    rows = [stage("actor_update", 0, 100)]
    for at, (begin, end) in enumerate(((10, 30), (40, 60), (70, 90)), start=2):
        rows.append(Row(opened, "region", 1, begin - 1, begin, id=10 * at))
        rows.append(Row(closed, "region", 1, end, end + 1, id=10 * at + 1))
    spans = loaded(rows)
    kernels = (Kernel(0, "gemm", 20, 25), Kernel(0, "gemm", 80, 85))
    # In the first and the third, 15 of 20 ns; in the second there was no recorder of kernels.
    assert totals_of(with_kernels(spans, *kernels))["unattributed idle"] == 30
    assert totals_of(spans)["compute"] == 100


def test_the_device_counts_before_what_the_host_waits_for_but_not_within_a_validation() -> None:
    rows = [Row("data_fetch", "region", 1, 0, 50), Row("validation", "region", 1, 50, 100)]
    spans = with_kernels(
        loaded(rows),
        Kernel(0, "gemm", 0, 20, "data_fetch"),
        Kernel(0, "gemm", 60, 70, "actor_update"),
        Kernel(0, "gemm", 110, 120, "actor_update"),  # after the end of the job
    )
    assert totals_of(spans) == {"compute": 20, "data wait": 30, "checkpoint/eval": 50}


def test_kernels_cover_time_and_ranks_without_spans() -> None:
    spans = loaded([stage("mine", 0, 40), Row("", "epoch", 1, 0, 100)], [stage("mine", 0, 40)])
    spans = with_kernels(
        spans, Kernel(0, "gemm", 30, 60), Kernel(0, "x", 90, 95), Kernel(1, "y", 0, 10)
    )
    assert totals_of(spans) == {
        "compute": 30 + 5 + 10,
        "custom stage": 30 + 30,
        "unattributed idle": 30,
        "outside steps": 5 + 60,
    }


def test_copies_have_a_table_of_their_own() -> None:
    spans = with_kernels(loaded([stage("actor_update", 0, 50)]), Kernel(0, "gemm", 0, 20))
    table = kernels_of([Kernel(0, "HtoD", 15, 30, "actor_update"), Kernel(0, "DtoH", 49, 50)])
    names = [
        replace(each, name="kind") if each.name == "kernel" else each for each in table.columns
    ]
    copies = replace(table, columns=tuple(names))
    both = replace(spans, tables={**spans.tables, "memcpy": lambda: copies})
    assert totals_of(both) == {"compute": 20, "exposed memcpy": 11, "unattributed idle": 19}
    assert "exposed memcpy" not in sources(spans)


def test_with_kernels_hidden_in_graphs_idle_is_unknown() -> None:
    note = "3 CUDA graph replays: kernels inside CUDA graphs aren't visible"
    spans = loaded([stage("actor_update", 0, 50)])
    spans = with_kernels(spans, Kernel(0, "a", 0, 9), Kernel(0, "b", 40, 50), note=note)
    assert totals_of(spans) == {"compute": 50}
    assert "host-bound idle" not in sources(spans)
    assert "Kernels inside CUDA graphs aren't visible" in ledger(spans).note


def broken() -> Table:
    raise TraceError("trace.json: is no trace")


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (broken, "The table kernels could not be read: trace.json: is no trace."),
        (
            lambda: Table("kernels", COLUMNS, abstained="gone"),
            "The table kernels is missing: gone.",
        ),
        (
            lambda: Table("kernels", COLUMNS),
            "Without device kernels, compute includes host-bound idle",
        ),
    ],
)
def test_a_table_that_cannot_be_read_costs_its_precision_alone(
    read: Callable[[], Table], says: str
) -> None:
    spans = replace(loaded([stage("actor_update", 0, 50)]), tables={"kernels": read})
    assert totals_of(spans) == {"compute": 50}
    assert says in ledger(spans).note


def test_a_collective_is_the_wait_for_the_last_to_come_and_then_the_transfer() -> None:
    early = [stage("actor_update", 0, 30), Row("all_reduce", "region", 1, 30, 100)]
    late = [stage("actor_update", 0, 90), Row("all_reduce", "region", 1, 90, 100)]
    spans = loaded(early, late)
    assert totals_of(spans) == {"compute": 120, "collective wait": 60, "exposed communication": 20}
    alone = loaded(early)
    assert totals_of(alone) == {"compute": 30, "exposed communication": 70}
    assert "collective wait" not in sources(alone)
    assert "1 collectives have no counterpart on other ranks" in ledger(alone).note


def test_what_is_opened_inside_of_a_collective_hides_its_wait_too() -> None:
    reduce = Row("all_reduce", "region", 1, 0, 60, id=1)
    first = [reduce, stage("actor_generate", 10, 30, parent=1, id=2)]
    second = [Row("all_reduce", "region", 1, 50, 60)]
    assert totals_of(loaded(first, second)) == {
        "collective wait": 30,
        "rollout": 20,
        "exposed communication": 20,
        "outside steps": 50,
    }


def test_kernels_of_collectives_are_divided_alike_but_those_between_two_ranks() -> None:
    spans = loaded([stage("actor_update", 0, 100)], [stage("actor_update", 0, 100)])
    reduce, send = "ncclDevKernel_AllReduce", "ncclDevKernel_SendRecv"
    spans = with_kernels(
        spans,
        Kernel(0, reduce, 0, 60, "actor_update", 1),
        Kernel(1, reduce, 50, 60, "actor_update", 1),
        Kernel(0, send, 60, 100, "actor_update", 1),
        Kernel(1, send, 95, 100, "actor_update", 1),
    )
    assert totals_of(spans) == {
        "collective wait": 50,
        "exposed communication": 10 + 10 + 40 + 5,
        "unattributed idle": 35,
        "compute": 50,  # before its first kernel nothing is known of rank 1's device
    }


def test_a_barrier_transfers_nothing() -> None:
    assert totals_of(loaded([Row("barrier", "region", 1, 0, 70)])) == {"collective wait": 70}


def listed(*rows: tuple[int, int, int, int, str]) -> Table:
    """Return the table ``collectives``: rank, stream, start, duration and operation of each."""
    names = ("rank", "stream", "start", "duration", "operation")
    rest: dict[str, Any] = {
        "device": 0,
        "group": "all",
        "group size": 2,
        "number": None,
        "bytes": None,
    }
    rest |= {"stage": "actor_update", "step": 1}
    columns = tuple(
        Column(name, "text" if name in ("operation", "group", "stage") else "count")
        for name in (*names, *rest)
    )
    return Table("collectives", columns, [(*row, *rest.values()) for row in rows])


def test_collectives_that_are_listed_meet_as_the_list_says() -> None:
    spans = loaded([stage("actor_update", 0, 100)], [stage("actor_update", 0, 100)])
    send = "ncclDevKernel_SendRecv"  # NCCL's all_to_all is called so, too
    spans = with_kernels(
        spans,
        Kernel(0, send, 0, 60, "actor_update", 1),
        Kernel(1, send, 50, 60, "actor_update", 1),
        Kernel(0, send, 70, 80, "actor_update", 1),
        Kernel(1, send, 75, 80, "actor_update", 1),
    )
    table = listed(
        (0, 0, 1, 60, "all_to_all"),  # a nanosecond later than the kernel, as Ascend's
        (1, 1, 50, 10, "all_to_all"),
        (0, 2, 70, 10, "send"),
        (1, 3, 75, 5, "recv"),
    )

    assert "collective wait" not in totals_of(spans)
    spans = replace(spans, tables={**spans.tables, "collectives": lambda: table})

    assert totals_of(spans)["collective wait"] == 50
    assert accounts_of(spans).unknown_transfers == 2
