"""Tables of real captures of a 910B: parts add up, and text and database agree."""

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from lightning_rlprof.loaders.ascend.reader import read_ascend
from tests.builders.ascend_recorded import (
    ABSENT,
    CAPTURES,
    DATA,
    DATABASE,
    OUTPUT,
    TEXT,
    ask,
    column,
    ns,
    sheet,
    table_rows,
)

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)


@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_parts_of_a_step_add_up_to_it(folder: Path) -> None:
    run = read_ascend(folder)
    (row,) = table_rows(run, "step_trace")

    whole = row["computing"] + row["communication not overlapped"] + row["free"]

    assert abs(row["stage"] - whole) < 200
    assert row["communication"] == row["communication not overlapped"] + row["overlapped"]
    assert row["step"] == 50
    # What came before the first kernel, in our own numbers; text rounds it to a quarter of a µs.
    first = min(column(run, "kernels", "start")) - int(run.start_ns[0])
    assert abs(row["preparing"] - first) < 256


def test_text_and_database_of_one_program_agree_on_what_does_not_depend_on_time() -> None:
    text, database = map(read_ascend, (TEXT[0], DATABASE))

    for table, heading in (
        ("communication", "size"),
        ("memory", "component"),
        ("kernels", "stream"),
    ):
        ours = [Counter(column(run, table, heading)) for run in (text, database)]
        assert ours[0] == ours[1], (table, heading)
    # Their names hold a counter of the communicator: hcom_allReduce__586_0_1, and __210_.
    kernels = [
        Counter(name for name in column(run, "kernels", "kernel") if not name.startswith("hcom"))
        for run in (text, database)
    ]
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize("folder", TEXT, ids=lambda folder: folder.name)
def test_collectives_are_those_of_the_file_with_exact_starts(folder: Path) -> None:
    run = read_ascend(folder)
    steps = json.loads((folder / OUTPUT / "communication.json").read_text())
    told = {key.partition("@")[0]: own for key, own in steps["step50"]["collective"].items()}
    kernels = {row["Name"]: row for row in sheet(folder, "kernel_details.csv")}

    rows = table_rows(run, "communication")

    for row in rows:
        times = told[row["operator"]]["Communication Time Info"]
        link = told[row["operator"]]["Communication Bandwidth Info"]["SDMA"]
        assert row["start"] + run.unix_ns == ns(kernels[row["operator"]]["Start Time(us)"])
        assert row["duration"] == ns(Decimal(str(times["Elapse Time(ms)"])) * 1000)
        assert row["transfer"] + row["wait"] + row["idle"] == pytest.approx(row["duration"], abs=2)
        assert row["size"] == round(link["Transit Size(MB)"] * 1e6)
        assert row["bandwidth"] == pytest.approx(link["Bandwidth(GB/s)"], abs=1e-4)
    assert len(rows) == len(told) - 1  # without their sum


def test_collectives_of_the_database_start_where_its_operators_do() -> None:
    run = read_ascend(DATABASE)
    told = ask("SELECT startNs, endNs - startNs FROM COMMUNICATION_OP ORDER BY startNs")

    starts = [start + run.unix_ns for start in column(run, "communication", "start")]

    assert [*zip(starts, column(run, "communication", "duration"), strict=True)] == told
    assert sum(column(run, "communication", "size")) == 427_596_096


@pytest.mark.parametrize("folder", TEXT, ids=lambda folder: folder.name)
def test_operators_among_the_calls_are_those_of_the_trace(folder: Path) -> None:
    run = read_ascend(folder)
    events = json.loads((folder / OUTPUT / "trace_view.json").read_text())
    lengths = [
        ns(event["dur"])
        for event in events
        if event.get("cat") == "cpu_op" and not event["name"].startswith("ProfilerStep")
    ]

    calls = zip(column(run, "calls", "kind"), column(run, "calls", "duration"), strict=True)
    found = [length for kind, length in calls if kind == "operator"]
    assert len(found) == len(lengths) == 859
    assert sum(found) == sum(lengths)


def test_memory_of_text_is_bytes_without_rounding() -> None:
    run = read_ascend(TEXT[0])
    rows = sheet(TEXT[0], "memory_record.csv")

    reserved = column(run, "memory", "reserved")
    times = [time + run.unix_ns for time in column(run, "memory", "time")]

    assert reserved == [int(Decimal(row["Total Reserved(MB)"]) * 2**20) for row in rows]
    assert times == [ns(row["Timestamp(us)"]) for row in rows]
