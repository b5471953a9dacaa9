"""`rlprof ascend parse` and `rlprof doctor` with the real torch_npu, on the CANN double.

The double computes nothing: times in these traces are of the host, and no measurement.
"""

import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ascend import double
from tests.ascend.conftest import Run
from tests.doubles.cann import cann

pytestmark = pytest.mark.deep


class Said(NamedTuple):
    status: int
    data: Any
    error: str


class Rlprof:
    """The command line, on the double."""

    def __init__(self, folder: Path, library: Path, torch_npu: Path) -> None:
        self._where = (folder, library, torch_npu)

    def __call__(self, *words: object, **changes: str | None) -> Said:
        command = ["-m", "lightning_rlprof", *map(str, words), "--json"]
        done = double.run(command, *self._where, **changes)
        data, end = json.JSONDecoder().raw_decode(done.output)
        rest = done.output[end:].strip()
        return Said(done.status, data, json.loads(rest)["error"]["message"] if rest else "")

    def states(self, *words: object) -> list[str]:
        return [each["state"] for each in self("ascend", "parse", *words).data["outcomes"]]

    def checks(self, *words: object, **changes: str | None) -> dict[str, dict[str, str]]:
        data = self("doctor", *words, **changes).data
        found = data["selftest"] if "selftest" in data else data["checks"]
        return {check["name"]: check for check in found}


@pytest.fixture
def rlprof(tmp_path: Path, library: Path, torch_npu: Path) -> Rlprof:
    return Rlprof(tmp_path / "process", library, torch_npu)


@pytest.fixture
def windows(train: Run, tmp_path: Path) -> Path:
    """Raw data of a lightweight window and of one with the host, one below the other."""
    process = train("trainings")
    for name in ("together", "deep"):
        (capture,) = process.captures(name).values()
        shutil.copytree(capture, tmp_path / "raw" / name / capture.name)
    return tmp_path / "raw"


def ranges(outcome: dict[str, Any]) -> list[str]:
    """Return the messages of the MSTX ranges in a database."""
    output = Path(outcome["path"]) / "ASCEND_PROFILER_OUTPUT"
    sql = "SELECT value FROM MSTX_EVENTS JOIN STRING_IDS ON message = id"
    with closing(sqlite3.connect(next(output.glob("ascend_pytorch*.db")))) as data:
        return [text for (text,) in data.execute(sql)]


def test_raw_data_is_analysed_at_once_and_only_once(rlprof: Rlprof, windows: Path) -> None:
    first = rlprof("ascend", "parse", windows, "-j", 2)
    outcomes = first.data["outcomes"]
    assert (first.status, first.error) == (0, "")
    assert [each["state"] for each in outcomes] == ["cached", "cached"]
    assert [each["rank"] for each in outcomes] == [0, 0]
    for each in outcomes:
        trace = Path(each["path"]) / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
        names = {event["name"] for event in json.loads(trace.read_text())}
        assert {"actor_generate", "actor_update"} <= names
    assert rlprof.states(windows) == ["up to date", "up to date"]


def test_another_format_is_written_on_request(rlprof: Rlprof, windows: Path) -> None:
    said = rlprof("ascend", "parse", windows / "deep", "--export", "db")
    (outcome,) = said.data["outcomes"]
    assert outcome["state"] == "cached"
    assert "actor_update" in ranges(outcome)
    assert rlprof.states(windows / "deep", "--export", "db") == ["up to date"]


def test_a_failure_that_torch_npu_calls_done_is_told_and_mended_by_the_next_call(
    rlprof: Rlprof, windows: Path, tmp_path: Path
) -> None:
    (tmp_path / "msprof").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "msprof").chmod(0o755)
    said = rlprof("ascend", "parse", windows / "deep", PATH=f"{tmp_path}:{os.environ['PATH']}")
    (outcome,) = said.data["outcomes"]
    assert (said.status, outcome["state"]) == (1, "failed")
    assert "analyse.done" in outcome["files"]
    missing, printed = outcome["message"].split("; torch_npu: ")
    assert missing.startswith("trace_view.json cannot be read (it is truncated")
    assert printed.startswith("Failed to export CANN Profiling data")
    assert said.error.startswith("cannot parse 1 of 1 directories; ")
    assert rlprof.states(windows / "deep") == ["cached"]


def test_the_doctor_finds_torch_npu_and_what_it_can_record(rlprof: Rlprof) -> None:
    said = rlprof("doctor")
    states = {check["name"]: check["state"] for check in said.data["checks"]}
    assert (said.status, said.error, said.data["device"]) == (0, "", "npu")
    assert said.data["records"] == ["spans", "memory", "device_time", "mstx", "npu_profiler"]
    assert (states["torch_npu"], states["msprof"], states["CANN"]) == ("ok", "ok", "warn")


def test_the_doctor_survives_a_torch_npu_without_cann(rlprof: Rlprof) -> None:
    checks = rlprof.checks(LD_LIBRARY_PATH=None, PATH=os.environ["PATH"])
    for name in ("torch", "torch_npu"):
        assert checks[name]["state"] == "broken"
        assert "libhccl.so" in checks[name]["message"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in checks["torch"]["fix"]
    assert checks["msprof"]["state"] == "missing"


def test_the_doctor_says_when_there_is_no_device(rlprof: Rlprof) -> None:
    check = rlprof.checks(CANN_DOUBLE_DEVICES="0")["torch_npu"]
    assert check["state"] == "broken"
    assert re.fullmatch(r"2\.\d+\S* finds no NPU", check["message"])


def test_the_selftest_fails_on_the_double_for_its_operators_alone(rlprof: Rlprof) -> None:
    said = rlprof("doctor", "--selftest")
    states = {check["name"]: check["state"] for check in said.data["selftest"]}
    assert said.error == "self-test failed: operators"
    assert [name for name, state in states.items() if state != "ok"] == ["operators"]
    assert list(states)[1:] == ["spans", "recorders", "device time", "capture", "analysis", "MSTX"]
    assert said.data["selftest"][0]["message"].startswith("npu cannot run them: ")


def test_the_selftest_tells_a_profiler_that_does_not_start(torch_npu: Path, tmp_path: Path) -> None:
    library = cann.build(tmp_path / "cann", without=("libmsprofiler",))
    checks = Rlprof(tmp_path / "process", library, torch_npu).checks("--selftest")
    assert checks["spans"]["state"] == "ok"
    assert "torch_npu.profiler did not start" in checks["recorders"]["message"]
    assert "MSTX does not record the stages:" in checks["recorders"]["message"]
    assert "[ERROR]" in checks["recorders"]["message"]
    assert [checks[name]["state"] for name in ("capture", "analysis", "MSTX")] == ["broken"] * 3
