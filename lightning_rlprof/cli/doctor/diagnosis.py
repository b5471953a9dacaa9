"""All checks of a machine, and what a run on it can record."""

from dataclasses import dataclass
from pathlib import Path

from lightning_rlprof.cli.doctor.check import Check
from lightning_rlprof.cli.doctor.machine import (
    check_cann,
    check_clock,
    check_cupti,
    check_disk,
    check_gpu,
    check_lightning,
    check_msprof,
    check_nsys,
    check_nvtx,
    check_torch,
    check_torch_npu,
)


@dataclass(frozen=True)
class Diagnosis:
    """All checks of a machine.

    Attributes:
        device: Kind of accelerator that torch finds, ``cpu`` without one, None without torch.
        checks: The checks, in reading order.
    """

    device: str | None
    checks: tuple[Check, ...]

    def __getitem__(self, name: str) -> Check:
        """Return a check by name."""
        return next(check for check in self.checks if check.name == name)


def diagnose(save_path: Path) -> Diagnosis:
    """Check everything that a recording may use; as slow as importing torch and torch_npu.

    Args:
        save_path: Output directory of runs; it need not exist.
    """
    torch, answer = check_torch()
    nvtx = check_nvtx()
    checks = (
        torch,
        check_lightning(),
        check_gpu(answer),
        nvtx,
        check_nsys(nvtx),
        check_cupti(),
        check_torch_npu(),
        check_cann(),
        check_msprof(),
        check_disk(save_path),
        check_clock(),
    )
    return Diagnosis(answer.get("kind"), checks)


def recordable(found: Diagnosis) -> list[str]:
    """Return what a run on this machine can record, by recorder name; spans always."""
    names = ["spans"]
    if found.device is None:
        return names
    names += ["memory"] if found.device == "npu" else ["memory", "torch_profiler"]
    names += ["device_time"] if found.device in ("cuda", "npu", "xpu") else []
    if found["nvtx"].state == "ok" and found["nsys"].state == "ok":
        names += ["nvtx", "nsight"]
    return names + (["mstx", "npu_profiler"] if found.device == "npu" else [])
