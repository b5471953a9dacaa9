"""When captures open and close: every row of the table is one decision."""

import pytest

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.window import after_step, arms_stages, at_stage, at_step, window_name


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
