"""A run folder that others may write, too: nothing there ends, stops or misleads a training."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rlprof.errors import ConfigError, TraceError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.loop import start_session, step
from lightning_rlprof.recording import job, stacks
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.capture_requests import LOOK_NS
from lightning_rlprof.recording.job import Place, shared_run
from lightning_rlprof.recording.session import Session
from lightning_rlprof.recording.watchdog import Watchdog, keep_dump
from lightning_rlprof.records.capture_request import CaptureRequest, request_file, write_request
from lightning_rlprof.records.hang_reports import (
    FOLDER,
    alarm_file,
    alive_file,
    dump_file,
    stack_request_file,
)
from lightning_rlprof.records.run_directory import (
    TraceWriter,
    make_capture_folder,
    rank_file,
    read_header,
    read_trace,
)
from lightning_rlprof.testing import FakeClock, make_header
from tests.builders.models import Tiny, loader, make_trainer
from tests.builders.recording import read, run_steps
from tests.places import ROOT

Start = Callable[..., Session]
Run = Callable[..., tuple[int, str, str]]
FOREIGN = b"another user's 256 bytes" * 20
OTHER_USER = 12345
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


@pytest.fixture(autouse=True)
def _nothing_waits_for_ever() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError("it waited")

    job._remarks.clear()  # of a test that started no session
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- requests


@pytest.mark.parametrize("steps", [900_000, 3_000_000, 10**9])
def test_a_request_for_endless_steps_costs_one_note(
    steps: int, start: Start, clock: FakeClock
) -> None:
    session = start()
    asked = {"id": "x", "unix_ns": session.header.unix_ns + 1, "first_step": 3, "steps": steps}
    request_file(session.run).write_text(json.dumps(asked))
    clock.advance(LOOK_NS)
    run_steps(session, clock, [*range(1, 8)])
    session.close()
    trace = read(session)
    assert [span.step for span in trace.spans if span.kind == "step"] == [*range(1, 8)]
    assert not any("capture" in (span.counters or {}) for span in trace.spans)
    (note,) = trace.notes
    assert "a request to capture was refused" in note.text


@is_root
def test_requests_of_another_user_count_neither_for_captures_nor_for_stacks(
    start: Start, clock: FakeClock
) -> None:
    session = start()
    watchdog = Watchdog(session, 300)
    (session.run / FOLDER).mkdir()
    asked = {"id": "x", "unix_ns": session.header.unix_ns + 1, "first_step": 3, "steps": 1}
    for path, content in [
        (request_file(session.run), asked),
        (stack_request_file(session.run), {"id": "x", "seconds": 1}),
    ]:
        path.write_text(json.dumps(content))
        os.chown(path, OTHER_USER, OTHER_USER)
    clock.advance(LOOK_NS)
    assert watchdog._sampler is not None
    watchdog._sampler.look()
    run_steps(session, clock, [*range(1, 6)])
    session.close()
    trace = read(session)
    assert not any("capture" in (span.counters or {}) for span in trace.spans)
    assert not any(span.name.startswith("stack") for span in trace.spans)
    assert len(trace.notes) == 2
    assert all(f"another user, {OTHER_USER}" in note.text for note in trace.notes)


@is_root
def test_root_may_ask_the_training_of_a_user(request: pytest.FixtureRequest) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own are root's alone
    request.addfinalizer(lambda: shutil.rmtree(folder))
    folder.chmod(0o777)
    program = f"""
import os, sys
from pathlib import Path
from lightning_rlprof.records.capture_request import read_request
from lightning_rlprof.records.run_directory import TraceWriter, rank_file
from lightning_rlprof.system.files import owners_of
from lightning_rlprof.testing import make_header
os.setuid({OTHER_USER})
run = Path({str(folder / "run")!r})
TraceWriter(run, make_header()).close()
print("written", flush=True)
sys.stdin.readline()
print(read_request(run, owners_of(rank_file(run, 0))).id)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    write_request(folder / "run", CaptureRequest("by root", 1, 3, 1))
    said, _ = child.communicate("\n")
    assert said == "by root\n"


