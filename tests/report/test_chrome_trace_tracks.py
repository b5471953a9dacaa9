"""Counters and waiting in an exported trace, and the arrows between ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.steps.step_matrix import find_waits
from lightning_rlprof.report import chrome_trace
from lightning_rlprof.report.chrome_trace import track
from tests.analysis.steps.test_waiting import Job
from tests.builders.chrome_tracks import Tracks
from tests.builders.runs import Row, grpo_run, loaded
from tests.builders.scripted import Script, play


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
    monkeypatch.setattr(chrome_trace, "MAX_COUNTER_EVENTS", 4)
    values = np.array([1, 9, 2, 3, 8, 4, 5, 6, 7, 0], np.float64)
    events = [json.loads(each) for each in track(1, "n", np.arange(10) * 1000, values)]
    assert [(each["ts"], each["args"]["value"]) for each in events] == [
        *((0.0, 9), (2.0, 8), (5.0, 5), (7.0, 7))
    ]


def test_a_run_without_counters_has_no_such_track(tmp_path: Path) -> None:
    spans = loaded([Row("step", "step", 1, 0, 9), Row("a", "stage", 1, 0, 5)])
    assert Tracks(spans, tmp_path / "t.json").counters == {}


def test_each_wait_is_a_slice_below_its_thread_and_names_the_last_rank(tmp_path: Path) -> None:
    spans = play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans
    tracks, waits = Tracks(spans, tmp_path / "t.json"), find_waits(spans)
    drawn = {
        (process, each.start, each.end): (track, each)
        for (process, track), slices in tracks.slices.items()
        for each in slices
        if each.category == "waiting"
    }
    assert len(drawn) == len(waits.row) > 100
    columns = (waits.row, waits.start_ns, waits.end_ns, waits.last)
    for row, start, end, last in zip(*columns, strict=True):
        span = spans.span(int(row))
        track, found = drawn[f"rank {span.rank} (node-a)", int(start), int(end)]
        assert track == "Main: waiting"
        assert found.args == {"step": span.step, "last rank": int(spans.rank[last])}
    assert sum(each.args["last rank"] == 2 for _, each in drawn.values()) > 0.9 * len(drawn)


def test_arrows_go_from_the_last_rank_to_the_end_of_each_wait(tmp_path: Path) -> None:
    spans = play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans
    tracks = Tracks(spans, tmp_path / "t.json")
    assert len(tracks.flows) == len(find_waits(spans).row)
    for (leaves, source), (reaches, target) in tracks.flows:
        assert leaves == f"rank {target.args['last rank']} (node-a)" != reaches
        assert (source.name, source.args["step"]) == ("actor_update", target.args["step"])
        assert target.name == "waiting"
    assert "arrows" not in tracks.other


@pytest.mark.parametrize("phases", [True, False])
def test_waits_in_the_phases_of_a_stage_are_drawn_once(tmp_path: Path, phases: bool) -> None:
    spans = Job(1, slow=[2], phases=phases).spans
    tracks = Tracks(spans, tmp_path / "t.json")  # which fails where slices do not nest
    found = [s for slices in tracks.slices.values() for s in slices if s.category == "waiting"]
    assert len(found) == len(find_waits(spans).row) > 0
    assert len(tracks.flows) > 0.9 * len(found)


def test_of_very_many_waits_the_longest_have_arrows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome_trace, "MAX_FLOWS", 10)
    spans = play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans
    tracks, waits = Tracks(spans, tmp_path / "t.json"), find_waits(spans)
    longest = sorted((waits.end_ns - waits.start_ns).tolist())[-10:]
    assert sorted(each.end - each.start for _, (_, each) in tracks.flows) == longest
    assert tracks.other["arrows"] == f"{len(waits.row) - 10} shorter waits have none"
