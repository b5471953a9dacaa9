"""What a machine can record."""

from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.cli.doctor import Check, Diagnosis, diagnose, recordable


def machine(device: str | None = "cpu", **states: Any) -> Diagnosis:
    """A machine on which everything is well but what is named."""
    names = ("torch", "nvtx", "nsys", "torch_npu", "CANN", "msprof", "disk")
    checks = {name: Check(name, states.get(name, "ok"), "found", "mend it") for name in names}
    return Diagnosis(device, checks)


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


def test_the_disk_of_a_diagnosis_is_that_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = diagnose()
    names = " ".join(found.checks)
    assert names == "torch Lightning GPU nvtx nsys CUPTI torch_npu CANN msprof disk"
    assert found.checks["disk"].message.endswith("free for profiler_data")
    assert all(check.message for check in found.checks.values())
    assert found.device in {"cpu", "cuda"}
