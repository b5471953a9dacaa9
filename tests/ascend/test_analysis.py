"""The real analyser of torch_npu, and Huawei's msprof-analyze, on what a training left behind.

What CANN's `msprof` would export is made by a stand-in from what the CANN double heard: ranges of
the host, no device. So this shows that our captures are whole, and no measurement.
"""

import csv
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ascend import double
from tests.ascend.double import Call, Run
from tests.builders.npu_run import notes

pytestmark = pytest.mark.deep

ANALYSE = """
import sys
from torch_npu.profiler.profiler import analyse

if __name__ == "__main__":
    analyse(sys.argv[1], max_process_number=1, export_type=["text", "db"])
"""


class Range(NamedTuple):
    name: str
    domain: str
    start_ns: int
    end_ns: int


class Analysed(NamedTuple):
    """A capture with its analysis, and the ranges that the double heard in it."""

    window: Path
    output: Path
    heard: list[Range]


def heard(calls: list[Call]) -> list[Range]:
    """Return ranges and marks by their start, as the double recorded them."""
    begun, found = {}, []
    for call in calls:
        if call["call"] == "mstxRangeStart":
            begun[call["id"]] = call
        elif call["call"] == "mstxRangeEnd":
            start = begun.pop(call["id"])
            times = start["unix_ns"], call["unix_ns"]
            found.append(Range(start["message"], start["domain"], *times))
        elif call["call"] == "mstxMark":
            found.append(Range(call["message"], call["domain"], *[call["unix_ns"]] * 2))
    return sorted(found, key=lambda one: one.start_ns)


@pytest.fixture(scope="module")
def analyse(
    train: Run, library: Path, torch_npu: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Analysed]:
    """Analyse steps 2 and 3 of a training, each training once."""

    @cache
    def run(part: str) -> Analysed:
        process = train("trainings")
        (capture,) = process.captures(part).values()
        window = tmp_path_factory.mktemp("analysed") / capture.parent.name
        shutil.copytree(capture.parent, window)
        words = ["-c", ANALYSE, str(window / capture.name)]
        done = double.run(words, window.parent / "process", library, torch_npu)
        assert done.status == 0, done.output
        output = window / capture.name / "ASCEND_PROFILER_OUTPUT"
        return Analysed(window, output, heard(process.part(part)))

    return run


@pytest.fixture(params=["together", "deep"])
def analysed(request: pytest.FixtureRequest, analyse: Callable[[str], Analysed]) -> Analysed:
    """Once lightweight, once at level 0."""
    return analyse(request.param)


def test_the_timeline_holds_our_ranges_to_the_nanosecond(analysed: Analysed) -> None:
    events: list[dict[str, Any]] = json.loads((analysed.output / "trace_view.json").read_text())
    found = [event for event in events if "domain" in event.get("args", {})]
    assert [(event["name"], event["args"]["domain"], event["ts"]) for event in found] == [
        (one.name, one.domain, f"{one.start_ns // 1000}.{one.start_ns % 1000:03d}")
        for one in analysed.heard
    ]
    assert {"rlprof", "default"} == {event["args"]["domain"] for event in found}
    names = {event["name"] for event in found}
    assert {"actor_generate", "actor_update", "score", "sampled", "step"} <= names


def test_the_database_holds_our_ranges_to_the_nanosecond(analysed: Analysed) -> None:
    query = """
        SELECT names.value, domains.value, startNs, endNs FROM MSTX_EVENTS
        JOIN STRING_IDS names ON names.id = message JOIN STRING_IDS domains ON domains.id = domainId
        ORDER BY startNs
    """
    with closing(sqlite3.connect(analysed.output / "ascend_pytorch_profiler.db")) as db:
        found = [Range(*row) for row in db.execute(query)]
    assert found == analysed.heard


def test_steps_of_the_analysis_are_our_steps_where_the_host_is_recorded(
    analyse: Callable[[str], Analysed],
) -> None:
    for part, expected in (("deep", [(2,), (3,)]), ("together", [])):
        with closing(sqlite3.connect(analyse(part).output / "ascend_pytorch_profiler.db")) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            found = [*db.execute("SELECT id FROM STEP_TIME")] if "STEP_TIME" in tables else []
        assert found == expected


def test_msprof_analyze_reads_our_stages_back(
    analyse: Callable[[str], Analysed], msprof_analyze: Path
) -> None:
    window, _, heard = analyse("deep")
    command = [msprof_analyze, "cluster", "-m", "mstx_sum", "-d", window, "--export_type", "text"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with (window / "cluster_analysis_output/MstxSum/all_cann_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    updates = [one for one in heard if one.name == "actor_update"]
    # In each step the loss of the user's mark, then backward and optimizer.
    paths = ("training_step::actor_update", "actor_update")
    found = [(step, path) for step in (2, 3) for path in paths]
    for (step, path), ours in zip(found, updates, strict=True):
        row = rows[f"ProfilerStep#{step}::step::{path}"]
        assert (row["StepId"], float(row["Count"])) == (str(step), 1.0)
        assert float(row["Sum(Ms)"]) == pytest.approx((ours.end_ns - ours.start_ns) / 1e6)


def test_profile_analysis_runs_after_the_recording(train: Run) -> None:
    process = train("analysis")
    (capture,) = process.captures("analysis").values()
    assert notes(process.trace("analysis")) == []
    assert "parsing 1 captures, for at most 3600 s" in notes(process.trace("analysis"), "info")
    events = json.loads((capture / "ASCEND_PROFILER_OUTPUT/trace_view.json").read_text())
    assert "actor_update" in {event["name"] for event in events}
