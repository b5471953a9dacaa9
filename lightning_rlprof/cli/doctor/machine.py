"""What every machine needs: torch that can be imported, Lightning, disk space, a quick clock.

What NVIDIA's tools need: a driver and devices, nvtx, Nsight Systems, rights to counters.

What Ascend needs: torch_npu that finds devices, CANN below it, and its exporter msprof.
"""

import os
import re
import shutil
import timeit
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from lightning_rlprof.cli.doctor.check import Check, content, installed, numbers
from lightning_rlprof.recording.nsys.command_line import installed_version
from lightning_rlprof.system.subprocess_python import InterpreterError, ask

_PROC = Path("/proc/driver/nvidia")
_STATUS = Path("/proc/self/status")
# Either lets a process read the counters of a GPU (CAP_PERFMON from driver 565 on).
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38


def check_gpu(answer: Mapping[str, Any]) -> Check:
    """Compare what torch finds, as `check_torch` returns it, with the driver of the kernel."""
    driver = _driver()
    if answer.get("kind") == "cuda":
        runs = f"driver {driver}" if driver else "unknown driver"
        return Check("GPU", "ok", f"{answer['count']} x {answer['name']}, {runs}")
    if driver is None:
        cure = "With a GPU: install its driver; in a container, use docker run --gpus all"
        return Check("GPU", "missing", "no NVIDIA driver", cure)
    if answer and not answer.get("cuda"):
        says = f"driver {driver}, but this torch is built without CUDA"
        return Check("GPU", "broken", says, "install a CUDA build: https://pytorch.org/get-started")
    cure = "See nvidia-smi. CUDA_VISIBLE_DEVICES may hide it"
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
        return Check("nsys", "warn", f"cannot read the version of {program}")
    says = "{}.{} at {}".format(*version, program)
    if nvtx.state != "ok" or numbers(nvtx.message) < (0, 2, 12) or version >= (2025, 3):
        return Check("nsys", "ok", says)
    cure = "install nsys 2025.3 or newer, or pip install nvtx==0.2.11"
    if version <= (2023, 4):
        return Check(
            "nsys", "broken", f"{says} does not receive ranges of nvtx {nvtx.message}", cure
        )
    return Check("nsys", "warn", f"{says}, untested with nvtx {nvtx.message}", cure)


def check_cupti() -> Check:
    """Say who may read performance counters, which nsys's GPU metrics and some drivers need."""
    found = re.search(r"RmProfilingAdminOnly: (\d)", content(_PROC / "params") or "")
    if found is None:
        if not _PROC.is_dir():
            return Check("CUPTI", "missing", "no NVIDIA driver, no performance counters")
        return Check("CUPTI", "warn", "cannot read who may use performance counters")
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


NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Lets torch be imported where torch_npu is installed and broken."""

_SET_ENV = (
    Path("/usr/local/Ascend/cann/set_env.sh"),
    Path("/usr/local/Ascend/ascend-toolkit/set_env.sh"),
)
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_ANSWERS_S = 180.0
_ASCEND_QUESTION = """
import torch, torch_npu
answer.update(version=torch_npu.__version__, count=torch.npu.device_count())
"""


def check_torch_npu() -> Check:
    """Import torch_npu in another interpreter and count the devices that it finds."""
    if util.find_spec("torch_npu") is None:
        cure = 'on a machine with Ascend NPUs: pip install "lightning-rlprof[npu]"'
        return Check("torch_npu", "missing", "not installed", cure)
    try:
        answer = ask(_ASCEND_QUESTION, timeout_s=_ANSWERS_S, environment=NO_AUTOLOAD)
    except InterpreterError as error:
        cure = "source set_env.sh of CANN; torch_npu and torch need the same version"
        return Check("torch_npu", "broken", f"import failed: {error}", cure)
    if not answer["count"]:
        cure = "See npu-smi info. ASCEND_RT_VISIBLE_DEVICES may hide it"
        return Check("torch_npu", "broken", f"{answer['version']} finds no NPU", cure)
    return Check("torch_npu", "ok", f"{answer['version']}, {answer['count']} NPUs")


def check_cann() -> Check:
    """Look for CANN where its set_env.sh says, and for its version there."""
    name = next((name for name in _HOMES if os.environ.get(name)), "")
    home = os.environ.get(name)
    if not home:
        there = next((str(path) for path in _SET_ENV if path.is_file()), None)
        cure = (
            f"source {there}" if there else "install CANN: https://www.hiascend.com/software/cann"
        )
        return Check("CANN", "missing", "ASCEND_HOME_PATH is not set", cure)
    if not Path(home).is_dir():
        says = f"{name}={home} is not a directory"
        return Check("CANN", "broken", says, "source set_env.sh of the installed CANN")
    for pattern in ("*/ascend_toolkit_install.info", "version.info", "*/version.info"):
        for path in sorted(Path(home).glob(pattern)):
            if found := re.search(r"(?im)^version\s*=\s*\[?([\w.]+)", content(path) or ""):
                return Check("CANN", "ok", f"{found[1]} at {home}")
    return Check("CANN", "warn", f"cannot read the version of CANN in {home}")


def check_msprof() -> Check:
    """Look for the exporter that the analysis of Ascend data calls."""
    program = shutil.which("msprof")
    if program is None:
        cure = "it comes with CANN: source its set_env.sh"
        return Check("msprof", "missing", "not on PATH: cannot parse Ascend data here", cure)
    return Check("msprof", "ok", program)


_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_QUESTION = """
import torch
from lightning_rlprof.recording.accelerator import device_count, device_kind, device_name
answer.update(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
answer.update(kind=device_kind(), name=device_name(), count=device_count())
"""
# Read without a call of the kernel; every span reads the clock twice.
_FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")
_LITTLE_BYTES = 10 << 30
_GET_TORCH = "see https://pytorch.org/get-started"


def check_torch() -> tuple[Check, Mapping[str, Any]]:
    """Ask torch for itself and its devices; once more without torch_npu, where that breaks it."""
    if util.find_spec("torch") is None:
        return Check("torch", "missing", "not installed", f"pip install torch; {_GET_TORCH}"), {}
    try:
        answer = ask(_QUESTION, timeout_s=_ANSWERS_S)
    except InterpreterError as error:
        says = f"import failed: {error}"
        try:
            version = ask(_QUESTION, timeout_s=_ANSWERS_S, environment=NO_AUTOLOAD)["version"]
        except InterpreterError:
            return Check("torch", "broken", says, f"reinstall it: {_GET_TORCH}"), {}
        cure = (
            "torch_npu is installed and CANN is not found: source set_env.sh of CANN, or pip "
            "uninstall torch_npu, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
        return Check("torch", "broken", f"{version}, but {says}", cure), {}
    built = f"for CUDA {answer['cuda']}" if answer["cuda"] else "without CUDA"
    built = f"for ROCm {answer['hip']}" if answer["hip"] else built
    return Check("torch", "ok", f"{answer['version']}, built {built}"), answer


def check_lightning() -> Check:
    """Look at the version of Lightning without importing it; two of them were malware."""
    for name in ("pytorch-lightning", "lightning"):
        version = installed(name)
        if version is None:
            continue
        if version in ("2.6.2", "2.6.3"):  # GHSA-w37p-236h-pfx3
            says = f"{name} {version} is malware that steals credentials"
            cure = f"pip install --upgrade {name}, and renew every secret that this machine holds"
            return Check("Lightning", "broken", says, cure)
        if numbers(version) < (2, 4):
            cure = "pip install 'pytorch-lightning>=2.4'"
            return Check("Lightning", "broken", f"{name} {version} is too old", cure)
        return Check("Lightning", "ok", f"{name} {version}")
    says = "not installed: only start_session records"
    return Check("Lightning", "missing", says, "pip install pytorch-lightning")


def check_disk(save_path: Path) -> Check:
    """Look at the space where runs go, in the nearest directory that exists by now."""
    try:
        folder = save_path.absolute()
    except FileNotFoundError:
        says = "the working directory is deleted"
        return Check("disk", "broken", says, "change to a directory that exists")
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        says, cure = f"{folder} cannot be written", "choose another integrated.profile_save_path"
        return Check("disk", "broken", says, cure)
    free = shutil.disk_usage(folder).free
    says = f"{free / 2**30:,.0f} GiB free for {save_path}"
    if free < _LITTLE_BYTES:
        cure = "captures can take gigabytes per rank, and parsing 20 times the raw data"
        return Check("disk", "broken", f"only {says}", cure)
    return Check("disk", "ok", says)


def check_clock() -> Check:
    """Look at what the kernel tells time by, and measure how long reading the clock takes."""
    source = (content(_CLOCK) or "").strip()
    costs = min(timeit.repeat(perf_counter_ns, number=1_000, repeat=20)) * 1e6
    says = f"{source or 'unknown source'}, {costs:.0f} ns per call"
    if source in _FAST_CLOCKS or not source:
        return Check("clock", "ok" if source else "warn", says)
    cure = "a span reads it twice; boot with clocksource=tsc if the processor has a stable TSC"
    return Check("clock", "broken", f"{says}, by a system call", cure)
