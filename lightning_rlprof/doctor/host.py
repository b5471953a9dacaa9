"""What every machine needs: torch that can be imported, Lightning, disk space, a quick clock."""

import os
import shutil
import timeit
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from lightning_rlprof.doctor.ascend import NO_AUTOLOAD
from lightning_rlprof.doctor.check import Check, content, installed, numbers
from lightning_rlprof.interpreter import InterpreterError, ask

__all__ = ["check_clock", "check_disk", "check_lightning", "check_torch"]

_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_ANSWERS_S = 180.0
_QUESTION = """
import torch
from lightning_rlprof.device import device_count, device_kind, device_name
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
        says = f"it cannot be imported: {error}"
        try:
            version = ask(_QUESTION, timeout_s=_ANSWERS_S, environment=NO_AUTOLOAD)["version"]
        except InterpreterError:
            return Check("torch", "broken", says, f"install it anew; {_GET_TORCH}"), {}
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
        cure = "a capture takes up to gigabytes per rank, an analysis 20 times its raw data"
        return Check("disk", "broken", f"only {says}", cure)
    return Check("disk", "ok", says)


def check_clock() -> Check:
    """Look at what the kernel tells time by, and measure how long a look at the clock takes."""
    source = (content(_CLOCK) or "").strip()
    costs = min(timeit.repeat(perf_counter_ns, number=1_000, repeat=20)) * 1e6
    says = f"{source or 'source not told'}, {costs:.0f} ns per look"
    if source in _FAST_CLOCKS or not source:
        return Check("clock", "ok" if source else "unknown", says)
    cure = "a span looks twice; boot with clocksource=tsc where the processor's is stable"
    return Check("clock", "broken", f"{says}, by a call of the kernel", cure)
