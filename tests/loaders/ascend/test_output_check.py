"""What an analysis left is believed by what is in it, and by what its raw data promises."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.ascend.capture import find_captures
from lightning_rlprof.loaders.ascend.offline_analysis import Content, check_content, has_raw_data
from tests.builders.ascend_captures import HOST, OUTPUT, RANGE, TASK, capture, database, trace
from tests.places import SHARED_DATA

REAL = SHARED_DATA / "ascend"
MARKED = {"device": True, "_mstx": True}


def check(directory: Path, *exports: str) -> Content:
    (found,) = find_captures(directory)
    return check_content(found, exports)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "w_1_20260101000000000_ascend_pt"


def test_a_trace_with_all_that_was_promised_verifies(place: Path) -> None:
    capture(place, tasks=b"tasks", **MARKED)
    trace(place / OUTPUT, *TASK, HOST, RANGE)
    assert check(place) == Content(("trace_view.json",), "", "")


@pytest.mark.parametrize(
    ("events", "lacks"),
    [
        ([RANGE, *TASK], "host operators"),
        ([HOST, *TASK], "MSTX ranges"),
        ([HOST, RANGE, TASK[1]], "device tasks"),
        ([HOST, RANGE, TASK[0]], "device tasks"),
        ([HOST], "MSTX ranges and no device tasks"),
    ],
)
def test_each_kind_of_rows_that_the_raw_data_has_is_missed(
    place: Path, events: list[Any], lacks: str
) -> None:
    capture(place, tasks=b"tasks", **MARKED)
    trace(place / OUTPUT, *events)
    assert check(place).missing == f"trace_view.json has no {lacks}"


@pytest.mark.parametrize(
    "config",
    [
        {"device": True},
        {"device": True, "activities": ["CPU"], "_mstx": True},
        {"device": False, "_mstx": True},
        {"device": True, "tasks": b"tasks", "_profiler_level": "Level_none"},
        {"device": True, "tasks": b""},
    ],
)
def test_what_the_raw_data_does_not_promise_is_not_missed(
    place: Path, config: dict[str, Any]
) -> None:
    trace(capture(place, **config) / OUTPUT, HOST)
    assert check(place).missing == ""


@pytest.mark.parametrize("key", ["_mstx", "_msprof_tx"])
def test_ranges_are_promised_by_both_names_of_the_option(place: Path, key: str) -> None:
    trace(capture(place, device=True, **{key: True}) / OUTPUT, HOST)
    assert check(place).missing == "trace_view.json has no MSTX ranges"


def test_the_name_of_the_hardware_may_come_after_its_rows(place: Path) -> None:
    capture(place, device=True, tasks=b"tasks")
    trace(place / OUTPUT, HOST, *reversed(TASK))
    assert check(place).missing == ""


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("", "trace_view.json: not a Chrome trace"),
        ("[]", "trace_view.json: not a Chrome trace"),
        (json.dumps([HOST, HOST])[:-9], "trace_view.json cannot be read (it is truncated"),
        ("no JSON", "trace_view.json: not a Chrome trace"),
    ],
)
def test_a_trace_that_does_not_parse_is_none(place: Path, text: str, lacks: str) -> None:
    trace(capture(place) / OUTPUT).write_text(text)
    assert check(place).missing.startswith(lacks)


def test_analyse_done_and_other_files_are_no_proof(place: Path) -> None:
    output = capture(place) / OUTPUT
    output.mkdir()
    for name in ("analyse.done", "operator_details.csv"):
        (output / name).touch()
    found = check(place)
    assert found.files == ("analyse.done", "operator_details.csv")
    assert found.missing == "trace_view.json is missing"
    assert check(capture(place.parent / "never_ascend_pt")).missing == "it is not parsed yet"


def test_a_database_is_judged_by_the_rows_of_its_tables(place: Path) -> None:
    capture(place, exports=["db"], tasks=b"tasks", **MARKED)
    path = database(place / OUTPUT, "MSTX_EVENTS", "TASK", "PYTORCH_API")
    assert check(place).missing == ""
    path.unlink()
    database(place / OUTPUT, "MSTX_EVENTS", empty=["TASK"])
    name = "ascend_pytorch_profiler_0.db"
    assert check(place).missing == f"{name} has no device tasks and no host operators"
    path.write_text("no database")
    assert check(place).missing.startswith(f"{name}: cannot be read as SQLite")
    path.write_bytes(b"")
    assert check(place).missing == f"{name}: the file is empty"
    path.unlink()
    assert check(place).missing == "the database ascend_pytorch_profiler*.db is missing"


def test_every_format_that_was_recorded_for_is_looked_at(place: Path) -> None:
    output = capture(place, exports=["text", "db"]) / OUTPUT
    trace(output, HOST)
    assert check(place).missing == "the database ascend_pytorch_profiler*.db is missing"
    assert check(place, "text").missing == ""
    database(output, "PYTORCH_API")
    assert check(place).missing == ""
    (output / "trace_view.json").unlink()
    assert check(place).missing == "trace_view.json is missing"
    assert check(place, "db").missing == ""


@pytest.mark.parametrize(
    ("told", "wanted"),
    [(5, "trace"), (True, "trace"), ("Text", "trace"), ("unknown", "trace"), (["DB", 5], "data")],
)
def test_what_it_was_recorded_for_may_be_told_in_any_way(
    place: Path, told: Any, wanted: str
) -> None:
    capture(place, _export_type=told)
    (place / OUTPUT).mkdir(exist_ok=True)
    missing = {"trace": "trace_view.json", "data": "the database ascend_pytorch_profiler*.db"}
    assert check(place).missing == f"{missing[wanted]} is missing"


def test_a_recording_without_data_of_the_device_is_remarked_on(place: Path) -> None:
    trace(capture(place) / OUTPUT, HOST)
    assert check(place) == Content(("trace_view.json",), "", "no device data (no PROF_* folder)")
    host = capture(place.parent / "host_ascend_pt", activities=["CPU"])
    trace(host / OUTPUT, HOST)
    assert check(host).note == ""


def test_raw_data_is_what_either_half_recorded(place: Path) -> None:
    assert has_raw_data(capture(place))
    assert has_raw_data(capture(place.parent / "b_ascend_pt", host=False, device=True))
    assert not has_raw_data(capture(place.parent / "c_ascend_pt", host=False))


@pytest.mark.skipif(not REAL.is_dir(), reason="no real Ascend data in ../shared/data/ascend")
def test_what_real_analyses_wrote_verifies_and_nothing_is_written_beside_it() -> None:
    folders = sorted(REAL.glob("*level1_rank?"))
    assert len(folders) == 3
    before = sorted(REAL.rglob("*"))
    assert [check(folder).missing for folder in folders] == ["", "", ""]
    assert sorted(REAL.rglob("*")) == before
