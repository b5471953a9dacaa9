"""One rank's recording: steps tile training, lines reach the disk, failures stop no run."""

import ast
import errno
import logging
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording import session as session_module
from lightning_rlprof.recording.annotations import Marker, mark, stage
from lightning_rlprof.recording.background.sampler import HostMemory
from lightning_rlprof.recording.session import Session, current, note_in_all_runs
from lightning_rlprof.records import run_directory
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import read_header, read_trace
from lightning_rlprof.testing import make_header
from tests.builders.recording import read, run_steps, spans, times


def test_steps_tile_training_without_a_gap(start, clock):
    session = start()
    session.begin_step(1)
    clock.advance(10)
    session.end_step()
    clock.advance(3)
    session.begin_step(2)
    clock.advance(10)
    session.end_step()
    session.close()
    assert times(session, "step") == [(1, 0, 10), (2, 10, 23)]
    assert read(session).status == "finished"


def test_spans_carry_the_step_in_which_they_began(start, clock):
    session = start()
    with stage("actor_generate"):
        session.begin_step(1)
    run_steps(session, clock, [1, 2])
    session.close()
    assert times(session, "actor_generate") == [(0, 0, 0)]
    assert times(session, "actor_update") == [(1, 1, 6), (2, 9, 14)]


def test_a_step_is_on_disk_when_it_ends(start, clock):
    session = start()
    run_steps(session, clock, [1])
    assert [span.name for span in read(session).spans] == ["actor_update", "step"]


def test_a_long_stage_is_on_disk_before_its_step_ends(start, clock):
    session = start()
    session.begin_step(1)
    with stage("actor_generate"):
        clock.advance(2_000_000_000)
    assert times(session, "actor_generate") == [(1, 0, 2_000_000_000)]


def test_a_long_stage_does_not_wait_while_another_thread_is_stuck_in_a_write(
    start, clock, monkeypatch
):
    session = start()
    inside, over, real = threading.Event(), threading.Event(), session.buffer._writer.write

    def hang(lines, **options):
        inside.set()
        assert over.wait(60)
        real(lines, **options)

    def generate():
        with stage("actor_generate"):
            clock.advance(2_000_000_000)

    with stage("actor_update"):
        pass
    monkeypatch.setattr(session.buffer._writer, "write", hang)
    writer, other = threading.Thread(target=session.flush), threading.Thread(target=generate)
    writer.start()
    assert inside.wait(60)
    other.start()
    other.join(30)
    waited = other.is_alive()
    over.set()
    writer.join(60)
    other.join(60)
    assert not waited
    session.flush()
    assert [span.name for span in read(session).spans] == ["actor_update", "actor_generate"]


def test_an_interrupted_step_stays_and_says_so(start, clock):
    session = start()
    session.begin_step(1)
    clock.advance(4)
    session.close("interrupted by ValueError")
    (step,) = spans(session, "step")
    assert (step.end_ns, step.counters) == (4, {"interrupted": 1})
    assert read(session).status == "interrupted by ValueError"


def test_a_step_without_batch_leaves_nothing(start, clock):
    session = start()
    run_steps(session, clock, [1])
    session.begin_step(2)
    session.abandon_step(interrupted=False)
    session.abandon_step(interrupted=True)
    session.close()
    assert [span.step for span in spans(session, "step")] == [1]


def test_as_a_context_manager_it_closes_in_both_ways(start, clock):
    with start() as session:
        run_steps(session, clock, [1])
    assert read(session).status == "finished"
    assert current() is None


def test_as_a_context_manager_it_lets_the_exception_pass(start):
    error, session = ValueError("mine"), start()
    session.begin_step(1)
    with pytest.raises(ValueError, match="mine") as caught, session:
        raise error
    assert caught.value is error
    assert read(session).status == "interrupted by ValueError"
    assert spans(session, "step")[0].counters == {"interrupted": 1}


def test_only_one_session_records_in_a_process(start, tmp_path):
    session = start()
    assert current() is session
    with pytest.raises(ConfigError, match=r"a session already records into"):
        Session(ProfilerConfig(), tmp_path / "other", make_header())
    session.close()
    session.close()
    assert current() is None


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"profile_save_path: .* cannot be written \(Not a dir"):
        Session(ProfilerConfig(), tmp_path / "file" / "run", make_header())
    assert current() is None


