"""Changes of memory and samples of counters."""

from pathlib import Path
from typing import Any

from lightning_rlprof.loaders.kineto import read_kineto
from lightning_rlprof.table import Table
from tests.loaders.chrome import PID, ChromeTrace, microseconds


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
        "1 events are left out: their times cannot be true"
    )
    assert counters.note == (
        "6 events are left out: they cannot be read; "
        "1 events are left out: their times cannot be true"
    )
