import json
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from lightning_rlprof.config.blocks import IntegratedConfig, RoleConfig
from lightning_rlprof.config.profiler_config import Options, ProfilerConfig
from lightning_rlprof.config.validation import explain
from lightning_rlprof.errors import ConfigError


def options(**keys: Any) -> Options:
    return Options.model_validate(keys)


def said(**keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        options(**keys)
    return explain(caught.value)


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
        ({"ranks": "all"}, True),
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
        ({"role": "actor", "custom_stages": ["a"]}, False),
        ({"wrap": [{"target": "f", "stage": "actor_update"}]}, False),
        ({"nsight": {"worker": {"trace": "nvtx"}, "reports": "/data"}}, False),
        ({"with_stack": True}, True),
        ({"torch_profiler": {"schedule": {"active": 1}}}, True),
        ({"torch_profiler": {}}, False),
        ({"memory": {"level": "snapshot"}}, True),
        ({"memory": {"level": "snapshot"}, "integrated": {"profile": False}}, False),
        ({"memory": {"level": None}}, False),
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
        ({"steps": []}, "no steps are chosen"),
        ({"tools": []}, "tools is an empty list"),
        (
            {"roles": {"a": {"enable": False}}},
            "no role is enabled (a): set enable or ranks of one",
        ),
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
        ({"all_ranks": True}, "all_ranks is not a key here; did you mean 'ranks'?"),
        (
            {"torch_profiler": {"with_stack": True}},
            "torch_profiler.with_stack is in the wrong place; write with_stack",
        ),
        (
            {"ranks": [1], "integrated": {"profile_ranks": [0]}},
            "ranks=[1] contradicts integrated.profile_ranks=[0]: choose ranks in one place",
        ),
        (
            {"ranks": "all", "integrated": {"profile_ranks": [0]}},
            "ranks='all' contradicts integrated.profile_ranks=[0]: choose ranks in one place",
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
            (
                "tools=['nsight', 'torch_profiler'] contains nsight and torch_profiler, "
                "but only one can record the GPU: keep one, or set "
                "integrated.profile_with_npu: false"
            ),
        ),
        (
            {"tools": ["nsight"], "memory": {"level": "snapshot"}},
            (
                "memory.level='snapshot' contradicts tools=['nsight']: add memory to "
                "tools, or remove the level"
            ),
        ),
        (
            {"tools": ["torch_profiler", "memory"], "integrated": {"mstx": True}},
            "integrated.mstx=True contradicts tools=['torch_profiler', 'memory']: add nvtx",
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
        {"device_time": False},
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
        ({"roles": [1]}, "roles=[1] should be a mapping; write KEY: VALUE"),
        ({"discrete": "yes"}, "discrete='yes' should be a valid boolean; write true or false"),
        ({"steps": [True]}, "steps=[True] holds True"),
        ({"ranks": ["0"]}, "ranks=['0'] holds '0'; ranks are whole numbers without quotes"),
        ({"integrated": 3}, "integrated=3 is not a block of keys (allowed: profile, mstx"),
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


build = ProfilerConfig.build


def profiler_said(source: Any = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(source, **overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_records_spans_and_captures_nothing() -> None:
    config = build()
    assert not config.captures
    assert config == ProfilerConfig()


def test_every_source_gives_the_same(tmp_path: Path) -> None:
    block = {"integrated": {"stage": "actor_update", "profile_step_end": 4}}
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"profiler_config": block}), encoding="utf-8")
    expected = ProfilerConfig.model_validate(block)
    assert expected.captures
    sources = [block, {"profiler_config": block}, OmegaConf.create(block), path, str(path)]
    for source in sources:
        assert build(source) == expected  # type: ignore[arg-type]
    assert build(stage="actor_update", profile_step_end=4) == expected
    assert ProfilerConfig.model_validate(OmegaConf.create({"profiler_config": block})) == expected


@pytest.mark.parametrize(
    "given",
    ["http://localhost:8000/metrics", ["https://a", "http://user:secret@[::1]:30000/x?k=v"]],
)
def test_pages_of_engines_are_one_url_or_several(given: str | list[str]) -> None:
    config = build(engine_metrics=given)
    assert config.engine_metrics == ([given] if isinstance(given, str) else given)
    assert not config.captures


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("localhost:8000", "='localhost:8000' is not a URL of http or https; write it as http://"),
        ("ftp://host/metrics", "='ftp://host/metrics' is not a URL of http or https"),
        ("http://", "='http://' is not a URL"),
        ("http://host:99999/metrics", "='http://host:99999/metrics' is not a URL"),
        ("http://host:x/metrics", "='http://host:x/metrics' is not a URL"),
        ("http://host/a b", "='http://host/a b' is not a URL"),
        ("http://host/\r\nX: y", "is not a URL"),
        ("http://[::1/metrics", "is not a URL"),
        (["http://a", 5], "='5' is not a URL"),
        (["http://a", "http://u:p@a"], "='http://a' is given twice; name each engine once"),
        (8000, "=8000 is neither a URL nor a list of URLs, such as http://localhost:8000/metrics"),
        ({"a": "http://a"}, "={'a': 'http://a'} is neither a URL nor a list of URLs"),
    ],
)
def test_what_is_no_page_of_an_engine_is_refused(given: Any, message: str) -> None:
    assert message in profiler_said(engine_metrics=given)


