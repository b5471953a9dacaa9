"""On an Ascend NPU with CANN: captures hold the device's own data. Skipped where there is none.

pytest -m npu tests/ascend
"""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.run_directory import RankTrace, read_trace
from tests.builders.npu_run import notes

pytestmark = pytest.mark.npu

LIGHTWEIGHT = {"mstx": True, "profile_level": "level_none", "profile_with_cpu": False}


@dataclass(frozen=True)
class Recorded:
    """Two steps of work on the device: the run, and its one analysed capture."""

    trace: RankTrace
    capture: Path

    def query(self, text: str) -> list[tuple[Any, ...]]:
        (path,) = (self.capture / "ASCEND_PROFILER_OUTPUT").glob("ascend_pytorch_profiler*.db")
        with closing(sqlite3.connect(path)) as db:
            return [*db.execute(text)]


def record(folder: Path, **options: Any) -> Recorded:
    given = {"profile_save_path": str(folder), "profile_step_end": 3, **options}
    config = ProfilerConfig.build(**given, npu={"device_ranges": True})
    with start_session(config, name="run", device="npu") as session:
        for step in (1, 2):
            session.begin_step(step)
            with stage("actor_update"):
                left = torch.ones(512, 512, device="npu")
                (left @ left).sum().item()
            session.end_step()
    (capture,) = (folder / "run/rank-00000").glob("*/*_ascend_pt")
    command = [sys.executable, "-m", "lightning_rlprof", "ascend", "parse", str(capture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Recorded(read_trace(folder / "run/rank-00000.jsonl"), capture)


@pytest.fixture(scope="module", params=["lightweight", "level1"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    options = LIGHTWEIGHT if request.param == "lightweight" else {"profile_level": "level1"}
    return record(tmp_path_factory.mktemp("npu"), **{**options, "mstx": True})


def test_nothing_went_wrong_and_cann_wrote_data(recorded: Recorded) -> None:
    assert (notes(recorded.trace), notes(recorded.trace, "error")) == ([], [])
    (data,) = recorded.capture.glob("PROF_*")
    assert list(data.glob("device_*")) or list(data.glob("msprof_*.db"))


def test_stages_have_a_device_time_without_a_capture(recorded: Recorded) -> None:
    updates = [span for span in recorded.trace.spans if span.name == "actor_update"]
    assert len(updates) == 2
    assert all(span.counters and (span.counters["device_ns"] or 0) > 0 for span in updates)


def test_stages_are_ranges_on_the_device(recorded: Recorded) -> None:
    ranges = recorded.query(
        "SELECT task.endNs - task.startNs FROM MSTX_EVENTS event "
        "JOIN STRING_IDS name ON name.id = event.message "
        "JOIN TASK task ON task.connectionId = event.connectionId WHERE name.value = 'actor_update'"
    )
    assert len(ranges) == 2
    assert all(length >= 0 for (length,) in ranges)


def test_the_timeline_holds_our_stages(recorded: Recorded) -> None:
    path = recorded.capture / "ASCEND_PROFILER_OUTPUT/trace_view.json"
    names = [event.get("name") for event in json.loads(path.read_text())]
    assert names.count("actor_update") >= 2
    kernels = [name for name in names if "MatMul" in str(name)]
    level = json.loads(next(recorded.capture.glob("profiler_info*.json")).read_text())["config"]
    assert kernels or level["experimental_config"]["_profiler_level"] == "Level_none"
