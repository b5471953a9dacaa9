"""Spans that are still open when what lay around them ends: a generator's, above all."""

import threading

from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import read, spans


def rollout(clock):
    for _ in range(2):
        with stage("actor_generate"):
            clock.advance(10)
            yield


def test_a_stage_around_a_yield_is_kept_and_remarked_on_once(start, clock):
    session = start()
    session.begin_step(1)
    batches = rollout(clock)
    for _ in range(3):
        with stage("collect"):
            next(batches, None)
        with stage("actor_update"):
            clock.advance(5)
    session.end_step()
    assert [s.end_ns - s.start_ns for s in spans(session, "actor_generate")] == [15, 15]
    assert [s.end_ns - s.start_ns for s in spans(session, "collect")] == [10, 10, 0]
    assert [s.parent for s in spans(session, "actor_update")] == [None] * 3
    (note,) = [note for note in read(session).notes if note.level == "warning"]
    assert note.text.startswith("<stage actor_generate> was open when what lay around it ended")


def test_stages_that_end_in_the_order_of_their_begins_are_both_kept(start, clock):
    session = start()
    first, second = stage("compute_reward"), stage("compute_advantage")
    first.__enter__()
    second.__enter__()
    clock.advance(2)
    first.__exit__(None, None, None)
    clock.advance(3)
    second.__exit__(None, None, None)
    second.__exit__(None, None, None)  # left already
    session.flush()
    lengths = {s.name: s.end_ns - s.start_ns for s in read(session).spans}
    assert lengths == {"compute_reward": 2, "compute_advantage": 5}


def test_another_thread_does_not_end_what_this_one_left_open(start, clock):
    session = start()
    batches = rollout(clock)
    with stage("collect"):
        next(batches)
    thread = threading.Thread(target=batches.close)
    thread.start()
    thread.join()
    session.flush()
    assert spans(session, "actor_generate") == []


def test_recorders_hear_ends_in_the_order_in_which_they_nest(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], steps=[1])
    session.begin_step(1)
    batches = rollout(clock)
    with stage("collect"):
        next(batches)
    batches.close()
    session.end_step()
    heard = [call for call in recorder.calls if "collect" in call or "actor_generate" in call]
    assert heard == ["enter collect", "enter actor_generate", "exit actor_generate", "exit collect"]
    assert len(spans(session, "actor_generate")) == 1


def test_what_an_earlier_session_left_open_is_forgotten(start, clock):
    session = start()
    batches = rollout(clock)
    with stage("collect"):
        next(batches)
    session.close()
    session.run.joinpath("rank-00000.jsonl").unlink()
    again = start()
    batches.close()
    again.flush()
    assert read(again).spans == []
