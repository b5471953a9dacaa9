"""A generation is captured from one decoding iteration to another, counted anew in each call."""

from typing import Any

import pytest

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.marking import annotate, stage
from lightning_rlprof.testing import FakeRecorder
from tests.recording import read

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
        (5, {"token_start": 1, "token_end": 3}, 2),
        (5, {"token_start": 4}, 1),
        (5, {"token_end": 2}, 2),
        (5, {"token_start": 0, "token_end": 9}, 5),
        (2, {"token_start": 1, "token_end": 9}, 1),
    ],
)
def test_the_capture_holds_the_iterations_from_start_up_to_end(
    start: Any, tokens: int, window: dict[str, int], iterations: int
) -> None:
    calls, _ = record(start, tokens, **window)
    assert calls == [OPEN.format(1), *LOOP * iterations, "close", "finish"]


def test_each_call_counts_from_0_and_has_its_own_capture(start: Any) -> None:
    calls, trace = record(start, 3, 2, token_start=1, token_end=2)
    assert calls == [
        *[OPEN.format(1), *LOOP, "close"],
        *[OPEN.format(2), *LOOP, "close", "finish"],
    ]
    assert [note.text for note in trace.notes if note.level == "warning"] == []


def test_stages_inside_a_generation_open_no_capture_and_others_keep_theirs(start: Any) -> None:
    recorder = FakeRecorder()
    options = {"discrete": True, "token_start": 1, "token_end": 2}
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
    calls, trace = record(start, 2, token_start=7)
    assert calls == ["finish"]
    (said,) = [note.text for note in trace.notes if note.level == "warning"]
    assert said == "nothing was captured (actor_generate had no span number 7 inside)"


def test_an_exception_closes_the_capture(start: Any) -> None:
    recorder = FakeRecorder()
    session = start([recorder], **STAGE, token_start=0)
    session.begin_step(1)
    with pytest.raises(KeyError), stage("actor_generate"), annotate("forward"):
        raise KeyError("reward")
    session.end_step()
    assert recorder.calls == [OPEN.format(1), "enter forward", "exit forward", "close"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"token_start": 1}, "token_start=1 needs a capture of its own for the stage"),
        ({"token_end": 1, "stage": "actor_update"}, "token_end=1 needs a capture of its own"),
        ({**STAGE, "token_start": 3, "token_end": 3}, "token_end=3 is not after token_start=3"),
        ({**STAGE, "token_start": -1}, "token_start=-1 should be greater than or equal to 0"),
        ({**STAGE, "token_end": 0}, "token_end=0 should be greater than 0"),
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
        assert (config.token_start, config.token_end, config.per_stage) == (2, 4, True)


def test_a_stage_inside_of_an_iteration_has_no_capture_of_its_own(start: Any) -> None:
    recorder = FakeRecorder()
    options = {"stage": ["actor_generate", "compute_reward"], "token_start": 0}
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
