"""Markers: `with` and `@`, nesting, threads, tasks, exceptions, and silence when nobody listens.

``stage(name, into=timings)``: seconds in a dict, recording or not.
"""

import asyncio
import contextvars
import threading

import pytest

from lightning_rlprof.recording import annotations, open_spans
from lightning_rlprof.recording.annotations import annotate, count, listen, mark, stage
from lightning_rlprof.recording.open_spans import Owner
from lightning_rlprof.testing import FakeClock
from tests.builders.recording import spans


class Sink:
    """A session reduced to what markers need; every reading of the clock takes one nanosecond."""

    def __init__(self):
        self.step, self.flush_at_ns = 3, 1 << 62
        self.ticks, self.rows, self.flushed, self.calls = FakeClock(), [], 0, []
        self.append = self.rows.append
        self.owner, self.silent_thread = Owner(), 0

    def clock(self):
        self.ticks.advance(1)
        return self.ticks()

    def enter(self, name, kind):
        self.calls.append(("enter", name, kind))
        return name

    def exit(self, span):
        self.calls.append(("exit", span.token))
        span.counters = {**(span.counters or {}), "mirrored": 1}

    def mark(self, name):
        self.calls.append(("mark", name))

    def flush(self):
        self.flushed += 1

    def note(self, code, text, /, **facts):
        self.calls.append((code.level, text))

    def spans(self):
        return {row.name: row for row in self.rows}


@pytest.fixture
def sink():
    sink = Sink()
    listen(sink)
    yield sink
    listen(None)


def test_a_span_has_name_kind_step_times_thread_and_counters(sink):
    with stage("actor_generate", tokens=5):
        pass
    (row,) = sink.rows
    assert (row.name, row.kind, row.step) == ("actor_generate", "stage", 3)
    assert (row.start_ns, row.end_ns, row.thread) == (1, 2, threading.get_ident())
    assert (row.parent, row.counters) == (None, {"tokens": 5})


def test_one_marker_serves_every_use_of_a_name():
    assert stage("actor_update") is stage("actor_update")
    assert repr(stage("actor_update")) == "<stage actor_update>"


@pytest.mark.parametrize("counters", [{}, {"tokens": 1}])
def test_a_stage_without_name_is_refused(counters):
    with pytest.raises(TypeError, match=r'a name is required, as in @stage\("actor_update"\)'):
        stage(lambda: None, **counters)


def test_the_same_stage_nests_in_itself(sink):
    with stage("a"), stage("a"):
        pass
    inner, outer = sink.rows
    assert inner.parent == outer.id
    assert (outer.start_ns, inner.start_ns, inner.end_ns, outer.end_ns) == (1, 2, 3, 4)


def test_a_marker_made_before_recording_records_later():
    marker = stage("early")

    @marker
    def work():
        return 1

    sink = Sink()
    listen(sink)
    with marker:
        work()
    listen(None)
    assert [row.name for row in sink.rows] == ["early", "early"]


def test_an_exception_closes_the_span_and_passes_untouched(sink):
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, stage("a"), stage("b"):
        raise error
    assert caught.value is error
    assert [row.name for row in sink.rows] == ["b", "a"]
    with stage("c"):
        pass
    assert sink.spans()["c"].parent is None


def test_nothing_is_recorded_while_nobody_listens():
    with stage("a", tokens=1) as nothing:
        count(tokens=2)
        mark("m")
    assert nothing is None
    assert open_spans.innermost() is None


def test_an_exception_passes_while_nobody_listens():
    with pytest.raises(KeyError), stage("a"):
        raise KeyError


def test_annotate_marks_regions_by_qualified_or_given_name(sink):
    class Worker:
        @annotate
        def offload(self):
            return 1

        @annotate("onload")
        async def onload(self):
            return 2

    assert Worker().offload() + asyncio.run(Worker().onload()) == 3
    names = [(row.name.rpartition(".")[2], row.kind) for row in sink.rows]
    assert names == [("offload", "region"), ("onload", "region")]


def test_marks_are_instants_inside_the_open_span(sink):
    with stage("a"):
        mark("published", version=2)
        mark("plain")
    spans = sink.spans()
    published = spans["published"]
    assert published.kind == "mark"
    assert published.start_ns == published.end_ns
    assert (published.parent, published.counters, spans["plain"].counters) == (
        spans["a"].id,
        {"version": 2},
        None,
    )


def test_count_adds_to_the_innermost_span_only(sink):
    with stage("outer"):
        count(tokens=1)
        with stage("inner", tokens=10):
            count(tokens=5, samples=2)
            count(samples=1)
        count(tokens=2)
    count(tokens=99)
    spans = sink.spans()
    assert spans["inner"].counters == {"tokens": 15, "samples": 3}
    assert spans["outer"].counters == {"tokens": 3}
    with stage("inner", tokens=10):
        pass
    assert sink.rows[-1].counters == {"tokens": 10}


WORK = ("tokens", "tokens_sq", "tokens_max")


def work_in(sink):
    """Return the last span's tokens, their squares and the longest."""
    return tuple((sink.rows[-1].counters or {}).get(name) for name in WORK)


def test_lengths_say_how_much_work_there_was(sink):
    with stage("actor_generate"):
        count(lengths=[900, 100])
        count(lengths=[[5], (3,)])
    assert work_in(sink) == (1008, 820_034, 905), "the longest of each batch, one after the other"
    with stage("actor_generate", lengths=[3, 4]):
        pass
    assert work_in(sink) == (7, 25, 4)


