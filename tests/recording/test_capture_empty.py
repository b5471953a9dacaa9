"""A run that should have captured something and did not says why at its end, and no other does."""

import pytest
import torch

from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.device_time import DeviceTimeRecorder
from lightning_rlprof.records.notes import Code
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import read, run_steps, spans

NO_RECORDER = (
    "nothing was captured: no profiler is enabled: "
    "check profile_level, profile_with_cpu, profile_with_npu, tools"
)
FAILED = "nothing was captured: all profilers failed: FakeRecorder"


class Always(FakeRecorder):
    always = True


@pytest.mark.parametrize(
    ("options", "steps", "reason"),
    [
        (
            {"profile_step_start": 5, "profile_step_end": 7},
            [1, 2],
            "nothing was captured: steps to capture: 5 up to 6; last complete step: 2",
        ),
        (
            {"steps": [9]},
            [1],
            "nothing was captured: steps to capture: [9]; last complete step: 1",
        ),
        (
            {"steps": [1], "stage": "critic_update"},
            [1],
            "nothing was captured: no stage to capture began in those steps; "
            "stages there: actor_update. "
            'Mark it with stage("critic_update"), or add a rule: wrap: {METHOD: critic_update}',
        ),
        ({"steps": [9], "ranks": [1]}, [1], None),
        ({"profile": False, "steps": [9]}, [1], None),
        ({"steps": [1]}, [1], None),
    ],
)
def test_a_run_that_captured_nothing_says_why(start, clock, options, steps, reason):
    session = start([FakeRecorder()], **options)
    run_steps(session, clock, steps)
    session.close()
    warnings = [note.text for note in read(session).notes if note.level == "warning"]
    assert warnings == ([reason] if reason else [])


def test_a_window_for_a_step_that_never_comes_is_closed_and_does_not_count(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], steps=[2])
    run_steps(session, clock, [1])
    session.close()
    assert recorder.calls == ["open step-000002", "enter step", "exit step", "close", "finish"]
    assert [note.text for note in read(session).notes] == [
        "nothing was captured in step-000002: the training ended before that step",
        "nothing was captured: steps to capture: [2]; last complete step: 1",
    ]


def test_a_window_that_covered_a_step_counts_although_the_next_never_comes(start, clock):
    recorder = FakeRecorder()
    session = start([recorder], profile_step_start=1, profile_step_end=3)
    run_steps(session, clock, [1])
    session.close()
    assert recorder.calls[0] == "open step-000001"
    assert not [note for note in read(session).notes if note.level == "warning"]


def test_always_listening_is_no_capture_and_gives_no_warning(start, clock):
    session = start([Always()], steps=[9])
    run_steps(session, clock, [1])
    session.close()
    assert not [note for note in read(session).notes if note.level == "warning"]


@pytest.mark.parametrize(
    ("recorders", "options", "reason"),
    [
        ([], {}, NO_RECORDER),
        ([Recorder(), DeviceTimeRecorder(torch.Event)], {}, NO_RECORDER),
        ([], {"mstx": True, "profile_level": "level_none", "profile_with_cpu": False}, None),
        ([FakeRecorder(fail_at="open")], {}, FAILED),
        ([FakeRecorder(fail_at="close")], {}, FAILED),
    ],
)
def test_a_window_that_no_recorder_lived_through_captured_nothing(
    start, clock, monkeypatch, recorders, options, reason
):
    monkeypatch.setattr(DeviceTimeRecorder, "enter", lambda *_: None)
    session = start(recorders, steps=[1], **options)
    run_steps(session, clock, [1])
    session.close()
    notes = read(session).notes
    assert [note.text for note in notes if note.level == "warning"] == ([reason] if reason else [])
    assert not [note for note in notes if note.code == Code.CAPTURE_TAKEN]


def test_steps_count_as_captured_only_if_something_captures_here(start, clock):
    """Lightweight markers on a CPU capture nothing, so that no step is left out of tables."""
    session = start(mstx=True, profile_level="level_none", profile_with_cpu=False, steps=[1, 2])
    run_steps(session, clock, [1, 2, 3])
    session.close()
    assert not [span for span in read(session).spans if "capture" in (span.counters or {})]


def test_one_recorder_or_one_window_that_went_well_is_a_capture(start, clock):
    failing = FakeRecorder()
    session = start([FakeRecorder(fail_at="open"), failing], steps=[1, 2])
    run_steps(session, clock, [1])
    failing.fail_at = "enter"
    run_steps(session, clock, [2])
    session.close()
    notes = read(session).notes
    assert not [note for note in notes if note.level == "warning"]
    captured = [note.text for note in notes if note.text.startswith("captured")]
    assert captured == ["captured step-000001 with FakeRecorder"]


def test_a_recorder_whose_tool_is_not_there_captured_nothing(start, clock):
    recorder = FakeRecorder()
    recorder.why_nothing = "no tool is attached"
    session = start([recorder], steps=[1])
    run_steps(session, clock, [1])
    session.close()
    assert [(note.level, note.text) for note in read(session).notes] == [
        ("warning", "nothing was captured: no tool is attached")
    ]


@pytest.mark.parametrize(
    ("recorder", "why_nothing", "counted"),
    [
        (None, "", []),
        (FakeRecorder(), "", [1, 2]),
        (FakeRecorder(), "no tool is attached", []),
        (FakeRecorder(fail_at="open"), "", [1]),  # which may have taken long
    ],
)
def test_a_step_counts_as_captured_if_a_recorder_ran(start, clock, recorder, why_nothing, counted):
    recorders = [] if recorder is None else [recorder]
    for each in recorders:
        each.why_nothing = why_nothing
    session = start(recorders, steps=[1, 2], mstx=True)
    run_steps(session, clock, [1, 2, 3])
    session.close()
    steps = spans(session, "step")
    assert [step.step for step in steps if "capture" in (step.counters or {})] == counted
