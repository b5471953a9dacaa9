import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import rank_files, read_header, read_trace
from lightning_rlprof.system.files import open_file, replace_file
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
    replace_file(path, b"1", "x")
    replace_file(path, b"2", "x")
    assert path.read_bytes() == b"2"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path, b"3", "x")
    assert [*tmp_path.iterdir()] == [path]
