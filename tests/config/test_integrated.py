from pathlib import Path

import pytest
from pydantic import ValidationError

from lightning_rlprof.config.integrated import IntegratedConfig
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.config.section import explain
from lightning_rlprof.errors import ConfigError

DEFAULTS = {
    "profile": None,
    "mstx": False,
    "stage": "all",
    "profile_save_path": "./profiler_data",
    "profile_export_type": "text",
    "profile_step_start": 1,
    "profile_step_end": 2,
    "profile_level": "level0",
    "profile_with_memory": False,
    "profile_record_shapes": False,
    "profile_with_cpu": True,
    "profile_with_npu": True,
    "profile_with_module": False,
    "profile_analysis": False,
    "profile_ranks": "all",
}


def said(**keys: object) -> str:
    with pytest.raises(ValidationError) as caught:
        IntegratedConfig(**keys)  # type: ignore[arg-type]
    return explain(caught.value)


def test_keys_and_defaults_are_mindspeeds_and_profile_is_unset() -> None:
    assert IntegratedConfig().model_dump() == DEFAULTS


def test_the_whole_block_is_taken_as_users_write_it() -> None:
    block = {**DEFAULTS, "profile": True, "profile_level": "level1", "profile_export_type": "db"}
    assert IntegratedConfig.model_validate(block).model_dump() == block


@pytest.mark.parametrize("end", [1, 2, -1])
def test_an_end_not_after_the_start_is_refused(end: int) -> None:
    text = said(profile_step_start=2, profile_step_end=end)
    if end < 1:
        assert text == f"profile_step_end={end} is no step; steps count from 1"
    else:
        assert text.startswith(f"profile_step_end={end} must be greater than profile_step_start=2")
        assert text.endswith("one step needs profile_step_end=3")


@pytest.mark.parametrize("key", ["profile_step_start", "profile_step_end"])
@pytest.mark.parametrize("value", [True, "1", 1.0, None])
def test_a_step_is_a_whole_number(key: str, value: object) -> None:
    expected = f"{key}={value!r} is no whole number; write a step without quotes"
    assert said(**{key: value}) == expected


def test_steps_count_from_one() -> None:
    assert said(profile_step_start=0) == "profile_step_start=0 is no step; steps count from 1"


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("profile_level", "level3", "did you mean"),
        ("profile_level", 1, "'level_none', 'level0', 'level1' or 'level2'"),
        ("profile_export_type", "texts", "did you mean 'text'?"),
    ],
)
def test_a_word_that_is_not_allowed_is_refused(key: str, value: object, hint: str) -> None:
    text = said(**{key: value})
    assert text.startswith(f"{key}={value!r} should be ")
    assert hint in text


def test_markers_need_the_device_side() -> None:
    text = said(mstx=True, profile_with_npu=False)
    assert text.startswith("mstx=True contradicts profile_with_npu=False: markers live in")


def test_a_path_object_is_a_path() -> None:
    assert IntegratedConfig(profile_save_path=Path("a/b")).profile_save_path == "a/b"  # type: ignore[arg-type]


def test_an_empty_path_is_the_default() -> None:
    assert IntegratedConfig(profile_save_path="").profile_save_path == "./profiler_data"


@pytest.mark.parametrize("value", [3, False, 0, [], {}])
def test_a_path_is_text(value: object) -> None:
    assert said(profile_save_path=value) == f"profile_save_path={value} should be a valid string"


def test_a_path_that_omegaconf_calls_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("integrated:\n  profile_save_path: ???", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"profile_save_path='\?\?\?' is OmegaConf's word for a"):
        ProfilerConfig.build(path)


@pytest.mark.parametrize("path", ["s3://bucket/runs", "hdfs://node/runs", "file:///runs"])
def test_a_url_is_no_path(path: str) -> None:
    text = "is a URL: give a directory, and ship the run from it by on_finish"
    assert said(profile_save_path=path) == f"profile_save_path='{path}' {text}"


def test_a_path_may_begin_with_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/some")
    block = IntegratedConfig(profile_save_path="~/runs")
    assert block.profile_save_path == "/some/runs"
    assert IntegratedConfig(profile_save_path="a~b").profile_save_path == "a~b"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, False),
        ({"mstx": True}, False),
        ({"mstx": True, "profile_level": "level_none"}, False),
        ({"mstx": True, "profile_with_cpu": False}, False),
        ({"profile_level": "level_none", "profile_with_cpu": False}, False),
        ({"mstx": True, "profile_level": "level_none", "profile_with_cpu": False}, True),
    ],
)
def test_lightweight_is_markers_only(keys: dict[str, object], expected: bool) -> None:
    assert IntegratedConfig.model_validate(keys).lightweight is expected
