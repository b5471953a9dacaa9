"""Captures: which windows recorders see, what they cost, and what happens when one fails.

A generation is captured from one decoding iteration to another, counted anew in each call.

When captures open and close: every row of the table is one decision.
"""

import asyncio
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import Marker, annotate, mark, stage
from lightning_rlprof.recording.capture import (
    after_step,
    arms_stages,
    at_stage,
    at_step,
    window_name,
)
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import read, run_steps, spans, times


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
    text = f"FakeRecorder was disabled after an error (RuntimeError: asked to fail at {where})"
    assert [note.text for note in read(session).notes if note.level == "error"] == [text]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [text]
    window = ["enter step", "enter actor_update", "exit actor_update", "exit step", "close"]
    assert good.calls == ["open step-000001", *window, "open step-000002", *window, "finish"]
    if where in ("open", "enter", "exit"):
        assert bad.calls.count("close") == 1, "its tool must not stay on"
    assert len(spans(session, "step")) == 2


class Raising(Recorder):
    """Raises in one call; a later call in `ask` is that of a late number."""

    def __init__(self, where: str, error: Any) -> None:
        self._error = error
        setattr(self, where, self._fail)

    def _fail(self, *_: Any) -> Any:
        if isinstance(self._error, BaseException):
            raise self._error
        return self._error()

    def exit(self, token: object) -> Any:
        return getattr(self, "ask", None)


PLACES = ["open", "enter", "mark", "exit", "close", "finish", "ask"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_what_is_no_exception_costs_a_recorder_its_place_too(start, clock, where, error):
    good = FakeRecorder()
    session = start([Raising(where, error), good], steps=[1, 2])
    with stage("outside"):
        pass
    for step in (1, 2):
        session.begin_step(step)
        mark("half")
        session.end_step()
    session.close()
    (text,) = [note.text for note in read(session).notes if note.level == "error"]
    assert type(error).__name__ in text
    assert good.calls.count("close") == 2
    assert len(spans(session, "step")) == 2


class StopError(Exception):
    """As `torch.distributed.elastic` raises it in a signal's handler."""


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        sys.exit(3)

    def stop(self, number: int, frame: Any) -> None:
        raise StopError


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (signal.default_int_handler, KeyboardInterrupt),
        (Handler(), SystemExit),
        (Handler().stop, StopError),
        (partial(Handler.__call__, None), SystemExit),
    ],
)
def test_a_signal_that_arrives_in_a_recorder_reaches_the_training(
    start, clock, where, handler, error
):
    before = signal.signal(signal.SIGINT, handler)
    session = start([Raising(where, lambda: signal.raise_signal(signal.SIGINT))], steps=[1])
    try:
        with pytest.raises(error):
            session.begin_step(1)
            mark("half")
            session.end_step()
            session.close()
    finally:
        signal.signal(signal.SIGINT, before)
        with suppress(BaseException):
            session.close(f"interrupted by {error.__name__}")


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
    assert "returned: of <stage actor_update> (RuntimeError: the device is gone)" in caplog.text


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


STAGE = {"stage": "actor_generate", "profile_step_end": 3}


def generate(tokens: int) -> None:
    """Decode: each iteration is a forward, with a layer inside, and then a sample."""
    with stage("actor_generate"):
        for _ in range(tokens):
            with annotate("forward"), annotate("layer"):
                pass
            with annotate("sample"):
                pass


def record(start: Any, *tokens: int, **options: Any) -> tuple[list[str], Any]:
    """Return what a recorder was told in steps that generate, and the run."""
    recorder = FakeRecorder()
    session = start([recorder], **{**STAGE, **options})
    for step, count in enumerate(tokens, 1):
        session.begin_step(step)
        generate(count)
        session.end_step()
    session.close()
    return recorder.calls, read(session)


LOOP = ["enter forward", "enter layer", "exit layer", "exit forward", "enter sample", "exit sample"]
OPEN = "open step-00000{}-actor_generate"


