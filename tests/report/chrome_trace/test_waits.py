"""Waiting in an exported trace: slices inside stages, and arrows from the last rank."""

from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.steps.waiting import Waits, find_waits
from lightning_rlprof.report.chrome_trace import waits as waits_module
from tests.analysis.steps.test_waiting import Job
from tests.builders.chrome_tracks import Tracks
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play


def test_each_wait_is_a_slice_inside_its_stage_and_names_the_last_rank(tmp_path: Path) -> None:
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
        assert track == "Main"
        assert found.depth == 1
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
def test_waits_nest_beside_the_phases_of_a_stage(tmp_path: Path, phases: bool) -> None:
    spans = Job(1, slow=[2], phases=phases).spans
    tracks = Tracks(spans, tmp_path / "t.json")  # which fails where slices do not nest
    found = [s for slices in tracks.slices.values() for s in slices if s.category == "waiting"]
    assert len(found) == len(find_waits(spans).row) > 0
    assert len(tracks.flows) > 0.9 * len(found)


def test_a_wait_that_would_cut_a_slice_in_two_has_a_track_of_its_own(tmp_path: Path) -> None:
    ranks = []
    for arrives in (10, 60):
        rows = []
        for step in range(1, 9):
            start = 1000 * step
            rows.append(Row("step", "step", step, start, start + 200))
            rows.append(Row("barrier", "stage", step, start + arrives, start + 100))
            rows.append(Row("hook", "region", step, start + arrives + 20, start + 80))
        ranks.append(rows)
    tracks = Tracks(loaded(*ranks), tmp_path / "t.json")
    waits = [s for s in tracks.slices["rank 0 (node-a)", "Main: waiting"] if s.name == "waiting"]
    assert [each.end - each.start for each in waits] == [50] * 8
    assert len(tracks.flows) == 8
    for (leaves, source), (reaches, target) in tracks.flows:
        assert (leaves, source.name) == ("rank 1 (node-a)", "barrier")
        assert (reaches, target.name) == ("rank 0 (node-a)", "hook")


@pytest.mark.parametrize(
    ("start", "end", "track"),
    [(60, 100, "Main"), (10, 60, "Main"), (20, 50, "Main"), (5, 70, "Main"),
     (50, 100, "Main: waiting"), (5, 30, "Main: waiting")],
)  # fmt: skip
def test_a_wait_is_inside_its_stage_wherever_it_nests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, end: int, track: str
) -> None:
    rows = [Row("update", "stage", 1, 0, 100), Row("backward", "region", 1, 10, 60)]
    spans = loaded(rows, [Row("update", "stage", 1, 0, 100)])
    row, last = (np.array([at]) for at in (0, 2))
    waits = Waits(row, np.array([start]), np.array([end]), np.array([True]), last)
    monkeypatch.setattr(waits_module, "find_waits", lambda spans: waits)
    tracks = Tracks(spans, tmp_path / "t.json")
    found = tracks.slices["rank 0 (node-a)", track]
    assert [(s.start, s.end) for s in found if s.name == "waiting"] == [(start, end)]
    assert [target.name for _, (_, target) in tracks.flows] == ["waiting"]


def test_of_very_many_waits_the_longest_have_arrows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "MOST_FLOWS", 10)
    spans = play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans
    tracks, waits = Tracks(spans, tmp_path / "t.json"), find_waits(spans)
    longest = sorted((waits.end_ns - waits.start_ns).tolist())[-10:]
    assert sorted(each.end - each.start for _, (_, each) in tracks.flows) == longest
    assert tracks.other["arrows"] == f"{len(waits.row) - 10} shorter waits have none"
