"""Every option reaches torch_npu under its name, or is refused with the versions that have it."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.npu_profiler import build, npu_options
from lightning_rlprof.testing import make_header
from tests.doubles.torch_npu.fake import VERSIONS, Activity, Device, install

NEW = "2.13.0"
OLD = ("2.1.0.post8", "2.5.1")
BEFORE_MSTX = (*OLD, "2.6.0")
BEFORE_NUMA = (*BEFORE_MSTX, "2.7.1", "2.10.0")
ADDS_METRICS = (*BEFORE_MSTX, "2.7.1")
DEEP = {"profile_level": "level1"}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, request.param)
    return request.param


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch, NEW)


def told(**options: Any) -> Any:
    """Return the keywords of a profile, and its experimental configuration."""
    config = ProfilerConfig.build(profile=True, **options)
    profile = npu_options(config, importlib.import_module("torch_npu.profiler"))
    return SimpleNamespace(experimental=profile.pop("experimental_config"), profile=profile)


def given(**options: Any) -> dict[str, Any]:
    experimental: dict[str, Any] = told(**options).experimental.given
    return experimental


KEYS: list[tuple[str, Any, Callable[[Any], Any], Any]] = [
    ("profile_record_shapes", True, lambda found: found.profile["record_shapes"], True),
    ("profile_with_memory", True, lambda found: found.profile["profile_memory"], True),
    ("profile_with_module", True, lambda found: found.profile["with_modules"], True),
    ("profile_with_cpu", False, lambda found: found.profile["activities"], [Activity.NPU]),
    ("profile_with_npu", False, lambda found: found.profile["activities"], [Activity.CPU]),
    ("profile_export_type", "db", lambda found: found.experimental.given["export_type"], "db"),
    ("profile_level", "level1", lambda found: found.experimental.given["profiler_level"], "Level1"),
    ("profile_level", "level2", lambda found: found.experimental.given["profiler_level"], "Level2"),
    ("mstx", True, lambda found: found.experimental.marks, True),
]


@pytest.mark.parametrize(("key", "value", "read", "expected"), KEYS)
def test_each_key_of_the_block_changes_what_torch_npu_is_told_and_nothing_else(
    version: str, key: str, value: Any, read: Any, expected: Any
) -> None:
    default, changed = told(), told(**{key: value})
    assert read(changed) == expected != read(default)
    before, after = {**default.profile}, {**changed.profile}
    differ = {name for name in before if before[name] != after[name]}
    one, other = default.experimental.given, changed.experimental.given
    differ |= {name for name in one if one[name] != other[name]}
    differ -= {"aic_metrics"} if key == "profile_level" else set()
    assert len(differ) == 1


def test_the_defaults_are_those_of_mindspeed_rl(version: str) -> None:
    found = told()
    assert found.profile == {
        "activities": [Activity.CPU, Activity.NPU],
        "record_shapes": False,
        "profile_memory": False,
        "with_modules": False,
        "with_stack": False,
    }
    marks = "msprof_tx" if version in BEFORE_MSTX else "mstx"
    told_of = {"profiler_level", "aic_metrics", "export_type", "data_simplification", marks}
    values = {name: found.experimental.given[name] for name in told_of}
    assert values == {
        "profiler_level": "Level0",
        "aic_metrics": "ACL_AICORE_NONE",
        "export_type": "text",
        "data_simplification": True,
        marks: False,
    }


def test_markers_go_by_the_name_that_the_version_has(version: str) -> None:
    found = given(mstx=True)
    if version in BEFORE_MSTX:
        assert (found["msprof_tx"], "mstx" in found) == (True, False)
    else:
        assert (found["msprof_tx"], found["mstx"]) == (False, True)


@pytest.mark.parametrize(
    ("options", "marks"),
    [
        ({"profile_level": "level_none"}, True),
        ({"tools": ["npu_profiler", "mstx"]}, True),
        ({"tools": ["npu_profiler"]}, False),
        ({}, False),
    ],
)
def test_markers_are_on_where_nothing_else_is_captured_or_the_tool_is_asked_for(
    options: dict[str, Any], marks: bool, device: Device
) -> None:
    assert told(**options).experimental.marks is marks
    assert device.printed == []


@pytest.mark.parametrize(("level", "metrics"), [("level0", "NONE"), ("level2", "PIPE_UTILIZATION")])
def test_counters_of_the_ai_core_are_those_of_mindspeed_rl_without_its_warning(
    level: str, metrics: str, device: Device
) -> None:
    assert given(profile_level=level)["aic_metrics"] == f"ACL_AICORE_{metrics}"
    assert device.printed == []


FURTHER: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
    ({"l2_cache": True}, {}, ("l2_cache", True)),
    ({"record_op_args": True}, {}, ("record_op_args", True)),
    ({"op_attr": True}, {"profile_export_type": "db"}, ("op_attr", True)),
    ({"data_simplification": False}, {}, ("data_simplification", False)),
    ({"gc_detect_threshold": 0.0}, {}, ("gc_detect_threshold", 0.0)),
    ({"aic_metrics": "MemoryUB"}, DEEP, ("aic_metrics", "ACL_AICORE_MEMORYUB")),
    ({"aic_metrics": "MemoryAccess"}, DEEP, ("aic_metrics", "ACL_AICORE_MEMORYACCESS")),
    ({"host_sys": ["cpu", "mem"]}, {}, ("host_sys", ["cpu", "mem"])),
    ({"sys_io": True}, {}, ("sys_io", True)),
    ({"sys_interconnection": True}, {}, ("sys_interconnection", True)),
    ({"mstx_domain_include": ["rlprof"]}, {"mstx": True}, ("mstx_domain_include", ["rlprof"])),
    ({"mstx_domain_exclude": ["comms"]}, {"mstx": True}, ("mstx_domain_exclude", ["comms"])),
]


@pytest.mark.parametrize(("npu", "more", "expected"), FURTHER)
def test_options_that_every_version_has_arrive(
    version: str, npu: dict[str, Any], more: dict[str, Any], expected: tuple[str, Any]
) -> None:
    assert given(npu={"experimental": npu}, **more)[expected[0]] == expected[1]


def test_python_stacks_arrive(version: str) -> None:
    assert told(with_stack=True).profile["with_stack"] is True


def test_a_member_that_the_version_does_not_know_is_refused(version: str) -> None:
    npu = {"experimental": {"host_sys": ["numa"]}}
    if version not in BEFORE_NUMA:
        assert given(npu=npu)["host_sys"] == ["numa"]
        return
    with pytest.raises(RecorderError, match="host_sys NUMA is not known to the installed torch_n"):
        told(npu=npu)


USELESS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"op_attr": True}, {}, "torch_npu makes False of it; needs integrated.profile_ex"),
    ({"aic_metrics": "Memory"}, {}, "needs integrated.profile_level: level1 or level2"),
    ({"mstx_domain_exclude": ["default"]}, {}, "needs integrated.mstx: true"),
    ({"gc_detect_threshold": 2.0}, {"profile_with_cpu": False}, "profile_with_cpu: true"),
    ({"l2_cache": True}, {"profile_with_npu": False}, "npu.experimental.l2_cache needs integrated"),
    ({"aic_metrics": "Memory"}, {"profile_with_npu": False}, "npu.experimental.aic_metrics needs"),
]


@pytest.mark.parametrize(("npu", "more", "text"), USELESS)
def test_what_torch_npu_would_reset_is_refused_before_training(
    npu: dict[str, Any], more: dict[str, Any], text: str, device: Device
) -> None:
    with pytest.raises(RecorderError) as caught:
        told(npu={"experimental": npu}, **more)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("npu", "text"),
    [
        ({"l2": True}, "npu.experimental.l2 is not known to the installed torch_npu"),
        ({"aic_metrics": "pipes"}, "npu.experimental.aic_metrics pipes is not known"),
        ({"host_sys": "gpu"}, "npu.experimental.host_sys GPU is not known"),
        ({"export_type": "db"}, "npu.experimental.export_type is chosen by integrated.profile_ex"),
        ({"l2_cache": "yes"}, "npu.experimental.l2_cache='yes' is neither true nor false"),
    ],
)
def test_what_torch_npu_does_not_know_is_refused_before_training(
    npu: dict[str, Any], text: str, device: Device
) -> None:
    with pytest.raises(RecorderError) as caught:
        told(npu={"experimental": npu})
    assert str(caught.value).startswith(text)


def test_deeper_levels_without_counters_are_refused_where_torch_npu_adds_them(
    version: str,
) -> None:
    if version in ADDS_METRICS:
        with pytest.raises(RecorderError, match="torch_npu makes 'ACL_AICORE_PIPE_UTILIZATION' of"):
            told(npu={"experimental": {"aic_metrics": "AiCoreNone"}}, **DEEP)
    else:
        found = given(npu={"experimental": {"aic_metrics": "AiCoreNone"}}, **DEEP)
        assert found["aic_metrics"] == "ACL_AICORE_NONE"


def test_options_are_checked_when_the_recorder_is_built(device: Device) -> None:
    header = replace(make_header(), device="npu")
    with pytest.raises(RecorderError, match="op_attr"):
        build(ProfilerConfig.build(profile=True, npu={"experimental": {"op_attr": True}}), header)
    assert device.profiles == []
