"""How a driver collects the reports of all ranks: runs made by hand, and neither Ray nor nsys."""

import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.integrations import ray as door
from lightning_rlprof.integrations.ray import collect_reports
from lightning_rlprof.recording.nsys import fetch
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import TraceWriter, note_line, read_trace
from lightning_rlprof.testing import make_header

GONE = 2**22 + 1  # above the highest process id of Linux


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(door, "fetch", partial(fetch, pause=seconds.append))
    monkeypatch.setattr(door, "REPORT_WAIT_S", 2.0)
    return seconds


class Run:
    """A run directory with rank files made by hand, and a folder for reports."""

    def __init__(self, folder: Path) -> None:
        self.path, self.reports = folder / "run", folder / "nsight"
        self.reports.mkdir()

    def rank(self, rank: int = 0, status: str | None = "finished", **header: Any) -> int:
        """Write a rank that captured steps 2 and 5; returns its PID."""
        options = {
            "tools": ["nsight"],
            "nsight": {"reports": str(self.reports)},
        }
        facts = {"pid": GONE + rank, "host": socket.gethostname(), "config": options, **header}
        writer = TraceWriter(self.path, replace(make_header(rank), **facts))
        names = ("step-000002", "step-000005")
        notes = [
            note_line(5, Code.NSYS_RANGE, "", {"number": number, "capture": name})
            for number, name in enumerate(names, 1)
        ]
        writer.write([*notes, ("end", 9, status)] if status else notes)
        writer.close()
        return int(facts["pid"])

    def put(self, pid: int, *numbers: int) -> None:
        for number in numbers:
            (self.reports / f"worker_process_{pid}.{number}.nsys-rep").write_text("report")

    def collected(self) -> list[str]:
        found = [path.relative_to(self.path).as_posix() for path in collect_reports(self.path)]
        return [name.replace(f"_{socket.gethostname()}_", "_HOST_") for name in found]

    def warnings(self, rank: int = 0) -> list[str]:
        notes = read_trace(self.path / f"rank-{rank:05d}.jsonl").notes
        return [note.text for note in notes if note.level == "warning"]


@pytest.fixture
def run(tmp_path: Path, pauses: list[float]) -> Run:
    return Run(tmp_path)


def test_the_reports_of_every_rank_go_into_its_own_folder(run: Run, pauses: list[float]) -> None:
    run.put(run.rank(0), 1, 2)
    run.put(run.rank(1, role="critic"), 2, 1)
    assert run.collected() == [
        "rank-00000/actor_HOST_rank0_step2.nsys-rep",
        "rank-00000/actor_HOST_rank0_step5.nsys-rep",
        "rank-00001/critic_HOST_rank1_step2.nsys-rep",
        "rank-00001/critic_HOST_rank1_step5.nsys-rep",
    ]
    assert (run.warnings(0), run.warnings(1), pauses) == ([], [], [1.0])
    assert list(run.reports.iterdir()) == []


@pytest.mark.parametrize("odd", [{"nsight": {"reports": 3}}, {"nsight": 3}, {"tools": 3}])
def test_a_rank_with_an_odd_header_costs_no_other_its_reports(
    run: Run, odd: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run.put(run.rank(0), 1, 2)
    run.rank(1, config=odd)
    assert [name[:10] for name in run.collected()] == ["rank-00000"] * 2
    assert "rank-00001.jsonl: its reports are not collected: " in caplog.text


def test_a_controller_with_a_rank_has_one_report_of_its_whole_life(run: Run) -> None:
    pid = run.rank(role="controller")
    (run.reports / f"worker_process_{pid}.nsys-rep").write_text("report")
    assert run.collected() == ["rank-00000/controller_HOST_rank0.nsys-rep"]
    assert (run.collected(), run.warnings()) == ([], [])


def test_a_killed_workers_missing_report_becomes_a_line_in_its_file(run: Run) -> None:
    pid = run.rank(status=None)
    run.put(pid, 1)
    assert run.collected() == ["rank-00000/actor_HOST_rank0_step2.nsys-rep"]
    assert run.warnings() == [
        f"no nsys report for step-000005 in {run.reports}: process {pid} was killed or crashed, "
        "so nsys lost what it had not written"
    ]


def test_a_worker_that_was_killed_before_its_first_line_is_missed_as_a_whole(run: Run) -> None:
    facts = replace(
        make_header(), pid=GONE, host=socket.gethostname(), config={"tools": ["nsight"]}
    )
    options = {**facts.config, "nsight": {"reports": str(run.reports)}}
    TraceWriter(run.path, replace(facts, config=options)).close()
    assert run.collected() == []
    assert run.warnings()[0].startswith(f"no nsys report for process {GONE} in ")


@pytest.mark.parametrize(
    ("pid", "reason"),
    [
        (os.getpid(), f"process {os.getpid()} still runs, and nsys writes after it ends: collect"),
        (
            GONE,
            ("nsys may still be writing (then collect again), or recorded no range: capture-range"),
        ),
    ],
    ids=["it runs", "it is gone"],
)
def test_the_reason_depends_on_what_became_of_the_process(run: Run, pid: int, reason: str) -> None:
    run.rank(pid=pid)
    run.collected()
    assert run.warnings()[0].startswith(
        f"no nsys report for step-000002 in {run.reports}: {reason}"
    )


def test_what_came_later_is_collected_and_nothing_is_said_twice(run: Run) -> None:
    pid = run.rank()
    run.put(pid, 1)
    assert (len(run.collected()), len(run.warnings())) == (1, 1)
    assert (len(run.collected()), len(run.warnings())) == (0, 1)
    run.put(pid, 2)
    assert run.collected() == ["rank-00000/actor_HOST_rank0_step5.nsys-rep"]
    assert len(run.warnings()) == 1


def test_remarks_stand_at_the_time_of_the_ranks_own_clock(run: Run) -> None:
    run.rank(unix_ns=0, clock_ns=10**18)
    run.collected()
    (late, _) = [
        note for note in read_trace(run.path / "rank-00000.jsonl").notes if "no " in note.text
    ]
    assert late.clock_ns > 10**18 + 10**18


@pytest.mark.parametrize(
    "header",
    [
        {"host": "another-host"},
        {"config": {}},
        {"config": {"tools": ["nvtx"]}},
    ],
)
def test_ranks_of_other_hosts_and_without_nsight_are_left_alone(
    run: Run, pauses: list[float], header: dict[str, Any]
) -> None:
    run.put(run.rank(**header), 1, 2)
    assert (run.collected(), run.warnings(), pauses) == ([], [], [])


def test_a_rank_that_ended_without_a_capture_misses_nothing(run: Run) -> None:
    header = replace(make_header(), host=socket.gethostname(), config={"tools": ["nsight"]})
    writer = TraceWriter(run.path, header)
    writer.write([("end", 9, "finished")])
    writer.close()
    assert (run.collected(), run.warnings()) == ([], [])


def test_a_damaged_file_costs_its_own_reports_only(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.put(run.rank(1), 1, 2)
    (run.path / "rank-00000.jsonl").write_text("nonsense\n")
    assert len(run.collected()) == 2
    assert "its reports are not collected" in caplog.text


def test_a_remark_that_cannot_be_kept_is_only_logged(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    run.rank()
    monkeypatch.setattr(door, "append_note", read_only)
    assert run.collected() == []
    assert "the note cannot be saved (Permission denied)" in caplog.text


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"expected rank-\*\.jsonl\); give the run directory"):
        collect_reports(tmp_path)