def test_threads_are_named_once(start):
    session = start()

    def work():
        with stage("actor_generate"):
            pass
        session.flush()

    thread = threading.Thread(target=work, name="rollout")
    thread.start()
    thread.join()
    with stage("actor_update"):
        pass
    session.close()
    names = read(session).threads
    assert sorted(names.values()) == [threading.current_thread().name, "rollout"]


def test_a_thread_that_is_gone_has_a_number(start):
    session = start()
    thread = threading.Thread(target=lambda: mark("hello"))
    thread.start()
    thread.join()
    session.close()
    assert read(session).threads == {thread.ident: f"thread {thread.ident}"}


def test_totals_of_a_step_are_there_when_it_ended(start, clock):
    session = start()
    session.begin_step(1)
    for tokens in (3, 4):
        with stage("actor_generate", tokens=tokens):
            clock.advance(10)
    thread = threading.Thread(target=lambda: mark("elsewhere"))
    thread.start()
    thread.join()
    session.record(Marker("backward", "region"), 0, 5)
    session.end_step()
    counts = {("actor_generate", "tokens"): (7, 20)}
    assert session.step_totals == (20, False, {"actor_generate": 20}, counts)


def test_notes_are_logged_by_rank_zero_and_warnings_by_all(start, caplog):
    caplog.set_level(logging.INFO)
    session = start(rank=1)
    session.note("info", "quiet")
    session.note("warning", "loud")
    session.close()
    assert [record.message for record in caplog.records] == ["loud"]
    assert [note.text for note in read(session).notes] == ["quiet", "loud"]


class FullDisk:
    """Let ``os.write`` fail while `full`."""

    def __init__(self, monkeypatch):
        self.full, real = False, os.write

        def write(file, data):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, data)

        monkeypatch.setattr(run_directory.os, "write", write)


def run_slow_steps(session, clock, steps):
    """Each is written when it ends, as the last write was long ago."""
    for step in steps:
        clock.advance(100_000_000)
        run_steps(session, clock, [step])


def test_steps_that_end_just_after_a_write_wait_for_the_next_one(start, clock):
    session = start()

    def written():
        return [span.step for span in spans(session, "step")]

    run_steps(session, clock, [1])
    assert written() == [1]
    run_steps(session, clock, [2, 3])
    assert written() == [1]
    clock.advance(99_999_900)
    run_steps(session, clock, [4])
    assert written() == [1]
    clock.advance(100)
    run_steps(session, clock, [5])
    assert written() == [1, 2, 3, 4, 5]
    run_steps(session, clock, [6])
    session.close()
    assert written() == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_full_for_a_while_costs_nothing(start, clock, monkeypatch, caplog):
    disk = FullDisk(monkeypatch)
    session = start()
    for step in range(1, 6):
        disk.full = step < 4
        run_slow_steps(session, clock, [step])
    session.close()
    trace = read(session)
    assert [span.step for span in spans(session, "step")] == [1, 2, 3, 4, 5]
    assert [note.text for note in trace.notes] == [
        "the disk took nothing for 0.3 s; what waited in memory is written"
    ]
    assert (trace.lost_lines, len(trace.threads)) == (0, 1)
    assert len([r for r in caplog.records if "cannot write" in r.message]) == 1


def test_a_disk_that_is_full_for_long_costs_the_oldest_lines(start, clock, monkeypatch):
    monkeypatch.setattr(run_directory, "_MOST_WAITING", 1_000)
    disk = FullDisk(monkeypatch)
    session = start()
    disk.full = True
    run_slow_steps(session, clock, range(1, 30))
    disk.full = False
    run_slow_steps(session, clock, [30, 31])
    session.close()
    trace = read(session)
    found = [span.step for span in trace.spans]
    assert found == sorted(found)
    assert set(found) == set(range(min(found), 32)), "the newest ones are there"
    (lost,) = [note.text for note in trace.notes if "lost" in note.text]
    # Two spans a step, and the name of their thread, which is written again.
    assert lost == f"{2 * 31 + 1 - len(found)} lines were lost, because they could not be written"
    assert len(trace.threads) == 1, "the name of the thread was lost with the first lines"


