"""When a rank reports that it makes no progress, on a fake clock, and when it does not."""

import gc
import logging
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.recording import stacks
from lightning_rlprof.recording.annotations import Marker, annotate, stage
from lightning_rlprof.recording.session import Loop, Session
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.recording.watchdog import Watchdog
from lightning_rlprof.records.hang_reports import (
    alarm_file,
    alive_file,
    read_beat,
    read_reports,
)
from lightning_rlprof.records.notes import Code
from tests.builders.recording import read, run_steps

TIMEOUT_S = 300


class Watched:
    """A session, its watchdog, and time that passes in seconds, each with a look.

    The first look after progress finds it: from then on the rank is quiet.
    """

    def __init__(self, session: Session, clock, timeout_s: float = TIMEOUT_S) -> None:
        self.session, self.clock = session, clock
        self.watchdog = Watchdog(session, timeout_s)

    def steps(self, *numbers: int) -> None:
        run_steps(self.session, self.clock, [*numbers])
        self.watchdog.look()

    def wait(self, seconds: int, every: int = 1) -> None:
        for _ in range(0, seconds, every):
            self.clock.advance(every * 1_000_000_000)
            self.watchdog.look()

    @property
    def causes(self) -> list[str]:
        return [report.cause for report in self.reports]

    @property
    def reports(self):
        return read_reports(self.session.run, 0)


@pytest.fixture
def watched(start, clock, monkeypatch) -> Watched:
    monkeypatch.setattr(stacks, "_LOOK_S", 0)
    return Watched(start(), clock)


def test_a_stage_that_hangs_is_reported_with_line_and_open_spans(watched, caplog):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with stage("actor_update"), annotate("all-reduce"):
        watched.wait(TIMEOUT_S - 1)
        assert watched.causes == []
        watched.wait(2)

        (report,) = watched.reports
    assert (report.cause, report.step, report.in_step, report.quiet_s) == ("hang", 3, True, 300)
    assert [span.name for span in report.spans] == ["actor_update", "all-reduce"]
    assert report.last_span == "step"
    assert any(frame.file == __file__ for frame in report.threads[0].frames)
    assert report.threads[0].is_training
    assert "no progress for 300 s in all-reduce, step 3" in caplog.text
    (note,) = read(watched.session).notes
    assert note.text.startswith("no progress"), "on the disk although the step has not ended"
    assert (note.code, note.facts["quiet_s"]) == (Code.NO_PROGRESS, 300)
    assert (note.facts["step"], note.facts["span"]) == (3, "all-reduce")


def test_the_text_of_the_line_is_in_the_report(watched):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with stage("actor_update"):
        watched.wait(TIMEOUT_S + 1)
        texts = [frame.text for frame in watched.reports[0].threads[0].frames]
    assert "watched.wait(TIMEOUT_S + 1)" in texts


def test_spans_with_counters_and_of_other_threads_are_known_too(watched):
    watched.steps(1)
    watched.session.begin_step(2)
    entered, end = threading.Event(), threading.Event()

    def reward() -> None:
        with stage("compute_reward"):
            entered.set()
            end.wait()

    thread = threading.Thread(target=reward, name="rewards")
    thread.start()
    entered.wait()
    with stage("actor_update", tokens=5):
        watched.wait(6 * TIMEOUT_S)
        (*_, report) = watched.reports
    end.set()
    thread.join()
    spans = {span.name: span.is_training for span in report.spans}
    assert spans == {"compute_reward": False, "actor_update": True}
    assert "rewards" in [each.name for each in report.threads]


def test_a_span_that_an_earlier_session_left_open_is_not_open_now(start, clock, monkeypatch):
    monkeypatch.setattr(stacks, "_LOOK_S", 0)
    left = stage("left_open")
    before = start()
    left.__enter__()
    before.discard()
    watched = Watched(start(), clock)
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with stage("actor_update"):
        watched.wait(TIMEOUT_S + 1)
    (report,) = watched.reports
    assert [span.name for span in report.spans] == ["actor_update"]


def test_a_hang_is_reported_again_twice_and_then_no_more(watched):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with stage("actor_update"):
        watched.wait(20 * TIMEOUT_S)
    assert watched.causes == ["hang", "still", "still"]
    assert [report.quiet_s for report in watched.reports] == [300, 600, 1200]


def test_progress_after_a_hang_is_recorded(watched):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with stage("actor_update"):
        watched.wait(TIMEOUT_S + 11)
    watched.wait(1)
    assert watched.causes == ["hang", "recovered"]
    assert watched.reports[-1].quiet_s == 310
    watched.session.end_step()
    last = read(watched.session).notes[-1]
    assert (last.code, last.facts) == (Code.PROGRESS_AGAIN, {"quiet_s": 310})


