"""What every machine needs.

What NVIDIA needs, on directories as the driver makes them and on the fake nsys.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlprof.cli import doctor as machine
from lightning_rlprof.cli.doctor import Check
from tests.doubles.nsys.on_path import FakeNsys


def versions(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    found = {name.replace("_", "-"): version for name, version in known.items()}
    monkeypatch.setattr(machine, "installed", found.get)


@pytest.mark.deep
def test_torch_is_asked_for_its_build_and_its_device() -> None:
    import torch

    check, answer = machine.check_torch()
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    assert check == Check("torch", "ok", f"{torch.__version__}, built {built}")
    assert answer["kind"] in {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("torch", "state", "says"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "broken", "libcudart.so.12"),
        (
            "import os\n__version__ = '2.13.0'\nif os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD')"
            " != '0':\n    raise RuntimeError('Failed to load the backend extension: torch_npu')\n",
            "broken",
            "Failed to load the backend extension: torch_npu",
        ),
    ],
)
def test_a_torch_that_cannot_be_imported_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, state: str, says: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check, answer = machine.check_torch()
    assert (check.state, answer) == (state, {})
    assert f"import failed: {says}" in check.message


def test_a_torch_that_torch_npu_may_break_says_how_to_import_it_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(code: str, *, timeout_s: float) -> dict[str, str]:
        raise machine.InterpreterError("Failed to load the backend extension: torch_npu")

    monkeypatch.setattr(machine, "ask", ask)
    assert "AUTOLOAD" not in machine.check_torch()[0].fix
    monkeypatch.setattr(machine.util, "find_spec", lambda name: name)
    check, _ = machine.check_torch()
    assert check.message == "import failed: Failed to load the backend extension: torch_npu"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in check.fix


def test_without_torch_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "ask", None)
    check, answer = machine.check_torch()
    assert (check.state, answer) == ("missing", {})


@pytest.mark.parametrize(
    ("known", "state", "says"),
    [
        ({"pytorch_lightning": "2.6.6"}, "ok", "pytorch-lightning 2.6.6"),
        ({"lightning": "2.4.0"}, "ok", "lightning 2.4.0"),
        ({"pytorch_lightning": "2.3.3"}, "broken", "pytorch-lightning 2.3.3 is too old"),
        ({"lightning": "2.6.3"}, "broken", "lightning 2.6.3 is malware that steals credentials"),
        ({}, "missing", "not installed: only start_session records"),
    ],
)
def test_lightning_is_judged_by_its_version(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, str], state: str, says: str
) -> None:
    versions(monkeypatch, **known)
    check = machine.check_lightning()
    assert (check.state, check.message) == (state, says)
    assert bool(check.fix) == (state != "ok")


def test_the_disk_is_that_of_the_nearest_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=11 << 30)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.chdir(tmp_path)
    assert machine.check_disk(Path("runs/of/today")) == Check(
        "disk", "ok", "11 GiB free for runs/of/today"
    )
    assert asked == [tmp_path]


def test_a_disk_that_is_full_or_closed_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 30))
    check = machine.check_disk(tmp_path)
    assert (check.state, check.message) == ("broken", f"only 3 GiB free for {tmp_path}")
    (tmp_path / "file").touch()
    check = machine.check_disk(tmp_path / "file" / "below")
    assert (check.state, check.message) == ("broken", f"{tmp_path}/file cannot be written")


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build"
ARM = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build"
H100 = {"kind": "cuda", "count": 2, "name": "NVIDIA H100", "cuda": "12.8"}
NVTX = Check("nvtx", "ok", "0.2.17")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the driver, not yet there."""
    monkeypatch.setattr(machine, "_PROC", tmp_path / "nvidia")
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "status")
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
    assert machine.check_gpu(H100) == Check("GPU", "ok", f"2 x NVIDIA H100, driver {number}")


def test_a_driver_without_a_word_is_still_a_driver(proc: Path) -> None:
    assert machine.check_gpu(H100).message == "2 x NVIDIA H100, unknown driver"
    put(proc, version="?")
    assert machine.check_gpu(H100).message == "2 x NVIDIA H100, driver of unknown version"


def test_without_a_driver_there_is_nothing_to_mend_but_a_way_to_get_it(proc: Path) -> None:
    check = machine.check_gpu({"kind": "cpu", "cuda": None})
    assert (check.state, check.message) == ("missing", "no NVIDIA driver")
    assert "--gpus all" in check.fix


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
    check = machine.check_gpu(answer)
    assert (check.state, check.message) == ("broken", says)
    assert check.fix


def test_nvtx_is_looked_for_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: {"nvtx": "0.2.14"}[name])
    assert machine.check_nvtx() == Check("nvtx", "ok", "0.2.14")
    monkeypatch.setattr(machine, "installed", lambda name: None)
    assert machine.check_nvtx().state == "missing"


@pytest.mark.parametrize(
    ("version", "nvtx", "state"),
    [
        ("2022.4.2.1", "0.2.17", "broken"),
        ("2023.4.4.54", "0.2.12", "broken"),
        ("2023.4.4.54", "0.2.11", "ok"),
        ("2024.5.1.1", "0.2.17", "warn"),
        ("2024.5.1.1", "0.2.8", "ok"),
        ("2025.3.1.90", "0.2.17", "ok"),
    ],
)
def test_an_nsys_that_hears_nothing_of_nvtx_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, nvtx: str, state: str
) -> None:
    fake = FakeNsys(tmp_path, monkeypatch, version=version)
    check = machine.check_nsys(Check("nvtx", "ok", nvtx))
    assert check.state == state
    assert check.message.startswith(f"{version[:6]} at {fake.bin}/nsys")
    assert bool(check.fix) == (state != "ok")
    assert machine.check_nsys(Check("nvtx", "missing", "not installed")).state == "ok"


def test_an_nsys_that_is_not_there_or_does_not_speak_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNsys(tmp_path, monkeypatch, version="unreadable")
    assert machine.check_nsys(NVTX).state == "warn"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    check = machine.check_nsys(NVTX)
    assert (check.state, check.message) == ("missing", "not on PATH: no Nsight Systems reports")


@pytest.mark.parametrize(
    ("params", "rights", "state"),
    [
        ("RmProfilingAdminOnly: 0", "0", "ok"),
        ("RmProfilingAdminOnly: 1", "00000000a80425fb", "broken"),
        ("RmProfilingAdminOnly: 1", "000001ffffffffff", "ok"),
        ("RmProfilingAdminOnly: 1", f"{1 << 21:016x}", "ok"),
        ("RmProfilingAdminOnly: 1", f"{1 << 38:016x}", "ok"),
        ("Mobile: 1", "0", "warn"),
    ],
)
def test_who_may_read_counters_is_as_driver_and_rights_say(
    proc: Path, params: str, rights: str, state: str
) -> None:
    put(proc, params=f"ResmanDebugLevel: 4294967295\n{params}")
    put(proc.parent, status=f"Name:\tpython\nCapEff:\t{rights}")
    check = machine.check_cupti()
    assert check.state == state
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in check.fix) == (state == "broken")


def test_rights_that_cannot_be_read_are_none(proc: Path) -> None:
    put(proc, params="RmProfilingAdminOnly: 1")
    assert machine.check_cupti().state == "broken"


def test_without_a_driver_there_are_no_counters(proc: Path) -> None:
    assert machine.check_cupti() == Check(
        "CUPTI", "missing", "no NVIDIA driver, no performance counters"
    )
