"""Which recorders a run gets is a table over configuration and device."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.base import build_recorders, recorder_names, unmet
from lightning_rlprof.recording.recorders.memory import MemoryRecorder
from lightning_rlprof.recording.recorders.mstx import MstxRecorder
from lightning_rlprof.recording.recorders.npu_profiler import NpuProfilerRecorder
from lightning_rlprof.recording.recorders.nsight import NsightRecorder
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder
from lightning_rlprof.recording.recorders.torch_profiler import TorchProfilerRecorder
from lightning_rlprof.testing import make_header
from tests.doubles.torch_npu.fake import install
from tests.places import ROOT

LIGHTWEIGHT = {"mstx": True, "profile_level": "level_none", "profile_with_cpu": False}
DEVICE_ONLY = {"profile": True, "profile_with_cpu": False}
HOST_ONLY = {"profile": True, "profile_with_npu": False}

# options, then what cpu, cuda, xpu and npu get
NAMES: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({}, "", "", "", ""),
    ({"profile": False, "mstx": True, "tools": ["nvtx", "memory"]}, "", "", "", ""),
    ({"profile": True}, *["torch_profiler"] * 3, "npu_profiler"),
    (
        {"mstx": True},
        "torch_profiler",
        "nvtx torch_profiler",
        "torch_profiler",
        "npu_profiler mstx",
    ),
    (LIGHTWEIGHT, "", "nvtx", "", "npu_profiler mstx"),
    (
        {**LIGHTWEIGHT, "profile_with_memory": True},
        "memory",
        "nvtx memory",
        "memory",
        "npu_profiler mstx memory",
    ),
    ({"mstx": True, "profile_level": "level_none"}, "", "nvtx", "", "npu_profiler mstx"),
    ({"profile_level": "level_none"}, "", "", "", "npu_profiler mstx"),
    ({"profile_level": "level_none", "profile_with_npu": False}, "", "", "", "npu_profiler"),
    ({"profile_level": "level1"}, *["torch_profiler"] * 3, "npu_profiler"),
    ({"profile_level": "level2"}, *["torch_profiler"] * 3, "npu_profiler"),
    (DEVICE_ONLY, "", "torch_profiler", "torch_profiler", "npu_profiler"),
    (HOST_ONLY, *["torch_profiler"] * 3, "npu_profiler"),
    (
        {"profile_with_memory": True},
        "torch_profiler memory",
        "torch_profiler memory",
        "torch_profiler memory",
        "npu_profiler memory",
    ),
    (
        {"memory": {"level": "snapshot"}},
        "torch_profiler memory",
        "torch_profiler memory",
        "torch_profiler memory",
        "npu_profiler memory",
    ),
    ({"memory": {"level": "counters"}, "profile": False}, "", "", "", ""),
    ({"tools": []}, "", "", "", ""),
    ({"tools": ["memory", "nvtx"]}, *["memory nvtx"] * 4),
    ({"tools": ["nsight"]}, *["nsight nvtx"] * 4),
    ({"tools": ["memory", "nvtx", "nsight"]}, *["nsight nvtx memory"] * 4),
    ({"tools": ["memory"], "memory": {"level": "timeline"}}, *["memory"] * 4),
    ({"tools": ["mstx"], "profile_level": "level_none"}, *["mstx"] * 4),
    ({"tools": ["memory", "mstx", "npu_profiler"]}, *["npu_profiler mstx memory"] * 4),
]


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        (options, device, tuple(names.split()))
        for options, *found in NAMES
        for device, names in zip(("cpu", "cuda", "xpu", "npu"), found, strict=True)
    ],
)
def test_recorders_follow_from_configuration_and_device(
    options: dict[str, Any], device: str, expected: tuple[str, ...]
) -> None:
    assert recorder_names(ProfilerConfig.build(**options, device_time=False), device) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"cpu": False, "mps": False, "cuda": True, "xpu": True, "npu": True}),
        ({"device_time": True}, dict.fromkeys(("cpu", "mps", "cuda", "xpu", "npu"), True)),
        ({"device_time": False}, dict.fromkeys(("cpu", "mps", "cuda", "xpu", "npu"), False)),
    ],
)
def test_device_time_is_measured_wherever_there_is_an_accelerator(
    options: dict[str, Any], expected: dict[str, bool]
) -> None:
    for capture in ({}, {"tools": ["nvtx"]}):
        config = ProfilerConfig.build(**options, **capture)
        names = {device: recorder_names(config, device) for device in expected}
        assert {device: "device_time" in found for device, found in names.items()} == expected


@pytest.mark.parametrize(
    ("options", "rank", "expected"),
    [
        ({"ranks": [1], "tools": ["nsight"]}, 0, ("device_time",)),
        ({"ranks": [1], "tools": ["nsight"]}, 1, ("device_time", "nsight", "nvtx")),
        ({"roles": {"actor": {}}, "role": "critic", "tools": ["nvtx"]}, 0, ("device_time",)),
        ({"profile_ranks": [2], "device_time": False, "profile_with_memory": True}, 1, ()),
    ],
)
def test_a_rank_that_is_not_captured_only_measures_device_time(
    options: dict[str, Any], rank: int, expected: tuple[str, ...]
) -> None:
    assert recorder_names(ProfilerConfig.build(**options), "cuda", rank) == expected


def test_nsight_stands_before_nvtx_so_that_ranges_begin_inside_the_report() -> None:
    config = ProfilerConfig.build(tools=["nvtx", "nsight"])
    assert recorder_names(config, "cuda") == ("device_time", "nsight", "nvtx")


LIGHT = "lightweight mode: {} has no profiler markers, only spans are recorded"
LIGHT_MEMORY = LIGHT.replace("only spans", "spans and memory")
NOTHING = "the configuration enables no capture on {!r}: only spans are recorded"


@pytest.mark.parametrize(
    ("options", "device", "text"),
    [
        ({}, "cpu", None),
        ({}, "npu", None),
        ({"profile": True}, "cpu", None),
        ({"mstx": True}, "cuda", None),
        (LIGHTWEIGHT, "cpu", LIGHT),
        (LIGHTWEIGHT, "mps", LIGHT),
        (LIGHTWEIGHT, "cuda", None),
        (LIGHTWEIGHT, "npu", None),
        ({**LIGHTWEIGHT, "profile_with_memory": True}, "cpu", LIGHT_MEMORY),
        (
            {"mstx": True},
            "xpu",
            "mstx: xpu has no profiler markers, spans and torch_profiler are recorded",
        ),
        ({"profile": True}, "npu", None),
        ({"mstx": True}, "npu", None),
        (DEVICE_ONLY, "cpu", NOTHING),
        (DEVICE_ONLY, "cuda", None),
        ({"profile_level": "level_none"}, "cuda", NOTHING),
        ({"profile_level": "level_none", "tools": ["memory"]}, "npu", None),
    ],
)
def test_what_has_no_recorder_is_told(
    options: dict[str, Any], device: str, text: str | None
) -> None:
    expected = None if text is None else text.format(device)
    assert unmet(ProfilerConfig.build(**options), device) == expected


def test_choosing_imports_no_tool_and_no_torch() -> None:
    script = """
