from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.verl import translate
from tests.builders.verl_blocks import ACTOR, new, said, values


def test_a_mapping_without_profiling_keys_is_no_configuration_of_verl() -> None:
    data = {"trainer": {"total_epochs": 3}, "actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}
    assert translate(data) is None
    assert translate({"trainer": None, "critic": 3}) is None


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("nsys", {"tools": ["nsight"]}),
        ("torch", {"tools": ["torch_profiler"]}),
        ("torch_memory", {"tools": ["memory"], "memory.level": "snapshot"}),
        ("npu", {"integrated.mstx": True, "integrated.profile_export_type": "db"}),
    ],
)
def test_tools(tool: str, expected: dict[str, Any]) -> None:
    assert values(new(tool=tool)) == {"steps": [1, 2], **expected}


def test_an_unknown_tool_has_a_near_match() -> None:
    expected = (
        "global_profiler.tool='nsy' is not a tool; did you mean 'nsys'? "
        "(allowed: nsys, torch, torch_memory, npu)"
    )
    assert said(new(tool="nsy")) == expected


def test_the_precision_debugger_is_refused_by_name() -> None:
    text = said(new(tool="precision_debugger"))
    assert text.startswith("global_profiler.tool='precision_debugger' is not a tool (allowed: nsys")


@pytest.mark.parametrize("keys", [{"steps": None}, {"steps": []}])
def test_without_steps_verl_profiles_nothing(keys: dict[str, Any]) -> None:
    assert values(new(**keys))["steps"] == []
    assert values({"global_profiler": {"tool": "torch"}})["steps"] == []
    assert values({"trainer": {"profile_steps": None}}) == {"steps": []}


def test_without_a_tool_verl_profiles_nothing() -> None:
    assert values(new(tool=None)) == {"steps": [1, 2], "tools": []}


def test_where_no_tool_is_named_the_device_chooses() -> None:
    assert values({"global_profiler": {"steps": [1]}}) == {"steps": [1]}


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ([3, 5], {"integrated.profile_step_start": 3, "integrated.profile_step_end": 6}),
        ([-1, -1], {"steps": []}),
        ([3], {"steps": [3]}),
        ("3", {"steps": "3"}),
    ],
)
def test_the_interval_of_the_sft_trainer_includes_its_end(
    interval: object, expected: dict[str, Any]
) -> None:
    assert values({"trainer": {"profile_interval": interval}}) == expected


def test_the_block_of_the_sft_trainer_is_the_actors() -> None:
    data = {"trainer": {"profile_interval": [1, 1]}, "profiler": {"enable": True, "ranks": [0]}}
    found = values(data)
    assert found["roles.actor.enable"] is True
    assert found["roles.actor.ranks"] == [0]


def test_a_roles_block() -> None:
    actor = {"enable": True, "all_ranks": False, "ranks": [0, 1], "save_path": "here"}
    assert values(new(actor)) == {
        "tools": ["torch_profiler"],
        "steps": [1, 2],
        "roles.actor.enable": True,
        "roles.actor.ranks": [0, 1],
        "integrated.profile_save_path": "here",
    }


def test_all_ranks_wins_over_ranks() -> None:
    found = values(new({"enable": True, "all_ranks": True, "ranks": [0]}))
    assert found["roles.actor.ranks"] == "all"
    assert "roles.actor.all_ranks" not in found


@pytest.mark.parametrize(
    ("block", "enabled"),
    [({"ranks": [1]}, True), ({"all_ranks": True}, True), ({"ranks": []}, False), ({}, None)],
)
def test_without_enable_a_role_takes_part_when_ranks_are_chosen(
    block: dict[str, Any], enabled: bool | None
) -> None:
    assert values(new(block)).get("roles.actor.enable") is enabled


def test_the_shared_block_of_old_speaks_for_three_roles_and_own_blocks_win() -> None:
    data = {
        "trainer": {"profile_steps": [1]},
        "actor_rollout_ref": {
            "profiler": {"discrete": True, "ranks": [0]},
            "ref": {"profiler": {"ranks": [1]}},
        },
    }
    found = values(data)
    assert found["roles.actor.ranks"] == found["roles.rollout.ranks"] == [0]
    assert found["roles.reference.ranks"] == [1]
    assert found["roles.actor.discrete"] is found["roles.reference.discrete"] is True


