"""Ascend captures behind the one door: by themselves, and in the folders of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import is_ascend
from lightning_rlprof.loaders.ascend.reader import _repeated_steps
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import rank_directory
from tests.builders import ascend_output
from tests.builders.ascend_output import MAIN, DatabaseRows, TraceEvents, capture_folder
from tests.builders.runs import Row, header, write_rank

START = header().unix_ns  # of clock 0 of every rank


@pytest.fixture(autouse=True)
def _captures_are_of_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_output, "EPOCH", START)


def capture(parent: Path, *, rank: int = 0, stage: str = "actor_update", pid: int = 1) -> Path:
    trace = TraceEvents()
    trace.mark("rlprof.canary", 10, 20)
    trace.mark(stage, 100, 500)
    trace.task("Mul", 700, 800, torch=(200, MAIN))
    trace.collective("hcom_send", 900, 1_000)
    output = capture_folder(parent, rank=rank, pid=pid)
    return trace.write(output / "trace_view.json").parent.parent


@pytest.mark.parametrize(
    "inner", ["", "ASCEND_PROFILER_OUTPUT", "ASCEND_PROFILER_OUTPUT/trace_view.json"]
)
def test_a_capture_is_loaded_by_its_folder_its_output_and_its_trace(
    tmp_path: Path, inner: str
) -> None:
    path = capture(tmp_path, rank=3) / inner
    seen: list[tuple[int, int]] = []

    run = load(path, progress=lambda done, of: seen.append((done, of)))

    assert [(span.name, span.rank) for span in run] == [("actor_update", 3)]
    assert run.table("kernels").column("stage") == ["actor_update", None]
    assert seen == [(1, 1)]


def test_a_database_is_loaded_by_name_and_another_one_by_its_tables(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.mark("actor_update", 0, 9)
    for name in ("ascend_pytorch_profiler_0.db", "msprof_20260101.db", "renamed"):
        assert [span.name for span in load(rows.write(tmp_path / name))] == ["actor_update"]
        (tmp_path / name).unlink()
        rows.rows.pop("STRING_IDS")


def test_folders_of_steps_and_roles_are_searched_to_any_depth_but_links_are_not(
    tmp_path: Path,
) -> None:
    capture(tmp_path / "3" / "actor", rank=0)
    capture(tmp_path / "3" / "critic", rank=1)
    elsewhere = capture(tmp_path.parent / f"{tmp_path.name}-elsewhere", rank=2)
    (tmp_path / "3" / "linked_ascend_pt").symlink_to(elsewhere)
    capture(tmp_path / "a" / "b" / "c" / "d" / "e", rank=4)

    assert load(tmp_path).ranks == (0, 1, 4)
    assert load(tmp_path / "a").ranks == (4,)


def test_what_is_none_is_left_to_the_other_readers(tmp_path: Path) -> None:
    (tmp_path / "a.trace.json").write_text('{"traceEvents": [{"ph": "X", "name": "a"}]}')

    assert not is_ascend(tmp_path)
    assert not is_ascend(tmp_path / "a.trace.json")
    assert not is_ascend(tmp_path / "nothing")
    assert load(tmp_path).path == tmp_path / "a.trace.json"
    (tmp_path / "a.trace.json").unlink()
    with pytest.raises(TraceError, match="empty directory"):
        load(tmp_path)


def test_ranks_that_nothing_tells_are_counted_by_process_and_that_is_said(tmp_path: Path) -> None:
    for pid in (11, 12):
        for stage in ("actor_generate", "actor_update"):
            folder = capture(tmp_path / str(pid) / stage, pid=pid, stage=stage)
            (folder / "profiler_info_0.json").unlink()

    run = load(tmp_path)

    assert run.ranks == (0, 1)
    assert [len(run.rows(rank=rank)) for rank in run.ranks] == [2, 2]
    assert "no file has the ranks of 2 processes" in run.warnings[0].text


def test_two_processes_of_one_rank_stand_side_by_side_and_that_is_said(tmp_path: Path) -> None:
    capture(tmp_path / "actor", pid=11)
    capture(tmp_path / "rollout", pid=12, stage="actor_generate")

    run = load(tmp_path)

    assert [span.parent for span in run] == [None, None]
    assert "captures of 2 processes have this rank" in run.warnings[0].text


def run_of(path: Path) -> Path:
    """Write a run of two ranks: step 4 from 0 to 1000, with a stage from 100 to 500."""
    for rank in (0, 1):
        rows = [Row("critic_update", "stage", 4, 100, 500), Row("step", "step", 4, 0, 1_000)]
        write_rank(path, header(rank, 2), rows)
    return path


def test_captures_in_the_folders_of_a_run_give_it_kernels_and_tables(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    # The folder knows the rank; with MSTX the capture knows the stage, and it says actor_update.
    capture(rank_directory(run, 0) / "step-000004")
    other = capture(rank_directory(run, 1) / "step-000004", stage="rlprof.canary")
    assert other.parent.parent.name == "rank-00001"

    spans = load(run)

    table = spans.table("kernels")
    assert table.column("rank") == [0, 0, 1, 1]
    assert table.column("kernel") == ["Mul", "hcom_send"] * 2
    assert table.column("start") == [700, 900] * 2
    assert table.column("stage") == ["actor_update", None, "critic_update", None]
    assert table.column("step") == [4, None, 4, None]
    collectives = spans.table("collectives")
    assert (collectives.column("rank"), collectives.column("start")) == ([0, 1], [900, 900])
    assert len(spans) == 4


def test_a_capture_that_is_not_parsed_leaves_the_run_and_says_what_to_do(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (rank_directory(run, 0) / "step-000004" / "a_1_20250109074803340_ascend_pt").mkdir(parents=True)

    spans = load(run)

    assert "not parsed yet. Run: rlprof ascend parse" in (spans.table("kernels").abstained or "")
    assert sorted(spans.tables) == ["kernels"]


def recorded(start: int, end: int, rank: int = 0, step: int = 3) -> Any:
    """Return a capture that holds so much of a step, with what `_repeated_steps` looks at."""
    columns = {"step": step, "start_ns": start, "end_ns": end}
    steps = SimpleNamespace(**{name: np.array([value]) for name, value in columns.items()})
    ranges = SimpleNamespace(only=lambda _: steps)
    return SimpleNamespace(rank=rank, timeline=SimpleNamespace(ranges=ranges))


@pytest.mark.parametrize(
    ("captures", "doubts"),
    [
        ([recorded(0, 10), recorded(900, 910)], 0),  # two stages of one step
        ([recorded(0, 10), recorded(9_000, 9_010)], 1),
        ([recorded(0, 10), recorded(9_000, 9_010, rank=1)], 0),
        ([recorded(0, 10), recorded(9_000, 9_010, step=4)], 0),
        ([recorded(0, 10, step=0), recorded(9_000, 9_010, step=0)], 0),  # not known
    ],
)
def test_a_step_in_captures_far_apart_is_a_doubt(captures: list[Any], doubts: int) -> None:
    assert len(_repeated_steps(captures)) == doubts