import sys
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.base import recorder_names, unmet
config = ProfilerConfig.build(tools=["nsight", "mstx", "memory"], device_time=True)
for device in ("cpu", "cuda", "npu"):
    assert len(recorder_names(config, device)) == 5 and unmet(config, device) is None
    recorder_names(ProfilerConfig.build(mstx=True), device)
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "lightning_rlprof.recording.recorders.base" in loaded
    assert loaded & {"torch", "nvtx", "torch_npu"} == set()
    assert {
        name for name in loaded if name.startswith("lightning_rlprof.recording.recorders.")
    } == {
        "lightning_rlprof.recording.recorders.base",
    }


def test_choosing_does_not_depend_on_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvtx", "torch_npu", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    config = ProfilerConfig.build(mstx=True)
    assert recorder_names(config, "cuda") == ("device_time", "nvtx", "torch_profiler")
    assert recorder_names(config, "npu") == ("device_time", "npu_profiler", "mstx")


def test_each_name_builds_its_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    names = ["npu_profiler", "mstx", "memory", "nvtx", "torch_profiler"]
    config = ProfilerConfig.build(tools=names)
    kinds = [type(recorder) for recorder in build_recorders(config, make_header())]
    assert kinds == [
        NpuProfilerRecorder,
        MstxRecorder,
        MemoryRecorder,
        NvtxRecorder,
        TorchProfilerRecorder,
    ]
    nsight = build_recorders(ProfilerConfig.build(tools=["nsight"]), make_header())
    assert [type(recorder) for recorder in nsight] == [NsightRecorder, NvtxRecorder]


def test_a_rank_that_is_not_captured_builds_no_recorder() -> None:
    config = ProfilerConfig.build(tools=["nvtx"], ranks=[1])
    assert build_recorders(config, make_header(0, 2)) == []
    assert len(build_recorders(config, make_header(1, 2))) == 1


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("profile_with_cpu", "activities", {torch.profiler.ProfilerActivity.CUDA}),
        ("profile_with_npu", "activities", {torch.profiler.ProfilerActivity.CPU}),
        ("profile_record_shapes", "record_shapes", True),
        ("profile_with_memory", "profile_memory", True),
        ("profile_with_module", "with_stack", True),
    ],
)
def test_every_option_reaches_torch_profiler(key: str, field: str, value: Any) -> None:
    header = dataclasses.replace(make_header(3, 8, "cuda"), role="critic")
    default, changed = (
        build_recorders(
            ProfilerConfig.build(profile=True, tools=["torch_profiler"], device_time=False, **more),
            header,
        )
        for more in ({}, {key: value is True})
    )
    assert isinstance(default[0], TorchProfilerRecorder)
    assert isinstance(changed[0], TorchProfilerRecorder)
    before, after = default[0].new_profiler(), changed[0].new_profiler()
    assert getattr(after, field) == value
    assert getattr(before, field) != value
