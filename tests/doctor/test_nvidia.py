"""What NVIDIA needs, on directories as the driver makes them and on the fake nsys."""

from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.doctor import nvidia
from lightning_rlprof.doctor.check import Check
from tests.doubles.nsys.on_path import FakeNsys

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build"
ARM = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build"
H100 = {"kind": "cuda", "count": 2, "name": "NVIDIA H100", "cuda": "12.8"}
NVTX = Check("nvtx", "ok", "0.2.17")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the driver, not yet there."""
    monkeypatch.setattr(nvidia, "_PROC", tmp_path / "nvidia")
    monkeypatch.setattr(nvidia, "_STATUS", tmp_path / "status")
    return tmp_path / "nvidia"


def put(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("text", "number"), [(CLOSED, "535.104.05"), (OPEN, "560.35.03"), (ARM, "570.86.15")]
)
def test_devices_are_told_with_the_driver_below_them(proc: Path, text: str, number: str) -> None:
    put(proc, version=text)
    assert nvidia.check_gpu(H100) == Check("GPU", "ok", f"2 x NVIDIA H100, driver {number}")


def test_a_driver_without_a_word_is_still_a_driver(proc: Path) -> None:
    assert nvidia.check_gpu(H100).says == "2 x NVIDIA H100, driver not told"
    put(proc, version="?")
    assert nvidia.check_gpu(H100).says == "2 x NVIDIA H100, driver of unknown version"


def test_without_a_driver_there_is_nothing_to_mend_but_a_way_to_get_it(proc: Path) -> None:
    check = nvidia.check_gpu({"kind": "cpu", "cuda": None})
    assert (check.state, check.says) == ("missing", "no NVIDIA driver here")
    assert "--gpus all" in check.cure


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"kind": "cpu", "cuda": None}, "driver 560.35.03, but this torch is built without CUDA"),
        ({"kind": "cpu", "cuda": "12.8"}, "driver 560.35.03, but torch finds no device"),
        ({}, "driver 560.35.03, but torch finds no device"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_broken(
    proc: Path, answer: dict[str, Any], says: str
) -> None:
    put(proc, version=OPEN)
    check = nvidia.check_gpu(answer)
    assert (check.state, check.says) == ("broken", says)
    assert check.cure


def test_nvtx_is_looked_for_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "installed", lambda name: {"nvtx": "0.2.14"}[name])
    assert nvidia.check_nvtx() == Check("nvtx", "ok", "0.2.14")
    monkeypatch.setattr(nvidia, "installed", lambda name: None)
    assert nvidia.check_nvtx().state == "missing"


@pytest.mark.parametrize(
    ("version", "nvtx", "state"),
    [
        ("2022.4.2.1", "0.2.17", "broken"),
        ("2023.4.4.54", "0.2.12", "broken"),
        ("2023.4.4.54", "0.2.11", "ok"),
        ("2024.5.1.1", "0.2.17", "unknown"),
        ("2024.5.1.1", "0.2.8", "ok"),
        ("2025.3.1.90", "0.2.17", "ok"),
    ],
)
def test_an_nsys_that_hears_nothing_of_nvtx_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, nvtx: str, state: str
) -> None:
    fake = FakeNsys(tmp_path, monkeypatch, version=version)
    check = nvidia.check_nsys(Check("nvtx", "ok", nvtx))
    assert check.state == state
    assert check.says.startswith(f"{version[:6]} at {fake.bin}/nsys")
    assert bool(check.cure) == (state != "ok")
    assert nvidia.check_nsys(Check("nvtx", "missing", "not installed")).state == "ok"


def test_an_nsys_that_is_not_there_or_does_not_speak_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNsys(tmp_path, monkeypatch, version="unreadable")
    assert nvidia.check_nsys(NVTX).state == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    check = nvidia.check_nsys(NVTX)
    assert (check.state, check.says) == ("missing", "not on PATH: no Nsight Systems reports")


@pytest.mark.parametrize(
    ("params", "rights", "state"),
    [
        ("RmProfilingAdminOnly: 0", "0", "ok"),
        ("RmProfilingAdminOnly: 1", "00000000a80425fb", "broken"),
        ("RmProfilingAdminOnly: 1", "000001ffffffffff", "ok"),
        ("RmProfilingAdminOnly: 1", f"{1 << 21:016x}", "ok"),
        ("RmProfilingAdminOnly: 1", f"{1 << 38:016x}", "ok"),
        ("Mobile: 1", "0", "unknown"),
    ],
)
def test_who_may_read_counters_is_as_driver_and_rights_say(
    proc: Path, params: str, rights: str, state: str
) -> None:
    put(proc, params=f"ResmanDebugLevel: 4294967295\n{params}")
    put(proc.parent, status=f"Name:\tpython\nCapEff:\t{rights}")
    check = nvidia.check_cupti()
    assert check.state == state
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in check.cure) == (state == "broken")


def test_rights_that_cannot_be_read_are_none(proc: Path) -> None:
    put(proc, params="RmProfilingAdminOnly: 1")
    assert nvidia.check_cupti().state == "broken"


def test_without_a_driver_there_are_no_counters(proc: Path) -> None:
    assert nvidia.check_cupti() == Check(
        "CUPTI", "missing", "no NVIDIA driver, no performance counters"
    )
