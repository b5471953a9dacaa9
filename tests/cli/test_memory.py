import json
from collections.abc import Callable
from pathlib import Path

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.recorders.memory import build
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import make_header
from tests.builders.runs import Row, grpo_run, header, write_rank

Run = Callable[..., tuple[int, str, str]]
SNAPSHOT = "memory-snapshot_rank0_pid7.pickle"


def gpu_run(run: Path) -> None:
    """Write two ranks with memory, and the names of files that recorders leave."""
    for rank in (0, 1):
        counters = {"device_peak_bytes": (3 + rank) << 30, "host_rss_bytes": 1 << 30}
        rows = [Row("actor_update", "stage", 3, 0, 9, counters=counters)]
        write_rank(run, header(rank, 2, device="cuda"), rows)
    for name in (
        f"step-000003/{SNAPSHOT}",
        f"oom-step-000004/{SNAPSHOT}",
        "step-000003/memory-a.txt",
    ):
        path = run / "rank-00000" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_peaks_by_stage_and_rank_and_the_files_that_say_more(rlprof: Run, tmp_path: Path) -> None:
    gpu_run(tmp_path / "run")

    status, out, err = rlprof("memory", tmp_path / "run")

    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith("actor_update")]
    assert [row[:5] for row in rows] == [
        ["actor_update", "0", "3", "3.00", "GiB"],
        ["actor_update", "1", "3", "4.00", "GiB"],
    ]
    folder = tmp_path / "run" / "rank-00000"
    for window in ("oom-step-000004", "step-000003"):
        assert f"\nsnapshot, rank 0, {window}: {folder}/{window}/{SNAPSHOT}\n" in out
    assert (
        "Drop a snapshot on https://docs.pytorch.org/memory_viz (it stays in your browser)" in out
    )
    assert "memory-a.txt" not in out
    assert "timeline" not in out
    assert "doubts" not in out
    assert out.endswith(f"\nNext: rlprof report {tmp_path}/run\n")


def test_doubts_about_the_run_are_not_passed_over(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2), [], status=None)
    assert "! 2 doubts about this run: rlprof summary tells them\n" in rlprof("memory", tmp_path)[1]


def test_as_json_it_is_the_table_and_the_files(rlprof: Run, tmp_path: Path) -> None:
    gpu_run(tmp_path)
    data = json.loads(rlprof("memory", tmp_path, "--json")[1])
    assert (data["run"], data["warnings"]) == (str(tmp_path), [])
    (table,) = data["tables"]
    assert table["name"] == "memory"
    peak = [column["name"] for column in table["columns"]].index("peak")
    assert table["columns"][peak] == {"name": "peak", "kind": "count", "unit": "bytes"}
    assert [row[peak] for row in table["rows"]] == [3 << 30, 4 << 30]
    assert data["files"][0] == {
        "what": "snapshot",
        "rank": 0,
        "window": "oom-step-000004",
        "path": str(tmp_path / "rank-00000" / "oom-step-000004" / SNAPSHOT),
    }
    assert len(data["files"]) == 2


def test_a_run_without_memory_names_what_to_configure(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path)
    status, out, _ = rlprof("memory", tmp_path)
    assert status == 0
    text = " ".join(out.split())
    assert "This run has no memory data. Capture a step with profile_with_memory: true" in text
    assert json.loads(rlprof("memory", tmp_path, "--json")[1])["files"] == []


def test_it_finds_what_the_recorder_really_writes(rlprof: Run, tmp_path: Path) -> None:
    config = ProfilerConfig.build(profile=True, memory={"level": "timeline"})
    head = make_header()
    with Session(config, tmp_path, head, [build(config, head)]) as session:
        session.begin_step(1)
        with stage("actor_update"):
            pass
        session.end_step()
    for run in (tmp_path, tmp_path / "rank-00000.jsonl"):
        out = rlprof("memory", run)[1]
        folder = tmp_path / "rank-00000" / "step-000001"
        assert f"timeline, rank 0, step-000001: {folder}/memory-timeline.jsonl\n" in out
        assert "whole step" in out
        assert "A timeline is one JSON array per sample; its first line names the columns" in out
