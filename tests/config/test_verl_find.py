from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.verl import by_role, find, refuse_unknown
from lightning_rlprof.errors import ConfigError


def test_only_profiling_keys_are_found_as_they_are_written() -> None:
    data: dict[str, Any] = {
        "trainer": {"total_epochs": 3, "profile_steps": [1]},
        "global_profiler": {"tool": "nsys", "global_tool_config": None},
        "critic": {"strategy": "fsdp", "profiler": {"ranks": [1]}},
        "actor_rollout_ref": None,
    }
    assert [(item.key, item.value, item.place) for item in find(data)] == [
        ("trainer.profile_steps", [1], None),
        ("global_profiler.tool", "nsys", None),
        ("critic.profiler.ranks", [1], "critic"),
    ]


def test_a_mapping_without_them_has_none() -> None:
    assert find({"trainer": None, "critic": 3, "data": {}}) == []


def test_keys_of_lightning_and_of_other_profilers_are_not_verls() -> None:
    other = {"_target_": "pytorch_lightning.profilers.SimpleProfiler", "dirpath": "."}
    for profiler in (None, "simple", other):
        data = {"trainer": {"profiler": profiler}, "profiler": other}
        assert find(data) == []
        assert ProfilerConfig.build({**data, "profiler_config": {"steps": [2]}}).steps == [2]
    verls = {"_target_": "verl.utils.profiler.ProfilerConfig", "ranks": [1]}
    assert [item.value for item in find({"profiler": verls})][1:] == [[1]]


def test_an_unknown_key_is_refused_with_what_is_allowed_beside_it() -> None:
    with pytest.raises(ConfigError) as caught:
        find({"global_profiler": {"finish_hook_rank": [0]}})
    text = str(caught.value)
    start = "global_profiler.finish_hook_rank is not a key; did you mean 'finish_hook_ranks'? (all"
    assert text.startswith(start)
    assert "relocate_results" in text


def test_a_block_is_no_value() -> None:
    with pytest.raises(ConfigError, match=r"tool_config.torch.schedule is a block of keys, not a"):
        refuse_unknown(
            find({"critic": {"profiler": {"tool_config": {"torch": {"schedule": 2}}}}}), "torch"
        )


def test_a_roles_own_block_wins_over_a_shared_one() -> None:
    data = {
        "actor_rollout_ref": {
            "ref": {"profiler": {"ranks": [2]}},
            "profiler": {"ranks": [1], "discrete": True},
        }
    }
    roles = {
        name: {item.row.theirs.rpartition(".")[2]: item.value for item in items}
        for name, items in by_role(find(data)).items()
    }
    assert roles == {
        "actor": {"ranks": [1], "discrete": True},
        "rollout": {"ranks": [1], "discrete": True},
        "reference": {"ranks": [2], "discrete": True},
    }
