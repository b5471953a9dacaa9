import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import ConfigError

build = ProfilerConfig.build


def said(source: Any = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(source, **overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_records_spans_and_captures_nothing() -> None:
    config = build()
    assert config.spans
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
    assert said().endswith("declare others in custom_stages (set by RLPROF__INTEGRATED__STAGE)")
    monkeypatch.setenv("RLPROF__INTEGRATED__STAGE", "all")
    monkeypatch.setenv("RLPROF__INTEGRATED__STGE", "all")
    assert said().startswith("integrated.stge is not a key here; did you mean 'stage'?")
    assert said().endswith("(set by RLPROF__INTEGRATED__STGE)")


def test_a_wrong_key_of_verl_is_named() -> None:
    text = said({"global_profiler": {"tool": "nsys", "steps": [0]}})
    assert text == "steps=[0] holds 0; steps count from 1 (set by global_profiler.steps)"


def test_a_typo_is_one_line_with_a_near_match() -> None:
    start = "integrated.stage='actor_updat' is not a stage; did you mean 'actor_update'? Allowed: "
    assert said(stage="actor_updat").startswith(start)
    assert said({"integrated": {"stage": "actor_updat"}}).startswith(start)


def test_pydantics_own_error_says_the_same() -> None:
    with pytest.raises(ValidationError, match="'actor_updat' is not a stage; did you mean 'actor"):
        ProfilerConfig.model_validate({"integrated": {"stage": "actor_updat"}})
    with pytest.raises(ValidationError, match=r"global_profiler.tool='x' is not a tool"):
        ProfilerConfig.model_validate({"global_profiler": {"tool": "x"}})
    with pytest.raises(ValidationError, match="valid dictionary or instance"):
        ProfilerConfig.model_validate(3)


def test_a_key_of_the_block_at_the_top_is_told_its_place() -> None:
    assert said({"stage": "all"}) == "stage belongs one level down: integrated.stage"


def test_an_unknown_key_at_the_top_is_refused() -> None:
    assert said({"step": [1]}).startswith("step is not a key here; did you mean 'steps'?")
    assert said({"trainer": {"max_epochs": 1}}).startswith("trainer is not a key here (allowed:")


def test_a_key_with_a_line_break_is_told_in_one_line() -> None:
    assert said({"ste\nps": [1]}).startswith("ste\\nps is not a key here; did you mean 'steps'?")
    assert said({"global_profiler": {"a\r\nb": 1}}).startswith("global_profiler.a\\r\\nb is not")


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
    command = blocks["FinishConfig"]["properties"]["command"]["anyOf"]
    assert [choice["type"] for choice in command] == ["string", "array", "null"]
    assert blocks["TorchProfilerConfig"]["additionalProperties"] is False


def test_a_key_of_the_block_at_the_top_is_sent_one_level_down():
    with pytest.raises(ConfigError, match=r"profile belongs one level down: integrated\.profile"):
        ProfilerConfig.build({"profile": True})
