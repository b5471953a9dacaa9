from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_rlprof.config.blocks import IntegratedConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.sources import canonical, from_environment, from_overrides, merge, read
from lightning_rlprof.errors import ConfigError

FIELDS = tuple(ProfilerConfig.model_fields)


def test_a_mapping_is_read_as_it_is() -> None:
    data = {"steps": [1]}
    assert read(data) is data


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_read_as_yaml(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("integrated: {stage: actor_update}\n", encoding="utf-8")
    assert read(kind(path)) == {"integrated": {"stage": "actor_update"}}


def test_an_empty_file_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing\n", encoding="utf-8")
    assert read(path) == {}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"a: [1", "is not valid YAML: while parsing"),
        (b"a: !!set x", "is not valid YAML: expected a mapping node"),
        (b"a: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        (b"a: !!int x", "is not valid YAML: invalid literal for int"),
        (b"- 1\n", "holds list, not a mapping"),
        (b"text", "holds str, not a mapping"),
        (b"\xff\xfe\xff", "cannot be read: "),
    ],
)
def test_a_file_without_a_mapping_is_refused(content: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"configuration '{path}' {part}")
    assert "\n" not in str(caught.value)


def test_null_leaves_an_option_of_nsys_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF__NSIGHT__WORKER__KILL", "null")
    monkeypatch.setenv("RLPROF__NSIGHT__WORKER__TRACE", "none")
    worker = ProfilerConfig.build(None).nsight.worker
    assert (worker["kill"], worker["trace"]) == (None, "none")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*gone.yaml' cannot be read: No such file"):
        read(tmp_path / "gone.yaml")


