"""Lines on their way to the file: handlers of signals, sessions without steps, wrong counters.

`StepTotals`: what one step spent on its stages, each instant once.
"""

import asyncio
import logging
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.recording import span_buffer
from lightning_rlprof.recording.annotations import count, mark, stage
from lightning_rlprof.recording.span_buffer import Buffer, Tally
from tests.builders.recorded import recorded
from tests.builders.recording import read, spans


def test_a_signal_s_handler_may_flush_while_its_thread_writes(start, monkeypatch):
    session = start()
    real = session.buffer._writer.write

    def interrupted(lines):
        with stage("save_on_preempt"):
            pass
        session.flush()  # as a long stage does: it must neither wait nor write between
        real(lines)

    monkeypatch.setattr(session.buffer._writer, "write", interrupted)
    with stage("actor_update"):
        pass
    session.flush()
    assert [span.name for span in read(session).spans] == ["actor_update"]
    monkeypatch.undo()
    session.flush()
    assert [span.name for span in read(session).spans] == ["actor_update", "save_on_preempt"]


def test_a_note_is_written_at_the_end_of_its_step_however_short(start, clock):
    session = start()
    for step in (1, 2):
        session.begin_step(step)
        clock.advance(1)
        if step == 2:
            session.note("info", "captured step-000002 with nothing")
        session.end_step()
    assert [note.text for note in read(session).notes][-1:] == ["captured step-000002 with nothing"]
    assert [span.step for span in read(session).spans] == [1, 2]


def test_many_lines_without_a_step_are_summed_up(start, clock, monkeypatch):
    monkeypatch.setattr(span_buffer, "_MAX_INTERVALS", 3)
    session = start()
    session.begin_step(1)
    for number in range(10):
        with stage("compute_reward", samples=2):
            clock.advance(4)
        session.flush()
        assert len(session.buffer._flushed) <= 3, number
    session.end_step()
    assert spent(session, "compute_reward", "samples") == (40, (20, 40))
    session.end_step()
    assert "compute_reward" not in session.step_totals.stages


def test_a_step_of_numpy_is_a_step(start):
    numpy = pytest.importorskip("numpy")
    session = start()
    session.begin_step(numpy.int64(3))
    with stage("actor_update"):
        pass
    session.end_step()
    assert [span.step for span in read(session).spans] == [3, 3]


def test_what_no_file_can_hold_is_lost_and_raises_nothing(start, monkeypatch, caplog):
    session = start()

    def refuse(lines):
        raise TypeError("cannot be encoded")

    with stage("actor_update"):
        pass
    monkeypatch.setattr(session.buffer._writer, "write", refuse)
    session.flush()
    assert "spans are lost: cannot be encoded" in caplog.text
    with caplog.at_level(logging.WARNING):
        session.close()
    assert "lines that could not be written" in caplog.text


@pytest.mark.parametrize("wrong", ["5", ["5"], ({},), {"a": 1}, object()])
def test_a_counter_that_is_no_number_is_left_out(wrong, start):
    session = start()
    with stage("actor_update", tokens=wrong):
        count(tokens=wrong, samples=3)
    session.flush()
    assert spans(session, "actor_update")[0].counters == {"samples": 3}


def test_a_run_that_was_deleted_while_it_was_written_is_said(start, clock, caplog):
    session = start()
    session.begin_step(1)
    session.end_step()
    shutil.rmtree(session.run)
    clock.advance(100_000_000)
    session.begin_step(2)
    session.end_step()
    said = f"{session.run / 'rank-00000.jsonl'} was deleted: what this rank records is lost"
    assert [record.getMessage() for record in caplog.records] == [said]
    with caplog.at_level(logging.WARNING):
        session.close()
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_mark_without_a_name_is_refused_whether_or_not_anybody_records(start):
    with pytest.raises(TypeError, match="a name is required, as in @stage"):
        mark(5)
    start()
    with pytest.raises(TypeError, match="a name is required, as in @stage"):
        mark(5)


def test_a_tensor_that_is_a_counter_is_not_held_once_it_is_written(start):
    session = start()
    session.begin_step(1)
    with stage("actor_update", loss=torch.tensor(0.5, requires_grad=True)):
        pass
    session.end_step()
    (span,) = [each for each in session.buffer._last[0] if each.name == "actor_update"]
    assert span.counters == {"loss": 0.5}
    assert spans(session, "actor_update")[0].counters == {"loss": 0.5}


