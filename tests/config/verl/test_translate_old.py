"""The keys of verl up to 0.5, below its trainer."""

from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
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
    for more in (
        {"trainer": {"profile_steps": [1], "npu_profile": {"options": {"level": "level1"}}}},
        {"trainer": {"profile_steps": [1], "worker_nsight_options": None}},
    ):
        assert "tools" not in values(more)
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
        "npu.with_stack": True,
        "integrated.profile_analysis": True,
    }


def test_roles_of_the_old_options_that_are_no_list_are_left_to_validation() -> None:
    data = {"trainer": {"npu_profile": {"options": {"roles": "all"}}}}
    assert values(data)["integrated.stage"] == "all"
    data = {"trainer": {"npu_profile": {"options": {"roles": [3]}}}}  # type: ignore[dict-item]
    assert values(data)["integrated.stage"] == [3]
