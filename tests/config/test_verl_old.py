"""The keys of verl up to 0.5, below its trainer."""

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.sources import merge
from lightning_rlprof.integrations.ray import ray_runtime_env
from tests.builders.verl_blocks import values


def test_the_old_keys_of_the_trainer() -> None:
    data = {
        "trainer": {
            "total_epochs": 30,
            "profile_steps": [1, 2, 5],
            "profile_continuous_steps": True,
            "controller_nsight_options": {"trace": "cuda"},
            "worker_nsight_options": {"trace": "nvtx"},
        }
    }
    assert values(data) == {
        "steps": [1, 2, 5],
        "profile_continuous_steps": True,
        "nsight.controller": {"trace": "cuda"},
        "nsight.worker": {"trace": "nvtx"},
        "tools": ["nsight"],
    }


def test_the_old_options_of_nsys_choose_it_where_ascend_is_not_spoken_of() -> None:
    trainer = {"profile_steps": [1], "worker_nsight_options": {"trace": "nvtx"}}
    assert values({"trainer": trainer})["tools"] == ["nsight"]
    ascend = {"profile_steps": [1], "npu_profile": {"options": {"level": "level1"}}}
    assert "tools" not in values({"trainer": ascend})
    named = {"trainer": trainer, "global_profiler": {"tool": "torch", "steps": [1]}}
    assert values(named)["tools"] == ["torch_profiler"]


@pytest.mark.parametrize(
    ("device", "is_ascend"),
    [
        ({"device": "cuda"}, False),
        ({"device": "npu"}, True),
        ({}, False),
        ({"device": None}, False),
    ],
)
def test_the_old_file_has_options_for_every_device_and_the_device_chooses(
    device: dict[str, Any], is_ascend: bool
) -> None:
    options = {"save_path": "./p", "with_npu": True, "analysis": True}
    nsight = {"controller_nsight_options": {"trace": "cuda"}, "worker_nsight_options": {}}
    trainer = {"npu_profile": {"options": options}, "profile_steps": [1], **nsight, **device}
    config = ProfilerConfig.build({"trainer": trainer})
    assert config.tools == (None if is_ascend else ["nsight"])
    block = config.integrated
    assert (block.mstx, block.profile_analysis, block.profile_save_path == "./p") == (
        (is_ascend,) * 3
    )


def test_the_old_options_for_ascend_without_the_device_need_no_markers() -> None:
    trainer = {"profile_steps": [1], "npu_profile": {"options": {"with_npu": False}}}
    assert not ProfilerConfig.build({"trainer": trainer}).integrated.mstx


def test_the_old_options_for_ascend() -> None:
    options = {
        "save_path": "./p",
        "roles": ["rollout_generate", "actor_update"],
        "level": "level1",
        "with_memory": True,
        "record_shapes": False,
        "with_npu": True,
        "with_cpu": False,
        "with_module": True,
        "with_stack": True,
        "analysis": True,
    }
    assert values({"trainer": {"npu_profile": {"options": options}}}) == {
        "steps": [],
        "integrated.mstx": True,
        "integrated.profile_save_path": "./p",
        "integrated.stage": ["actor_generate", "actor_update"],
        "integrated.profile_level": "level1",
        "integrated.profile_with_memory": True,
        "integrated.profile_record_shapes": False,
        "integrated.profile_with_npu": True,
        "integrated.profile_with_cpu": False,
        "integrated.profile_with_module": True,
        "with_stack": True,
        "integrated.profile_analysis": True,
    }


def test_roles_of_the_old_options_that_are_no_list_are_left_to_validation() -> None:
    data = {"trainer": {"npu_profile": {"options": {"roles": "all"}}}}
    assert values(data)["integrated.stage"] == "all"
    data = {"trainer": {"npu_profile": {"options": {"roles": [3]}}}}  # type: ignore[dict-item]
    assert values(data)["integrated.stage"] == [3]


GUIDE: dict[str, Any] = {
    "steps": {"trainer": {"profile_steps": [1, 2, 5]}},
    "device": {"trainer": {"device": "cuda"}},
    "controller": {"trainer": {"controller_nsight_options": {"trace": "cuda"}}},
    "worker": {"trainer": {"worker_nsight_options": {"trace": "nvtx"}}},
    "shared discrete": {"actor_rollout_ref": {"profiler": {"discrete": True}}},
    "discrete": {"actor_rollout_ref": {"actor": {"profiler": {"discrete": True}}}},
    "ranks": {"actor_rollout_ref": {"actor": {"profiler": {"ranks": [0, 3]}}}},
    "critic": {"critic": {"profiler": {"discrete": True, "all_ranks": True}}},
}


@pytest.mark.parametrize("names", [*combinations(GUIDE, 1), *combinations(GUIDE, 2), tuple(GUIDE)])
@pytest.mark.parametrize("by_hydra", [False, True])
def test_every_key_of_the_nsight_guide_means_nsight_alone_and_with_others(
    names: tuple[str, ...], by_hydra: bool
) -> None:
    data = merge(*(GUIDE[name] for name in names))
    if by_hydra:
        words = [f"{key}={json.dumps(value)}" for key, value in leaves(data)]
        data = OmegaConf.from_dotlist(words)
    config = ProfilerConfig.build(data)
    steps = "steps" in names
    assert config.steps == ([1, 2, 5] if steps else None if names == ("device",) else [])
    assert (config.tools == ["nsight"]) == bool({*names} - {"device", "ranks"})
    assert ("controller" in names) == (config.nsight.controller["trace"] == "cuda")
    assert ("worker" in names) == (config.nsight.worker["trace"] == "nvtx")
    roles = {"ranks", "critic"} & {*names}
    assert config.captures == (steps and bool(roles or not config.roles))
    if "ranks" in names:
        assert config.roles["actor"].ranks == [0, 3]
    if config.captures and roles:
        assert config.per_stage == ("critic" in names or "discrete" in names)
        assert config.wants_rank(7) == ("critic" in names)
    for process in ("controller", "worker"):
        assert bool(ray_runtime_env(config, process)) == config.captures


def leaves(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


@pytest.mark.parametrize("key", ["global_profiler", "profiler"])
def test_the_newer_nsight_guide_names_no_tool(key: str) -> None:
    role = {"profiler": {"enable": True, "all_ranks": True}}
    block = {"steps": [1, 2], "discrete": False}
    config = ProfilerConfig.build({key: block, "actor_rollout_ref": {"actor": role}})
    assert (config.tools, config.steps, config.per_stage) == (["nsight"], [1, 2], False)
    assert config.wants_rank(9)


def test_the_device_alone_captures_nothing_and_decides_nothing_beside_other_blocks() -> None:
    trainer = {"trainer": {"device": "npu"}}
    assert not ProfilerConfig.build(trainer).captures
    block = {"profiler_config": {"integrated": {"stage": "actor_update"}}}
    config = ProfilerConfig.build(trainer | block)
    assert config.captures
    assert config.tools is None
