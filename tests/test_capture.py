"""Captures: which windows recorders see, what they cost, and what happens when one fails."""

import threading
from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.marking import Marker, mark, stage
from lightning_rlprof.testing import FakeRecorder
from tests.recording import read, run_steps, spans, times


def test_a_window_on_steps_mirrors_their_stages(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], profile_step_start=2, profile_step_end=4)
    run_steps(session, clock, [1, 2, 3, 4])
    session.close()
    assert recorder.calls == [
        "open step-000002",
        *["enter step", "enter actor_update", "exit actor_update", "exit step"] * 2,
        "close",
        "finish",
    ]
    counters = [span.counters for span in spans(session, "actor_update")]
    assert counters == [None, {"fake": 1}, {"fake": 1}, None]
    captured = [span.counters for span in spans(session, "step")]
    assert captured == [None, {"fake": 1, "capture": 1}, {"fake": 1, "capture": 1}, None]


def test_a_window_on_a_stage_opens_and_closes_with_it(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], stage="actor_update", steps=[2])
    run_steps(session, clock, [1])
    session.begin_step(2)
    for name in ("actor_generate", "actor_update", "actor_update"):
        with stage(name):
            pass
    session.end_step()
    assert session.step_totals.captured
    session.close()
    assert recorder.calls == [
        *["open step-000002-actor_update", "enter actor_update", "exit actor_update", "close"],
        *["open step-000002-actor_update-2", "enter actor_update", "exit actor_update", "close"],
        "finish",
    ]
    notes = [note.text for note in read(session).notes]
    assert notes[0] == "captured step-000002-actor_update with FakeRecorder"


def test_what_the_profiler_itself_takes_is_a_region_outside_of_steps(start, clock):
    class Slow(FakeRecorder):
        def open(self, out: Path) -> None:
            clock.advance(100)

        def close(self) -> None:
            clock.advance(1000)

    session = start([Slow()], steps=[2])
    run_steps(session, clock, [1, 2, 3])
    session.close()
    assert times(session, "step") == [(1, 0, 8), (2, 108, 116), (3, 1116, 1124)]
    assert times(session, "rlprof open capture") == [(2, 8, 108)]
    assert times(session, "rlprof close capture") == [(2, 116, 1116)]


def test_a_stage_open_when_its_window_closes_is_ended_for_the_recorder(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], steps=[1])
    session.begin_step(1)
    with stage("actor_update"):
        session.end_step()
    session.begin_step(2)
    session.close()
    assert recorder.calls == [
        *["open step-000001", "enter step", "enter actor_update"],
        *["exit step", "exit actor_update", "close", "finish"],
    ]


def test_a_window_that_the_next_step_does_not_want_closes(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], profile_step_start=1, profile_step_end=3)
    session.begin_step(1)
    session.begin_step(7)
    session.end_step()
    session.close()
    assert recorder.calls == ["open step-000001", "enter step", "exit step", "close", "finish"]


def test_other_threads_are_not_mirrored(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], steps=[1])
    session.begin_step(1)

    def work():
        with stage("elsewhere"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    session.end_step()
    session.close()
    assert recorder.calls == ["open step-000001", "enter step", "exit step", "close", "finish"]
    assert len(spans(session, "elsewhere")) == 1


def test_a_run_that_ends_inside_a_window_closes_it(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], profile_step_start=1, profile_step_end=100)
    run_steps(session, clock, [1])
    session.close()
    assert recorder.calls[-2:] == ["close", "finish"]


@pytest.mark.parametrize("where", ["open", "enter", "exit", "close", "finish"])
def test_a_recorder_that_raises_is_logged_noted_and_dropped(start, clock, caplog, where):
    bad, good = FakeRecorder(fail_at=where), FakeRecorder()
    session = start([bad, good], steps=[1, 2])
    run_steps(session, clock, [1, 2])
    session.close()
    text = f"FakeRecorder failed and was dropped (RuntimeError: told to fail at {where})"
    assert [note.text for note in read(session).notes if note.level == "error"] == [text]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [text]
    window = ["enter step", "enter actor_update", "exit actor_update", "exit step", "close"]
    assert good.calls == ["open step-000001", *window, "open step-000002", *window, "finish"]
    if where in ("open", "enter", "exit"):
        assert bad.calls.count("close") == 1, "its tool must not stay on"
    assert len(spans(session, "step")) == 2


class Always(FakeRecorder):
    always = True


def test_a_recorder_that_always_listens_hears_stages_outside_of_windows_too(start, clock):
    everywhere, windowed = Always(), FakeRecorder()
    session = start([everywhere, windowed], steps=[2])
    run_steps(session, clock, [1, 2])
    session.close()
    stages = ["enter actor_update", "exit actor_update"]
    assert everywhere.calls == [
        *stages,
        *["open step-000002", "enter step", *stages, "exit step", "close"],
        "finish",
    ]
    assert windowed.calls == everywhere.calls[2:]
    assert [span.counters for span in spans(session, "actor_update")] == [{"fake": 1}] * 2


def test_a_window_that_closes_ends_a_span_only_for_those_that_leave(start, clock):
    everywhere, windowed = Always(), FakeRecorder()
    session = start([everywhere, windowed], steps=[1])
    session.begin_step(1)
    with stage("actor_update"):
        session.end_step()
        assert windowed.calls[-2:] == ["exit actor_update", "close"]
        assert "exit actor_update" not in everywhere.calls
    assert everywhere.calls[-1] == "exit actor_update"
    session.close()


def test_marks_are_mirrored_while_somebody_listens(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], steps=[2])
    for step in (1, 2):
        session.begin_step(step)
        mark("weights published", version=step)
        session.end_step()
    session.close()
    assert [call for call in recorder.calls if "mark" in call] == ["mark weights published"]
    assert len(spans(session, "weights published")) == 2


class Late(FakeRecorder):
    """Knows numbers one step late, one time never, and one time raises."""

    always = True

    def __init__(self):
        super().__init__()
        self.known = {}

    def exit(self, token):
        number = len(self.known)
        self.known[number] = None

        def ask():
            if self.known[number] == "raise":
                raise RuntimeError("the device is gone")
            return self.known[number]

        return ask


def test_numbers_that_are_known_later_reach_their_span(start, clock):
    recorder = Late()
    session = start([recorder])
    run_steps(session, clock, [1])
    assert spans(session, "actor_update")[0].counters is None
    recorder.known[0] = {"device_ns": 7}
    run_steps(session, clock, [2])
    recorder.known[1] = {"device_ns": 9}
    session.close()
    loaded = load(session.run)
    rows = loaded.rows(name="actor_update")
    assert [loaded.counters_of(row) for row in rows] == [{"device_ns": 7}, {"device_ns": 9}]


def test_numbers_that_never_come_or_raise_are_absent(start, clock, caplog):
    recorder = Late()
    session = start([recorder])
    run_steps(session, clock, [1, 2])
    recorder.known[1] = "raise"
    session.close()
    loaded = load(session.run)
    assert loaded.counters == {}
    assert "lost: of <stage actor_update> (RuntimeError: the device is gone)" in caplog.text


def test_regions_open_no_capture_of_their_own(start):
    recorder = FakeRecorder()
    session = start([recorder], discrete=True, steps=[1])
    session.begin_step(1)
    with Marker("data_fetch", "region"), stage("actor_update"):
        pass
    session.end_step()
    session.close()
    assert recorder.calls[0] == "open step-000001-actor_update"
    assert "enter data_fetch" not in recorder.calls
