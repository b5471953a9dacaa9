"""verl's options of its NVIDIA tools, and of its finish hook, as ours."""

from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from tests.builders.verl_blocks import ACTOR, new, said, values


def torch(**keys: Any) -> dict[str, Any]:
    return {"enable": True, "tool_config": {"torch": keys}}


def schedule(found: dict[str, Any]) -> dict[str, Any]:
    start = "torch_profiler.schedule."
    return {key.removeprefix(start): found[key] for key in found if key.startswith(start)}


def test_nsys_is_nsight_and_its_options_arrive() -> None:
    nsys = {
        "discrete": True,
        "controller_nsight_options": {"trace": "nvtx"},
        "worker_nsight_options": {"cuda-memory-usage": "false"},
    }
    config = ProfilerConfig.build(new(tool="nsys", global_tool_config={"nsys": nsys}))
    assert config.tools == ["nsight"]
    assert config.per_stage
    assert config.nsight.controller["trace"] == "nvtx"
    assert config.nsight.worker["cuda-memory-usage"] == "false"
    assert config.nsight.worker["capture-range"] == "cudaProfilerApi"


def test_discrete_where_the_guide_of_verl_has_it() -> None:
    assert values(new(tool="nsys", discrete=True))["discrete"] is True
    nsys = {"nsys": {"discrete": False}}
    text = said(new(tool="nsys", discrete=True, global_tool_config=nsys))
    assert "global_profiler.discrete and global_profiler.global_tool_config.nsys.discrete" in text


def test_stacks_of_torch() -> None:
    config = ProfilerConfig.build(new(torch(contents=["cpu", "cuda", "stack"])))
    assert config.with_stack
    assert not ProfilerConfig.build(new(torch(contents=["cpu"]))).with_stack


def test_a_schedule_of_torch() -> None:
    keys = {"skip_first": 1, "wait": 2, "warmup": 3, "active": 4, "repeat": 5}
    config = ProfilerConfig.build(new(torch(schedule={**keys, "name": "x", "_target_": "y"})))
    assert config.torch_profiler.schedule.model_dump() == keys


@pytest.mark.parametrize("more", [{}, {"active": 0}, {"active": None}])
def test_without_active_there_is_no_schedule_as_in_verl(more: dict[str, Any]) -> None:
    assert schedule(values(new(torch(schedule={"wait": 2, "repeat": 1, **more})))) == {}


@pytest.mark.parametrize(
    ("discrete", "keys", "repeat"),
    [
        (False, {}, 1),
        (False, {"repeat": 0}, 1),
        (False, {"repeat": 2}, 2),
        (True, {}, None),
        (True, {"repeat": 0}, 0),
        (True, {"repeat": 2}, 2),
    ],
)
def test_a_capture_of_the_step_has_one_cycle_unless_more_are_asked_for_as_in_verl(
    discrete: bool, keys: dict[str, Any], repeat: int | None
) -> None:
    found = schedule(values(new(torch(discrete=discrete, schedule={"active": 1, **keys}))))
    assert found.pop("repeat", None) == repeat
    assert found == {"active": 1}


def test_discrete_of_another_tool_does_not_count_for_the_schedule() -> None:
    tools = {"torch": {"schedule": {"active": 1}}, "nsys": {"discrete": True}}
    found = values(new({"enable": True, "tool_config": tools}))
    assert schedule(found) == {"active": 1, "repeat": 1}


def test_the_schedule_of_another_tool_does_not_count() -> None:
    assert schedule(values(new(torch(schedule={"active": 1}), tool="nsys"))) == {}


def test_a_role_without_a_schedule_does_not_disagree_with_one_that_has() -> None:
    critic = {"critic": {"profiler": torch(schedule={"active": 0, "wait": 3})}}
    both = {**new(torch(schedule={"active": 2, "wait": 1})), **critic}
    assert schedule(values(both)) == {"active": 2, "wait": 1, "repeat": 1}
    critic = {"critic": {"profiler": torch(schedule={"active": 3})}}
    assert "schedule.active disagree" in said({**new(torch(schedule={"active": 2})), **critic})


def test_a_wrong_schedule_is_refused_with_verls_key() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.build(new(torch(schedule={"active": "2"})))
    text = f"(set by {ACTOR}.tool_config.torch.schedule.active)"
    assert str(caught.value).startswith("torch_profiler.schedule.active='2' should be")
    assert str(caught.value).endswith(text)


def test_the_memory_tool_writes_snapshots() -> None:
    sizes = {"trace_alloc_max_entries": 7, "stack_depth": 8}
    data = new(tool="torch_memory", global_tool_config={"torch_memory": sizes})
    config = ProfilerConfig.build(data)
    assert config.tools == ["memory"]
    assert config.memory.model_dump() == {
        "level": "snapshot",
        "max_entries": 7,
        "stack_depth": 8,
    }
    actor = {"enable": True, "tool_config": {"torch_memory": {"stack_depth": 9}}}
    assert ProfilerConfig.build({**data, **new(actor, **data["global_profiler"])}).memory == (
        config.memory.model_copy(update={"stack_depth": 9})
    )


def test_sizes_of_snapshots_do_not_count_for_another_tool() -> None:
    data = new(tool="torch", global_tool_config={"torch_memory": {"stack_depth": 8}})
    assert "memory.stack_depth" not in values(data)


@pytest.mark.parametrize("value", [True, False, None])
def test_reports_are_always_collected(value: bool | None) -> None:
    assert values(new(tool="nsys", relocate_results=value)) == values(new(tool="nsys"))


def test_a_command_at_the_end_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.build(new(finish_hook_cmd="upload.sh", finish_hook_ranks=[1]))
    assert str(caught.value) == (
        "global_profiler.finish_hook_cmd='upload.sh' is not supported yet; set it to '' or None, "
        "and pass on_finish=function to ProfilerCallback or start_session"
    )


def test_where_a_command_would_run_means_nothing_without_one() -> None:
    keys = {"finish_hook_all_ranks": True, "finish_hook_ranks": [1]}
    assert values(new(**keys)) == values(new())
