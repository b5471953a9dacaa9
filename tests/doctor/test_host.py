"""What every machine needs."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rlprof.doctor import host
from lightning_rlprof.doctor.check import Check


def versions(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    found = {name.replace("_", "-"): version for name, version in known.items()}
    monkeypatch.setattr(host, "installed", found.get)


def test_torch_is_asked_for_its_build_and_its_device() -> None:
    import torch

    check, answer = host.check_torch()
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
    check, answer = host.check_torch()
    assert (check.state, answer) == (state, {})
    assert f"it cannot be imported: {says}" in check.says


def test_a_torch_that_torch_npu_breaks_is_told_from_one_that_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(code: str, *, timeout_s: float, environment: object = None) -> dict[str, str]:
        if environment is None:
            raise host.InterpreterError("Failed to load the backend extension: torch_npu")
        return {"version": "2.13.0"}

    monkeypatch.setattr(host, "ask", ask)
    check, _ = host.check_torch()
    assert check.says == (
        "2.13.0, but it cannot be imported: Failed to load the backend extension: torch_npu"
    )
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in check.cure


def test_without_torch_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.util, "find_spec", lambda name: None)
    monkeypatch.setattr(host, "ask", None)
    check, answer = host.check_torch()
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
    check = host.check_lightning()
    assert (check.state, check.says) == (state, says)
    assert bool(check.cure) == (state != "ok")


def test_the_disk_is_that_of_the_nearest_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=11 << 30)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.chdir(tmp_path)
    assert host.check_disk(Path("runs/of/today")) == Check(
        "disk", "ok", "11 GiB free for runs/of/today"
    )
    assert asked == [tmp_path]


def test_a_disk_that_is_full_or_closed_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 30))
    check = host.check_disk(tmp_path)
    assert (check.state, check.says) == ("broken", f"only 3 GiB free for {tmp_path}")
    (tmp_path / "file").touch()
    check = host.check_disk(tmp_path / "file" / "below")
    assert (check.state, check.says) == ("broken", f"{tmp_path}/file cannot be written")


def test_a_working_directory_that_is_deleted_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    check = host.check_disk(Path("runs"))
    assert (check.state, check.says) == ("broken", "the working directory is deleted")


@pytest.mark.parametrize(
    ("source", "state"),
    [("tsc", "ok"), ("arch_sys_counter", "ok"), ("hpet", "broken"), ("acpi_pm", "broken")],
)
def test_a_slow_clock_is_told_with_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, state: str
) -> None:
    (tmp_path / "clock").write_text(f"{source}\n")
    monkeypatch.setattr(host, "_CLOCK", tmp_path / "clock")
    monkeypatch.setattr(host.timeit, "repeat", lambda *_, **__: [2.5e-3, 1.2e-3])
    check = host.check_clock()
    slow = ", by a call of the kernel" if state == "broken" else ""
    assert (check.state, check.says) == (state, f"{source}, 1200 ns per look{slow}")
    assert bool(check.cure) == bool(slow)


def test_a_clock_that_the_kernel_does_not_name_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CLOCK", tmp_path / "nothing")
    check = host.check_clock()
    assert check.state == "unknown"
    assert check.says.startswith("source not told, ")
