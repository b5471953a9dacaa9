"""What recorders tell of a span, when it is no number: it costs them their place, nothing else."""

import pytest

from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.recorders.base import Recorder
from tests.builders.recording import read, run_steps, spans


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


class Answers(Recorder):
    """Tells of a span what it is given, or raises it."""

    always = True

    def __init__(self, answer):
        self.answer = answer

    def exit(self, token):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


GARBAGE = ["text", 5, {1, 2}, {"a": "b"}, {"a": [1, 2]}, {3: 4}, [], SpeechlessError()]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda one: type(one).__name__)
def test_a_recorder_that_tells_garbage_is_dropped_and_the_training_goes_on(garbage, start, clock):
    session = start([Answers(garbage)])
    run_steps(session, clock, [1, 2, 3])
    session.close()
    assert [span.step for span in spans(session, "actor_update")] == [1, 2, 3]
    assert [span.step for span in spans(session, "step")] == [1, 2, 3]
    assert (
        sum("Answers was disabled after an error" in note.text for note in read(session).notes) == 1
    )


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda one: type(one).__name__)
def test_numbers_that_are_owed_and_are_garbage_cost_themselves(garbage, start, clock):
    def owed():
        return Answers(garbage).exit(None)

    session = start([Answers(owed)])
    run_steps(session, clock, [1, 2, 3])
    session.close()
    assert [span.step for span in spans(session, "actor_update")] == [1, 2, 3]
    assert (
        sum(
            "lost numbers that a recorder should have returned:" in one.text
            for one in read(session).notes
        )
        == 1
    )


def test_numbers_that_nobody_ever_tells_are_not_asked_for_without_end(start, clock, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.recording.span_buffer._MAX_LATE_SPANS", 4)
    asked = []
    session = start([Answers(lambda: asked.append(1))])
    for step in range(1, 9):
        run_steps(session, clock, [step])
    assert len(session.buffer._late) == 4
    session.close()
    assert sum("are never told" in note.text for note in read(session).notes) == 1


def test_what_the_training_counted_stands_above_what_a_recorder_tells(start, clock):
    session = start([Answers({"tokens": 999, "own": 1})])
    session.begin_step(1)
    with stage("actor_generate", tokens=10):
        pass
    session.end_step()
    assert spans(session, "actor_generate")[0].counters == {"tokens": 10, "own": 1}
