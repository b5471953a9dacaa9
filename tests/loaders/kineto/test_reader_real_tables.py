"""Tables of real traces: every event is a row, to the nanosecond, and torch's own links hold."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from lightning_rlprof.loaders.kineto.reader import read_kineto
from lightning_rlprof.tables.table import Table
from tests.loaders.kineto.test_reader_real import (
    CALLS,
    DATA,
    NAMES,
    events_of,
    every_trace,
    loaded,
    of,
    path_of,
)

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no real traces in ../shared/data/kineto")
KINDS = {"cpu_op": "operator", "python_function": "python", **dict.fromkeys(CALLS, "runtime")}


@cache
def table_of(name: str, table: str) -> Table:
    return loaded(name).table(table)


@cache
def zero_of(name: str) -> int:
    return min((event["start"] for event in of(name, "kernel", "user_annotation")), default=0)


def columns(table: Table, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*map(table.column, names), strict=True))


def having(category: str) -> list[str]:
    if not DATA.is_dir():
        return []
    return [name for name in NAMES if of(name, category)]


@pytest.mark.parametrize("name", having("gpu_memcpy"))
def test_every_copy_is_there_to_the_nanosecond(name: str) -> None:
    table, zero = table_of(name, "memcpy"), zero_of(name)

    found = Counter(columns(table, "kind", "bytes", "start", "duration", "device", "stream"))

    assert found == Counter(
        (
            "memset" if copy["name"].startswith("Memset") else copy["name"].split()[1],
            copy["args"]["bytes"],
            copy["start"] - zero,
            copy["length"],
            copy["args"]["device"],
            copy["args"]["stream"],
        )
        for copy in of(name, "gpu_memcpy", "gpu_memset")
    )


@every_trace
def test_launches_are_those_with_the_same_correlation(name: str) -> None:
    table, zero = loaded(name).table("kernels"), zero_of(name)
    calls = {call["args"]["correlation"]: call for call in of(name, *CALLS)}
    kernels = [
        (kernel, calls.get(kernel["args"]["correlation"]))
        for kernel in sorted(of(name, "kernel"), key=lambda event: int(event["start"]))
    ]

    found = columns(table, "launch", "launch duration", "thread")

    assert found == [
        (call["start"] - zero, call["length"], call["tid"]) if call else (None,) * 3
        for _, call in kernels
    ]
    replays = {call["args"]["correlation"] for _, call in kernels if call and is_replay(call)}
    graphs = {graph for graph in table.column("graph") if graph is not None}
    assert len(graphs) == len(replays)


def is_replay(call: dict[str, Any]) -> bool:
    return "GraphLaunch" in call["name"]


@every_trace
def test_every_call_is_there_to_the_nanosecond(name: str) -> None:
    table, zero = table_of(name, "calls"), zero_of(name)
    module = "nn.Module: "

    found = Counter(columns(table, "name", "kind", "start", "duration", "thread"))

    assert found == Counter(
        (
            call["name"].removeprefix(module),
            "module" if call["name"].startswith(module) else KINDS[call["cat"]],
            call["start"] - zero,
            call["length"],
            call["tid"],
        )
        for call in of(name, *KINDS)
    )
    assert table.column("id") == list(range(1, len(table.rows) + 1))


@every_trace
def test_calls_lie_in_their_parents(name: str) -> None:
    rows = columns(table_of(name, "calls"), "id", "parent", "thread", "start", "duration", "kind")
    for _, parent, thread, start, length, _ in rows:
        if parent is not None:
            _, _, where, begin, around, kind = rows[parent - 1]
            assert (where, kind != "runtime") == (thread, True)
            assert begin <= start < begin + around
            assert start + length <= begin + around + 1_000


@pytest.mark.parametrize("name", having("python_function"))
def test_parents_of_functions_are_those_that_torch_knew(name: str) -> None:
    """Torch loses its way where generators go on: their caller is another one by then."""
    rows = columns(table_of(name, "calls"), "parent", "kind", "name", "start", "duration")
    zero, ids = zero_of(name), {}
    for event in of(name, "python_function"):
        key = (event["name"].removeprefix("nn.Module: "), event["start"] - zero, event["length"])
        ids[key] = (event["args"]["Python id"], event["args"]["Python parent id"])
    there = {number for number, _ in ids.values()}
    found: Counter[bool] = Counter()
    for parent, kind, *key in rows:
        above = parent
        while above is not None and rows[above - 1][1] not in ("python", "module"):
            above = rows[above - 1][0]
        if kind in ("python", "module") and ids[tuple(key)][1] in there:
            number = None if above is None else ids[rows[above - 1][2:]][0]
            found[number == ids[tuple(key)][1]] += 1
    assert found.total() > 0.7 * len(ids)
    assert found[False] <= 0.02 * found.total(), found


@pytest.mark.parametrize("name", having("fwdbwd"))
def test_forward_operators_are_those_of_torchs_own_arrows(name: str) -> None:
    rows = columns(table_of(name, "calls"), "id", "thread", "start", "forward")
    arrows: dict[str, dict[int, Any]] = {"s": {}, "f": {}}
    for event in of(name, "fwdbwd"):
        arrows[event["ph"]][event["id"]] = (event["tid"], event["start"] - zero_of(name))
    forwards = {(thread, start): forward for _, thread, start, forward in rows}
    numbers = {(thread, start): number for number, thread, start, _ in rows}

    assert len(arrows["f"]) > 500
    for number, place in arrows["f"].items():
        assert forwards[place] == numbers[arrows["s"][number]]


def test_collectives_are_told_with_group_and_bytes() -> None:
    table = table_of("nccl", "collectives")
    kernels = [event for event in of("nccl", "kernel") if "nccl" in event["name"]]
    sizes = {"Float": 4, "Long": 8}

    found = columns(table, "operation", "group", "group size", "bytes", "dtype", "number")

    assert found == [
        (
            {"allreduce": "all_reduce", "broadcast": "broadcast"}[args["Collective name"]],
            "0 default_pg",
            2,
            args["In msg nelems"] * sizes[args["dtype"]],
            args["dtype"],
            None,
        )
        for args in (event["args"] for event in sorted(kernels, key=lambda each: each["start"]))
    ]
    assert len(found) == 21


@pytest.mark.parametrize("rank", [0, 1])
def test_where_arguments_tell_nothing_the_annotation_around_tells_the_operation(rank: int) -> None:
    table = table_of(f"two_ranks/rank-{rank}", "collectives")

    found = Counter(columns(table, "operation", "group", "bytes"))

    assert found == {
        ("all_to_all", None, None): 4,
        ("all_reduce", None, None): 4,
        ("all_gather", None, None): 2,
    }


@pytest.mark.parametrize(
    ("name", "component"), [("h100_qwen1.5-0.5b", "CUDA"), ("mi300_bert-small", "HIP")]
)
def test_every_change_of_memory_is_there(name: str, component: str) -> None:
    table, zero = table_of(name, "memory"), zero_of(name)
    changes = [event for event in events_of(name) if event["name"] == "[memory]"]
    kinds = {0: ("CPU", None)}

    found = Counter(columns(table, "component", "device", "time", "allocated", "reserved"))

    assert found == Counter(
        (
            *kinds.get(args["Device Type"], (component, args["Device Id"])),
            event["start"] - zero,
            args["Total Allocated"],
            args["Total Reserved"],
        )
        for event, args in ((event, event["args"]) for event in changes)
    )


@every_trace
def test_only_what_the_trace_holds_is_a_table(name: str) -> None:
    counts = Counter(event.get("cat") for event in events_of(name))
    there = set(loaded(name).tables)

    assert "kernels" in there
    assert ("memcpy" in there) == (counts["gpu_memcpy"] + counts["gpu_memset"] > 0)
    assert ("memory" in there) == (counts["cpu_instant_event"] > 0)
    assert ("collectives" in there) == (name in ("nccl", "two_ranks/rank-0", "two_ranks/rank-1"))
    assert "counters" not in there


@every_trace
def test_all_at_once_gives_the_same_tables(name: str) -> None:
    at_once = read_kineto(path_of(name), every=True)

    assert set(at_once.tables) == set(loaded(name).tables)
    for table in at_once.tables:
        assert at_once.table(table) == table_of(name, table) or list(
            at_once.table(table).rows
        ) == list(table_of(name, table).rows)