@pytest.mark.parametrize(
    ("tokens", "window", "iterations"),
    [
        (5, [1, 3], 2),
        (5, [4, None], 1),
        (5, [0, 2], 2),
        (5, [0, 9], 5),
        (2, [1, 9], 1),
    ],
)
def test_the_capture_holds_the_iterations_from_start_up_to_end(
    start: Any, tokens: int, window: list[int | None], iterations: int
) -> None:
    calls, _ = record(start, tokens, tokens=window)
    assert calls == [OPEN.format(1), *LOOP * iterations, "close", "finish"]


def test_each_call_counts_from_0_and_has_its_own_capture(start: Any) -> None:
    calls, trace = record(start, 3, 2, tokens=[1, 2])
    assert calls == [
        *[OPEN.format(1), *LOOP, "close"],
        *[OPEN.format(2), *LOOP, "close", "finish"],
    ]
    assert [note.text for note in trace.notes if note.level == "warning"] == []


def test_stages_inside_a_generation_open_no_capture_and_others_keep_theirs(start: Any) -> None:
    recorder = FakeRecorder()
    options = {"discrete": True, "tokens": [1, 2]}
    session = start([recorder], profile=True, **options)
    session.begin_step(1)
    with stage("actor_generate"):
        for _ in range(3):
            with stage("compute_reward"):
                pass
    with stage("actor_update"):
        pass
    session.end_step()
    session.close()
    assert [call for call in recorder.calls if call.split()[0] in ("open", "close")] == [
        *[OPEN.format(1), "close"],
        *["open step-000001-actor_update", "close"],
    ]


def test_a_generation_that_is_too_short_is_told(start: Any) -> None:
    calls, trace = record(start, 2, tokens=[7, None])
    assert calls == ["finish"]
    (said,) = [note.text for note in trace.notes if note.level == "warning"]
    assert said == "nothing was captured: actor_generate contained no span number 7"


def test_an_exception_closes_the_capture(start: Any) -> None:
    recorder = FakeRecorder()
    session = start([recorder], **STAGE, tokens=[0, None])
    session.begin_step(1)
    with pytest.raises(KeyError), stage("actor_generate"), annotate("forward"):
        raise KeyError("reward")
    session.end_step()
    assert recorder.calls == [OPEN.format(1), "enter forward", "exit forward", "close"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tokens": [1, None]},
            "tokens=[1, None] needs one capture per stage: set integrated.stage: actor_generate",
        ),
        (
            {"tokens": [0, 1], "stage": "actor_update"},
            "tokens=[0, 1] needs one capture per stage: set integrated.stage: actor_generate",
        ),
        ({**STAGE, "tokens": [3, 3]}, "tokens=[3, 3] is not [start, end]"),
        ({**STAGE, "tokens": [-1, None]}, "tokens=[-1, None] is not [start, end]"),
        ({**STAGE, "tokens": [None, 2]}, "tokens=[None, 2] is not [start, end]"),
        ({**STAGE, "tokens": 3}, "tokens=3 is not [start, end]"),
        ({**STAGE, "token_start": 3}, "token_start is not an option; did you mean 'tokens'?"),
    ],
)
def test_a_window_that_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.build(**options)
    assert str(caught.value).startswith(text)


def test_verls_token_window_is_read_for_every_tool() -> None:
    for tool in ("npu", "nsys", "torch"):
        tokens = {"discrete": True, "profile_token_start": 2, "profile_token_end": 4}
        profiler = {"enable": True, "tool_config": {tool: tokens}}
        data = {
            "global_profiler": {"tool": tool, "steps": [1]},
            "actor_rollout_ref": {"rollout": {"profiler": profiler}},
        }
        config = ProfilerConfig.build(data)
        assert (config.tokens, config.per_stage) == ((2, 4), True)


