"""Which rank a process is, and what the wall clock says, in small exports."""

from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from tests.builders.nsys_export import EPOCH, NsysExport


def texts(path: Path) -> list[str]:
    return [problem.text for problem in load(path).warnings]


def export(path: Path, *pids: int, epoch: int | None = EPOCH) -> NsysExport:
    made = NsysExport(path, epoch=epoch)
    for pid in pids:
        made.own("actor_update", "stage", 1000, 2000, step=1, pid=pid)
    return made


def test_processes_that_say_nothing_are_counted_by_pid_and_that_is_a_problem(
    tmp_path: Path,
) -> None:
    path = export(tmp_path / "x.sqlite", 31, 7, 19).write()

    assert [(rank, head.pid) for rank, head in load(path).headers.items()] == [
        (0, 7),
        (1, 19),
        (2, 31),
    ]
    assert texts(path) == [
        "ranks are guessed, counting from 0, because no mark contains them: processes 7, 19, 31"
    ]


def test_the_file_name_tells_the_rank_of_those_that_say_nothing(tmp_path: Path) -> None:
    name = "actor_node_rank3_ab_rank12_step7.sqlite"
    made = export(tmp_path / name, 31, 7)
    made.said("rlprof.rank", 4, pid=31)
    path = made.write()

    assert load(path).ranks == (4, 12)
    assert texts(path) == []


@pytest.mark.parametrize("name", ["rank3.sqlite", "rank-3.sqlite", "a_rank_3.sqlite"])
def test_a_name_may_spell_the_rank_in_several_ways(tmp_path: Path, name: str) -> None:
    path = export(tmp_path / name, 7).write()

    assert load(path).ranks == (3,)


@pytest.mark.parametrize("name", ["a_rank3b.sqlite", "crank3.sqlite", "rank.3.sqlite"])
def test_other_names_tell_no_rank(tmp_path: Path, name: str) -> None:
    path = export(tmp_path / name, 7).write()

    assert load(path).ranks == (0,)


def test_guessed_ranks_follow_those_that_were_said(tmp_path: Path) -> None:
    made = export(tmp_path / "x.sqlite", *range(10, 17))
    made.said("rlprof.rank", 6, pid=16)

    path = made.write()

    assert load(path).ranks == (6, 7, 8, 9, 10, 11, 12)
    assert texts(path)[0].endswith(
        "counting from 7, because no mark contains them: processes 10, 11, 12, 13 and 2 more"
    )


def test_two_processes_of_one_rank_are_one_rank(tmp_path: Path) -> None:
    made = export(tmp_path / "x.sqlite", 10, 11)
    for pid in (10, 11):
        made.said("rlprof.rank", 2, pid=pid)

    spans = load(made.write())

    assert spans.ranks == (2,)
    assert [(s.id, s.parent, s.thread) for s in spans] == [(0, None, 10), (1, None, 11)]


def test_a_rank_that_only_says_itself_is_there(tmp_path: Path) -> None:
    made = export(tmp_path / "x.sqlite")
    made.said("rlprof.rank", 2, start=50)

    assert load(made.write()).ranks == (2,)


@pytest.mark.parametrize("second", [2, 3, -1, 2**20])
def test_a_process_is_the_rank_that_it_said_first(tmp_path: Path, second: int) -> None:
    made = export(tmp_path / "x.sqlite", 10)
    made.said("rlprof.rank", 2, pid=10, start=1)
    made.said("rlprof.rank", second, pid=10, start=2)
    path = made.write()

    assert load(path).ranks == (2,)
    assert texts(path) == []


def test_without_a_session_start_the_marks_of_the_clock_tell_the_time(tmp_path: Path) -> None:
    made = export(tmp_path / "x_rank0.sqlite", 10, epoch=None)
    made.said("rlprof.clock", EPOCH + 100, pid=10, start=900)  # marked 0.8 us after it was read
    made.said("rlprof.clock", EPOCH + 1100, pid=10, start=1150)

    spans = load(made.write())

    assert spans.unix_ns == EPOCH - 50 + 1000
    assert spans.headers[0].unix_ns == EPOCH - 50
    assert spans.warnings == ()


def test_without_either_the_wall_clock_is_not_known_and_said(tmp_path: Path) -> None:
    path = export(tmp_path / "x_rank0.sqlite", 10, epoch=None).write()

    assert load(path).unix_ns == 0
    assert texts(path) == ["recording time unknown: no TARGET_INFO_SESSION_START_TIME"]


@pytest.mark.parametrize(
    ("off_ns", "told"),
    [
        (19_000_000, []),
        (-3_000_000_000, ["its clock is +3000 ms off the clock of the program"]),
    ],
)
def test_a_session_start_that_the_marks_deny_is_a_problem(
    tmp_path: Path, off_ns: int, told: list[str]
) -> None:
    made = export(tmp_path / "x_rank0.sqlite", 10)
    made.said("rlprof.clock", EPOCH + 500 + off_ns, pid=10, start=500)
    path = made.write()

    assert load(path).unix_ns == EPOCH + 1000
    assert texts(path) == told


@pytest.mark.parametrize("name", ["x_rank3.sqlite", "x.sqlite"])
def test_two_processes_that_launched_work_as_one_rank_are_a_problem(
    tmp_path: Path, name: str
) -> None:
    made = export(tmp_path / name, 10, 11, 12)
    for pid in (10, 11):
        made.kernel("gemm", 1500, 1600, 1, pid=pid)
    if name == "x.sqlite":
        for pid in (10, 11, 12):
            made.said("rlprof.rank", 3, pid=pid)
    path = made.write()

    assert load(path).ranks == (3,)
    assert texts(path) == [
        "processes 10, 11 all launched kernels and count as one rank, 3, by the "
        "file name or by their marks"
    ]
