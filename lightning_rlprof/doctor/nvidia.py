"""What NVIDIA's tools need: a driver and devices, nvtx, Nsight Systems, rights to counters."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rlprof.doctor.check import Check, content, installed, numbers
from lightning_rlprof.nsys import installed_version

__all__ = ["check_cupti", "check_gpu", "check_nsys", "check_nvtx"]

_PROC = Path("/proc/driver/nvidia")
_STATUS = Path("/proc/self/status")
# Either lets a process read the counters of a GPU (CAP_PERFMON from driver 565 on).
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38


def check_gpu(answer: Mapping[str, Any]) -> Check:
    """Compare what torch finds, as `check_torch` returns it, with the driver of the kernel."""
    driver = _driver()
    if answer.get("kind") == "cuda":
        runs = f"driver {driver}" if driver else "driver not told"
        return Check("GPU", "ok", f"{answer['count']} x {answer['name']}, {runs}")
    if driver is None:
        cure = "where there is a GPU: install its driver; in a container, docker run --gpus all"
        return Check("GPU", "missing", "no NVIDIA driver here", cure)
    if answer and not answer.get("cuda"):
        says = f"driver {driver}, but this torch is built without CUDA"
        return Check("GPU", "broken", says, "install one for CUDA: https://pytorch.org/get-started")
    cure = "nvidia-smi may say why; CUDA_VISIBLE_DEVICES may hide it"
    return Check("GPU", "broken", f"driver {driver}, but torch finds no device", cure)


def _driver() -> str | None:
    text = content(_PROC / "version")
    if text is None:
        return None
    found = re.search(r"Module\D*?(?:x86_64|aarch64)?\s+([\d.]+)", text)
    return found[1] if found else "of unknown version"


def check_nvtx() -> Check:
    """Look for the package nvtx without importing it."""
    version = installed("nvtx")
    if version is None:
        return Check("nvtx", "missing", "not installed: no stages in Nsight", "pip install nvtx")
    return Check("nvtx", "ok", version)


def check_nsys(nvtx: Check) -> Check:
    """Judge by what was seen: 2022.4 and 2023.4 hear nothing of nvtx 0.2.12, 2025.3 does."""
    program = shutil.which("nsys")
    if program is None:
        cure = "install Nsight Systems: https://developer.nvidia.com/nsight-systems"
        return Check("nsys", "missing", "not on PATH: no Nsight Systems reports", cure)
    version = installed_version(program)
    if version is None:
        return Check("nsys", "unknown", f"{program} does not tell its version")
    says = "{}.{} at {}".format(*version, program)
    if nvtx.state != "ok" or numbers(nvtx.says) < (0, 2, 12) or version >= (2025, 3):
        return Check("nsys", "ok", says)
    cure = "install nsys 2025.3 or newer, or pip install nvtx==0.2.11"
    if version <= (2023, 4):
        return Check("nsys", "broken", f"{says} hears no range of nvtx {nvtx.says}", cure)
    return Check("nsys", "unknown", f"{says}, not tried with nvtx {nvtx.says}", cure)


def check_cupti() -> Check:
    """Say who may read performance counters, which nsys's GPU metrics and some drivers need."""
    found = re.search(r"RmProfilingAdminOnly: (\d)", content(_PROC / "params") or "")
    if found is None:
        if not _PROC.is_dir():
            return Check("CUPTI", "missing", "no NVIDIA driver, no performance counters")
        return Check("CUPTI", "unknown", "the driver does not say who may read its counters")
    if found[1] == "0":
        return Check("CUPTI", "ok", "every user may read performance counters")
    held = re.search(r"CapEff:\s*([0-9a-f]+)", content(_STATUS) or "")
    rights = int(held[1], 16) if held else 0
    if rights >> _CAP_SYS_ADMIN & 1 or rights >> _CAP_PERFMON & 1:
        return Check(
            "CUPTI", "ok", "only administrators may read performance counters, and you are one"
        )
    cure = (
        "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reboot; in "
        "a container --cap-add=SYS_ADMIN (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )
    says = "only administrators may read performance counters, which GPU metrics of nsys need"
    return Check("CUPTI", "broken", says, cure)
