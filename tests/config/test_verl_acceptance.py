"""What verl's own tests ask of its configuration, asked of ours, on a file with all its keys."""

from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

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
    assert not any(block.enable or block.ranks == "all" for block in config.roles.values())


def test_config_init_every_field_of_a_role_is_kept() -> None:
    config = build(file(**NSYS), actor={"ranks": [0, 3]}, critic={"all_ranks": True})
    assert config.tools == ["nsight"]
    assert config.roles["actor"].ranks == [0, 3]
    assert config.roles["critic"].ranks == "all"
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


def test_a_configuration_is_frozen() -> None:
    config = build(file(**NSYS), actor={})
    for section, key in ((config, "ranks"), (config.roles["actor"], "ranks")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, [1])
        with pytest.raises(TypeError):
            section[key] = [1]  # type: ignore[index]
