"""Reports of nsys are fetched by PID once they are whole; what does not come is said."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lightning_rlprof.recording import nsys as report_files
from lightning_rlprof.recording.nsys import Source, fetch
from lightning_rlprof.records.notes import Code, Fact, Level, level_of
from lightning_rlprof.testing import make_header

TWO = {1: "step-000002", 2: "step-000005-actor_update"}
WHY = "the reason"


class Worker:
    """Reports of one process in a folder, and what happens while `fetch` pauses."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "nsight", folder / "run" / "rank-00003"
        self.folder.mkdir()
        self.notes: list[tuple[str, str]] = []
        self.header = replace(make_header(rank=3), pid=41, host="box")
        self.happenings: list[Callable[[], object]] = []
        self.paused: list[float] = []

    def put(self, name: str, text: str = "report") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def source(self, captures: dict[int, str]) -> Source:
        def note(code: Code | Level, text: str, /, **facts: Fact) -> None:
            self.notes.append((level_of(code), text))

        return Source(self.header, self.home, self.folder, captures, WHY, note)

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        if self.happenings:
            self.happenings.pop(0)()

    def fetched(self, captures: dict[int, str], timeout_s: float = 0.0) -> list[str]:
        found = fetch([self.source(captures)], timeout_s, self.pause)
        assert all(path.parent == self.home for path in found)
        return [path.name for path in found]


def grow(path: Path) -> None:
    path.write_text(path.read_text() + "more")