def test_tokens_that_are_counted_take_the_place_of_those_of_lengths(sink):
    for first, second in (
        ({"tokens": 9}, {"lengths": [3, 4]}),
        ({"lengths": [3, 4]}, {"tokens": 9}),
    ):
        with stage("actor_generate"):
            count(**first)
            count(**second)
        assert work_in(sink) == (9, 25, 4)
    with stage("actor_generate"):
        count(tokens=9, lengths=[3, 4])
        count(tokens=1)
    assert work_in(sink) == (10, 25, 4)


def test_threads_do_not_see_each_others_spans(sink):
    def work():
        with stage("inside"):
            pass

    with stage("outside"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    spans = sink.spans()
    assert spans["inside"].parent is None
    assert spans["inside"].thread != spans["outside"].thread


def test_a_context_copied_to_a_thread_keeps_its_parent(sink):
    def work():
        with stage("inside"):
            pass

    with stage("outside"):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        thread.join()
    spans = sink.spans()
    assert spans["inside"].parent == spans["outside"].id


def test_interleaved_tasks_keep_their_own_parents(sink):
    async def sample(name):
        with stage(name):
            await asyncio.sleep(0)
            with stage(f"{name}.child"):
                await asyncio.sleep(0)

    async def rollouts():
        await asyncio.gather(sample("a"), sample("b"))

    with stage("actor_generate"):
        asyncio.run(rollouts())
    spans = sink.spans()
    for name in "ab":
        assert spans[f"{name}.child"].parent == spans[name].id
        assert spans[name].parent == spans["actor_generate"].id
    assert spans["a"].start_ns < spans["b"].start_ns < spans["a"].end_ns


def test_a_span_that_was_never_ended_ends_no_other_too_early(sink):
    outer, forgotten = stage("outer"), stage("forgotten")
    with outer:
        forgotten.__enter__()
    assert [row.name for row in sink.rows] == ["outer"]
    with stage("next"):
        pass
    assert sink.rows[-1].parent is None


def test_ending_what_was_never_begun_does_nothing(sink):
    stage("never").__exit__(None, None, None)
    with stage("a"):
        stage("never").__exit__(None, None, None)
    assert [row.name for row in sink.rows] == ["a"]


def test_a_span_belongs_to_whoever_listened_when_it_began():
    sink = Sink()
    with stage("before"):
        listen(sink)
    assert sink.rows == []
    with stage("across"):
        listen(None)
    assert [row.name for row in sink.rows] == ["across"]
    later = Sink()
    listen(later)
    with stage("later"):
        pass
    listen(None)
    assert [row.name for row in later.rows] == ["later"]


def test_mirrored_spans_tell_recorders_first_and_last(sink):
    listen(sink, mirrored=True)
    with stage("a", tokens=1), stage("b"):
        pass
    assert sink.calls == [
        ("enter", "a", "stage"),
        ("enter", "b", "stage"),
        ("exit", "b"),
        ("exit", "a"),
    ]
    assert sink.spans()["a"].counters == {"tokens": 1, "mirrored": 1}
    assert sink.spans()["b"].counters == {"mirrored": 1}


def test_a_mirrored_span_that_ends_after_the_capture_still_tells(sink):
    listen(sink, mirrored=True)
    with stage("a"):
        listen(sink)
    assert sink.calls[-1] == ("exit", "a")


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_long_outermost_span_is_flushed_when_it_ends(sink, mirrored):
    listen(sink, mirrored=mirrored)
    sink.flush_at_ns = 0
    with stage("outer"):
        with stage("inner"):
            pass
        assert sink.flushed == 0
    assert sink.flushed == 1


@pytest.fixture
def ticks(monkeypatch):
    """Let every reading of the clock be one second later."""
    seconds = iter(range(1_000))
    monkeypatch.setattr(annotations, "perf_counter", lambda: float(next(seconds)))


def test_seconds_add_up_per_name_while_nobody_records(ticks):
    timings = {}
    for _ in range(3):
        with stage("actor_update", into=timings):
            pass
    with stage("actor_generate", into=timings):
        pass
    assert timings == {"actor_update": 3.0, "actor_generate": 1.0}


@pytest.mark.parametrize("into", [5, [], "timings", ()])
def test_what_cannot_hold_seconds_is_refused_before_the_stage_begins(into):
    with pytest.raises(TypeError, match=r"^into=.* cannot hold seconds by name; give it a dict$"):
        stage("actor_update", into=into)


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
    annotations = stage("turn", into=timings)
    with annotations, annotations:
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
    annotations = stage("turn", into=timings)
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with annotations:
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    annotations.__exit__(None, None, None)
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


def test_a_name_of_a_megabyte_is_cut_since_each_span_repeats_it(sink):
    with stage("x" * 1_000_000), annotate("y" * 1_000):
        pass
    assert [len(row.name) for row in sink.rows] == [1_000, 1_001]


def test_versions_of_weights_are_not_added_up(start):
    session = start()
    with stage("actor_generate", version=3):
        count(version=3, tokens=5)
        count(version=4, tokens=6)
    with stage("actor_generate"):
        count(version=7)
    session.flush()
    assert [span.counters for span in spans(session, "actor_generate")] == [
        {"version": 3, "version_end": 4, "tokens": 11},
        {"version": 7},
    ]