@pytest.mark.parametrize(
    ("place", "role"),
    [
        ("actor", "actor"),
        ("rollout", "rollout"),
        ("ref", "reference"),
        ("critic", "critic"),
        ("reward_model", "reward"),
    ],
)
def test_places_of_roles(place: str, role: str) -> None:
    assert values({place: {"profiler": {"ranks": [1]}}})[f"roles.{role}.ranks"] == [1]


def test_the_nested_place_of_the_reward_model() -> None:
    data = {"reward": {"reward_model": {"profiler": {"ranks": [1]}}}}
    assert values(data)["roles.reward.ranks"] == [1]


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([], {}),
        (["cpu", "cuda"], {"with_cpu": True, "with_npu": True}),
        (["cuda"], {"with_cpu": False, "with_npu": True}),
        (["cpu"], {"with_cpu": True, "with_npu": False}),
        (["memory", "shapes"], {"with_memory": True, "record_shapes": True}),
        (["cpu", "module"], {"with_cpu": True, "with_module": True}),
    ],
)
def test_contents_of_the_torch_profiler(contents: list[str], expected: dict[str, bool]) -> None:
    actor = {"enable": True, "tool_config": {"torch": {"contents": contents}}}
    found = values(new(actor))
    keys = {key: found[f"integrated.profile_{key}"] for key in expected}
    assert keys == expected
    if not contents:
        assert not any(key.startswith("integrated.") for key in found)


def test_contents_of_ascend() -> None:
    npu = {"contents": ["npu", "module"], "level": "level1", "analysis": True, "discrete": True}
    found = values(new({"enable": True, "tool_config": {"npu": npu}}, tool="npu"))
    assert found["integrated.profile_with_module"] is True
    assert found["integrated.profile_with_cpu"] is False
    assert found["integrated.profile_level"] == "level1"
    assert found["integrated.profile_analysis"] is True
    assert found["integrated.mstx"] is True
    assert found["roles.actor.discrete"] is True


def test_contents_without_the_device_need_no_markers() -> None:
    actor = {"enable": True, "tool_config": {"npu": {"contents": ["cpu"]}}}
    assert values(new(actor, tool="npu"))["integrated.mstx"] is False
    assert ProfilerConfig.build(new(actor, tool="npu")).captures


@pytest.mark.parametrize(
    ("contents", "part"),
    [
        ("cuda", "='cuda' is not a list (allowed items: cuda, cpu, memory, shapes, stack, module)"),
        (["cude"], " holds 'cude'; did you mean 'cuda'? (allowed: cuda, cpu, memory"),
    ],
)
def test_wrong_contents_are_refused(contents: object, part: str) -> None:
    actor = {"enable": True, "tool_config": {"torch": {"contents": contents}}}
    assert said(new(actor)).startswith(f"{ACTOR}.tool_config.torch.contents{part}")


def test_options_of_a_tool_that_is_not_selected_do_not_count() -> None:
    tools = {"npu": {"level": "level2", "discrete": True}, "torch": {"discrete": False}}
    found = values(new({"enable": True, "tool_config": tools}))
    assert "integrated.profile_level" not in found
    assert found["roles.actor.discrete"] is False


def test_the_block_of_a_role_that_is_off_does_not_count() -> None:
    actor = {"enable": False, "tool": "nsys", "save_path": "x", "relocate_results": True}
    found = values({**new(actor), "critic": {"profiler": {"enable": True}}})
    assert found["tools"] == ["torch_profiler"]
    assert found["roles.actor.enable"] is False
    assert "integrated.profile_save_path" not in found


def test_a_roles_own_path_wins_over_the_global_one() -> None:
    found = values(new({"enable": True, "save_path": "own"}, save_path="common"))
    assert found["integrated.profile_save_path"] == "own"
    assert values(new(save_path="common"))["integrated.profile_save_path"] == "common"


def test_discrete_of_nsys_counts_for_nsys() -> None:
    nsys = {"nsys": {"discrete": True, "worker_nsight_options": {"trace": "nvtx"}}}
    assert values(new(tool="nsys", global_tool_config=nsys))["discrete"] is True
    found = values(new(tool="torch", global_tool_config=nsys))
    assert "discrete" not in found
    assert found["nsight.worker"] == {"trace": "nvtx"}
