"""``stage(name, into=timings)``: seconds in a dict, recording or not."""

import asyncio
import threading

import pytest

from lightning_rlprof import timed
from lightning_rlprof.marking import stage
from tests.recording import spans


@pytest.fixture
def ticks(monkeypatch):
    """Let every reading of the clock be one second later."""
    seconds = iter(range(1_000))
    monkeypatch.setattr(timed, "perf_counter", lambda: float(next(seconds)))


def test_seconds_add_up_per_name_while_nobody_records(ticks):
    timings = {}
    for _ in range(3):
        with stage("actor_update", into=timings):
            pass
    with stage("actor_generate", into=timings):
        pass
    assert timings == {"actor_update": 3.0, "actor_generate": 1.0}


def test_what_was_in_the_mapping_stays(ticks):
    timings = {"actor_update": 10.0, "other": 1.0}
    with stage("actor_update", into=timings):
        pass
    assert timings == {"actor_update": 11.0, "other": 1.0}


def test_the_span_is_recorded_as_always(start, ticks):
    session = start()
    timings = {}
    session.begin_step(1)
    with stage("actor_update", into=timings, tokens=5):
        pass
    session.end_step()
    session.close()
    (span,) = spans(session, "actor_update")
    assert span.counters == {"tokens": 5}
    assert timings == {"actor_update": 1.0}


def test_a_mapping_that_raises_costs_no_span(start, ticks):
    class Full(dict):
        def __setitem__(self, name, value):
            raise ValueError("full")

    session = start()
    session.begin_step(1)
    with pytest.raises(ValueError, match="full"), stage("actor_update", into=Full()):
        pass
    with stage("compute_reward"):
        pass
    session.end_step()
    session.close()
    assert [len(spans(session, name)) for name in ("actor_update", "compute_reward")] == [1, 1]
    assert spans(session, "compute_reward")[0].parent is None


def test_a_stage_that_raises_is_added_and_its_exception_passes(ticks):
    timings = {}
    with pytest.raises(KeyError), stage("actor_update", into=timings):
        raise KeyError("reward")
    assert timings == {"actor_update": 1.0}


def test_one_object_nests_in_itself(ticks):
    timings = {}
    timed = stage("turn", into=timings)
    with timed, timed:
        pass
    assert timings == {"turn": 1.0 + 3.0}


def test_functions_and_coroutines_are_added_up(ticks):
    timings = {}

    @stage("compute_reward", into=timings)
    def reward():
        return 1

    @stage("actor_generate", into=timings)
    async def generate():
        await asyncio.sleep(0)
        return 2

    async def both():
        return await asyncio.gather(generate(), generate())

    assert (reward(), asyncio.run(both())) == (1, [2, 2])
    assert timings["compute_reward"] == 1.0
    # The second starts one tick after the first and they end in turn: two ticks each.
    assert timings["actor_generate"] == 4.0


def test_threads_do_not_mix_their_starts():
    timings = {}
    timed = stage("turn", into=timings)
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with timed:
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    timed.__exit__(None, None, None)
    assert timings == {}, "this thread has begun nothing"
    go_on.set()
    thread.join()
    assert set(timings) == {"turn"}


def test_one_that_ends_around_another_that_never_did_is_added(ticks):
    timings = {}
    outer, inner = stage("outer", into=timings), stage("inner", into=timings)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert timings == {"outer": 2.0}
