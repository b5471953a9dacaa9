"""Keys of ours over those of verl, and which source a message names afterwards."""

from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from tests.builders.verl_blocks import new

build = ProfilerConfig.build
ACTOR = {"actor_rollout_ref": {"actor": {"profiler": {"enable": True, "tool": "torch"}}}}
WINDOW = {"profile_step_start": 3, "profile_step_end": 5}


def steps(config: ProfilerConfig) -> list[int]:
    return [step for step in range(9) if config.wants_step(step)]


def said(source: Any = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(source, **overrides)
    return str(caught.value)


@pytest.mark.parametrize("data", [ACTOR, new(steps=None), {**ACTOR, **new(steps=[])}])
def test_without_steps_verl_profiles_nothing_whatever_else_is_said(data: dict[str, Any]) -> None:
    assert build(data).steps == []
    assert not build(data).captures
    assert not build({**data, "integrated": None}).captures


@pytest.mark.parametrize("data", [ACTOR, new(steps=None), new(steps=[1, 2])])
def test_steps_of_ours_win_over_those_of_verl(data: dict[str, Any]) -> None:
    assert steps(build({**data, "integrated": WINDOW})) == [3, 4]
    assert steps(build({**data, "profiler_config": {"integrated": WINDOW}})) == [3, 4]
    dashed = {"profile-step-start": 3, "profile-step-end": 5}
    assert steps(build({**data, "integrated": dashed})) == [3, 4]
    assert steps(build(data, **WINDOW)) == [3, 4]
    assert steps(build({**data, "steps": [7]})) == steps(build(data, steps=[7])) == [7]


def test_steps_of_ours_win_over_a_window_of_ours_wherever_they_are_given() -> None:
    assert steps(build({**new(), "steps": [7]}, **WINDOW)) == [7]


def test_steps_of_a_variable_win_over_those_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_STEP_END", "4")
    assert steps(build(ACTOR)) == [1, 2, 3]


def test_a_source_that_is_overridden_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    verls = new(save_path="x")
    assert said({**verls, "steps": [0]}) == "steps=[0] holds 0; steps count from 1"
    assert said(verls, steps=[0]) == "steps=[0] holds 0; steps count from 1"
    assert said(verls, integrated={"profile-save-path": 3}).endswith(
        "should be text; put it in quotes"
    )
    monkeypatch.setenv("RLPROF__STEPS", "[-1]")
    assert said(verls).endswith("count from 1 (set by RLPROF__STEPS)")
    assert said(verls, steps=[0]) == "steps=[0] holds 0; steps count from 1"
    assert said(verls, integrated=None, steps=[2], ranks=[-1]).endswith("ranks count from 0")


def test_a_source_beside_what_is_overridden_is_named() -> None:
    assert said(new(steps=[0]), stage="all").endswith("(set by global_profiler.steps)")