def test_what_took_long_before_may_take_five_times_as_long(watched):
    watched.steps(1, 2)
    for step in (3, 4):
        watched.session.begin_step(step)
        with stage("actor_update"):
            watched.wait(201)
        watched.session.end_step()
    watched.session.begin_step(5)
    with stage("actor_update"):
        watched.wait(999)
        assert watched.causes == []
        watched.wait(3)
    assert watched.causes == ["hang"]


def test_a_first_compilation_of_ten_minutes_is_no_hang(watched):
    watched.session.begin_step(1)
    with stage("actor_update"):
        watched.wait(600)
    watched.session.end_step()
    assert watched.causes == []


def test_a_first_step_that_never_ends_is_a_hang(watched):
    watched.session.begin_step(1)
    with stage("actor_update"):
        watched.wait(6 * TIMEOUT_S)
        assert watched.causes == []
        watched.wait(1)
    assert watched.causes == ["hang"]


@pytest.mark.parametrize("name", ["save_checkpoint", None], ids=["checkpoint", "validation"])
def test_a_first_checkpoint_or_validation_of_twenty_minutes_is_no_hang(watched, name):
    watched.steps(1, 2)
    if name is None:  # Lightning's callbacks hear of it when it is over
        watched.wait(1200)
    else:
        with Marker(name, "region"):
            watched.wait(1200)
    watched.steps(3)
    assert watched.causes == []


def test_a_stage_that_is_compiled_in_a_later_step_may_take_ten_minutes_the_first_time(watched):
    """A critic that warms up alone, in Lightning's region around all stages."""
    watched.session.begin_step(1)
    with Marker("training_step", "region"), stage("critic_update"):
        pass
    watched.session.end_step()
    for step in (2, 3):
        watched.session.begin_step(step)
        with Marker("training_step", "region"), stage("actor_update"):
            watched.wait(600 if step == 2 else 20)
        watched.session.end_step()
    assert watched.causes == []


def test_a_region_in_a_known_stage_is_no_reason_to_wait_longer(watched):
    watched.steps(1)
    for step in (2, 3):
        watched.session.begin_step(step)
        with stage("actor_generate"), annotate(f"request {step}"):
            watched.wait(1 if step == 2 else TIMEOUT_S + 1)
        watched.session.end_step()
    assert watched.causes == ["hang"]


@pytest.mark.parametrize("in_step", [True, False], ids=["in a step", "between steps"])
@pytest.mark.parametrize("name", ["save_checkpoint", "validation", "Trainer._validate"])
def test_a_checkpoint_or_validation_may_take_long_each_time(watched, name, in_step):
    """The first one is short: a sanity check, or a checkpoint without optimizer states."""
    watched.steps(1, 2)
    for step, seconds in ((3, 10), (4, 1200)):
        if in_step:
            watched.session.begin_step(step)
        with Marker(name, "stage"):
            watched.wait(seconds)
        if not in_step:
            watched.session.begin_step(step)
        watched.session.end_step()
    assert watched.causes == []


def test_a_checkpoint_that_never_ends_is_a_hang(watched):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with Marker("save_checkpoint", "region"):
        watched.wait(6 * TIMEOUT_S)
        assert watched.causes == []
        watched.wait(1)
    assert watched.causes == ["hang"]


def test_a_long_validation_whose_batches_are_spans_is_no_hang(watched):
    watched.steps(1, 2)
    with Marker("validation", "region"):
        for _ in range(100):
            with stage("actor_generate"):
                watched.wait(120, every=2)
    watched.steps(3)
    assert watched.causes == []


@pytest.mark.parametrize("what", ["spans", "steps"])
def test_a_slow_step_with_progress_is_no_hang(watched, what):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    for number in range(40):
        watched.wait(TIMEOUT_S - 10)
        if what == "spans":
            with stage("actor_generate"):
                pass
        else:
            watched.session.end_step()
            watched.session.begin_step(4 + number)
    assert watched.causes == []


def test_spans_that_only_begin_are_progress_too(watched):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with ExitStack() as around:
        for _ in range(20):
            around.enter_context(stage("actor_update"))
            watched.wait(TIMEOUT_S - 10)
    assert watched.causes == []


def test_time_in_which_the_process_was_stopped_does_not_count(watched):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with stage("actor_update"):
        watched.wait(1)
        watched.wait(3600, every=3600)
        watched.wait(200)
        assert watched.causes == []
        watched.wait(100)
    assert watched.causes == ["hang"]


