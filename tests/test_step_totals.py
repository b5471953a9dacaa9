"""`StepTotals`: what one step spent on its stages, each instant once."""

import asyncio
import threading

from lightning_rlprof.marking import count, stage
from lightning_rlprof.step_totals import Tally


def spent(session, name):
    return session.step_totals.stages[name]


def test_a_stage_inside_of_itself_counts_once(start, clock):
    session = start()
    session.begin_step(1)
    with stage("actor_generate", tokens=5):
        clock.advance(3)
        with stage("actor_generate", tokens=2):
            clock.advance(4)
        clock.advance(3)
    session.end_step()
    assert spent(session, "actor_generate") == (10, {"tokens": 7}, {"tokens": 10})


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
    assert spent(session, "actor_generate") == (80, {"tokens": 8}, {"tokens": 80})


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
    assert spent(session, "actor_generate") == (130, {"tokens": 6}, {"tokens": 10})


def test_what_lies_before_the_step_is_not_of_it(start, clock):
    session = start()
    with stage("actor_generate", tokens=9):  # as Lightning's sanity check of the validation does
        clock.advance(50)
    with stage("actor_update"):
        clock.advance(50)
        session.begin_step(1)
        clock.advance(20)
    session.end_step()
    assert session.step_totals == (20, False, {"actor_update": (20, {}, {})})


def test_a_stage_called_step_and_other_threads_do_not_mix_in(start, clock):
    session = start()
    session.begin_step(1)
    with stage("step"):
        clock.advance(7)
    thread = threading.Thread(target=stage("actor_update")(lambda: clock.advance(9)))
    thread.start()
    thread.join()
    session.end_step()
    assert session.step_totals == (16, False, {"step": (7, {}, {})})


def test_more_intervals_than_are_kept_are_added_up(monkeypatch):
    monkeypatch.setattr("lightning_rlprof.step_totals._MOST", 2)
    tally = Tally(thread=1)
    lines = [("span", "reward", "stage", 1, at, at + 3, 1, 0, None, {}) for at in range(0, 50, 5)]
    tally.add([*lines, ("span", "step", "step", 1, 0, 50, 1, 0, None, {})])
    assert tally.totals().stages["reward"].ns == 30


def test_without_a_step_nothing_is_told(start):
    session = start()
    with stage("actor_update"):
        pass
    assert session.step_totals == (0, False, {})