def spent(session, name, counter):
    totals = session.step_totals
    return totals.stages[name], totals.counts[name, counter]


def test_a_stage_inside_of_itself_counts_once(start, clock):
    session = start()
    session.begin_step(1)
    with stage("actor_generate", tokens=5):
        clock.advance(3)
        with stage("actor_generate", tokens=2):
            clock.advance(4)
        clock.advance(3)
    session.end_step()
    assert spent(session, "actor_generate", "tokens") == (10, (7, 10))


def test_tasks_that_run_at_once_share_the_time(start, clock):
    session = start()
    session.begin_step(1)

    async def rollout():
        with stage("actor_generate", tokens=1):
            await asyncio.sleep(0)
            clock.advance(10)

    async def rollouts():
        await asyncio.gather(*(rollout() for _ in range(8)))

    asyncio.run(rollouts())
    session.end_step()
    assert spent(session, "actor_generate", "tokens") == (80, (8, 80))


def test_spans_without_a_counter_take_no_part_in_its_rate(start, clock):
    session = start()
    session.begin_step(1)
    with stage("actor_generate"):
        clock.advance(90)
    for tokens in (None, float("nan"), 10**400, 6):
        with stage("actor_generate"):
            clock.advance(10)
            count(tokens=tokens)
    session.end_step()
    assert spent(session, "actor_generate", "tokens") == (130, (6, 10))


def test_what_lies_before_the_step_is_not_of_it(start, clock):
    session = start()
    with stage("actor_generate", tokens=9):  # as Lightning's sanity check of the validation does
        clock.advance(50)
    with stage("actor_update"):
        clock.advance(50)
        session.begin_step(1)
        clock.advance(20)
    session.end_step()
    assert session.step_totals == (20, False, {"actor_update": 20}, {})


def test_a_stage_called_step_and_other_threads_do_not_mix_in(start, clock):
    session = start()
    session.begin_step(1)
    with stage("step"):
        clock.advance(7)
    thread = threading.Thread(target=stage("actor_update")(lambda: clock.advance(9)))
    thread.start()
    thread.join()
    session.end_step()
    assert session.step_totals == (16, False, {"step": 7}, {})


def test_more_intervals_than_are_kept_are_added_up(monkeypatch):
    monkeypatch.setattr("lightning_rlprof.recording.span_buffer._MAX_INTERVALS", 2)
    tally = Tally(thread=1)
    lines = [recorded("reward", "stage", 1, at, at + 3, 1, 0, None, {}) for at in range(0, 50, 5)]
    tally.add([*lines, recorded("step", "step", 1, 0, 50, 1, 0, None, {})])
    assert tally.totals().stages["reward"] == 30


def test_without_a_step_nothing_is_told(start):
    session = start()
    with stage("actor_update"):
        pass
    assert session.step_totals == (0, False, {}, {})


NESTED = [(1, 0, 18), (1, 2, 9), (1, 2, 5), (1, 12, 18), (2, 3, 7), (0, 4, 4)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 9)), max_size=8),
    st.permutations(range(len(NESTED))),
)
def test_an_interval_is_inside_the_innermost_span_of_its_thread(
    intervals: list[tuple[int, int, int]], order: list[int]
) -> None:
    """Against every span, one by one."""
    buffer = Buffer(SimpleNamespace(path="x"), lambda: 0)
    for number in order:
        thread, start, end = NESTED[number]
        kind = "region" if number % 2 else "stage"
        buffer.append(recorded("a", kind, 1, start, end, thread, number, None))
    buffer.append(recorded("step", "step", 1, 0, 30, 1, 99, None))
    asked = sorted(((t, at, at + size) for t, at, size in intervals), key=lambda each: each[1])
    for (thread, start, end), found in zip(asked, buffer.around(asked), strict=True):
        inside = [
            (begin, number)
            for number, (own, begin, over) in enumerate(NESTED)
            if own == thread and begin <= start < over and end <= over
        ]
        assert found == (max(inside)[1] if inside else None)