@pytest.mark.parametrize(
    "url",
    ["htp://user:secret@host/metrics?key=secret", "user:secret@host/metrics", "host?k=secret"],
)
def test_no_message_and_no_file_has_the_password_of_an_engine(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(engine_metrics=[url])
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    config = build(engine_metrics="http://user:secret@host/metrics?key=secret")
    assert config.masked()["engine_metrics"] == ["http://host/metrics?***"]


def test_a_configuration_is_its_own_source() -> None:
    config = build(stage="actor_update")
    assert build(config) is config


def test_keywords_are_laid_over_a_configuration() -> None:
    config = build(build(profile_save_path="x"), stage="actor_update")
    assert config.captures
    assert config.integrated.profile_save_path == "x"
    assert not build(build(profile=False), stage="actor_update").captures


def test_variables_are_laid_over_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF__STEPS", "[2]")
    assert build(build(stage="actor_update")).steps == [2]


def test_order_of_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "integrated: {stage: weight_sync, profile_level: level1, profile_with_memory: true}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("RLPROF__INTEGRATED__STAGE", "actor_generate")
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_LEVEL", "level2")
    config = build(path, stage="actor_update")
    assert config.integrated.stage == "actor_update"
    assert config.integrated.profile_level == "level2"
    assert config.integrated.profile_with_memory is True


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF__INTEGRATED__STAGE", "actor_updat")
    assert profiler_said().endswith(
        "add your own to custom_stages (set by RLPROF__INTEGRATED__STAGE)"
    )
    monkeypatch.setenv("RLPROF__INTEGRATED__STAGE", "all")
    monkeypatch.setenv("RLPROF__INTEGRATED__STGE", "all")
    assert profiler_said().startswith("integrated.stge is not a key here; did you mean 'stage'?")
    assert profiler_said().endswith("(set by RLPROF__INTEGRATED__STGE)")


def test_a_wrong_key_of_verl_is_named() -> None:
    text = profiler_said({"global_profiler": {"tool": "nsys", "steps": [0]}})
    assert text == "steps=[0] holds 0; steps count from 1 (set by global_profiler.steps)"


def test_a_typo_is_one_line_with_a_near_match() -> None:
    start = "integrated.stage='actor_updat' is not a stage; did you mean 'actor_update'? Allowed: "
    assert profiler_said(stage="actor_updat").startswith(start)
    assert profiler_said({"integrated": {"stage": "actor_updat"}}).startswith(start)


def test_pydantics_own_error_says_the_same() -> None:
    with pytest.raises(ValidationError, match="'actor_updat' is not a stage; did you mean 'actor"):
        ProfilerConfig.model_validate({"integrated": {"stage": "actor_updat"}})
    with pytest.raises(ValidationError, match=r"global_profiler.tool='x' is not a tool"):
        ProfilerConfig.model_validate({"global_profiler": {"tool": "x"}})
    with pytest.raises(ValidationError, match="is not a block of keys"):
        ProfilerConfig.model_validate(3)


def test_a_key_of_the_block_at_the_top_is_told_its_place() -> None:
    assert profiler_said({"stage": "all"}) == "stage is one level down: integrated.stage"


def test_an_unknown_key_at_the_top_is_refused() -> None:
    assert profiler_said({"step": [1]}).startswith("step is not a key here; did you mean 'steps'?")
    assert profiler_said({"trainer": {"max_epochs": 1}}).startswith(
        "trainer is not a key here (allowed:"
    )


def test_a_key_with_a_line_break_is_told_in_one_line() -> None:
    assert profiler_said({"ste\nps": [1]}).startswith(
        "ste\\nps is not a key here; did you mean 'steps'?"
    )
    assert profiler_said({"global_profiler": {"a\r\nb": 1}}).startswith(
        "global_profiler.a\\r\\nb is not"
    )


def test_verls_defaults_profile_nothing() -> None:
    profiler = {"enable": False, "all_ranks": False, "ranks": [], "tool": None}
    data = {
        "actor_rollout_ref": {"actor": {"profiler": profiler}, "ref": {"profiler": profiler}},
        "global_profiler": {"tool": None, "steps": None, "save_path": "outputs/profile"},
    }
    config = build(data)
    assert not config.captures
    assert config.integrated.profile_save_path == "outputs/profile"


def test_a_run_of_verl_with_roles() -> None:
    data = {
        "global_profiler": {"tool": "torch", "steps": [1, 2, 5], "profile_continuous_steps": True},
        "actor_rollout_ref": {
            "actor": {"profiler": {"enable": True, "ranks": [0, 1]}},
            "ref": {"profiler": {"enable": True, "ranks": [2]}},
        },
        "critic": {"profiler": {"enable": False, "all_ranks": True}},
    }
    config = build(data)
    assert [rank for rank in range(5) if config.wants_rank(rank)] == [0, 1, 2]
    assert [step for step in range(8) if config.wants_step(step)] == [1, 2, 5]
    assert config.joins_steps
    assert config.tools == ["torch_profiler"]
    assert not build(config, role="critic").captures


@pytest.mark.parametrize(
    "config",
    [
        build(),
        build(stage="actor_update"),
        build(profile=False, stage="actor_update"),
        build(steps=[]),
        build(steps=[1, 2], ranks=[0], discrete=True, tools=["nvtx"]),
        build(roles={"actor": {"ranks": [1], "discrete": True}}, custom_stages=["mine"]),
        build(wrap=[{"target": "f", "by_grad": {"grad": "actor_update"}}]),
        build({"profiler_config": {"integrated": {"profile": True}}}),
    ],
)
def test_a_dump_is_json_and_builds_an_equal_configuration(config: ProfilerConfig) -> None:
    again = build(json.loads(json.dumps(config.dump())))
    assert again == config
    assert again.captures == config.captures
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        build().spans = False  # type: ignore[misc]


def test_the_schema_for_editors_describes_every_key() -> None:
    schema = ProfilerConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    models = [schema, *schema["$defs"].values()]
    keys = [key for model in models for key in model["properties"].items()]
    assert len(keys) > 30
    assert [name for name, key in keys if not key.get("description")] == []


def test_the_schema_for_editors_holds_the_blocks_of_single_tools() -> None:
    blocks = ProfilerConfig.model_json_schema()["$defs"]
    assert set(blocks["ScheduleConfig"]["properties"]) == {
        "skip_first",
        "wait",
        "warmup",
        "active",
        "repeat",
    }
    levels = blocks["MemoryConfig"]["properties"]["level"]["anyOf"][0]["enum"]
    assert levels == ["counters", "timeline", "snapshot"]
    assert blocks["TorchProfilerConfig"]["additionalProperties"] is False


def test_a_key_of_the_block_at_the_top_is_sent_one_level_down():
    with pytest.raises(ConfigError, match=r"profile is one level down: integrated\.profile"):
        ProfilerConfig.build({"profile": True})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {"integrated": {"profile_continuous_steps": False}},
            "integrated.profile_continuous_steps is in the wrong place; "
            "write profile_continuous_steps",
        ),
        (
            {"integrated": {"steps": [1]}},
            "integrated.steps is in the wrong place; write steps",
        ),
        (
            {"npu": {"profile-level": "level1"}},
            "npu.profile-level is in the wrong place; write integrated.profile_level",
        ),
        (
            {"integrated": {"with_stack": True}},
            "integrated.with_stack is in the wrong place; write with_stack",
        ),
        ({"max_entries": 5}, "max_entries is one level down: memory.max_entries"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_its_own(data: dict[str, Any], text: str) -> None:
    for source in (data, {"profiler_config": data}):
        with pytest.raises(ConfigError) as caught:
            build(source)
        assert str(caught.value) == text
