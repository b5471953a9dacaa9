"""Runs elsewhere: in fsspec's file system in memory, in a folder, on a web server right here."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load, read_remote
from lightning_rlprof.system import remote_files
from lightning_rlprof.system.location import RemotePath, place
from lightning_rlprof.system.remote_files import fetch, local
from lightning_rlprof.tables.spans import Spans
from tests.builders.chrome import BASE, ChromeTrace
from tests.builders.runs import grpo_run

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
WINDOW = "rank-00000/step-000001"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that copies are made in."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(remote_files.tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of two ranks with a trace of kernels, and with much that nobody reads."""
    run = tmp_path / "runs" / "my run"
    grpo_run(run, steps=2, ranks=2)
    trace = ChromeTrace(after={"baseTimeNanoseconds": BASE})
    trace.launched(1, 2_000_000)
    (run / WINDOW).mkdir(parents=True)
    trace.write(run / WINDOW / "a.trace.json")
    raw = run / WINDOW / "x_ascend_pt" / "PROF_000001_2024_ABC"
    raw.mkdir(parents=True)
    for name in ("report.html", ".rlprof-cache/x.json", f"{WINDOW}/memory.pickle"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"not read")
    (raw / "raw.json").write_bytes(b"not read")
    return run


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return fsspec's file system in memory, which all of a process share."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def at(url: str) -> RemotePath:
    path = place(url)
    assert isinstance(path, RemotePath)
    return path


def remotely(url: str) -> Spans:
    return read_remote(at(url), load)


def refused(url: str) -> str:
    """Return an error's text, after a look at all that a traceback of it would show."""
    with pytest.raises(TraceError) as caught:
        remotely(url)
    said, seen = "", caught.value.__cause__ or caught.value.__context__
    while seen:
        said, seen = said + str(seen), seen.__cause__ or seen.__context__
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value) + said
    return str(caught.value)


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("folder", ["", "/"])
def test_a_run_in_memory_reads_as_it_does_here(
    folder: str, run: Path, memory: Any, temporary: Path
) -> None:
    memory.put(str(run), "/bucket/my run", recursive=True)
    spans, here = remotely(f"memory://bucket/my run{folder}"), load(run)
    assert str(spans.path) == f"memory://bucket/my run{folder}"
    assert (len(spans), spans.headers, spans.warnings) == (len(here), here.headers, here.warnings)
    assert list(spans.table("kernels").rows) == list(here.table("kernels").rows)
    assert spans.notes[0].text.startswith(f"{spans.path}: 3 files, ")
    assert [name.partition("/")[2] for name in files_in(temporary)] == [
        "my run/rank-00000.jsonl",
        f"my run/{WINDOW}/a.trace.json",
        "my run/rank-00001.jsonl",
    ]


def test_copies_go_with_the_last_table_that_needs_them(
    run: Path, memory: Any, temporary: Path
) -> None:
    memory.put(str(run), "/bucket/run", recursive=True)
    spans = remotely("memory://bucket/run")
    table = spans.tables["kernels"]
    del spans
    gc.collect()
    assert len(table().rows) == 1
    del table
    gc.collect()
    assert list(temporary.iterdir()) == []


END = """
import sys
from lightning_rlprof.system.location import place
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.load import read_remote
spans = read_remote(place(sys.argv[1]), load)
sys.exit(f"{len(spans)} spans")
"""