def test_a_stage_inside_of_an_iteration_has_no_capture_of_its_own(start: Any) -> None:
    recorder = FakeRecorder()
    options = {"stage": ["actor_generate", "compute_reward"], "tokens": [0, None]}
    session = start([recorder], **options)
    session.begin_step(1)
    with stage("actor_generate"), annotate("forward"), stage("compute_reward"):
        pass
    with stage("compute_reward"):
        pass
    session.end_step()
    session.close()
    opened = [call for call in recorder.calls if call.startswith("open")]
    assert opened == [OPEN.format(1), "open step-000001-compute_reward"]


def config(**options):
    return ProfilerConfig.build(None, **options)


def windows(config, steps, rank=0):
    """Return the steps that each window of whole steps covers."""
    found, is_open = [], False
    for step in range(1, steps + 1):
        action = at_step(config, rank, step, is_open=is_open)
        if action == "open":
            found.append([])
        is_open = is_open if action == "keep" else action == "open"
        if is_open:
            found[-1].append(step)
        if after_step(config, rank, step, is_open=is_open) == "close":
            is_open = False
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"profile": True}, [[1]]),
        ({"profile": False, "profile_step_end": 9}, []),
        ({"profile_step_start": 2, "profile_step_end": 5}, [[2, 3, 4]]),
        ({"profile_step_start": 2, "profile_step_end": 99}, [[2, 3, 4, 5, 6]]),
        ({"steps": [1, 2, 5]}, [[1], [2], [5]]),
        ({"steps": [1, 2, 5], "profile_continuous_steps": True}, [[1, 2], [5]]),
        (
            {"profile_step_end": 4, "profile_continuous_steps": False},
            [[1], [2], [3]],
        ),
        ({"steps": [9]}, []),
        ({"steps": [2], "stage": "actor_update"}, []),
        ({"steps": [2], "discrete": True}, []),
        ({"steps": [2], "ranks": [1]}, []),
    ],
)
def test_windows_of_whole_steps(options, expected):
    assert windows(config(**options), steps=6) == expected


def test_a_window_on_a_rank_that_is_not_wanted_never_opens():
    wanted = config(steps=[1], ranks=[1])
    assert windows(wanted, 3, rank=1) == [[1]]
    assert windows(wanted, 3, rank=0) == []


def test_a_window_left_open_closes_at_the_next_unwanted_step():
    assert at_step(config(steps=[1]), 0, 2, is_open=True) == "close"


@pytest.mark.parametrize(
    ("options", "step", "stage", "is_open", "expected"),
    [
        ({"stage": "actor_update"}, 1, "actor_update", False, "open"),
        ({"stage": "actor_update"}, 1, "actor_update", True, "keep"),
        ({"stage": "actor_update"}, 2, "actor_update", False, "keep"),
        ({"stage": "actor_update"}, 1, "actor_generate", False, "keep"),
        ({"stage": ["actor_update", "actor_generate"]}, 1, "actor_generate", False, "open"),
        ({"discrete": True}, 1, "actor_generate", False, "open"),
        ({"profile": True}, 1, "actor_generate", False, "keep"),
        ({"stage": "actor_update", "profile": False}, 1, "actor_update", False, "keep"),
        ({"stage": "actor_update", "ranks": [3]}, 1, "actor_update", False, "keep"),
    ],
)
def test_windows_of_stages(options, step, stage, is_open, expected):
    assert at_stage(config(**options), 0, step, stage, is_open=is_open) == expected


def test_only_steps_that_may_open_a_stage_are_armed():
    staged = config(stage="actor_update", steps=[2])
    assert [arms_stages(staged, 0, step) for step in (1, 2, 3)] == [False, True, False]
    assert not arms_stages(config(steps=[2]), 0, 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, None, 1), "step-000001"),
        ((1, None, 3), "step-000001-3"),
        ((12, "actor_update", 1), "step-000012-actor_update"),
        ((12, "../../etc", 1), "step-000012-.._.._etc"),
        ((12, "a b/é", 2), "step-000012-a_b_é-2"),
    ],
)
def test_folders_of_windows_are_safe_names(arguments, expected):
    assert window_name(*arguments) == expected
