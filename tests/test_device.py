"""What the device says: the real CPU, and modules of torch replaced by fakes."""

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_rlprof import device

REAL_CPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a CPU-only machine")


def fake_module(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


def fake_accelerator(kind: str | None, *, available: bool, **functions: Any) -> ModuleType:
    current = None if kind is None else SimpleNamespace(type=kind)
    return fake_module(
        "torch.accelerator",
        is_available=lambda: available,
        current_accelerator=lambda: current,
        **functions,
    )


@REAL_CPU
def test_a_machine_without_accelerator_is_a_cpu() -> None:
    assert device.device_kind() == "cpu"


@pytest.mark.parametrize(
    ("kind", "available", "expected"),
    [
        ("cuda", True, "cuda"),
        ("npu", True, "npu"),
        ("npu", False, "cpu"),  # torch_npu without a device still names npu
        (None, False, "cpu"),
        (None, True, "cpu"),
    ],
)
def test_the_kind_is_that_of_a_fake_accelerator_that_is_available(
    kind: str | None, available: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "accelerator", fake_accelerator(kind, available=available))
    assert device.device_kind() == expected


def test_a_cpu_keeps_no_memory_of_its_own() -> None:
    assert device.memory_bytes("cpu") == {}
    device.reset_peak("cpu")


def test_a_cpu_is_not_asked_even_where_torch_has_a_fake_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions: list[str] = []
    accelerator = fake_accelerator(
        "cuda",
        available=True,
        max_memory_allocated=lambda: questions.append("peak"),
        reset_peak_memory_stats=lambda: questions.append("reset"),
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    assert device.memory_bytes("cpu") == {}
    device.reset_peak("cpu")
    assert questions == []


def test_a_kind_that_torch_has_no_module_for_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", fake_accelerator(None, available=False))
    assert device.memory_bytes("hpu") == {}
    device.reset_peak("hpu")


def test_memory_comes_from_a_fake_torch_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[str] = []
    accelerator = fake_accelerator(
        "cuda",
        available=True,
        max_memory_allocated=lambda: 70,
        memory_reserved=lambda: 80,
        reset_peak_memory_stats=lambda: resets.append("accelerator"),
    )
    older = fake_module(
        "torch.cuda",
        max_memory_allocated=lambda: 1,
        memory_reserved=lambda: 2,
        mem_get_info=lambda: (10, 100),
        reset_peak_memory_stats=lambda: resets.append("cuda"),
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(torch, "cuda", older)
    assert device.memory_bytes("cuda") == {
        "device_peak_bytes": 70,
        "device_reserved_bytes": 80,
        "device_used_bytes": 90,
    }
    device.reset_peak("cuda")
    assert resets == ["accelerator"]


def test_before_torch_2_9_memory_comes_from_a_fake_module_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resets: list[str] = []
    module = fake_module(
        "torch.npu",
        max_memory_allocated=lambda: 7,
        memory_reserved=lambda: 8,
        reset_peak_memory_stats=lambda: resets.append("npu"),
    )
    monkeypatch.setattr(torch, "accelerator", fake_accelerator("npu", available=True))
    monkeypatch.setattr(torch, "npu", module, raising=False)
    assert device.memory_bytes("npu") == {"device_peak_bytes": 7, "device_reserved_bytes": 8}
    device.reset_peak("npu")
    assert resets == ["npu"]


def test_what_a_fake_device_cannot_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", fake_accelerator("mps", available=True))
    monkeypatch.setattr(torch, "mps", fake_module("torch.mps", memory_reserved=lambda: 5))
    assert device.memory_bytes("mps") == {"device_reserved_bytes": 5}
    device.reset_peak("mps")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_the_hosts_memory_grows_with_what_this_process_keeps() -> None:
    before = device.host_rss_bytes()
    kept = bytearray(b"x") * (64 << 20)
    after = device.host_rss_bytes()
    assert before is not None
    assert after is not None
    assert after - before > len(kept) // 2


@pytest.mark.parametrize("content", [None, b"", b"12", b"12 many"])
def test_a_host_that_tells_nothing_readable_has_no_memory(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "statm"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr("builtins.open", lambda name, mode, real=open: real(path, mode))
    assert device.host_rss_bytes() is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_memory_of_a_gpu() -> None:
    torch.zeros(1, device="cuda")
    device.reset_peak("cuda")
    before = device.memory_bytes("cuda")
    big = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    after = device.memory_bytes("cuda")
    del big
    assert device.device_kind() == "cuda"
    assert after["device_peak_bytes"] - before["device_peak_bytes"] >= 64 << 20
    assert after["device_used_bytes"] >= after["device_reserved_bytes"] >= 64 << 20