@pytest.mark.parametrize("make", [str, Path])
def test_no_credential_of_a_url_is_repeated(make: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file") as caught:
        read(make("s3://key:hunter2222@bucket/c.yaml"))
    assert "hunter" not in str(caught.value)
    assert "bucket/c.yaml" in str(caught.value)


def test_another_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mapping or the path of a YAML file, not 3"):
        read(3)  # type: ignore[arg-type]


BLOCK = {"integrated": {"profile": True, "stage": "actor_update"}}


@pytest.mark.parametrize(
    "data",
    [
        BLOCK,
        {"profiler_config": BLOCK},
        {"profiler_config": BLOCK, "megatron_training": {"x": 1}, "rl_config": {}},
    ],
)
def test_mindspeeds_block_with_and_without_its_top(data: dict[str, Any]) -> None:
    assert canonical(data, FIELDS) == BLOCK
    assert canonical(OmegaConf.create(data), FIELDS) == BLOCK  # type: ignore[arg-type]


def test_our_keys_may_stand_in_and_beside_the_block() -> None:
    data = {"profiler_config": {**BLOCK, "steps": [1]}, "custom-stages": ["a"]}
    assert canonical(data, FIELDS) == {**BLOCK, "steps": [1], "custom-stages": ["a"]}


def test_an_empty_block_is_no_configuration() -> None:
    assert canonical({"profiler_config": None}, FIELDS) == {}


def test_a_block_is_a_mapping() -> None:
    with pytest.raises(
        ConfigError, match=r"profiler_config=\[1\] is not a mapping of keys such as integrated"
    ):
        canonical({"profiler_config": [1]}, FIELDS)


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("integratd", "integratd is not a key; did you mean 'integrated'?"),
        ("global_profilr", "global_profilr is not a key; did you mean 'global_profiler'?"),
        ("stage", "stage is one level down: integrated.stage"),
        ("profile-level", "profile-level is one level down: integrated.profile_level"),
    ],
)
def test_a_misspelled_key_in_a_whole_file_is_refused(key: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        canonical({"profiler_config": BLOCK, key: 1}, FIELDS)
    assert str(caught.value) == part


def test_verls_keys_become_ours_and_ours_win() -> None:
    data = {
        "data": {"train_batch_size": 8},
        "global_profiler": {"tool": "nsys", "steps": [1, 2], "save_path": "theirs"},
        "integrated": {"profile_save_path": "ours"},
    }
    origins: dict[str, str] = {}
    assert canonical(data, FIELDS, origins) == {
        "steps": [1, 2],
        "tools": ["nsight"],
        "integrated": {"profile_save_path": "ours"},
    }
    assert origins["steps"] == "global_profiler.steps"


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_the_model_of_a_training_is_not_our_path_of_one(wrap: Any) -> None:
    theirs = {"model": {"path": "${oc.env:NONE}"}, "global_profiler": {"steps": [1]}}
    assert canonical(wrap(theirs), FIELDS) == {"steps": [1]}
    ours = {"model": "config.json", "global_profiler": {"steps": [1]}}
    assert canonical(wrap(ours), FIELDS) == {"steps": [1], "model": "config.json"}


def whole_file() -> dict[str, Any]:
    actor = "actor_rollout_ref.actor.profiler"
    return {
        "actor_rollout_ref": {
            "actor": {
                "optim": {"lr": 1e-6},
                "profiler": {
                    "_target_": "x",
                    "tool": "${oc.select:global_profiler.tool,null}",
                    "enable": True,
                    "ranks": [0, 1],
                    "save_path": "${oc.select:global_profiler.save_path,null}",
                    "tool_config": {"torch": {"contents": ["cuda"], "discrete": False}},
                },
            },
            "rollout": {
                "name": "???",
                "profiler": {
                    "enable": f"${{oc.select:{actor}.enable,false}}",
                    "ranks": f"${{oc.select:{actor}.ranks,[]}}",
                    "tool_config": f"${{oc.select:{actor}.tool_config,null}}",
                },
            },
        },
        "critic": {"model": "${nowhere.to.be.found}", "profiler": {"enable": False}},
        "trainer": {"default_local_dir": "${nowhere}", "total_epochs": 30},
        "global_profiler": {"tool": "torch", "steps": [2], "save_path": "outputs/profile"},
    }


def test_a_whole_file_of_verl_with_references_is_resolved_where_it_is_read() -> None:
    expected = {
        "steps": [2],
        "tools": ["torch_profiler"],
        "integrated": {
            "profile_save_path": "outputs/profile",
            "profile_with_cpu": False,
            "profile_with_npu": True,
            "profile_with_memory": False,
            "profile_record_shapes": False,
            "profile_with_module": False,
        },
        "with_stack": False,
        "roles": {
            "actor": {"enable": True, "ranks": [0, 1], "discrete": False},
            "rollout": {"enable": True, "ranks": [0, 1], "discrete": False},
            "critic": {"enable": False},
        },
    }
    assert canonical(whole_file(), FIELDS) == expected
    assert canonical(OmegaConf.create(whole_file()), FIELDS) == expected  # type: ignore[arg-type]


def test_a_reference_to_nothing_in_a_profiler_block_is_one_line() -> None:
    data = {"global_profiler": {"tool": "torch", "steps": "${nowhere}"}}
    with pytest.raises(ConfigError, match=r"cannot resolve the configuration: .*nowhere"):
        canonical(data, FIELDS)


def test_variables_set_keys() -> None:
    environment = {
        "RLPROF__INTEGRATED__STAGE": "[actor_update, weight_sync]",
        "RLPROF__INTEGRATED__PROFILE": "true",
        "RLPROF__STEPS": "[1, 3]",
        "RLPROF__ROLES__ACTOR__RANKS": "[0]",
        "RLPROF__NSIGHT__WORKER__CUDA_MEMORY_USAGE": "true",
        "RLPROF__NSIGHT__CONTROLLER": "{trace: nvtx}",
        "RLPROF__SUMMARY": "false",
        "RLPROF__TORCH_PROFILER__SCHEDULE__ACTIVE": "2",
        "RLPROF": "1",
        "RLPROF_CONFIG": "x.yaml",
        "HOME": "/",
    }
    values, origins = from_environment(environment, FIELDS)
    assert values == {
        "integrated": {"stage": ["actor_update", "weight_sync"], "profile": True},
        "steps": [1, 3],
        "roles": {"actor": {"ranks": [0]}},
        "nsight": {
            "worker": {"cuda_memory_usage": "true"},
            "controller": {"trace": "nvtx"},
        },
        "summary": False,
        "torch_profiler": {"schedule": {"active": 2}},
    }
    assert origins["integrated.stage"] == "RLPROF__INTEGRATED__STAGE"


@pytest.mark.parametrize(
    ("variable", "part"),
    [
        ("RLPROF__STEP", "; did you mean 'RLPROF__STEPS'?"),
        ("RLPROF__STAGE", "; did you mean 'RLPROF__INTEGRATED__STAGE'?"),
        ("RLPROF__QQQQQQQQQQQQQQQQQQQQQ", "; write RLPROF__ and a key, such as RLPROF__INTEGRATED"),
        ("RLPROF__", ""),
        ("RLPROF__TRAINER__PROFILE_STEPS", ""),
    ],
)
def test_a_variable_that_names_no_key_is_refused(variable: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({variable: "1"}, FIELDS)
    assert str(caught.value).startswith(f"{variable} is not a configuration key{part}")


def test_a_variable_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RLPROF__STEPS='\[1' is not valid YAML: .* line 1"):
        from_environment({"RLPROF__STEPS": "[1"}, FIELDS)


def test_keywords_may_be_flat() -> None:
    values = from_overrides({"stage": "all", "steps": [1], "profile_step_start": 2}, FIELDS)
    assert values == {"steps": [1], "integrated": {"stage": "all", "profile_step_start": 2}}


def test_flat_keywords_join_the_block() -> None:
    for block in ({"mstx": True}, IntegratedConfig(mstx=True)):
        values = from_overrides({"stage": "all", "integrated": block}, FIELDS)
        assert values == {"integrated": {"stage": "all", "mstx": True}}
    assert from_overrides({"stage": "all", "integrated": None}, FIELDS) == {
        "integrated": {"stage": "all"}
    }


def test_no_flat_name_is_also_a_key_of_the_top() -> None:
    assert not set(FIELDS) & set(IntegratedConfig.model_fields)


def test_a_keyword_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage is set twice: as a keyword and in integrated"):
        from_overrides({"stage": "all", "integrated": {"stage": "all"}}, FIELDS)


def test_an_unknown_keyword_has_a_near_match() -> None:
    with pytest.raises(ConfigError, match=r"^stagee is not an option; did you mean 'stage'\?"):
        from_overrides({"stagee": 1}, FIELDS)


def test_merge_replaces_lists_and_joins_mappings() -> None:
    assert merge({"a": {"x": [1, 2]}, "b": 1}, {"a": {"x": [3], "y": 1}}, {"b": {"c": 1}}) == {
        "a": {"x": [3], "y": 1},
        "b": {"c": 1},
    }
    assert merge() == {}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_save_path_at_the_top_is_refused_with_its_place(wrapped: bool) -> None:
    keys = {"profile_save_path": "runs"}
    with pytest.raises(ConfigError, match=r"one level down: integrated\.profile_save_path"):
        ProfilerConfig.build({"profiler_config": keys} if wrapped else keys)
