"""What a configuration needs, by the key that needs it; the recorders are built for real."""

from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.cli import doctor as module
from lightning_rlprof.cli.doctor import Check, Diagnosis, check_needs, diagnose, recordable
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.system.subprocess_python import InterpreterError


def machine(device: str | None = "cpu", **states: Any) -> Diagnosis:
    """A machine on which everything is well but what is named."""
    names = ("torch", "nvtx", "nsys", "torch_npu", "CANN", "msprof", "disk")
    checks = {name: Check(name, states.get(name, "ok"), "found", "mend it") for name in names}
    return Diagnosis(device, checks)


def needs(found: Diagnosis, **options: Any) -> dict[str, Check]:
    found_needs = check_needs(ProfilerConfig.build(None, **options), found)
    return {check.name: check for check in found_needs}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the interpreter that builds the recorders shall say."""
    said: dict[str, Any] = {"refused": {}, "unmet": ""}
    monkeypatch.setattr(module, "ask", lambda *_, **__: said)
    return said


@pytest.mark.deep
def test_recorders_are_built_here_and_say_themselves_what_they_cannot_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ProfilerConfig.build(None, tools=["npu_profiler", "torch_profiler", "memory"])
    monkeypatch.setenv("RLPROF__NO_SUCH_KEY", "1")  # is in the configuration by now, or nowhere
    disk, *tools = check_needs(config, machine())
    assert (disk.name, disk.state) == ("integrated.profile_save_path", "ok")
    assert [check.name for check in tools] == ["tools"] * 3
    assert [check.state for check in tools] == ["missing", "ok", "ok"]
    assert tools[0].message.startswith("npu_profiler: torch_npu on a machine with CANN is required")
    assert tools[1].message == "torch_profiler can record"


def test_markers_that_the_device_does_not_have_are_missing() -> None:
    found = needs(machine(), mstx=True, memory={"level": "timeline"})
    assert found["integrated.mstx"].state == "missing"
    assert found["integrated.mstx"].message.startswith("mstx: cpu has no profiler markers,")
    assert found["integrated.profile_level"].message == "torch_profiler can record"
    assert found["memory.level"].message == "memory can record"


@pytest.mark.parametrize(
    ("recorder", "options", "key"),
    [
        ("device_time", {}, "device_time"),
        ("memory", {"profile_with_memory": True}, "integrated.profile_with_memory"),
        ("memory", {"memory": {"level": "timeline"}}, "memory.level"),
        ("memory", {"memory": {"level": "timeline"}, "tools": ["memory"]}, "tools"),
        ("mstx", {"mstx": True}, "integrated.mstx"),
        ("npu_profiler", {"profile": True}, "integrated.profile"),
        ("nvtx", {"mstx": True}, "integrated.mstx"),
        ("nvtx", {"tools": ["nsight"]}, "tools"),
        ("device_time", {"tools": ["nsight"]}, "device_time"),
    ],
)
def test_each_recorder_is_named_by_the_key_that_asks_for_it(
    answers: dict[str, Any], recorder: str, options: dict[str, Any], key: str
) -> None:
    answers["refused"] = {recorder: "it is too old"}
    assert needs(machine(), **options)[key] == Check(key, "missing", f"{recorder}: it is too old")


@pytest.mark.parametrize("state", ["ok", "missing", "broken"])
def test_nsight_needs_an_nsys_that_hears(answers: dict[str, Any], state: str) -> None:
    answers["refused"] = {"nsight": ""}
    check = needs(machine(nsys=state), tools=["nsight"])["tools"]
    assert check.state == state
    if state != "ok":
        assert (check.message, check.fix) == ("nsight: nsys found", "mend it")


def test_an_analysis_needs_msprof_where_there_is_something_to_analyse(
    answers: dict[str, Any],
) -> None:
    options = {"profile": True, "profile_analysis": True}
    key = "integrated.profile_analysis"
    assert key not in needs(machine(msprof="missing"), **options)
    answers["refused"] = {"npu_profiler": ""}
    assert needs(machine("npu", msprof="missing"), **options)[key].state == "missing"


def test_the_save_path_needs_its_disk(answers: dict[str, Any]) -> None:
    found = needs(machine(disk="broken"))["integrated.profile_save_path"]
    assert (found.state, found.fix) == ("broken", "mend it")


def test_without_torch_every_training_lacks_it() -> None:
    found = needs(machine(None, torch="broken"), mstx=True)
    assert found["every training"].state == "broken"


def test_recorders_that_bring_the_interpreter_down_are_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise InterpreterError("no answer within 180 s")

    monkeypatch.setattr(module, "ask", ask)
    check = needs(machine())["recorders"]
    assert check.message == "could not be tested: no answer within 180 s"


@pytest.mark.parametrize(
    ("device", "states", "names"),
    [
        (None, {}, ["spans"]),
        ("cpu", {"nsys": "missing"}, ["spans", "memory", "torch_profiler"]),
        ("cpu", {}, ["spans", "memory", "torch_profiler", "nvtx", "nsight"]),
        (
            "cuda",
            {"nsys": "broken"},
            ["spans", "memory", "torch_profiler", "device_time"],
        ),
        (
            "npu",
            {"nsys": "missing"},
            ["spans", "memory", "device_time", "mstx", "npu_profiler"],
        ),
    ],
)
def test_what_a_run_can_hold_follows_from_device_and_findings(
    device: str | None, states: dict[str, str], names: list[str]
) -> None:
    assert recordable(machine(device, **states)) == names


def test_the_disk_of_a_diagnosis_is_that_of_the_save_path(tmp_path: Path) -> None:
    found = diagnose(tmp_path)
    names = " ".join(found.checks)
    assert names == "torch Lightning GPU nvtx nsys CUPTI torch_npu CANN msprof disk"
    assert found.checks["disk"].message.endswith(f"free for {tmp_path}")
    assert all(check.message for check in found.checks.values())
    assert found.device in {"cpu", "cuda"}
