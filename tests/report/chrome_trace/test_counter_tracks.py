"""Counters in an exported trace: their values, when they change, and how many there may be."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.report.chrome_trace import counter_tracks
from lightning_rlprof.report.chrome_trace.counter_tracks import track
from tests.builders.chrome_tracks import Tracks
from tests.builders.runs import Row, grpo_run, loaded


def test_tokens_per_second_are_those_of_the_rank_in_each_step(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=5, ranks=2)
    counters = Tracks(spans, tmp_path / "t.json").counters
    for rank in (0, 1):
        steps = [s for s in spans if s.kind == "step" and s.rank == rank]
        points = counters[f"rank {rank} (node-a)", "tokens/s"]
        assert [time for time, _ in points] == [*(s.start_ns for s in steps), steps[-1].end_ns]
        rates = [(1000 + s.step) / s.duration_ns * 1e9 for s in steps]
        assert [value for _, value in points] == pytest.approx([*rates, 0], abs=0.001)


def test_memory_is_drawn_where_it_changes(tmp_path: Path) -> None:
    values = [100, 100, 300, 200]
    rows = [
        Row("a", "stage", n, 10 * n, 10 * n + 5, counters={"host_rss_bytes": value})
        for n, value in enumerate(values)
    ]
    rows[3] = rows[3]._replace(counters={"host_rss_bytes": 200, "device_reserved_bytes": 7})
    counters = Tracks(loaded(rows), tmp_path / "t.json").counters
    assert counters == {
        ("rank 0 (node-a)", "host memory (bytes)"): [(5, 100.0), (25, 300.0), (35, 200.0)],
        ("rank 0 (node-a)", "device memory reserved (bytes)"): [(35, 7.0)],
    }


def test_very_many_values_become_the_largest_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_tracks, "MOST_EVENTS", 4)
    values = np.array([1, 9, 2, 3, 8, 4, 5, 6, 7, 0], np.float64)
    events = [json.loads(each) for each in track(1, "n", np.arange(10) * 1000, values)]
    assert [(each["ts"], each["args"]["value"]) for each in events] == [
        *((0.0, 9), (2.0, 8), (5.0, 5), (7.0, 7))
    ]


def test_a_run_without_counters_has_no_such_track(tmp_path: Path) -> None:
    spans = loaded([Row("step", "step", 1, 0, 9), Row("a", "stage", 1, 0, 5)])
    assert Tracks(spans, tmp_path / "t.json").counters == {}
