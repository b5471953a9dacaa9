"""How many captures nsys has to expect, against the windows that really open."""

from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.capture import after_step, at_stage, at_step
from lightning_rlprof.recording.nsys import capture_range_end, captures

STAGES = ["actor_generate", "actor_update"]


def config(**options: Any) -> ProfilerConfig:
    return ProfilerConfig.build(None, **{"tools": ["nsight"], **options})


@pytest.mark.parametrize(
    ("options", "number", "end"),
    [
        ({}, 1, "stop"),
        ({"profile_step_start": 3, "profile_step_end": 9}, 1, "stop"),
        (
            {"profile_step_start": 3, "profile_step_end": 9, "profile_continuous_steps": False},
            6,
            "repeat:6",
        ),
        ({"steps": [4]}, 1, "stop"),
        ({"steps": [1, 2, 5]}, 3, "repeat:3"),
        ({"steps": [5, 2, 1], "profile_continuous_steps": True}, 2, "repeat:2"),
        ({"steps": [1, 2, 3], "profile_continuous_steps": True}, 1, "stop"),
        ({"steps": "all"}, None, "repeat"),
        ({"steps": "all", "profile_continuous_steps": True}, 1, "stop"),
        ({"steps": []}, 0, "stop"),
        ({"profile": False, "steps": [1, 2]}, 0, "stop"),
        ({"stage": "actor_update"}, 1, "stop"),
        ({"stage": STAGES, "steps": [1, 2, 5]}, 6, "repeat:6"),
        ({"stage": STAGES, "steps": "all"}, None, "repeat"),
        ({"discrete": True}, None, "repeat"),
        ({"discrete": True, "steps": []}, 0, "stop"),
        ({"discrete": True, "stage": STAGES, "steps": [7]}, 2, "repeat:2"),
        ({"roles": {"actor": {}, "critic": {}}, "steps": [1, 3]}, 2, "repeat:2"),
        ({"roles": {"actor": {"discrete": True}}, "steps": [1, 3]}, None, "repeat"),
        ({"roles": {"actor": {"enable": False}, "critic": {}}, "steps": [3]}, 1, "stop"),
        ({"roles": {"actor": {}}, "role": "critic", "steps": [1, 3]}, 0, "stop"),
    ],
)
def test_captures_are_counted_and_the_end_of_ranges_follows(
    options: dict[str, Any], number: int | None, end: str
) -> None:
    assert captures(config(**options)) == number
    assert capture_range_end(config(**options)) == end


def test_an_end_that_was_given_stays() -> None:
    given = {"worker": {"capture-range-end": "repeat-shutdown:6"}}
    assert capture_range_end(config(steps=[1, 2], nsight=given)) == "repeat-shutdown:6"


@pytest.mark.parametrize("steps", [[1], [2, 3], [1, 2, 5, 6, 9], None])
@pytest.mark.parametrize("stage", ["all", "actor_update", STAGES])
@pytest.mark.parametrize("joined", [None, False, True])
def test_the_count_is_that_of_the_windows_which_open(steps: Any, stage: Any, joined: Any) -> None:
    if joined and stage != "all":
        return  # refused by the configuration
    one = config(steps=steps, stage=stage, profile_continuous_steps=joined)
    assert captures(one) == _windows_opened(one)


def _windows_opened(one: ProfilerConfig) -> int:
    """Walk through a training in which every stage occurs once per step."""
    opened, is_open = 0, False
    for step in range(1, 12):
        if at_step(one, 0, step, is_open=is_open) == "open":
            opened, is_open = opened + 1, True
        opened += sum(
            at_stage(one, 0, step, name, is_open=is_open) == "open"
            for name in (*STAGES, "critic_update")
        )
        if after_step(one, 0, step, is_open=is_open) == "close":
            is_open = False
    return opened