def test_an_actor_that_waits_for_its_next_call_may_do_so_for_ever(start, clock):
    watched = Watched(start(loop=Loop(idles=True)), clock)
    watched.steps(1, 2)
    watched.wait(50 * TIMEOUT_S, every=2)
    assert watched.causes == []


def test_a_session_at_a_prompt_may_wait_for_ever(watched, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    watched.steps(1, 2)
    watched.wait(50 * TIMEOUT_S, every=2)
    assert watched.causes == []


def test_an_alarm_of_another_rank_lets_this_one_report_once(watched):
    watched.steps(1, 2)
    watched.wait(6)
    alarm_file(watched.session.run).touch()
    watched.wait(5)
    assert watched.causes == ["asked"]
    watched.wait(TIMEOUT_S)
    os.utime(alarm_file(watched.session.run), ns=(1, 1))
    watched.wait(1)
    assert watched.causes == ["asked", "asked"]


def test_an_alarm_is_seen_by_others_and_not_by_who_raised_it(watched):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    with stage("actor_update"):
        watched.wait(TIMEOUT_S + 60)
    assert alarm_file(watched.session.run).exists()
    assert watched.causes == ["hang"]


def test_reports_are_bounded(watched, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.recording.watchdog.MOST_REPORTS", 3)
    watched.steps(1, 2)
    for step in range(3, 6):
        watched.watchdog._longest_s.clear()
        watched.session.begin_step(step)
        with stage("actor_update"):
            watched.wait(TIMEOUT_S + 1)
        watched.session.end_step()
        watched.wait(1)
    assert watched.causes == ["hang", "recovered", "hang"]


def test_a_sign_of_life_is_written_and_removed_at_the_end(watched):
    run = watched.session.run
    watched.steps(1)
    watched.wait(12)
    beat = read_beat(run, 0)
    assert (beat.step, beat.quiet_s) == (2, 10)
    watched.watchdog.stop()
    assert not alive_file(run, 0).parent.exists()
    assert (alive_file(run, 0).parent.parent / "rank-00000.jsonl").exists()


def test_a_run_directory_that_is_gone_costs_no_training(watched, caplog):
    watched.steps(1, 2)
    watched.session.begin_step(3)
    watched.watchdog._run = Path("/proc/nowhere")
    with stage("actor_update"):
        watched.wait(TIMEOUT_S + 1)
    assert "the report of a hang cannot be written" in caplog.text


def test_a_failure_of_the_watchdog_is_one_warning(watched, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("lightning_rlprof.recording.watchdog._TICK_S", 0.001)
    monkeypatch.setattr(watched.watchdog, "look", lambda: 1 / 0)
    watched.watchdog.start()._thread.join()
    assert "the watchdog for hangs stopped: division by zero" in caplog.text


def test_looking_costs_a_span_nothing_and_leaves_the_garbage_collector_alone(watched):
    """A look takes one number; the heap is searched only when the rank is quiet for minutes."""
    watched.steps(1, 2)
    looked = []
    gc_objects = gc.get_objects
    try:
        gc.get_objects = lambda: looked.append(1) or gc_objects()
        watched.wait(TIMEOUT_S - 1)
        assert looked == []
        watched.wait(100)
        assert looked == [1]
    finally:
        gc.get_objects = gc_objects


def test_the_configuration_turns_it_off_and_refuses_what_is_no_time(tmp_path):
    with start_session(ProfilerConfig.build(profile_save_path=str(tmp_path))) as session:
        assert session.helpers.watchdog is not None
    off = ProfilerConfig.build(profile_save_path=str(tmp_path), hang_timeout=None)
    with start_session(off) as session:
        assert session.helpers.watchdog is None
    with pytest.raises(ConfigError, match="hang_timeout"):
        ProfilerConfig.build(hang_timeout=0)


def test_null_in_the_environment_turns_it_off(monkeypatch):
    monkeypatch.setenv("RLPROF__HANG_TIMEOUT", "null")
    assert ProfilerConfig.build().hang_timeout is None


def test_the_thread_ends_with_the_session(tmp_path):
    with start_session(ProfilerConfig.build(profile_save_path=str(tmp_path))):
        assert "rlprof-watchdog" in [each.name for each in threading.enumerate()]
    assert "rlprof-watchdog" not in [each.name for each in threading.enumerate()]


def test_a_session_that_is_discarded_ends_it_too(tmp_path):
    session = start_session(ProfilerConfig.build(profile_save_path=str(tmp_path)))
    session.discard()
    assert "rlprof-watchdog" not in [each.name for each in threading.enumerate()]
    assert [*tmp_path.iterdir()] == []
