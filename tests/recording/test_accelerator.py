"""What the device says: the real CPU, and modules of torch replaced by fakes."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_rlprof.recording import accelerator as device

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


def test_a_fake_accelerator_that_fails_when_asked_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("SetDevice, error code is 107001")  # torch_npu 2.6 without a device

    broken = fake_module("torch.accelerator", is_available=refuse)
    monkeypatch.setattr(torch, "accelerator", broken)
    assert device.device_kind() == "cpu"


def test_a_cpu_keeps_no_memory_of_its_own() -> None:
    assert device.memory_bytes("cpu") == {}
    device.reset_peak("cpu")
    device.use_device("cpu", 3)


def test_a_cpu_is_not_asked_even_where_torch_has_a_fake_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions: list[str] = []
    names = ("memory_stats", "reset_peak_memory_stats", "get_memory_info", "set_device_index")
    functions = {name: lambda *_, name=name: questions.append(name) for name in names}
    monkeypatch.setattr(torch, "accelerator", fake_accelerator("cuda", available=True, **functions))
    assert device.memory_bytes("cpu") == {}
    device.reset_peak("cpu")
    device.use_device("cpu", 0)
    assert questions == []


def test_a_kind_that_torch_has_no_module_for_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", fake_accelerator(None, available=False))
    assert device.memory_bytes("hpu") == {}
    device.reset_peak("hpu")


def stats(allocated: int, peak: int, reserved: int) -> dict[str, int]:
    """Some of torch's keys, the same in torch.accelerator and in the modules of devices."""
    return {
        "allocated_bytes.all.current": allocated,
        "allocated_bytes.all.peak": peak,
        "allocated_bytes.small_pool.peak": 1,
        "reserved_bytes.all.current": reserved,
        "reserved_bytes.all.peak": 1,
    }


def test_memory_comes_from_a_fake_torch_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    accelerator = fake_accelerator(
        "cuda",
        available=True,
        memory_stats=lambda: stats(60, 70, 80),
        get_memory_info=lambda: (8, 100),
        reset_peak_memory_stats=lambda: called.append("reset"),
        set_device_index=called.append,
    )
    older = fake_module("torch.cuda", memory_stats=lambda: 1 / 0, mem_get_info=lambda: 1 / 0)
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(torch, "cuda", older)
    assert device.memory_bytes("cuda") == {
        "device_allocated_bytes": 60,
        "device_peak_bytes": 70,
        "device_reserved_bytes": 80,
        "device_used_bytes": 92,
        "device_other_bytes": 12,
    }
    device.reset_peak("cuda")
    device.use_device("cuda", 3)
    assert called == ["reset", 3]


def unknown() -> None:
    raise RuntimeError("Allocator for npu is not a DeviceAllocator.")


@pytest.mark.parametrize("accelerator", [{}, {"memory_stats": unknown, "set_device_index": None}])
def test_what_a_fake_accelerator_does_not_tell_the_fake_module_of_the_device_does(
    accelerator: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    module = fake_module(
        "torch.npu",
        memory_stats=lambda: stats(6, 7, 8),
        mem_get_info=lambda: (5, 10),
        reset_peak_memory_stats=lambda: called.append("reset"),
        set_device=called.append,
    )
    fake = fake_accelerator("npu", available=True, **accelerator)
    monkeypatch.setattr(torch, "accelerator", fake)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    found = device.memory_bytes("npu")
    assert (found["device_peak_bytes"], found["device_used_bytes"]) == (7, 5)
    assert found["device_other_bytes"] == 0  # read a moment later: never below nothing
    device.reset_peak("npu")
    device.use_device("npu", 1)
    assert called == ["reset", 1]


def test_what_a_fake_device_cannot_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", fake_accelerator("xpu", available=True))
    # Before its first tensor a device has no statistics, and some drivers tell no memory in use.
    empty = fake_module("torch.xpu", memory_stats=dict, mem_get_info=unknown)
    monkeypatch.setattr(torch, "xpu", empty)
    assert device.memory_bytes("xpu") == {}
    assert device.device_memory() == (None, None)
    assert device.device_name() is None


@pytest.mark.parametrize(
    ("started", "properties", "expected"),
    [
        (True, SimpleNamespace(uuid="8d3f"), (2, "8d3f")),
        (True, SimpleNamespace(), (2, None)),
        (False, SimpleNamespace(uuid="8d3f"), None),
    ],
)
def test_a_fake_device_is_used_from_when_it_was_started(
    started: bool, properties: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    module = fake_module(
        "torch.cuda",
        is_initialized=lambda: started,
        current_device=lambda: asked.append("which") or 2,
        get_device_properties=lambda index: asked.append(index) or properties,
    )
    monkeypatch.setattr(torch, "accelerator", fake_accelerator("cuda", available=True))
    monkeypatch.setattr(torch, "cuda", module)
    assert device.used_device("cuda") == expected
    assert asked == (["which", 2] if started else [])  # which would start it
    assert device.used_device("cpu") is None


def test_a_fake_device_that_keeps_its_peak_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_accelerator("npu", available=True, reset_peak_memory_stats=unknown)
    monkeypatch.setattr(torch, "accelerator", fake)
    with pytest.raises(RuntimeError, match="not a DeviceAllocator"):
        device.reset_peak("npu")  # else the peaks that follow would be those of the whole run


@REAL_CPU
def test_a_machine_without_accelerator_answers_none_and_not_zero() -> None:
    answers = (device.device_name(), device.device_count(), device.device_index())
    assert answers == (None, None, None)
    assert device.device_memory() == (None, None)
    assert device.device_backend() == "gloo"


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cuda", "nccl"), ("npu", "hccl"), ("xpu", "xccl"), ("mps", "gloo")],
)
def test_answers_of_a_fake_accelerator(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_accelerator(
        kind,
        available=True,
        device_count=lambda: 8,
        current_device_index=lambda: 0,
        get_memory_info=lambda: (30, 100),
    )
    module = fake_module(f"torch.{kind}", get_device_name=lambda: "Model X")
    monkeypatch.setattr(torch, "accelerator", fake)
    monkeypatch.setattr(torch, kind, module, raising=False)
    answers = (device.device_name(), device.device_count(), device.device_index())
    assert answers == ("Model X", 8, 0)
    assert device.device_memory() == (70, 100)
    assert device.device_backend() == backend


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_memory_of_a_gpu() -> None:
    torch.zeros(1, device="cuda")
    device.reset_peak("cuda")
    before = device.memory_bytes("cuda")
    big = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    after = device.memory_bytes("cuda")
    assert device.device_kind() == "cuda"
    assert after["device_allocated_bytes"] - before["device_allocated_bytes"] >= big.numel()
    assert after["device_peak_bytes"] - before["device_peak_bytes"] >= big.numel()
    used, reserved = after["device_used_bytes"], after["device_reserved_bytes"]
    assert after["device_other_bytes"] == used - reserved > 0  # its CUDA context, at the least


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_answers_of_a_gpu() -> None:
    torch.zeros(1, device="cuda")
    used, total = device.device_memory()
    assert device.device_name() == torch.cuda.get_device_name()
    assert device.device_count() == torch.cuda.device_count()
    assert device.device_index() == torch.cuda.current_device()
    assert device.device_backend() == "nccl"
    assert used is not None
    assert total == torch.cuda.mem_get_info()[1] > used > 0
