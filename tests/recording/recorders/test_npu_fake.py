"""The fake torch_npu has the signatures of its version and loses what the real one loses."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles.torch_npu.fake import CONTRACT, VERSIONS, Action, Activity, install

OWNERS = {"profile.__init__", "_ExperimentalConfig.__init__"}


def written(function: Any) -> list[str]:
    """Return the parameters of a function as the contract writes them, but for defaults."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fake_has_the_signatures_and_names_of_its_version(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    profiler, mstx = (
        importlib.import_module("torch_npu.profiler"),
        sys.modules["torch_npu.npu"].mstx,
    )
    facts = CONTRACT[version]
    functions = {
        "profile.__init__": profiler.profile,
        "_ExperimentalConfig.__init__": profiler._ExperimentalConfig,
        "tensorboard_trace_handler": profiler.tensorboard_trace_handler,
        "mstx.mark": mstx.mark,
        "mstx.range_start": mstx.range_start,
        "mstx.range_end": mstx.range_end,
    }
    for name, function in functions.items():
        assert written(function) == [
            text.partition("=")[0] + ("=" if "=" in text else "") for text in facts[name]
        ], name
    for enum, members in facts["enums"].items():
        assert set(vars(getattr(profiler, enum))) == set(members)
    assert hasattr(profiler, "HostSystem") == ("HostSystem" in facts["exports"])


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_keyword_is_a_type_error(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    profiler = importlib.import_module("torch_npu.profiler")
    with pytest.raises(TypeError, match="banana"):
        profiler._ExperimentalConfig(banana=1)
    with pytest.raises(TypeError, match="banana"):
        profiler.profile(banana=1)
    with pytest.raises(TypeError, match="banana"):
        profiler.tensorboard_trace_handler("x", banana=1)


GATES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"activities": [Activity.CPU]}, False),
    ({"activities": [Activity.NPU]}, True),
    ({"mstx": False}, False),
    ({"mstx_domain_include": ["default"]}, False),
    ({"mstx_domain_include": ["rlprof"]}, True),
    ({"mstx_domain_exclude": ["rlprof"]}, False),
    ({"mstx_domain_exclude": ["communication"]}, True),
]


@pytest.mark.parametrize(("options", "heard"), GATES)
def test_a_range_is_heard_only_through_all_gates(
    options: dict[str, Any], heard: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = install(monkeypatch)
    profiler, mstx = sys.modules["torch_npu.profiler"], sys.modules["torch_npu.npu"].mstx
    assert mstx.range_start("before", None, "rlprof") == 0
    activities = options.pop("activities", [Activity.CPU, Activity.NPU])
    given = {"mstx": True, "aic_metrics": "ACL_AICORE_NONE", **options}
    profile = profiler.profile(
        activities=activities,
        schedule=lambda number: Action.NONE if number else Action.RECORD_AND_SAVE,
        on_trace_ready=profiler.tensorboard_trace_handler(str(tmp_path), analyse_flag=False),
        experimental_config=profiler._ExperimentalConfig(**given),
    )
    profile.start()
    assert torch.autograd._profiler_enabled()
    assert bool(mstx.range_start("actor_update", None, "rlprof")) is heard
    profile.step()
    profile.stop()
    assert not torch.autograd._profiler_enabled()
    assert device.lost == (["range 1, never ended"] if heard else [])
    assert device.printed == []


def test_a_range_ended_in_another_domain_or_twice_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = install(monkeypatch)
    mstx = sys.modules["torch_npu.npu"].mstx
    mstx.range_end(7, "rlprof")
    assert device.lost == ["range 7 of None, ended in rlprof"]
