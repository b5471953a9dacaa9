from typing import Any

import pytest
from pydantic import ValidationError

from lightning_rlprof.config.integrated import IntegratedConfig
from lightning_rlprof.config.options import Options
from lightning_rlprof.config.roles import RoleConfig
from lightning_rlprof.config.section import explain


def options(**keys: Any) -> Options:
    return Options.model_validate(keys)


def said(**keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        options(**keys)
    return explain(caught.value)


def test_defaults() -> None:
    blocks = {"integrated", "nsight", "torch_profiler", "npu", "memory", "on_finish", "parallel"}
    assert Options().model_dump(exclude=blocks) == {
        "steps": None,
        "ranks": None,
        "all_ranks": None,
        "profile_continuous_steps": None,
        "discrete": False,
        "roles": {},
        "role": None,
        "custom_stages": [],
        "wrap": [],
        "spans": True,
        "device_time": None,
        "clock_minutes": 10,
        "token_start": None,
        "token_end": None,
        "tools": None,
    }


@pytest.mark.parametrize(
    ("keys", "on"),
    [
        ({}, False),
        ({"integrated": {}}, False),
        ({"integrated": {"profile": None}}, False),
        ({"integrated": {"profile": True}}, True),
        ({"integrated": {"profile": False, "stage": "actor_update"}, "steps": [1]}, False),
        ({"integrated": {"profile_save_path": "x"}}, False),
        ({"integrated": {"stage": "actor_update"}}, True),
        ({"integrated": {"stage": "all"}}, True),
        ({"integrated": {"profile_step_start": 1}}, True),
        ({"integrated": {"profile_with_memory": True}}, True),
        ({"integrated": {"profile": None, "stage": "all"}}, False),
        ({"integrated": {"profile": None, "stage": "actor_update"}}, True),
        ({"steps": [1]}, True),
        ({"steps": "all"}, True),
        ({"ranks": [1]}, True),
        ({"all_ranks": False}, True),
        ({"profile_continuous_steps": False}, True),
        ({"discrete": True}, True),
        ({"discrete": False}, False),
        ({"roles": {"actor": {}}}, True),
        ({"tools": ["nvtx"]}, True),
        ({"steps": []}, False),
        ({"tools": []}, False),
        ({"steps": [1], "tools": []}, False),
        ({"roles": {"actor": {"enable": False}}, "steps": [1]}, False),
        ({"roles": {"actor": {"enable": False}, "critic": {}}}, True),
        ({"spans": False, "role": "actor", "custom_stages": ["a"]}, False),
        ({"wrap": [{"target": "f", "stage": "actor_update"}]}, False),
        ({"nsight": {"worker": {"trace": "nvtx"}, "collect": False}}, False),
        ({"torch_profiler": {"with_stack": True}}, True),
        ({"torch_profiler": {"schedule": {"active": 1}}}, True),
        ({"torch_profiler": {}}, False),
        ({"memory": {"level": "snapshot"}}, True),
        ({"memory": {"level": "snapshot"}, "integrated": {"profile": False}}, False),
        ({"memory": {"level": None}}, False),
        ({"on_finish": {"command": "upload.sh"}}, False),
        ({"device_time": True}, False),
    ],
)
def test_the_master_switch_is_resolved(keys: dict[str, Any], on: bool) -> None:
    assert options(**keys).integrated.profile is on


def test_the_users_own_block_is_not_changed() -> None:
    block = IntegratedConfig(stage="actor_update")
    resolved = Options(integrated=block).integrated
    assert block.profile is None
    assert resolved.profile is True
    assert resolved.model_fields_set == {"stage"}


def test_filled_in_defaults_do_not_count_as_given() -> None:
    filled = IntegratedConfig().model_dump() | {"stage": "actor_update"}
    resolved = options(integrated=filled).integrated
    assert resolved.profile is True
    assert resolved.model_fields_set == {"stage"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"steps": []}, "steps is an empty list"),
        ({"tools": []}, "tools is an empty list"),
        ({"roles": {"a": {"enable": False}}}, "no role is enabled (a)"),
    ],
)
def test_on_with_nothing_to_capture_is_refused(keys: dict[str, Any], reason: str) -> None:
    text = said(integrated={"profile": True}, **keys)
    assert text == f"integrated.profile=True has nothing to capture: {reason}"