@pytest.fixture
def nsys(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_the_nth_report_is_named_after_the_nth_capture(nsys: Worker) -> None:
    nsys.put("worker_process_41.2.nsys-rep", "two")
    nsys.put("worker_process_41.1.nsys-rep", "one")
    one, two = "actor_box_rank3_step2.nsys-rep", "actor_box_rank3_step5-actor_update.nsys-rep"
    assert nsys.fetched(TWO) == [one, two]
    assert [(nsys.home / name).read_text() for name in (one, two)] == ["one", "two"]
    assert list(nsys.folder.iterdir()) == []
    assert nsys.notes == []


def test_a_report_is_of_its_user_alone_as_it_contains_the_environment(nsys: Worker) -> None:
    nsys.put("worker_process_41.nsys-rep").chmod(0o644)
    (name,) = nsys.fetched(TWO)
    assert (nsys.home / name).stat().st_mode & 0o777 == 0o600


def test_a_single_report_is_that_of_the_only_capture(nsys: Worker) -> None:
    nsys.put("worker_process_41.nsys-rep")
    assert nsys.fetched({1: "step-000010"}) == ["actor_box_rank3_step10.nsys-rep"]


def test_a_single_report_of_several_captures_is_that_of_the_first(nsys: Worker) -> None:
    nsys.put("worker_process_41.nsys-rep")
    assert nsys.fetched(TWO) == ["actor_box_rank3_step2.nsys-rep"]
    assert [text.split(" in ")[0] for _, text in nsys.notes] == [
        "no nsys report for step-000005-actor_update"
    ]


def test_a_report_of_the_whole_process_is_named_after_no_step(nsys: Worker) -> None:
    nsys.put("worker_process_41.nsys-rep")
    assert nsys.fetched({}) == ["actor_box_rank3.nsys-rep"]
    assert nsys.fetched({}) == []
    assert nsys.notes == []


def test_a_range_that_somebody_else_opened_keeps_its_number(nsys: Worker) -> None:
    nsys.put("worker_process_41.1.nsys-rep")
    nsys.put("worker_process_41.7.nsys-rep")
    assert nsys.fetched({1: "step-000002"})[1] == "actor_box_rank3_range7.nsys-rep"


@pytest.mark.parametrize(
    "name",
    [
        "worker_process_4.1.nsys-rep",
        "worker_process_411.1.nsys-rep",
        "worker_process_41.1.qdstrm",
        "worker_process_41.1.nsys-rep.part",
        "worker_process_41.x.nsys-rep",
        "my_worker_process_41.1.nsys-rep",
    ],
)
def test_files_of_others_stay_where_they_are(name: str, nsys: Worker) -> None:
    theirs = nsys.put(name)
    assert nsys.fetched(TWO) == []
    assert theirs.exists()


def test_what_an_earlier_process_of_this_pid_left_stays(nsys: Worker) -> None:
    old = nsys.put("worker_process_41.1.nsys-rep")
    nsys.header = replace(nsys.header, unix_ns=old.stat().st_mtime_ns + 1)
    assert nsys.fetched(TWO) == []
    assert old.exists()


def test_a_link_is_not_followed(nsys: Worker, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (nsys.folder / "worker_process_41.1.nsys-rep").symlink_to(tmp_path / "secret")
    assert nsys.fetched({1: "step-000002"}) == []
    assert (tmp_path / "secret").exists()


def test_a_role_or_a_host_cannot_lead_out_of_the_folder(nsys: Worker) -> None:
    nsys.header = replace(nsys.header, role="../../actor", host="a/b")
    nsys.put("worker_process_41.1.nsys-rep")
    assert nsys.fetched({1: "../x"}) == ["..-..-actor_a-b_rank3_..-x.nsys-rep"]


def test_nothing_is_overwritten(nsys: Worker) -> None:
    nsys.home.mkdir(parents=True)
    mine = nsys.home / "actor_box_rank3_step2.nsys-rep"
    mine.write_text("mine")
    nsys.put("worker_process_41.1.nsys-rep")
    assert nsys.fetched({1: "step-000002"}) == ["actor_box_rank3_step2_2.nsys-rep"]
    assert mine.read_text() == "mine"


# ---- waiting


def test_a_report_that_is_whole_is_looked_at_twice_and_not_waited_for(nsys: Worker) -> None:
    nsys.put("worker_process_41.1.nsys-rep")
    assert len(nsys.fetched({1: "step-000002"}, timeout_s=30.0)) == 1
    assert nsys.paused == [1.0]


def test_a_report_that_comes_late_is_waited_for_until_it_stops_growing(nsys: Worker) -> None:
    path = nsys.folder / "worker_process_41.1.nsys-rep"
    nsys.happenings = [bool, path.touch, *[partial(grow, path)] * 3]
    assert len(nsys.fetched({1: "step-000002"}, timeout_s=30.0)) == 1
    assert nsys.paused == [1.0] * 6
    assert nsys.notes == []


def test_a_report_that_still_grows_when_time_is_up_stays(nsys: Worker) -> None:
    path = nsys.put("worker_process_41.1.nsys-rep")
    nsys.happenings = [partial(grow, path)] * 5
    assert nsys.fetched({1: "step-000002"}, timeout_s=4.5) == []
    assert nsys.paused == [1.0] * 5
    ((level, text),) = nsys.notes
    assert (level, path.exists()) == ("warning", True)
    assert text.startswith(
        f"{path} is still being written; fetch it later with "
        f"lightning_rlprof.integrations.ray.collect_reports"
    )


def test_an_empty_report_stays_and_the_others_come(nsys: Worker) -> None:
    path = nsys.put("worker_process_41.1.nsys-rep", "")
    nsys.put("worker_process_41.2.nsys-rep")
    assert len(nsys.fetched(TWO, timeout_s=2.0)) == 1
    ((level, text),) = nsys.notes
    assert (level, path.exists()) == ("warning", True)
    assert text.startswith(
        f"{path} is empty: nsys is still writing it, or was killed; fetch it later "
        f"with lightning_rlprof.integrations.ray.collect_reports"
    )


def test_a_report_that_never_comes_is_said_with_its_capture_and_the_reason(nsys: Worker) -> None:
    nsys.put("worker_process_41.1.nsys-rep")
    nsys.fetched(TWO, timeout_s=3.0)
    text = f"no nsys report for step-000005-actor_update in {nsys.folder}: {WHY}"
    assert nsys.notes == [("warning", text)]
    assert nsys.paused == [1.0] * 3


def test_without_known_captures_any_report_will_do(nsys: Worker) -> None:
    nsys.put("worker_process_41.1.nsys-rep")
    assert nsys.fetched({}) == ["actor_box_rank3_range1.nsys-rep"]
    assert (nsys.fetched({}), nsys.notes) == ([], [])


def test_without_known_captures_and_reports_the_process_is_named(nsys: Worker) -> None:
    nsys.fetched({})
    assert nsys.notes == [("warning", f"no nsys report for process 41 in {nsys.folder}: {WHY}")]


def test_what_is_at_home_already_is_not_missed(nsys: Worker) -> None:
    nsys.put("worker_process_41.1.nsys-rep")
    nsys.put("worker_process_41.2.nsys-rep")
    nsys.fetched(TWO)
    assert nsys.fetched(TWO, timeout_s=30.0) == []
    assert (nsys.notes, nsys.paused) == ([], [1.0, 1.0])


def test_a_folder_that_is_not_there_holds_no_reports(nsys: Worker) -> None:
    nsys.folder.rmdir()
    assert nsys.fetched({1: "step-000002"}) == []
    assert nsys.notes[0][1].startswith("no nsys report for step-000002")


def test_all_ranks_are_waited_for_together(nsys: Worker) -> None:
    other = replace(nsys.source(TWO), header=replace(nsys.header, pid=42, rank=4))
    assert fetch([nsys.source(TWO), other], 3.0, nsys.pause) == []
    assert (nsys.paused, len(nsys.notes)) == ([1.0] * 3, 4)


# ---- other file systems


def of_another_system(*paths: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_between_file_systems_a_report_is_copied(
    nsys: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_files.shutil.os, "rename", of_another_system)
    path = nsys.put("worker_process_41.1.nsys-rep", "report")
    nsys.home.mkdir(parents=True)
    mine = nsys.home / "actor_box_rank3_step2.nsys-rep"
    mine.write_text("mine")
    monkeypatch.setattr(Path, "rename", lambda self, to: self.replace(to))
    (name,) = nsys.fetched({1: "step-000002"})
    assert name == "actor_box_rank3_step2_2.nsys-rep"
    assert ((nsys.home / name).read_text(), mine.read_text()) == ("report", "mine")
    assert not path.exists()


def test_a_full_disk_leaves_the_report_where_it_is(
    nsys: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str, **options: object) -> None:
        Path(target).write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report_files.shutil.os, "rename", of_another_system)
    monkeypatch.setattr(report_files.shutil, "copyfile", full)
    path = nsys.put("worker_process_41.1.nsys-rep")
    assert nsys.fetched({1: "step-000002"}) == []
    assert (path.exists(), list(nsys.home.iterdir())) == (True, [])
    text = f"{path} could not be moved (No space left on device)"
    assert nsys.notes[0] == ("warning", text)


def test_what_cannot_be_removed_is_not_there_twice(
    nsys: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nsys.put("worker_process_41.1.nsys-rep")
    unlink = os.unlink

    def denied(gone: str | Path, **options: None) -> None:
        if gone == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(gone, **options)

    monkeypatch.setattr(report_files.shutil.os, "rename", of_another_system)
    monkeypatch.setattr(os, "unlink", denied)
    assert nsys.fetched({1: "step-000002"}) == []
    assert (path.exists(), list(nsys.home.iterdir())) == (True, [])
