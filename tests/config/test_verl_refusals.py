import math
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.verl import translate
from lightning_rlprof.errors import ConfigError
from tests.builders.verl_blocks import ACTOR, new, said, values


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (
            new(tool="torch_memory", global_tool_config={"torch_memory": {"context": "alloc"}}),
            "global_profiler.global_tool_config.torch_memory.context='alloc'",
        ),
        (
            new(tool="torch_memory", global_tool_config={"torch_memory": {"stacks": "python"}}),
            "global_profiler.global_tool_config.torch_memory.stacks='python'",
        ),
        (
            new(tool="torch_memory", global_tool_config={"torch_memory": {"kw_args": {"a": 1}}}),
            "global_profiler.global_tool_config.torch_memory.kw_args={'a': 1}",
        ),
        (
            {
                "actor_rollout_ref": {
                    "actor": {"profile": {"use_profile": True}, "profiler": {"ranks": [0]}}
                }
            },
            "actor_rollout_ref.actor.profile.use_profile=True",
        ),
    ],
)
def test_what_comes_with_later_work_is_refused_by_name(data: dict[str, Any], key: str) -> None:
    assert said(data).startswith(f"{key} is not supported yet; set it to ")


def test_values_that_change_nothing_are_accepted() -> None:
    actor = {
        "_target_": "verl.utils.profiler.ProfilerConfig",
        "enable": True,
        "relocate_results": False,
        "finish_hook_cmd": "",
        "finish_hook_ranks": [],
        "tool_config": {
            "torch": {
                "schedule": {"active": 0, "wait": 2},
                "step_start": 0,
                "step_end": None,
                "name": "torch",
            },
            "torch_memory": {"stack_depth": 64},
            "precision_debugger": {"strict": True, "stages": {"a": 1}},
            "nsys": None,
        },
    }
    memory = {"trace_alloc_max_entries": 100_000, "context": "all", "kw_args": {}}
    data = new(actor, relocate_results=False, global_tool_config={"torch_memory": memory})
    expected = {"steps", "tools", "roles.actor.enable"}
    assert set(values(data)) == expected
    assert set(values(new(actor, global_tool_config=None))) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"trainer": {"profile_step": [1]}}, "trainer.profile_step is not a key; did you mean"),
        (
            {"trainer": {"worker_nsight_option": {}}},
            "trainer.worker_nsight_option is not a key; did you mean 'worker_nsight_options'?",
        ),
        (
            new({"tool_config": {"torch": {"schedule": 2}}}),
            f"{ACTOR}.tool_config.torch.schedule is a block of keys, not a value",
        ),
        (new(stps=[1]), "global_profiler.stps is not a key; did you mean 'steps'?"),
        (new({"rank": [1]}), f"{ACTOR}.rank is not a key; did you mean 'ranks'?"),
        (
            new({"tool_config": {"torch": {"content": []}}}),
            f"{ACTOR}.tool_config.torch.content is not a key; did you mean 'contents'?",
        ),
        (new({"tool_config": {"torchh": None}}), f"{ACTOR}.tool_config.torchh is not a key; did"),
        ({"global_profiler": "nsys"}, "global_profiler is a block of keys, not a value"),
        (new({"tool_config": "x"}), f"{ACTOR}.tool_config is a block of keys, not a value"),
    ],
)
def test_an_unknown_key_inside_a_profiler_block_is_refused(
    data: dict[str, Any], expected: str
) -> None:
    assert said(data).startswith(expected)


def test_an_unknown_key_of_a_tool_counts_only_where_the_tool_is_selected() -> None:
    blocks = {"torch_memory": {"memory_snapshot_step": 1}, "later_tool": {"tool": "x", "level": 3}}
    actor = {"enable": True, "tool_config": {"nsys": {"deep": True}, "other": 2}}
    expected = {"steps", "tools", "roles.actor.enable"}
    assert set(values(new(actor, global_tool_config=blocks))) == expected
    text = said(new(actor, tool="torch_memory", global_tool_config=blocks))
    key = "global_profiler.global_tool_config.torch_memory.memory_snapshot_step"
    assert text.startswith(f"{key} is not a key; did you mean 'memory_snapshot_num_steps'? (allow")


def test_snapshots_of_several_steps_are_refused_where_memory_is_watched() -> None:
    def data(tool: str, number: int) -> dict[str, Any]:
        memory = {"torch_memory": {"memory_snapshot_num_steps": number}}
        return new({"enable": True, "tool_config": memory}, tool=tool, global_tool_config=memory)

    assert "memory.level" in values(data("torch_memory", 1))
    assert values(data("torch", 2))["tools"] == ["torch_profiler"]
    assert "memory_snapshot_num_steps=2 is not supported yet" in said(data("torch_memory", 2))


def test_spellings_that_disagree_are_refused() -> None:
    data = {**new(), "trainer": {"profile_steps": [3]}}
    expected = "trainer.profile_steps and global_profiler.steps disagree: they mean steps=[3] and"
    assert said(data).startswith(expected)


def test_origins_name_the_key_of_verl() -> None:
    translation = translate(new({"enable": True}))
    assert translation is not None
    assert translation.origins["steps"] == "global_profiler.steps"
    assert translation.origins["tools"] == "global_profiler.tool"
    assert translation.origins["roles.actor.enable"] == f"{ACTOR}.enable"


def test_roles_that_disagree_about_the_one_capture_are_refused() -> None:
    data = {
        **new({"enable": True, "save_path": "a"}),
        "critic": {"profiler": {"enable": True, "save_path": "b"}},
    }
    text = said(data)
    assert text.startswith(f"{ACTOR}.save_path and critic.profiler.save_path disagree: they mean ")
    assert "integrated.profile_save_path='a' and 'b'" in text


def test_roles_with_different_tools_are_refused() -> None:
    data = {**new({"enable": True}), "critic": {"profiler": {"enable": True, "tool": "nsys"}}}
    text = said(data)
    start = "global_profiler.tool='torch' and critic.profiler.tool='nsys': different tools per role"
    assert text.startswith(start)


def test_a_value_that_does_not_even_equal_itself_is_refused_by_its_key() -> None:
    """`.nan` in YAML."""
    data = {"global_profiler": {"tool": "nsys", "steps": [1], "save_path": math.nan}}
    with pytest.raises(ConfigError, match=r"save_path=nan"):
        ProfilerConfig.build(data)