@pytest.mark.parametrize("profile", [True, None])
def test_a_capture_of_neither_host_nor_device_is_refused(profile: bool | None) -> None:
    block = {"profile": profile, "profile_with_cpu": False, "profile_with_npu": False}
    text = said(integrated=block)
    start = "integrated.profile_with_cpu=False contradicts profile_with_npu=False: nothing is left"
    assert text.startswith(start)
    assert options(integrated={**block, "profile": False}).integrated.profile is False


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        (
            {"all_ranks": True, "ranks": [1]},
            "ranks=[1] contradicts all_ranks=True: give one of the two",
        ),
        (
            {"ranks": [1], "integrated": {"profile_ranks": [0]}},
            "ranks=[1] contradicts integrated.profile_ranks=[0]: choose ranks in one place",
        ),
        (
            {"all_ranks": True, "integrated": {"profile_ranks": [0]}},
            "all_ranks=True contradicts integrated.profile_ranks=[0]: choose ranks in one place",
        ),
        (
            {"ranks": [1], "roles": {"actor": {}}},
            "ranks contradicts roles: give roles.actor.ranks",
        ),
        (
            {"integrated": {"profile_ranks": [1]}, "roles": {"actor": {}}},
            "integrated.profile_ranks contradicts roles: give roles.actor.ranks",
        ),
        (
            {"profile_continuous_steps": True, "discrete": True},
            "profile_continuous_steps=True contradicts discrete=True, which makes one capture per",
        ),
        (
            {"profile_continuous_steps": True, "integrated": {"stage": "actor_update"}},
            "profile_continuous_steps=True contradicts integrated.stage, which makes one capture",
        ),
        (
            {"tools": ["nsight", "torch_profiler"]},
            "tools=['nsight', 'torch_profiler'] holds nsight and torch_profiler, and a GPU tells",
        ),
        (
            {"tools": ["nsight"], "memory": {"level": "snapshot"}},
            "memory.level='snapshot' contradicts tools=['nsight']: add memory to them, or leave",
        ),
        (
            {"tools": ["torch_profiler", "memory"], "integrated": {"mstx": True}},
            "integrated.mstx=True contradicts tools=['torch_profiler', 'memory']: add nvtx",
        ),
        (
            {"device_time": True, "spans": False},
            "device_time=True contradicts spans=False: device times are numbers of spans",
        ),
        (
            {"roles": {"actor": {"discrete": True}, "critic": {}}},
            "roles with discrete=True and discrete=False share a process",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(keys: dict[str, Any], part: str) -> None:
    assert said(**keys).startswith(part)


@pytest.mark.parametrize(
    "keys",
    [
        {"tools": ["nsight", "torch_profiler"], "integrated": {"profile_with_npu": False}},
        {"tools": ["nsight", "memory"], "memory": {"level": "snapshot"}},
        {"tools": [], "memory": {"level": "snapshot"}},
        {"tools": ["nsight", "memory"], "integrated": {"mstx": True}},
        {"tools": ["npu_profiler", "mstx"], "integrated": {"mstx": True}},
        {"device_time": False, "spans": False},
    ],
)
def test_options_that_do_not_contradict_each_other_pass(keys: dict[str, Any]) -> None:
    assert options(**keys).tools == keys.get("tools")


def test_roles_of_other_processes_may_differ() -> None:
    roles = {"actor": {"discrete": True}, "critic": {}}
    assert options(roles=roles, role="actor").per_stage is True
    assert options(roles=roles, role="critic").per_stage is False
    assert options(roles=roles, role="reward").per_stage is False


def test_a_role_takes_discrete_from_the_top() -> None:
    roles = {"actor": {}, "critic": {"discrete": True}}
    assert options(roles=roles, discrete=True).per_stage is True


@pytest.mark.parametrize(
    ("keys", "per_stage"),
    [
        ({}, False),
        ({"discrete": True}, True),
        ({"integrated": {"stage": "actor_update"}}, True),
        ({"integrated": {"stage": ["actor_update"]}}, True),
        ({"roles": {"a": {"discrete": True}}}, True),
        ({"roles": {"a": {"discrete": False}}, "discrete": True}, False),
    ],
)
def test_per_stage(keys: dict[str, Any], per_stage: bool) -> None:
    assert options(**keys).per_stage is per_stage


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        (
            {"integrated": {"stage": "actor_updat"}},
            "integrated.stage='actor_updat' is not a stage; did you mean 'actor_update'? Allowed:",
        ),
        (
            {"integrated": {"stage": ["actor_update", "mine"]}, "custom_stages": ["other"]},
            "integrated.stage=['actor_update', 'mine'] holds 'mine', which is not a stage",
        ),
        (
            {"wrap": [{"target": "f", "stage": "actor_updat"}]},
            "wrap[0].stage='actor_updat' is not a stage; did you mean 'actor_update'?",
        ),
        (
            {"wrap": [{"target": "f", "stage": ""}]},
            "wrap[0].stage='' is not a stage. Allowed:",
        ),
        (
            {"wrap": [{"target": "f", "by_grad": {"grad": "x_y_z"}}]},
            "wrap[0].by_grad.grad='x_y_z' is not a stage. Allowed:",
        ),
        (
            {"wrap": [{"target": "f", "by_arg": {"arg": "m", "stages": {"Old": "weight_sink"}}}]},
            "wrap[0].by_arg.stages.Old='weight_sink' is not a stage; did you mean 'weight_sync'?",
        ),
        (
            {"wrap": [{"target": "f", "stage": "weight_sync"}] * 2},
            "wrap[1].target='f' has a rule already; one method has one rule",
        ),
        ({"tools": ["nvtxx"]}, "tools[0]='nvtxx' should be 'nvtx', 'nsight', 'mstx', 'npu_pro"),
        ({"device_time": "yes"}, "device_time='yes' should be a valid boolean"),
        ({"roles": {"actor": {"rank": [1]}}}, "roles.actor.rank is not a key here; did you mean"),
        ({"roles": [1]}, "roles=[1] should be a valid dictionary"),
        ({"discrete": "yes"}, "discrete='yes' should be a valid boolean; write true or false"),
        ({"steps": [True]}, "steps=[True] holds True"),
        ({"ranks": ["0"]}, "ranks=['0'] holds '0'; ranks are whole numbers without quotes"),
        ({"integrated": 3}, "integrated=3 should be a valid dictionary"),
    ],
)
def test_bad_input_names_its_dotted_key(keys: dict[str, Any], part: str) -> None:
    assert said(**keys).startswith(part)


def test_custom_stages_are_stages() -> None:
    wrap = [{"target": "f", "stage": "mine"}, {"target": "g", "by_grad": {"grad": "mine"}}]
    found = options(integrated={"stage": ["mine"]}, custom_stages=["mine"], wrap=wrap)
    assert found.integrated.stage == ["mine"]


def test_roles_may_be_given_as_models() -> None:
    assert options(roles={"a": RoleConfig(ranks=[1])}).roles["a"].ranks == [1]
