"""Options of an Ascend capture: their defaults, and what is refused without torch_npu.

How a copy of the model is spread: what is allowed, and what a training of so many ranks has.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_rlprof.config.blocks import (
    IntegratedConfig,
    MemoryConfig,
    NpuConfig,
    NsightConfig,
    RoleConfig,
    ScheduleConfig,
    TorchProfilerConfig,
)
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import explain
from lightning_rlprof.errors import ConfigError
from tests.builders.verl_blocks import new, values

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


def integrated_said(**keys: object) -> str:
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
    text = integrated_said(profile_step_start=2, profile_step_end=end)
    if end < 1:
        assert text == f"profile_step_end={end} should be greater than or equal to 1"
    else:
        assert text.startswith(f"profile_step_end={end} must be greater than profile_step_start=2")
        assert text.endswith("one step needs profile_step_end=3")


@pytest.mark.parametrize("key", ["profile_step_start", "profile_step_end"])
@pytest.mark.parametrize("value", [True, "1", 1.0, None])
def test_a_step_is_a_whole_number(key: str, value: object) -> None:
    expected = f"{key}={value!r} should be a valid integer; write a number without quotes"
    assert integrated_said(**{key: value}) == expected


def test_steps_count_from_one() -> None:
    assert (
        integrated_said(profile_step_start=0)
        == "profile_step_start=0 should be greater than or equal to 1"
    )


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("profile_level", "level3", "did you mean"),
        ("profile_level", 1, "'level_none', 'level0', 'level1' or 'level2'"),
        ("profile_export_type", "texts", "did you mean 'text'?"),
    ],
)
def test_a_word_that_is_not_allowed_is_refused(key: str, value: object, hint: str) -> None:
    text = integrated_said(**{key: value})
    assert text.startswith(f"{key}={value!r} should be ")
    assert hint in text


def test_markers_need_the_device_side() -> None:
    text = integrated_said(mstx=True, profile_with_npu=False)
    assert text.startswith("mstx=True contradicts profile_with_npu=False: markers live in")


def test_a_path_object_is_a_path() -> None:
    assert IntegratedConfig(profile_save_path=Path("a/b")).profile_save_path == "a/b"  # type: ignore[arg-type]


def test_an_empty_path_is_the_default() -> None:
    assert IntegratedConfig(profile_save_path="").profile_save_path == "./profiler_data"


@pytest.mark.parametrize("value", [3, False, 0, [], {}])
def test_a_path_is_text(value: object) -> None:
    assert (
        integrated_said(profile_save_path=value)
        == f"profile_save_path={value} should be text; put it in quotes"
    )


def test_a_path_that_omegaconf_calls_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("integrated:\n  profile_save_path: ???", encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=(
            r"profile_save_path='\?\?\?' is OmegaConf's marker for a missing value: give a "
            r"directory"
        ),
    ):
        ProfilerConfig.build(path)


@pytest.mark.parametrize("path", ["s3://bucket/runs", "hdfs://node/runs", "file:///runs"])
def test_a_url_is_no_path(path: str) -> None:
    text = "is a URL: give a directory, and upload the run afterwards"
    assert integrated_said(profile_save_path=path) == f"profile_save_path='{path}' {text}"


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


def npu_said(data: object) -> str:
    with pytest.raises(ValidationError) as caught:
        NpuConfig.model_validate(data)
    return explain(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mstx_domain_include": ["default"]}, "leaves out the domain 'rlprof', so no stage would"),
        ({"mstx_domain_exclude": ["rlprof"]}, "leaves out the domain 'rlprof', so no stage would"),
        ("l2_cache", "experimental='l2_cache' should be a mapping"),
    ],
)
def test_npu_bad_input_names_its_key(options: object, text: str) -> None:
    said = npu_said({"experimental": options})
    assert said.startswith("experimental=")
    assert text in said
    assert npu_said({"l2_cache": True}).startswith("l2_cache is not a key here")


@pytest.mark.parametrize("name", ["mstx_domain_include", "mstx_domain_exclude"])
def test_domains_that_keep_ours_are_taken(name: str) -> None:
    kept = ["rlprof", "default"] if name.endswith("include") else ["communication"]
    assert NpuConfig(experimental={name: kept}).experimental == {name: kept}


def test_an_option_of_ascend_switches_captures_on() -> None:
    assert not ProfilerConfig.build().captures
    assert ProfilerConfig.build(npu={"experimental": {"l2_cache": True}}).captures
    assert not ProfilerConfig.build(
        npu={"experimental": {"l2_cache": True}}, profile=False
    ).captures


@pytest.mark.parametrize("stack", [True, False])
def test_contents_of_verl_choose_python_stacks(stack: bool) -> None:
    contents = ["npu", "cpu", *(["stack"] if stack else [])]
    actor = {"enable": True, "tool_config": {"npu": {"contents": contents}}}
    assert values(new(actor, tool="npu"))["with_stack"] is stack
    assert ProfilerConfig.build(new(actor, tool="npu")).with_stack is stack


def nsight_said(data: object) -> str:
    with pytest.raises(ValidationError) as caught:
        NsightConfig.model_validate(data)
    return explain(caught.value)


def test_defaults_are_verls() -> None:
    trace = {
        "trace": "cuda,nvtx,cublas,ucx",
        "cuda-memory-usage": "true",
        "cuda-graph-trace": "graph",
    }
    assert NsightConfig().controller == trace
    capture = {"capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}
    assert NsightConfig().worker == {**trace, **capture}


def test_reports_are_in_rays_directory_unless_another_is_given() -> None:
    assert NsightConfig().reports is None
    assert NsightConfig(reports="/data").reports == "/data"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"reports": ""}, "reports='' should have at least 1 character"),
        ({"reports": 3}, "reports=3 should be text"),
        ({"workers": {}}, "workers is not a key here; did you mean 'worker'?"),
    ],
)
def test_nsight_bad_input_names_its_key(data: object, part: str) -> None:
    assert nsight_said(data).startswith(part)


def test_options_are_laid_over_the_defaults() -> None:
    config = NsightConfig.model_validate({"worker": {"trace": "nvtx", "gpu-metrics-device": "all"}})
    assert config.worker["trace"] == "nvtx"
    assert config.worker["gpu-metrics-device"] == "all"
    assert config.worker["kill"] == "none"


def test_null_leaves_an_option_out() -> None:
    assert NsightConfig(controller={"trace": None}).controller["trace"] is None


def test_underscores_in_an_option_are_dashes() -> None:
    config = NsightConfig(controller={"cuda_memory_usage": "false"})
    assert config.controller["cuda-memory-usage"] == "false"
    assert "cuda_memory_usage" not in config.controller


@pytest.mark.parametrize(("value", "quoted"), [(True, "true"), (6, "6"), (False, "false")])
def test_a_value_that_is_no_text_is_refused(value: object, quoted: str) -> None:
    text = nsight_said({"worker": {"cuda-memory-usage": value}})
    expected = f"={value!r} must be text: put it in quotes, '{quoted}'"
    assert text == f"worker.cuda-memory-usage{expected}"


@pytest.mark.parametrize(
    "value", ["a;b", "$(id)", "a b", "`x`", "a|b", "a&", "x>y", "a\nb", "", "*"]
)
def test_what_a_shell_would_interpret_is_refused(value: str) -> None:
    text = nsight_said({"controller": {"trace": value}})
    assert text.startswith(
        f"controller.trace={value!r} may contain only letters, digits and _.,:/@%+=-: a "
        f"shell reads it"
    )


@pytest.mark.parametrize("value", ["cuda,nvtx", "/data/%p", "rlprof.capture@rlprof", "repeat:6"])
def test_usual_values_pass(value: str) -> None:
    assert NsightConfig(controller={"trace": value}).controller["trace"] == value


@pytest.mark.parametrize("key", ["--trace", "a;b", "Trace", 3])
def test_an_option_is_a_long_name_without_dashes_in_front(key: object) -> None:
    assert nsight_said({"controller": {key: "x"}}).startswith(
        f"controller.{key} is not an option of nsys"
    )


def test_a_near_option_is_offered() -> None:
    assert nsight_said({"controller": {"Trace": "x"}}).endswith("; did you mean 'trace'?")


def test_options_are_a_mapping() -> None:
    assert nsight_said({"worker": "nvtx"}).startswith(
        "worker='nvtx' is not a mapping of nsys options, such as"
    )


@pytest.mark.parametrize("value", ["nvtx", None])
def test_the_capture_range_of_workers_is_fixed(value: object) -> None:
    text = nsight_said({"worker": {"capture-range": value}})
    assert text.startswith(f"worker.capture-range={value!r} must stay 'cudaProfilerApi'")


def build(sizes: Any) -> ProfilerConfig:
    return ProfilerConfig.build({"parallel": sizes})


def test_without_it_every_rank_is_a_copy_and_nothing_is_captured() -> None:
    config = ProfilerConfig.build()
    assert config.dump()["parallel"] == {"tp": 1, "cp": 1, "ep": 1, "pp": 1}
    config.check_world(7)
    assert not build({"tp": 2}).captures


def test_sizes_are_dumped_and_read_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPROF__PARALLEL__PP", "2")
    assert build({"tp": 2}).dump()["parallel"] == {"tp": 2, "cp": 1, "ep": 1, "pp": 2}


@pytest.mark.parametrize("world", [4, 8, 1])
def test_copies_that_fill_the_training_are_fine(world: int) -> None:
    build({"tp": 2, "pp": 2}).check_world(world)


@pytest.mark.parametrize("world", [2, 6, 9])
def test_sizes_whose_product_does_not_divide_the_ranks_are_refused(world: int) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"tp": 2, "pp": 2}).check_world(world)
    allowed = {2: "1, 2", 6: "1, 2, 3, 6", 9: "1, 3, 9"}[world]
    assert str(caught.value) == (
        "parallel={tp: 2, pp: 2} needs 4 ranks per replica of the model, but this training has "
        f"{world} (allowed products: {allowed})"
    )


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 0}, "parallel.tp=0"),
        ({"tp": "2"}, "parallel.tp='2'"),
        ({"pp": True}, "parallel.pp=True"),
        ({"dp": 4}, "parallel.dp is not a key here"),
    ],
)
def test_what_is_no_size_is_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(sizes)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("role", "wanted"),
    [
        (RoleConfig(), [0]),
        (RoleConfig(ranks="all"), [0, 1, 2, 3]),
        (RoleConfig(ranks=[1, 3]), [1, 3]),
        (RoleConfig(enable=False, ranks="all"), []),
    ],
)
def test_wanted_ranks(role: RoleConfig, wanted: list[int]) -> None:
    assert [rank for rank in range(4) if role.wants_rank(rank)] == wanted


@pytest.mark.parametrize("value", [True, "all", [0]])
def test_a_role_that_is_not_a_block_is_told_its_keys(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.build({"steps": [1], "roles": {"actor": value}})
    text = f"roles.actor={value!r} is not a block of keys (allowed: enable, ranks, discrete)"
    assert str(caught.value) == text


def test_an_empty_block_means_its_defaults() -> None:
    config = ProfilerConfig.build({"steps": [1], "roles": {"actor": None}})
    assert config.roles == {"actor": RoleConfig()}


ROLES = [
    RoleConfig(),
    RoleConfig(ranks=[2]),
    RoleConfig(ranks=[1, 2]),
    RoleConfig(ranks="all"),
    RoleConfig(enable=False, ranks=[3]),
]


@pytest.mark.parametrize("one", ROLES)
@pytest.mark.parametrize("other", ROLES)
def test_union_wants_what_either_wants(one: RoleConfig, other: RoleConfig) -> None:
    both = one.union(other)
    for rank in range(5):
        assert both.wants_rank(rank) == (one.wants_rank(rank) or other.wants_rank(rank))
    assert both.enable == (one.enable or other.enable)


def test_union_keeps_discrete() -> None:
    one = RoleConfig(discrete=True, ranks=[1])
    assert one.union(RoleConfig(discrete=True)).discrete is True
    assert one.union(RoleConfig(discrete=True, ranks="all")).discrete is True


def test_union_refuses_different_discrete() -> None:
    with pytest.raises(ConfigError, match="discrete=True and discrete=False share a process"):
        RoleConfig(discrete=True).union(RoleConfig(discrete=False))


def test_a_role_that_is_off_has_no_say_about_discrete() -> None:
    off = RoleConfig(enable=False, discrete=True)
    assert off.union(RoleConfig(discrete=False)).discrete is False
    assert RoleConfig(discrete=False).union(off).discrete is False


@pytest.mark.parametrize(
    "off", [{"integrated": {"profile": False}}, {"steps": []}, {"steps": [1], "tools": []}]
)
def test_roles_that_cannot_share_a_capture_may_be_off(off: dict[str, Any]) -> None:
    roles = {"actor": {"discrete": False}, "rollout": {"discrete": True}}
    config = ProfilerConfig.build({"roles": roles, **off})
    assert not config.captures
    assert not config.wants_rank(0)
    with pytest.raises(ConfigError, match="discrete=False and discrete=True share"):
        ProfilerConfig.build({"roles": roles, "steps": [1]})


def said(section: Any, **keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section(**keys)
    return explain(caught.value)


# The dotted key, what it is without being given, the text of a variable, and what it is then.
OPTIONS: list[tuple[str, Any, str, Any]] = [
    ("with_stack", False, "true", True),
    ("torch_profiler.schedule.active", 0, "2", 2),
    ("memory.level", None, "timeline", "timeline"),
    ("nsight.reports", None, "/data/reports", "/data/reports"),
    ("device_time", None, "false", False),
    ("tools", None, "[nsight]", ["nsight"]),
]


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("key", "default", "text", "value"), OPTIONS)
def test_every_option_has_a_default_and_can_be_changed(
    key: str, default: Any, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value_of(ProfilerConfig.build(), key) == default
    monkeypatch.setenv(f"RLPROF__{key.replace('.', '__').upper()}", text)
    changed = ProfilerConfig.build()
    assert value_of(changed, key) == value
    assert ProfilerConfig.build(changed.dump()) == changed


@pytest.mark.parametrize("key", ["skip_first", "wait", "warmup", "repeat"])
def test_a_schedule_needs_active(key: str) -> None:
    assert getattr(ScheduleConfig(**{"active": 1, key: 3}), key) == 3
    text = f"{key}=3 needs active above 0, which turns the schedule on"
    assert said(ScheduleConfig, **{key: 3}) == text


@pytest.mark.parametrize(
    ("key", "value", "level"),
    [
        ("max_entries", 7, "snapshot"),
        ("stack_depth", 8, "snapshot"),
    ],
)
def test_how_memory_is_watched_needs_a_level(key: str, value: float, level: str) -> None:
    for given in ("counters", "timeline", "snapshot"):
        assert getattr(MemoryConfig.model_validate({"level": given, key: value}), key) == value
    expected = f"{key}={value} needs memory.level, such as level: {level}"
    assert said(MemoryConfig, **{key: value}) == expected
    assert MemoryConfig(**MemoryConfig().model_dump()) == MemoryConfig()


@pytest.mark.parametrize(
    ("section", "keys", "part"),
    [
        (ScheduleConfig, {"active": -1}, "active=-1 should be greater than or equal to 0"),
        (ScheduleConfig, {"active": True}, "active=True should be a valid integer"),
        (ScheduleConfig, {"warm_up": 1}, "warm_up is not a key here; did you mean 'warmup'?"),
        (
            TorchProfilerConfig,
            {"schedules": {}},
            "schedules is not a key here; did you mean 'sched",
        ),
        (RoleConfig, {"all_ranks": True}, "all_ranks is not a key here; did you mean 'ranks'?"),
        (TorchProfilerConfig, {"schedule": {"wait": 1}}, "schedule.wait=1 needs active above 0"),
        (MemoryConfig, {"level": "snapshots"}, "level='snapshots' should be 'counters', 'timel"),
        (MemoryConfig, {"max_entries": 0}, "max_entries=0 should be greater than 0"),
        (MemoryConfig, {"stack_depth": 1.5}, "stack_depth=1.5 should be a valid integer"),
    ],
)
def test_bad_input_names_its_key(section: Any, keys: dict[str, Any], part: str) -> None:
    assert said(section, **keys).startswith(part)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("torch_profiler.schedule.actives", "active"),
        ("memory.levels", "level"),
    ],
)
def test_a_near_match_is_offered_below_the_dotted_key(key: str, near: str) -> None:
    nested: Any = 1
    for part in reversed(key.split(".")):
        nested = {part: nested}
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.build(nested)
    assert str(caught.value).startswith(f"{key} is not a key here; did you mean '{near}'?")