def test_copies_go_at_the_end_of_the_program(run: Path, temporary: Path) -> None:
    command = [sys.executable, "-c", END, f"file://{run}"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == f"{len(load(run))} spans\n"
    assert list(temporary.iterdir()) == []


def test_a_block_gives_a_place_here_and_removes_it(run: Path, temporary: Path) -> None:
    with local(run) as here:
        assert here == run
    with pytest.raises(TraceError), local(place(f"file://{run}")) as here:
        assert here.name == "my run"
        assert files_in(here)
        raise TraceError("in the block")
    assert list(temporary.iterdir()) == []


def test_one_file_is_read_by_itself(run: Path, memory: Any, temporary: Path) -> None:
    memory.put(str(run), "/bucket/run", recursive=True)
    spans = remotely("memory://bucket/run/rank-00001.jsonl")
    assert (spans.ranks, spans.path.suffix) == ((1,), ".jsonl")
    assert len(remotely(f"memory://bucket/run/{WINDOW}/a.trace.json").table("kernels").rows) == 1


def test_of_several_runs_none_is_taken_and_one_is(run: Path, temporary: Path) -> None:
    assert len(remotely(f"file://{run.parent}")) == len(load(run))
    grpo_run(run.parent / "second", steps=1)
    text = refused(f"file://{run.parent}")
    assert text.endswith("runs: contains 2 runs, pass one of them: my run, second")


def test_what_is_not_there_is_told_by_its_url(memory: Any, temporary: Path) -> None:
    memory.pipe("/bucket/folder/readme.md", b"hello")
    assert refused("memory://bucket/none") == (
        "memory://bucket/none: cannot be read (FileNotFoundError: /bucket/none)"
    )
    assert "without a file that rlprof reads" in refused("memory://bucket/folder")
    memory.pipe("/bucket/x.json", b"{}")
    assert refused("memory://bucket/x.json").startswith("memory://bucket/x.json: not a Chrome")
    assert list(temporary.iterdir()) == []


def test_a_report_that_was_exported_is_not_copied(memory: Any, temporary: Path) -> None:
    for name in ("a.sqlite", "a.nsys-rep", "b.nsys-rep"):
        memory.pipe(f"/bucket/t/{name}", b"x")
    assert files_in(fetch(at("memory://bucket/t")).path) == ["a.sqlite", "b.nsys-rep"]


@pytest.mark.parametrize(
    "name", ["../../evil.json", "a/../../../evil.json", "./x.json", "//x.json"]
)
def test_a_name_that_leads_elsewhere_is_not_copied(
    name: str, memory: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/bucket/t/good.json", b"[]")
    found = memory.find("/bucket/t", detail=True)
    found[f"/bucket/t/{name}"] = {"type": "file", "size": 2}
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: found)
    copies = fetch(at("memory://bucket/t"))
    assert files_in(copies.path) == ["good.json"]
    assert [Path(file).name for file in files_in(temporary.parent)] == ["good.json"]


def test_what_does_not_fit_is_refused_before_it_is_copied(
    run: Path, memory: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.put(str(run), "/bucket/run", recursive=True)
    monkeypatch.setattr(type(memory), "open", None)  # nothing may be opened
    has_free(1_000, temporary, monkeypatch)
    text = refused("memory://bucket/run")
    assert "memory://bucket/run: its 3 files take " in text
    assert f"space for 1.0 kB in {temporary}: set TMPDIR" in text


def has_free(free_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = remote_files.shutil.disk_usage(folder)._replace(free=(1 << 28) + free_bytes)
    monkeypatch.setattr(remote_files.shutil, "disk_usage", lambda _: usage)


@pytest.mark.parametrize("told", [None, 10])
def test_a_file_larger_than_it_was_told_to_be_stops_at_the_limit(
    told: int | None, memory: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/bucket/x.json", b" " * 100_000)
    monkeypatch.setattr(remote_files, "_CHUNK", 1000)
    has_free(10_000, temporary, monkeypatch)
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: {"type": "file", "size": told})
    monkeypatch.setattr(type(memory), "isfile", lambda _, path: path in memory.store)
    wrote: list[int] = []
    stream = remote_files._stream
    monkeypatch.setattr(remote_files, "_stream", lambda *a: wrote.append(stream(*a)) or wrote[-1])
    assert "its 1 file take more than listed" in refused("memory://bucket/x.json")
    assert wrote == [11_000]


def test_a_file_that_ends_early_is_an_error(
    memory: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/bucket/x.json", b"[" * 90)
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: {"type": "file", "size": 100})
    monkeypatch.setattr(type(memory), "isfile", lambda _, path: path in memory.store)
    text = "memory://bucket/x.json: x.json ended after 90 of 100 bytes; try again"
    assert refused("memory://bucket/x.json") == text
    assert list(temporary.iterdir()) == []


def test_missing_packages_are_named_in_one_line(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused("nonsense://bucket/run") == (
        "nonsense://bucket/run: cannot be read (ValueError: Protocol not known: nonsense)"
    )
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert refused("s3://bucket/run") == (
        "s3://bucket/run: cannot be read (Install s3fs to access S3)"
    )
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert refused("s3://bucket/run") == (
        's3://bucket/run: fsspec is not installed: pip install "lightning-rlprof[remote]"'
    )


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(run: Path) -> Iterator[str]:
    """Serve the folder of the run; returns the address without the scheme."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(run.parent)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_web_server_gives_files_and_with_a_slash_folders(
    web: str, run: Path, temporary: Path
) -> None:
    trace = remotely(f"http://{web}/my%20run/{WINDOW}/a.trace.json?sig=hunter2hunter2")
    assert len(trace.table("kernels").rows) == 1
    assert "hunter2" not in f"{trace.path} {trace.notes} {trace!r}"
    spans = remotely(f"http://{web}/my%20run/")
    assert (len(spans), str(spans.path)) == (len(load(run)), f"http://{web}/my%20run/")


@pytest.mark.parametrize(
    "url",
    [
        "http://{web}/none.json?X-Amz-Signature=hunter2hunter2&x=1",
        "http://127.0.0.1:1/x.json?sig=hunter2hunter2",
        "filecache::http://{web}/none.json?sig=hunter2hunter2",
    ],
)
def test_an_error_holds_no_credential(url: str, web: str, temporary: Path) -> None:
    assert "127.0.0.1" in refused(url.format(web=web))
    assert list(temporary.glob("rlprof-*")) == []
