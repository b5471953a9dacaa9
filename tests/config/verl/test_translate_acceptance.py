"""What verl's own tests ask of its configuration, asked of ours, on a file with all its keys."""

from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from lightning_rlprof.config.blocks import FinishConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError

INHERITED = ("tool", "save_path", "relocate_results", "finish_hook_cmd", "finish_hook_ranks")


def inherit(key: str) -> str:
    return f"${{oc.select:global_profiler.{key},null}}"


def role() -> dict[str, Any]:
    """Return a role's block as the files of verl have it: off, and all else from the global one."""
    memory = "global_tool_config.torch_memory"
    sizes = {key: inherit(f"{memory}.{key}") for key in ("trace_alloc_max_entries", "stack_depth")}
    schedule = dict.fromkeys(["skip_first", "wait", "warmup", "active", "repeat"], 0)
    tokens = {"profile_token_start": None, "profile_token_end": None}
    return {
        "_target_": "verl.utils.profiler.ProfilerConfig",
        "enable": False,
        "all_ranks": False,
        "ranks": [],
        **{key: inherit(key) for key in (*INHERITED, "finish_hook_all_ranks")},
        "tool_config": {
            "npu": {"contents": [], "level": "level0", "analysis": False, "discrete": True},
            "nsys": {"discrete": inherit("global_tool_config.nsys.discrete"), "name": "nsight"},
            "torch": {"contents": [], "discrete": False, "schedule": schedule, **tokens},
            "torch_memory": sizes,
        },
    }


def file(**keys: Any) -> dict[str, Any]:
    """Return a whole file of verl, with keys of its ``global_profiler`` changed."""
    trace = {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true"}
    worker = {"capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}
    nsys = {"discrete": False, "controller_nsight_options": trace, "worker_nsight_options": worker}
    hook: dict[str, Any] = {
        "finish_hook_cmd": None,
        "finish_hook_all_ranks": False,
        "finish_hook_ranks": [],
    }
    return {
        "actor_rollout_ref": {name: {"profiler": role()} for name in ("actor", "rollout", "ref")},
        "critic": {"profiler": role()},
        "trainer": {"total_epochs": 30},
        "global_profiler": {
            "_target_": "verl.utils.profiler.ProfilerConfig",
            "tool": None,
            "steps": None,
            "profile_continuous_steps": False,
            "save_path": "outputs/profile",
            "relocate_results": False,
            **hook,
            "global_tool_config": {"nsys": nsys, "torch_memory": {"stack_depth": 32}},
            **keys,
        },
    }


def build(data: dict[str, Any], **enabled: dict[str, Any]) -> ProfilerConfig:
    """Build it as OmegaConf's mapping, with some roles switched on."""
    places = {**data["actor_rollout_ref"], "critic": data["critic"]}
    for name, keys in enabled.items():
        places[name]["profiler"] |= {"enable": True, **keys}
    return ProfilerConfig.build(OmegaConf.create(data))


NSYS = {"tool": "nsys", "steps": [1, 2, 5]}


def test_config_init_every_default_of_the_file_is_understood_and_profiles_nothing() -> None:
    config = build(file())
    assert not config.captures
    assert config.integrated.profile_save_path == "outputs/profile"
    assert set(config.roles) == {"actor", "rollout", "reference", "critic"}
    assert not any(block.enable or block.all_ranks for block in config.roles.values())


def test_config_init_every_field_of_a_role_is_kept() -> None:
    config = build(file(**NSYS), actor={"ranks": [0, 3]}, critic={"all_ranks": True})
    assert config.tools == ["nsight"]
    assert config.roles["actor"].ranks == [0, 3]
    assert config.roles["critic"].all_ranks
    assert not config.roles["reference"].enable
    with pytest.raises(AttributeError):
        _ = config.non_existing_key  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="non_existing_key is not a key"):
        build(file(non_existing_key=1))


def test_initialization_this_rank_is_wanted_and_no_step_before_the_first() -> None:
    config = build(file(**NSYS), actor={"all_ranks": True})
    assert config.wants_rank(0)
    assert [step for step in range(7) if config.wants_step(step)] == [1, 2, 5]
    assert not config.per_stage


def test_role_configs_inherit_the_global_finish_hook() -> None:
    hook = {"finish_hook_cmd": "upload.sh", "finish_hook_ranks": [0, 8], "relocate_results": True}
    for name in ("actor", "rollout", "ref", "critic"):
        config = build(file(**NSYS, **hook), **{name: {}})
        assert config.on_finish.command == ["upload.sh"]
        assert config.on_finish.ranks == [0, 8]
        assert config.nsight.collect_reports
        everywhere = build(file(**NSYS, **hook, finish_hook_all_ranks=True), **{name: {}})
        assert everywhere.on_finish.all_ranks


def test_a_role_inherits_the_finish_hook_in_a_part_of_a_file_too() -> None:
    hook = {"finish_hook_cmd": "upload.sh", "finish_hook_ranks": [0]}
    actor = {"profiler": {"enable": True, "finish_hook_ranks": [1]}}
    data = {"global_profiler": {**NSYS, **hook}, "actor_rollout_ref": {"actor": actor}}
    assert ProfilerConfig.build(data).on_finish.ranks == [1]
    data["critic"] = {"profiler": {"enable": True}}
    assert ProfilerConfig.build(data).on_finish.ranks == [1, 0]


def test_finish_hook_fields_have_defaults_and_are_validated() -> None:
    hook = build(file(**NSYS), actor={}).on_finish
    assert hook == FinishConfig()
    assert (hook.command, hook.all_ranks, hook.ranks) == (None, False, None)
    for wrong in ({"finish_hook_cmd": 123}, {"finish_hook_ranks": "0,1"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            build(file(**NSYS, **wrong), actor={})


def test_the_union_of_roles_carries_the_fields_of_the_finish_hook() -> None:
    one = {"ranks": [0], "finish_hook_cmd": "a", "finish_hook_ranks": [0, 1]}
    other = {"ranks": [4], "finish_hook_ranks": [1, 2]}
    config = build(file(**NSYS), actor={**one, "relocate_results": True}, critic=other)
    assert [rank for rank in range(9) if config.wants_rank(rank)] == [0, 4]
    assert [rank for rank in range(9) if config.wants_finish(rank)] == [0, 1, 2]
    assert config.on_finish.command == ["a"]
    assert config.nsight.collect_reports
    everywhere = build(file(**NSYS), actor=one, critic={**other, "finish_hook_all_ranks": True})
    assert [rank for rank in range(9) if everywhere.wants_finish(rank)] == list(range(9))


def test_a_configuration_is_frozen() -> None:
    config = build(file(**NSYS), actor={})
    for section, key in ((config, "all_ranks"), (config.roles["actor"], "ranks")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, [1])
        with pytest.raises(TypeError):
            section[key] = [1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("actor", "ranks"),
    [
        ({"all_ranks": True}, [0, 1, 2]),  # default: where it is profiled
        ({"all_ranks": True, "finish_hook_ranks": [1]}, [1]),
        ({"ranks": [0], "finish_hook_ranks": [1]}, [1]),  # a rank that is not profiled
        ({}, [0]),  # enabled without ranks: rank 0
    ],
)
def test_ranks_on_which_the_finish_hook_runs(actor: dict[str, Any], ranks: list[int]) -> None:
    config = build(file(**NSYS, finish_hook_cmd="echo marker"), actor=actor)
    assert [rank for rank in range(3) if config.wants_finish(rank)] == ranks
