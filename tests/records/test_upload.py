"""Finished runs on their way to fsspec's file system in memory."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load, read_remote
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.upload import Uploaded, upload
from lightning_rlprof.system.location import RemotePath, place
from lightning_rlprof.testing import FakeRecorder
from tests.builders.runs import grpo_rows, header, write_rank

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
TO = "memory://bucket/runs/"


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return fsspec's file system in memory, which all of a process share."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write two ranks that ended with a trace each, one that records, and more."""
    run = tmp_path / "my run"
    for rank in range(3):
        status = "finished" if rank < 2 else None
        write_rank(run, header(rank, 3), grpo_rows(2, rank), status=status)
        folder = run / f"rank-{rank:05d}" / "step-000001"
        folder.mkdir(parents=True)
        (folder / "x.trace.json.gz").write_bytes(bytes([rank]) * 1000)
    (run / ".rlprof-cache").mkdir()
    (run / ".rlprof-cache" / "x").write_text("cache")
    (run / "report.html").write_text("report")
    (run / "link").symlink_to(run / "report.html")
    return run


def there(memory: Any) -> list[str]:
    return [name.removeprefix("/bucket/runs/my run/") for name in sorted(memory.find("/"))]


def of_rank(rank: int) -> list[str]:
    name = f"rank-{rank:05d}"
    return [f"{name}.jsonl", f"{name}/step-000001/x.trace.json.gz"]


def test_ranks_that_ended_are_copied_and_the_others_named(run: Path, memory: Any) -> None:
    uploaded = upload(run, TO)
    assert there(memory) == [*of_rank(0), *of_rank(1), "report.html"]
    size = sum(memory.size(name) for name in memory.find("/"))
    assert uploaded == Uploaded(5, size, 0, ("rank-00002.jsonl",))
    path = place(f"{TO}my run")
    assert isinstance(path, RemotePath)
    assert read_remote(path, load).ranks == (0, 1)


def test_a_second_time_only_what_is_missing_is_copied(run: Path, memory: Any) -> None:
    upload(run, TO)
    memory.rm("/bucket/runs/my run/report.html")
    memory.pipe("/bucket/runs/my run/rank-00001.jsonl", b"cut off")
    assert upload(run, TO)[::2] == (2, 3)
    data = memory.cat("/bucket/runs/my run/rank-00001.jsonl")
    assert data == (run / "rank-00001.jsonl").read_bytes()


def test_a_rank_by_itself_is_its_own_files(run: Path, memory: Any) -> None:
    assert upload(run, TO, rank=1).left == ()
    assert there(memory) == of_rank(1)
    assert upload(run, TO, rank=2) == Uploaded(0, 0, 0, ("rank-00002.jsonl",))
    with pytest.raises(TraceError, match=r"no rank 7 in .*my run"):
        upload(run, TO, rank=7)


def test_after_a_crash_a_rank_that_never_ended_is_copied_when_asked(run: Path, memory: Any) -> None:
    assert upload(run, TO, rank=2, crashed=True).left == ()
    assert there(memory) == of_rank(2)


def test_a_broken_rank_is_left_and_named(run: Path, memory: Any) -> None:
    (run / "rank-00001.jsonl").write_text("no trace")
    assert upload(run, TO).left == ("rank-00001.jsonl", "rank-00002.jsonl")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("runs", "runs is not a URL such as s3://bucket/runs"),
        ("s3://KEY:hunter2hunter2@bucket", "s3://bucket: the URL contains credentials"),
        ("s3://KEY:pw@bucket", "s3://bucket: the URL contains credentials"),
        ("https://host/x?sig=hunter2hunter2", r"https://host/x\?\*\*\*: remove the query"),
        ("nonsense://bucket", r"nonsense://bucket: cannot be written \(ValueError: Protocol not"),
    ],
)
def test_where_nothing_can_be_copied_to_it_is_said(url: str, text: str, run: Path) -> None:
    with pytest.raises(TraceError, match=text) as caught:
        upload(run, url)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(TraceError, match="no run in"):
        upload(run / "rank-00000", TO)


def test_a_file_that_arrives_with_another_size_is_an_error(
    run: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(memory), "put_file", lambda self, _, to: self.pipe(to, b"part"))
    with pytest.raises(TraceError, match=r"trace.json.gz: upload is incomplete, 4 of 1,000 bytes"):
        upload(run, TO)


def test_a_callable_of_on_finish_uploads_the_complete_run(tmp_path: Path) -> None:
    config = ProfilerConfig.build(profile_save_path=str(tmp_path / "here"))
    to = f"file://{tmp_path}/kept"
    session = start_session(
        config,
        recorders=[FakeRecorder()],
        on_finish=lambda finished: upload(finished.run, to, finished.rank),
    )
    session.begin_step(1)
    session.end_step()
    session.close()
    for thread in threading.enumerate():
        if thread.name == "rlprof-finish":
            thread.join()
    (kept,) = (tmp_path / "kept").iterdir()
    assert load(kept).statuses == {0: "finished"}
    here = tmp_path / "here" / kept.name / "rank-00000.jsonl"
    assert (kept / here.name).read_bytes() == here.read_bytes()
