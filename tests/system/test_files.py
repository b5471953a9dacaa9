import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import rank_files, read_header, read_trace
from lightning_rlprof.system import files
from lightning_rlprof.system.files import (
    draft_of,
    make_folder,
    new_folder,
    open_file,
    open_without_link,
    overwrite_inside,
    owners_of,
    read_inside,
    remove_inside,
    stamp_of,
    write_inside,
)
from tests.builders.ascend_output import capture_folder

NO_FILE = "not a regular file"


@pytest.fixture(autouse=True)
def _nothing_waits_for_ever() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError("it waited")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_file_is_opened_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with open_file(tmp_path / "b") as file:
        assert file.read() == b"abc"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(OSError, match=NO_FILE):
            open_file(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "absent")


def test_a_pipe_in_the_place_of_a_ranks_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-00000.jsonl")
    (path,) = rank_files(tmp_path)
    for read in (read_header, read_trace):
        with pytest.raises(TraceError, match=NO_FILE):
            read(path)
    with pytest.raises(TraceError, match=NO_FILE):
        load(tmp_path)


@pytest.mark.parametrize("name", ["ascend_pytorch_profiler_0.db", "analysis.db"])
def test_a_pipe_in_the_place_of_a_database_is_told(tmp_path: Path, name: str) -> None:
    output = capture_folder(tmp_path)
    output.mkdir(parents=True, exist_ok=True)
    os.mkfifo(output / name)
    with pytest.raises(TraceError):
        load(tmp_path)


@pytest.mark.parametrize("name", ["x.sqlite", "x.json", "x.json.gz", "x.jsonl", "x"])
def test_a_pipe_that_is_named_is_told(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(TraceError, match=f"{name}: {NO_FILE}"):
        load(tmp_path / name)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_inside(tmp_path, path, b"1")
    write_inside(tmp_path, path, b"2")
    assert path.read_bytes() == b"2"
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_inside(tmp_path, tmp_path / "folder", b"3")
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "folder"]


@pytest.mark.parametrize("write", [write_inside, overwrite_inside])
def test_what_is_written_takes_the_place_of_a_link_or_a_pipe(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    run.mkdir()
    foreign.write_bytes(b"another's")
    (run / "linked").symlink_to(foreign)
    os.link(foreign, run / "second_name")
    os.mkfifo(run / "pipe")
    for name in ("linked", "second_name", "pipe", "new"):
        write(run, run / name, b"mine")
        assert (run / name).read_bytes() == b"mine"
        assert not (run / name).is_symlink()
    assert foreign.read_bytes() == b"another's"
    assert {path.name for path in run.iterdir()} == {"linked", "second_name", "pipe", "new"}


def test_a_file_is_overwritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    overwrite_inside(tmp_path, path, b"first")
    number = path.stat().st_ino
    overwrite_inside(tmp_path, path, b"again")
    assert (path.read_bytes(), path.stat().st_ino) == (b"again", number)


@pytest.fixture(params=["by folder", "by path"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system open files relative to a folder and refuse links; or neither, as Windows."""
    if request.param == "by path":
        monkeypatch.setattr(files, "IS_POSIX", False)
        monkeypatch.setattr(files, "_NO_LINK", 0)


@pytest.mark.usefixtures("_both_ways")
def test_no_link_is_followed_to_a_file_or_a_folder_inside(tmp_path: Path) -> None:
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    run.mkdir()
    foreign.mkdir()
    (foreign / "secret").write_bytes(b"secret")
    (run / "watchdog").symlink_to(foreign)
    (run / "file").symlink_to(foreign / "secret")
    with pytest.raises(OSError, match="is a link"):
        read_inside(run, run / "file", 10)
    for act in (
        lambda path: read_inside(run, path, 10),
        lambda path: write_inside(run, path, b"x"),
        lambda path: overwrite_inside(run, path, b"x"),
        lambda path: make_folder(run, path / "inner"),
        lambda path: remove_inside(run, path),
    ):
        with pytest.raises(OSError, match="link"):
            act(run / "watchdog" / "secret")
    assert [path.name for path in foreign.iterdir()] == ["secret"]
    assert (foreign / "secret").read_bytes() == b"secret"


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("target", ["there", "absent"])
def test_a_file_is_made_where_its_name_is_not_a_link(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="symbolic links"):
        open_without_link(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    with open(open_without_link(tmp_path / "new", os.O_RDWR | os.O_CREAT), "wb") as file:
        file.write(b"1")
    assert (tmp_path / "new").read_bytes() == b"1"
    assert not (tmp_path / "absent").exists()
    assert (tmp_path / "there").read_bytes() == b"kept"


def test_what_was_opened_is_still_what_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign").write_bytes(b"secret")
    (tmp_path / "own").write_bytes(b"own")
    monkeypatch.setattr(files, "_NO_LINK", 0)
    opened, real = [], os.open

    def swapped(path: Path, flags: int, mode: int) -> int:
        """Open what a link leads to that lies there for a moment."""
        assert path == tmp_path / "own"
        opened.append(real(tmp_path / "foreign", flags, mode))
        return opened[0]

    monkeypatch.setattr(files.os, "open", swapped)
    with pytest.raises(OSError, match="symbolic links"):
        open_without_link(tmp_path / "own", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


@pytest.mark.usefixtures("_both_ways")
def test_a_run_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    write_inside(tmp_path / "latest", tmp_path / "latest" / "a", b"1")
    assert read_inside(tmp_path / "latest", tmp_path / "latest" / "a", 1) == b"1"


@pytest.mark.usefixtures("_both_ways")
def test_a_small_file_is_small_and_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    own = path.stat().st_uid
    assert read_inside(tmp_path, path, 5, owners_of(path)) == b"12345"
    assert owners_of(tmp_path / "absent") == {0, files.user()}
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_inside(tmp_path, path, 4)
    with pytest.raises(PermissionError, match=f"belongs to another user, {own}"):
        read_inside(tmp_path, path, 5, {own + 1})
    assert stamp_of(path, {own}) == stamp_of(path) is not None
    assert stamp_of(path, {own + 1}) is None


def test_folders_have_the_mode_of_the_one_around_for_the_owner_and_group(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        for around, inside in [(0o700, 0o700), (0o2750, 0o2750), (0o777, 0o750)]:
            run = tmp_path / f"{around:o}"
            run.mkdir()
            run.chmod(around)
            make_folder(run, run / "a" / "b")
            modes = {path.stat().st_mode & 0o7777 for path in (run / "a", run / "a" / "b")}
            assert modes == {inside}
        new_folder(tmp_path / "export", 0o640)
        assert (tmp_path / "export").stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def test_a_draft_takes_its_place_in_the_end_or_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with draft_of(path, 0o640) as part:
        part.write_bytes(b"whole")
    with pytest.raises(ZeroDivisionError), draft_of(path) as part:
        part.write_bytes(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"whole"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*tmp_path.iterdir()] == [path]
