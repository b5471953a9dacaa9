"""An exception in any function of rlprof that a training calls never reaches the training."""

import logging

import pytest

from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.capture import Capture
from tests.builders.recording import read
from tests.chaos.injections import PROGRAMS, injected, losses_of, places
from tests.effort import DEEP


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_failure_in_any_function_leaves_the_training_as_it_was(program: str) -> None:
    found, losses = places(program), losses_of(program)
    assert len(found) > 120
    chosen = found[:: 2 if DEEP else 24]
    outcomes = {place: injected(program, place, losses) for place in chosen}
    assert {place: each.broken for place, each in outcomes.items() if each.broken} == {}
    assert sum(each.ended > 0 for each in outcomes.values()) > len(chosen) // 2


@pytest.mark.parametrize("name", ["enter", "exit"])
def test_a_failure_where_the_training_marks_something_is_said_once(
    name, start, caplog, monkeypatch
):
    monkeypatch.setattr(Capture, name, lambda *args, **kwargs: 1 / 0)
    caplog.set_level(logging.INFO)
    session = start(steps=[1], stage="actor_update")
    session.step = 1
    session._tune()
    for _ in range(3):
        with stage("actor_update"):
            pass
    monkeypatch.undo()
    session.close()
    said = "an error in rlprof, the training continues: ZeroDivisionError: division by zero"
    assert [note.text for note in read(session).notes if note.level == "error"] == [said]
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [said]
    assert len([span for span in read(session).spans if span.name == "actor_update"]) == 3