def test_what_is_quoted_in_a_note_steers_neither_log_nor_run(
    start: Start, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = "a\x1b[31m\r\nrlprof: all is well\u202e\x9b"
    session = start()
    session.begin_step(1)
    with stage(hostile):
        clock.advance(1)
    session.buffer._lose_numbers(f"of <stage {hostile}>")
    session.note("warning", hostile)
    session.failed(RuntimeError(hostile))
    session.end_step()
    session.close()
    for text in (*caplog.messages, *(note.text for note in read(session).notes)):
        assert text.isprintable(), text


# ---- fixed names


def linked(path: Path, foreign: Path) -> None:
    """Let a name of a run lead to another's file."""
    path.unlink(missing_ok=True)
    path.symlink_to(foreign)


@pytest.fixture
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign")
    (path / "file").write_bytes(FOREIGN)
    return path


@pytest.fixture
def tools(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let torch's flight recorder write into a folder of its own."""
    folder = tmp_path_factory.mktemp("tools")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(folder / "torch_"))
    monkeypatch.setattr(stacks, "_LOOK_S", 0)
    return folder


def hang(session: Session, clock: FakeClock, tools: Path) -> None:
    """Let a rank hang with everything that it writes then, and train on."""
    (tools / "torch_0").write_bytes(b"dump")
    watchdog = Watchdog(session, 10)
    run_steps(session, clock, [1, 2])
    session.begin_step(3)
    for _ in range(100):
        clock.advance(1_000_000_000)
        watchdog.look()
    session.end_step()
    keep_dump(session.run, 0, 0)
    session.close()


def test_links_in_the_place_of_what_a_watchdog_writes_are_not_followed(
    foreign: Path, clock: FakeClock, tools: Path, start: Start
) -> None:
    session = start()
    run = session.run
    (run / FOLDER).mkdir()
    names = [f"rank-00000-0{number}{end}" for number in (1, 2) for end in (".json", ".draft")]
    names.append("rank-00000.stacks")
    for path in (alive_file(run, 0), alarm_file(run), *(run / FOLDER / name for name in names)):
        linked(path, foreign / "file")
    linked(run / FOLDER / "rank-00001.alive", foreign / "absent")
    hang(session, clock, tools)
    assert (foreign / "file").read_bytes() == FOREIGN
    assert [path.name for path in foreign.iterdir()] == ["file"]
    assert [span.step for span in read(session).spans if span.kind == "step"] == [1, 2, 3]
    for path in (alive_file(run, 0), run / FOLDER / names[0], run / FOLDER / names[2]):
        assert stat.S_ISREG(path.lstat().st_mode), path
    assert dump_file(run, 0).read_bytes() == b"dump"


def test_a_watchdog_folder_that_is_a_link_gets_nothing(
    foreign: Path, clock: FakeClock, tools: Path, start: Start
) -> None:
    session = start()
    (foreign / "rank-00000.alive").write_bytes(FOREIGN)
    (session.run / FOLDER).symlink_to(foreign)
    hang(session, clock, tools)
    assert {path.name for path in foreign.iterdir()} == {"file", "rank-00000.alive"}
    assert (foreign / "rank-00000.alive").read_bytes() == FOREIGN
    assert [span.step for span in read(session).spans if span.kind == "step"] == [1, 2, 3]


def test_captures_do_not_follow_a_link_of_a_rank(
    foreign: Path, clock: FakeClock, start: Start
) -> None:
    session = start()
    (session.run / "rank-00000").symlink_to(foreign)
    with pytest.raises(OSError, match="link"):
        make_capture_folder(session.run / "rank-00000" / "step-000001")
    session.close()
    assert [path.name for path in foreign.iterdir()] == ["file"]


def test_a_dump_in_a_folder_for_all_is_not_read_through_a_link(
    foreign: Path, tools: Path, start: Start
) -> None:
    session = start()
    (session.run / FOLDER).mkdir()
    linked(tools / "torch_0", foreign / "file")
    keep_dump(session.run, 0, 0)
    assert not dump_file(session.run, 0).exists()


# ---- one run of a job


def place(rank: int) -> Place:
    return Place(rank, 2, None, "slurm 7.0", is_unique=True)


def agreement(folder: Path) -> Path:
    """Return where the ranks of the job agree, and leave it free."""
    shared_run(folder, place(0))
    (path,) = folder.glob(".jobs*/*-0")
    if path.is_dir():
        next(path.iterdir()).rmdir()
        path.rmdir()
    else:
        path.unlink()
    return path


def _entry(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).mkdir(parents=True)


ATTACKS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "text": lambda path: path.write_text("../x"),
    "garbage": lambda path: path.write_bytes(b"\xff\0" * 1000),
    "file in a folder": lambda path: (path.mkdir(), (path / "a").write_text("b")),
    "parent": _entry("..x"),
    "two": lambda path: (_entry("20261121-141500-9f2c41d7")(path), _entry("x")(path)),
    "long": _entry("x" * 200),
    "link to a folder": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_lies_in_the_place_of_an_agreement_is_left_out_and_said(
    attack: str, tmp_path: Path
) -> None:
    ATTACKS[attack](agreement(tmp_path))
    session = start_session(profile_save_path=str(tmp_path), summary=False)
    session.close()
    names = [shared_run(tmp_path, place(rank)) for rank in (0, 1)]
    assert names[0] == names[1]
    assert (tmp_path / names[0]).parent == tmp_path


def test_a_rank_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF_JOB", "slurm 7.0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    os.mkfifo(agreement(tmp_path))
    with start_session(profile_save_path=str(tmp_path), summary=False) as session:
        pass
    (note,) = [note for note in read(session).notes if note.level == "warning"]
    assert "is left out: not a directory" in note.text.lower()


BROKEN: dict[str, Callable[[Path, Path], object]] = {
    "pipe": lambda path, foreign: os.mkfifo(path),
    "link": lambda path, foreign: path.symlink_to(foreign),
    "file": lambda path, foreign: path.touch(),
    "of another user": lambda path, foreign: (path.mkdir(), os.chown(path, OTHER_USER, 0)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_without_a_folder_for_agreements_each_rank_says_that_it_is_alone(
    how: str, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "of another user" and os.geteuid():
        pytest.skip("only root may act as another user")
    folder = tmp_path / "runs"
    shared_run(folder, place(0))
    (home,) = folder.glob(".jobs*")
    for entry in (*home.glob("*/*"), *home.glob("*")):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    home.rmdir()
    BROKEN[how](home, foreign)
    monkeypatch.setenv("RLPROF_JOB", "slurm 7.0")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with start_session(profile_save_path=str(folder), summary=False) as session, step():
            pass
        (note,) = [note for note in read(session).notes if note.level == "warning"]
        assert "could not agree on one run" in note.text
        assert [span.step for span in read(session).spans if span.kind == "step"] == [1]
    assert [path.name for path in foreign.iterdir()] == ["file"]


def test_the_folder_of_another_users_agreements_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / ".jobs").mkdir(0)
    if not os.geteuid():
        os.chown(tmp_path / ".jobs", OTHER_USER, OTHER_USER)
    names = [shared_run(tmp_path, place(rank)) for rank in (0, 1)]
    assert names[0] == names[1]


def test_a_run_folder_that_another_user_made_is_not_joined(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shared_run(tmp_path, place(0))
    (tmp_path / first).symlink_to(foreign)
    names = [shared_run(tmp_path, place(rank)) for rank in (0, 1)]
    assert names[0] == names[1] != first


def test_a_name_from_the_store_that_is_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SimpleNamespace(compare_set=lambda key, before, name: b"../x")
    monkeypatch.setattr(job, "default_store", lambda: store)
    monkeypatch.setattr(job, "find_place", lambda: place(0))
    with start_session(profile_save_path=str(tmp_path), summary=False) as session:
        pass
    assert session.run.parent == tmp_path
    (note,) = [note for note in read(session).notes if note.level == "warning"]
    assert "'../x' is not the name of a run" in note.text


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_ranks_meet_without_hard_links(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    names = {shared_run(tmp_path, place(rank)) for rank in range(8)}
    assert len(names) == 1


def test_ranks_that_cannot_meet_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setenv("RLPROF_JOB", "slurm 7.0")
    with start_session(profile_save_path=str(tmp_path), summary=False) as session:
        pass
    (note,) = [note for note in read(session).notes if note.level == "warning"]
    assert "could not agree on one run (Function not implemented)" in note.text
    (folder,) = tmp_path.glob(".jobs*")
    assert [*folder.iterdir()] == [], "drafts are removed"


@pytest.mark.deep
def test_processes_that_start_at_once_meet_in_one_run(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from lightning_rlprof.recording.job import Place, shared_run
print(shared_run(Path({str(tmp_path)!r}), Place(None, None, 1, "job", is_unique=True)))
"""
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    assert len({rank.communicate()[0] for rank in ranks}) == 1
    assert {rank.returncode for rank in ranks} == {0}


# ---- modes


@pytest.mark.parametrize(("umask", "group"), [(0o022, False), (0o022, True), (0o077, True)])
def test_pages_and_exports_may_be_read_by_those_who_may_read_the_run(
    umask: int, group: bool, rlprof: Run, tmp_path: Path
) -> None:
    file, folder = (0o640, 0o2750) if group else (0o600, 0o2700)
    saved, out = tmp_path / "saved", tmp_path / "out"
    saved.mkdir()
    saved.chmod(0o2755)
    out.mkdir(0o755)
    before = os.umask(umask)
    try:
        config = {"group_access": group, "hang_timeout": 300}
        with start_session(config, profile_save_path=str(saved), summary=False) as session:
            for _ in range(3):
                with step(), stage("actor_update"):
                    pass
            made = {session.run: folder, session.run / FOLDER: folder}
            assert {path: stat.S_IMODE(path.stat().st_mode) for path in made} == made
        run = str(session.run)
        for words in (
            ["report", run, "-o", out / "report.html"],
            ["export", run, "-o", out / "trace.json"],
            ["export", run, "--format", "csv", "-o", out / "tables"],
            ["sql", run, "select * from spans", "-o", out / "rows.csv"],
            ["sql", run, "select * from spans", "-o", out / "rows.parquet"],
        ):
            status, _, error = rlprof(*words)
            assert status == 0, error
    finally:
        os.umask(before)
    found = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in (*out.rglob("*"), rank_file(session.run, 0))
    }
    assert {mode for path, mode in found.items() if path.is_file()} == {file}
    assert {mode for path, mode in found.items() if path.is_dir()} == {folder & 0o777}
    caches = [stat.S_IMODE(path.stat().st_mode) for path in session.run.glob(".rlprof-cache/*")]
    assert caches == [folder]
    assert stat.S_IMODE(saved.stat().st_mode) == 0o2755, "yours"


# ---- what is known before training


@pytest.mark.parametrize("given", [["upload.sh"], "notify.sh", 3])
def test_an_on_finish_that_cannot_be_called_is_refused_before_training(
    given: object, tmp_path: Path
) -> None:
    options = {"profile_save_path": str(tmp_path / "runs"), "on_finish": given}
    with pytest.raises(ConfigError, match=r"on_finish=.* is not callable"):
        start_session(**options)
    module = Tiny()
    with pytest.raises(ConfigError, match=r"on_finish=.* is not callable"):
        make_trainer(ProfilerCallback(**options)).fit(module, loader())
    assert module.losses == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [0, -1])
def test_a_format_below_1_is_refused(number: int, tmp_path: Path, rlprof: Run) -> None:
    header = replace(make_header(), format=number)
    path = TraceWriter(tmp_path / "run", header).path
    for read_it in (read_header, read_trace):
        with pytest.raises(TraceError, match="not a rank file"):
            read_it(path)
    assert rlprof("summary", tmp_path / "run")[0] == 2


def test_a_rank_file_that_was_swapped_is_noticed(
    start: Start, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    session = start()
    path = rank_file(session.run, 0)
    run_steps(session, clock, [1])
    path.rename(session.run / "kept")
    path.write_bytes((session.run / "kept").read_bytes())
    for number in (2, 3):
        clock.advance(1_000_000_000)
        run_steps(session, clock, [number])
    session.close()
    (said,) = [text for text in caplog.messages if "another file has its name" in text]
    trace = read_trace(session.run / "kept")
    assert [note.text for note in trace.notes] == [said]
    assert [span.step for span in trace.spans if span.kind == "step"] == [1, 2, 3]


def test_a_path_that_is_not_utf_8_is_recorded(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/runs-\xff"))
    with start_session(profile_save_path=str(folder)) as session, step(), stage("actor_update"):
        pass
    module = Tiny()
    make_trainer(ProfilerCallback(profile_save_path=str(folder))).fit(module, loader())
    assert module.losses
    runs = [*folder.iterdir()]
    assert len(runs) == 2
    for run in runs:
        trace = read_trace(rank_file(run, 0))
        assert (trace.status, trace.notes) == ("finished", [])
        assert trace.header.config["integrated"]["profile_save_path"].endswith("runs-?")
    assert session.run in runs


def test_a_header_that_cannot_be_written_leaves_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlprof.records.run_directory._encoded", lambda header: 1 / 0)
    start_session(profile_save_path=str(tmp_path), name="run").close()
    assert not (tmp_path / "run").exists()


def test_deep_brackets_are_refused_before_they_are_parsed(
    rlprof: Run, start: Start, clock: FakeClock
) -> None:
    session = start()
    run_steps(session, clock, [1, 2])
    session.close()
    for query in ("select " + "(" * 3000, "select " + "(" * 3000 + "1 1" + ")" * 3000):
        status, _, error = rlprof("sql", session.run, query)
        assert (status, "nested more than 200 deep" in error) == (2, True)