def test_a_disk_that_stays_full_does_not_stop_the_end_and_the_run_says_so(
    start, clock, monkeypatch
):
    disk = FullDisk(monkeypatch)
    session = start()
    run_slow_steps(session, clock, [1])
    disk.full = True
    run_slow_steps(session, clock, [2])
    session.close()
    trace = read(session)
    assert (trace.status, trace.lost_lines) == ("finished", 0)
    assert [span.step for span in spans(session, "step")] == [1]
    assert [(note.level, note.text) for note in trace.notes] == [
        ("error", "3 lines were lost, because they could not be written")
    ]
    assert read_header(trace.path) == trace.header


@pytest.mark.parametrize("size", [3200, 3500])
def test_steps_after_a_file_was_truncated_are_read(start, clock, caplog, size):
    session = start()
    path = session.run / "rank-00000.jsonl"
    run_slow_steps(session, clock, range(1, 30))
    assert path.stat().st_size > 4000
    line = path.read_bytes().rfind(b"\n", 0, size) + 1
    os.truncate(path, line)  # however long the header is
    run_slow_steps(session, clock, range(30, 34))
    (said,) = [record.message for record in caplog.records]
    assert said == f"{path} was truncated: what was cut off is lost"
    session.close()
    trace = read(session)
    assert [span.step for span in spans(session, "step")][-4:] == [30, 31, 32, 33]
    assert trace.lost_lines == 0
    assert (trace.status, [note.text for note in trace.notes]) == ("finished", [said])
    assert read_header(path) == trace.header
    assert load(session.run).statuses == {0: "finished"}


def test_a_file_that_was_emptied_is_said_once_and_the_training_goes_on(start, clock, caplog):
    session = start()
    path = session.run / "rank-00000.jsonl"
    run_slow_steps(session, clock, range(1, 30))
    os.truncate(path, 0)
    run_slow_steps(session, clock, range(30, 34))
    session.close()
    said = [record.message for record in caplog.records]
    assert said == [f"{path} was truncated: what was cut off is lost"]


