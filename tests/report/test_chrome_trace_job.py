"""The tracks of the whole job: findings, above the ranks, where a search finds them."""

import json
from pathlib import Path

from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from tests.builders.chrome_tracks import Tracks
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play

JOB = "job: findings"


def test_each_finding_is_a_slice_at_its_first_event(tmp_path: Path) -> None:
    spans = play(Script(ranks=4, steps=60, slow={2: 0.4}, when=(30, 60)), 3).spans
    tracks, table = Tracks(spans, tmp_path / "t.json"), findings(spans)
    titles = table.column("finding")
    assert len(titles) >= 2
    for number, (title, low, high, evidence) in enumerate(
        zip(*map(table.column, ("finding", "from", "to", "evidence")), strict=True), start=1
    ):
        (found,) = tracks.slices[JOB, f"finding {number}"]
        assert (found.name, found.start, found.end) == (title, low, high)
        assert found.args["evidence"] == evidence
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert min(order, key=lambda pid: order[pid]) == max(order), "the job is on top"


def test_a_run_without_findings_has_no_job_process(tmp_path: Path) -> None:
    tracks = Tracks(loaded([Row("a", "stage", 1, 0, 5)]), tmp_path / "t.json")
    assert [process for process, _ in tracks.slices] == ["rank 0 (node-a)"]
