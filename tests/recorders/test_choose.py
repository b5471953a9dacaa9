"""Which recorders a run gets is a table over configuration and device."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.recorders.choose import build_recorders, recorder_names, unmet
from lightning_rlprof.recorders.memory import MemoryRecorder
from lightning_rlprof.recorders.mstx import MstxRecorder
from lightning_rlprof.recorders.nvtx import NvtxRecorder
from lightning_rlprof.recorders.torch_profiler import TorchProfilerRecorder
from lightning_rlprof.testing import make_header
from tests.recorders.fake_mstx import install

ROOT = Path(__file__).parents[2]

LIGHTWEIGHT = {"mstx": True, "profile_level": "level_none", "profile_with_cpu": False}
DEVICE_ONLY = {"profile": True, "profile_with_cpu": False}
HOST_ONLY = {"profile": True, "profile_with_npu": False}

# options, then what cpu, cuda, xpu and npu get
NAMES: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({}, "", "", "", ""),
    ({"profile": False, "mstx": True, "tools": ["memory"]}, "", "", "", ""),
    ({"profile": True}, "torch_profiler", "torch_profiler", "torch_profiler", ""),
    (
        {"mstx": True},
        "torch_profiler",
        "nvtx torch_profiler",
        "torch_profiler",
        "mstx",
    ),
    (LIGHTWEIGHT, "", "nvtx", "", "mstx"),
    (
        {**LIGHTWEIGHT, "profile_with_memory": True},
        "memory",
        "nvtx memory",
        "memory",
        "mstx memory",
    ),
    ({"mstx": True, "profile_level": "level_none"}, "", "nvtx", "", "mstx"),
    ({"profile_level": "level_none"}, "", "", "", ""),
    ({"profile_level": "level1"}, "torch_profiler", "torch_profiler", "torch_profiler", ""),
    ({"profile_level": "level2"}, "torch_profiler", "torch_profiler", "torch_profiler", ""),
    (DEVICE_ONLY, "", "torch_profiler", "torch_profiler", ""),
    (HOST_ONLY, "torch_profiler", "torch_profiler", "torch_profiler", ""),
    (
        {"profile_with_memory": True},
        "torch_profiler memory",
        "torch_profiler memory",
        "torch_profiler memory",
        "memory",
    ),
    ({"tools": ["memory", "nvtx"]}, *["memory nvtx"] * 4),
    ({"tools": ["mstx"], "profile_level": "level_none"}, *["mstx"] * 4),
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
    assert recorder_names(ProfilerConfig.build(**options), device) == expected


LIGHT = "lightweight mode: {} has no markers of its own, spans alone are recorded"
LIGHT_MEMORY = LIGHT.replace("alone", "and memory")
NOTHING = "the configuration leaves nothing to capture on {!r}: spans alone are recorded"
NPU = "torch_npu.profiler captures are not part of this version, spans {} recorded"


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
            "mstx: xpu has no markers of its own, spans and torch_profiler are recorded",
        ),
        ({"profile": True}, "npu", NPU.replace("{}", "alone are")),
        ({"mstx": True}, "npu", NPU.replace("{}", "and mstx are")),
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
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.recorders.choose import recorder_names, unmet
config = ProfilerConfig.build(tools=["nvtx", "mstx", "torch_profiler", "memory"])
for device in ("cpu", "cuda", "npu"):
    assert len(recorder_names(config, device)) == 4 and unmet(config, device) is None
    recorder_names(ProfilerConfig.build(mstx=True), device)
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "lightning_rlprof.recorders.choose" in loaded
    assert loaded & {"torch", "nvtx", "torch_npu"} == set()
    assert {name for name in loaded if name.startswith("lightning_rlprof.recorders.")} == {
        "lightning_rlprof.recorders.base",
        "lightning_rlprof.recorders.choose",
    }


def test_choosing_does_not_depend_on_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvtx", "torch_npu", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    config = ProfilerConfig.build(mstx=True)
    assert recorder_names(config, "cuda") == ("nvtx", "torch_profiler")
    assert recorder_names(config, "npu") == ("mstx",)


def test_each_name_builds_its_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    config = ProfilerConfig.build(tools=["memory", "mstx", "nvtx", "torch_profiler"])
    kinds = [type(recorder) for recorder in build_recorders(config, make_header())]
    assert kinds == [MemoryRecorder, MstxRecorder, NvtxRecorder, TorchProfilerRecorder]


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("profile_with_cpu", "with_cpu", False),
        ("profile_with_npu", "with_device", False),
        ("profile_record_shapes", "record_shapes", True),
        ("profile_with_memory", "with_memory", True),
        ("profile_with_module", "with_modules", True),
    ],
)
def test_every_option_reaches_torch_profiler(key: str, field: str, value: bool) -> None:
    header = dataclasses.replace(make_header(3, 8, "cuda"), role="critic")
    default, changed = (
        build_recorders(
            ProfilerConfig.build(profile=True, tools=["torch_profiler"], **more), header
        )
        for more in ({}, {key: value})
    )
    assert isinstance(default[0], TorchProfilerRecorder)
    assert isinstance(changed[0], TorchProfilerRecorder)
    before, after = default[0]._options, changed[0]._options
    assert (before.device, before.role, before.rank, before.world_size) == ("cuda", "critic", 3, 8)
    assert after == dataclasses.replace(before, **{field: value})
    assert getattr(before, field) is not value