def test_a_training_that_changes_its_directory_moves_no_run(clock, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = Session(ProfilerConfig(), Path("run"), make_header(), (), clock)
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    run_steps(session, clock, [1])
    session.close()
    assert caplog.records == []


@pytest.mark.parametrize("part", ["file", "run"])
def test_a_run_that_is_moved_is_said_when_it_happens_and_noted_in_it(start, clock, caplog, part):
    session = start()
    path = session.run / "rank-00000.jsonl"
    run_steps(session, clock, [1])
    if part == "run":
        moved = session.run.rename(session.run.with_name("elsewhere")) / path.name
    else:
        moved = path.rename(path.with_name("old.jsonl"))
    run_slow_steps(session, clock, [2, 3])
    (said,) = [record.message for record in caplog.records]
    assert said == f"{path} was moved: this rank still writes to it"
    session.close()
    trace = read_trace(moved)
    assert [span.step for span in trace.spans if span.kind == "step"] == [1, 2, 3]
    assert [note.text for note in trace.notes] == [said]


def test_counters_that_are_no_numbers_cost_only_themselves(start, clock):
    session = start()
    with stage("actor_generate", tokens=object(), samples=2):
        pass
    session.close()
    assert spans(session, "actor_generate")[0].counters == {"samples": 2}


def test_a_forked_child_leaves_the_file_to_its_parent(start, clock):
    session = start()
    run_steps(session, clock, [1])
    child = os.fork()
    if child == 0:
        with stage("in the child"):
            pass
        session.flush()
        os._exit(0 if current() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.close()
    assert spans(session, "in the child") == []
    assert read(session).lost_lines == 0


def test_a_child_forgets_the_session(start):
    """The same without a fork, which a coverage tool cannot follow into ``os._exit``."""
    session = start()
    session_module._leave_to_parent()
    assert current() is None
    with stage("in the child"):
        pass
    session.close()
    assert spans(session, "in the child") == []


def test_a_child_that_goes_on_as_its_parent_did_writes_nothing(start):
    session = start()
    session.begin_step(1)
    with stage("before"):
        pass
    session.buffer._lock.acquire()  # as by another thread while this one forks
    child = os.fork()
    if child == 0:
        session.end_step()
        session.close("interrupted by SystemExit")
        os._exit(0)
    session.buffer._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert spans(session, "before") == []
    session.end_step()
    session.close()
    assert [len(spans(session, name)) for name in ("before", "step")] == [1, 1]
    assert read(session).status == "finished"


def test_a_child_takes_all_lines_and_keeps_none(start, clock):
    """The same without a fork, which a coverage tool cannot follow into ``os._exit``."""
    session = start()
    session_module._leave_to_parent()
    run_steps(session, clock, [1, 2])
    session.record(stage("update"), 1, 2)
    assert session.buffer._spans == []
    session.note("info", "in the child")
    session.close()
    found = read(session)
    assert (found.spans, found.notes, found.status) == ([], [], None)


def test_flushing_a_closed_session_does_nothing(start):
    session = start()
    session.close()
    session.note("info", "late")
    session.flush()
    assert read(session).notes == []


def test_what_cannot_be_recorded_is_in_this_run_and_in_those_that_follow(start, caplog):
    before, meanwhile = "TRL: no GRPOTrainer, so it is not recorded", "verl: no timer"
    note_in_all_runs(Code.DOOR_NOT_RECORDED, before, framework="TRL")
    first = start()
    note_in_all_runs(Code.DOOR_NOT_RECORDED, meanwhile, framework="verl")
    first.close()
    second = start(rank=1)
    second.close()
    for session in (first, second):
        found = [(note.code, note.text) for note in read(session).notes]
        assert found == [(Code.DOOR_NOT_RECORDED, before), (Code.DOOR_NOT_RECORDED, meanwhile)]
        assert [note.facts["framework"] for note in read(session).notes] == ["TRL", "verl"]
    assert sorted({*caplog.messages}) == [before, meanwhile]


def test_a_session_is_whole_once_it_is_made():
    """No method gives it an attribute that `__init__` has not."""
    tree = ast.parse(Path(session_module.__file__).read_text())
    (body,) = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Session"]
    methods = [node for node in body if isinstance(node, ast.FunctionDef)]
    (first,) = [node for node in methods if node.name == "__init__"]
    assert len(assigned(first)) > 15
    for method in methods:
        assert assigned(method) <= assigned(first), method.name


def assigned(method: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


@pytest.mark.parametrize("moment", ["as the end begins", "before it is written", "once written"])
def test_a_step_that_ends_while_the_run_is_ended_is_written_once(
    moment, start, clock, monkeypatch
) -> None:
    session = start()
    run_steps(session, clock, [1])
    session.begin_step(2)
    clock.advance(10**9)
    end = partial(session.end_at_once, "interrupted by SIGTERM")
    write = session.buffer.end_step
    if moment == "as the end begins":
        monkeypatch.setattr(session, "clock", in_turn([session.end_step], session.clock))
        end()
    elif moment == "before it is written":
        monkeypatch.setattr(session.buffer, "end_step", in_turn([end], write))
        session.end_step()
    else:
        monkeypatch.setattr(session.buffer, "end_step", lambda *a, **k: (write(*a, **k), end()))
        session.end_step()
    steps, status = times(session, "step"), read(session).status
    session.discard()  # The process would have ended.
    assert [step for step, _, _ in steps] == [1, 2]
    assert status == "interrupted by SIGTERM"


def in_turn(first, call):
    """Return a function that calls what comes first once, then another one each time."""

    def both(*args, **options):
        while first:
            first.pop()()
        return call(*args, **options)

    return both


def test_short_steps_between_two_writes_have_their_spans_and_totals(start, clock, monkeypatch):
    now = [10**9]  # of what reads memory
    monkeypatch.setattr(session_module, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(HostMemory, "counters", lambda memory: {"host_rss_bytes": 7})
    session = start()
    for step in range(1, 6):
        session.begin_step(step)
        with stage("actor_update"):
            clock.advance(step)
        if step % 2:
            with stage("compute_reward"):
                clock.advance(1)
        session.end_step()
        assert session.buffer.stage_count == len(session.step_totals.stages) == 1 + step % 2
        assert session.step_totals.stages["actor_update"] == step
        assert session.step_totals.ns == step + step % 2
        assert not session.buffer.has_stages()
    now[0] += 10**8
    session.begin_step(6)
    session.end_step()
    session.close()
    steps = spans(session, "step")
    assert [span.step for span in steps] == [1, 2, 3, 4, 5, 6]
    read_in = [span.step for span in steps if "host_rss_bytes" in (span.counters or {})]
    assert read_in == [1, 6]  # A reading takes longer than such a step.
