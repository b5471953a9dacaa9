"""A shadow step records its length alone; everything else goes on around it."""

import threading

import pytest

from lightning_rlprof.recording.annotations import Marker, annotate, count, mark, record, stage
from lightning_rlprof.records.records import is_shadow
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import read, run_steps, spans, times

SHADOWS = [1, 4, 5, 8]


def shadow_steps(session) -> list[int]:
    return [span.step for span in spans(session, "step") if "shadow" in (span.counters or {})]


def test_a_shadow_step_has_no_span_but_its_own(start, clock):
    session = start(measure_overhead=True)
    run_steps(session, clock, [*range(1, 9)])
    session.close()
    assert shadow_steps(session) == SHADOWS
    assert [step for step, _, _ in times(session, "step")] == [*range(1, 9)]
    assert [step for step, _, _ in times(session, "actor_update")] == [2, 3, 6, 7]


def test_without_the_key_no_step_is_one(start, clock):
    session = start()
    enter = Marker.__enter__
    run_steps(session, clock, [*range(1, 9)])
    assert Marker.__enter__ is enter  # and spans ask nothing
    session.close()
    assert shadow_steps(session) == []
    assert len(times(session, "actor_update")) == 8


def test_a_step_knows_how_long_the_end_of_the_one_before_took(start, clock):
    session = start(measure_overhead=True)
    write = session.buffer.end_step

    def slow_end(*step, **options) -> None:
        clock.advance(3)
        write(*step, **options)

    session.buffer.end_step = slow_end
    run_steps(session, clock, [1, 2, 3])
    session.close()
    assert [(span.counters or {}).get("step_end_ns") for span in spans(session, "step")] == [
        None,
        3,
        3,
    ]


def test_a_shadow_step_writes_nothing(start, clock):
    session = start(measure_overhead=True)
    run_steps(session, clock, [1])
    assert not read(session).spans
    run_steps(session, clock, [2])
    assert [span.step for span in read(session).spans] == [1, 2, 2]


def test_a_stage_that_began_before_it_ends_in_it(start, clock):
    session = start(measure_overhead=True)
    run_steps(session, clock, [1, 2])
    session.begin_step(3)
    with stage("outer"):
        clock.advance(1)
        session.end_step()
        session.begin_step(4)  # would be a shadow step
        with stage("inner"):
            clock.advance(1)
    session.end_step()
    session.close()
    assert shadow_steps(session) == [1]
    assert [step for step, _, _ in times(session, "outer")] == [3]
    assert [step for step, _, _ in times(session, "inner")] == [4]


def test_a_stage_that_began_in_it_is_left_out_when_it_ends_later(start, clock):
    session = start(measure_overhead=True)
    session.begin_step(1)
    with stage("outer"):
        session.end_step()
        session.begin_step(2)
        with stage("inner"):
            clock.advance(1)
    session.end_step()
    session.close()
    assert times(session, "outer") == []
    assert [span.parent for span in spans(session, "inner")] == [None]
    assert not read(session).notes


def test_another_thread_goes_on_recording(start, clock):
    session = start(measure_overhead=True)
    session.begin_step(1)

    def roll_out() -> None:
        with stage("actor_generate"):
            clock.advance(1)

    thread = threading.Thread(target=roll_out)
    thread.start()
    thread.join()
    session.end_step()
    session.close()
    assert len(times(session, "actor_generate")) == 1


def test_marks_stay_and_intervals_of_the_users_own_timers_do_not(start, clock):
    session = start(measure_overhead=True)
    session.begin_step(1)
    mark("weights published")
    count(tokens=3)
    record("compute_reward", 0, 1)
    session.end_step()
    session.begin_step(2)
    record("compute_reward", 0, 1)  # of step 1
    record("compute_reward", clock(), clock())
    session.close()
    assert len(times(session, "weights published")) == 1
    assert len(times(session, "compute_reward")) == 2


@pytest.mark.parametrize("stages", ["all", ["actor_update"]])
def test_a_step_that_is_captured_is_none(start, clock, stages):
    recorder = FakeRecorder()
    session = start(
        [recorder], measure_overhead=True, steps=[4], discrete=stages != "all",
        integrated={"stage": stages},
    )  # fmt: skip
    run_steps(session, clock, [*range(1, 9)])
    session.close()
    assert shadow_steps(session) == [1, 5, 8]
    assert "enter actor_update" in recorder.calls


def test_recorders_that_always_listen_are_not_asked_in_it(start, clock):
    recorder = FakeRecorder()
    recorder.always = True
    session = start([recorder], measure_overhead=True)
    run_steps(session, clock, [1, 2, 3, 4])
    session.close()
    assert recorder.calls.count("enter actor_update") == 2


def test_metrics_know_nothing_of_it(start, clock):
    session = start(measure_overhead=True)
    run_steps(session, clock, [1])
    assert session.metrics() == {}
    run_steps(session, clock, [2])
    assert session.metrics()["rlprof/actor_update_s"] == pytest.approx(5e-9)


def test_a_region_around_the_training_leaves_no_shadow_step(start, clock):
    session = start(measure_overhead=True)
    with annotate("train"):
        run_steps(session, clock, [*range(1, 9)])
    session.close()
    assert shadow_steps(session) == []
    assert any(is_shadow(step) for step in range(1, 9))
