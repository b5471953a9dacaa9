"""What Ascend needs: torch_npu that finds devices, CANN below it, and its exporter msprof."""

import os
import re
import shutil
from importlib import util
from pathlib import Path

from lightning_rlprof.doctor.check import Check, content
from lightning_rlprof.interpreter import InterpreterError, ask

__all__ = ["NO_AUTOLOAD", "check_cann", "check_msprof", "check_torch_npu"]

NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Lets torch be imported where torch_npu is installed and broken."""

_SET_ENV = (
    Path("/usr/local/Ascend/cann/set_env.sh"),
    Path("/usr/local/Ascend/ascend-toolkit/set_env.sh"),
)
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_ANSWERS_S = 180.0
_QUESTION = """
import torch, torch_npu
answer.update(version=torch_npu.__version__, count=torch.npu.device_count())
"""


def check_torch_npu() -> Check:
    """Import torch_npu in another interpreter and count the devices that it finds."""
    if util.find_spec("torch_npu") is None:
        cure = 'on a machine with Ascend NPUs: pip install "lightning-rlprof[npu]"'
        return Check("torch_npu", "missing", "not installed", cure)
    try:
        answer = ask(_QUESTION, timeout_s=_ANSWERS_S, environment=NO_AUTOLOAD)
    except InterpreterError as error:
        cure = "source set_env.sh of CANN; torch_npu and torch need the same version"
        return Check("torch_npu", "broken", f"it cannot be imported: {error}", cure)
    if not answer["count"]:
        cure = "npu-smi info may say why; ASCEND_RT_VISIBLE_DEVICES may hide it"
        return Check("torch_npu", "broken", f"{answer['version']} finds no NPU", cure)
    return Check("torch_npu", "ok", f"{answer['version']}, {answer['count']} NPU in sight")


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
        says = f"{name}={home} is no directory"
        return Check("CANN", "broken", says, "source set_env.sh of the CANN that is installed")
    for pattern in ("*/ascend_toolkit_install.info", "version.info", "*/version.info"):
        for path in sorted(Path(home).glob(pattern)):
            if found := re.search(r"(?im)^version\s*=\s*\[?([\w.]+)", content(path) or ""):
                return Check("CANN", "ok", f"{found[1]} at {home}")
    return Check("CANN", "unknown", f"{home} does not tell its version")


def check_msprof() -> Check:
    """Look for the exporter that the analysis of Ascend data calls."""
    program = shutil.which("msprof")
    if program is None:
        cure = "it comes with CANN: source its set_env.sh"
        return Check("msprof", "missing", "not on PATH: Ascend data cannot be analysed here", cure)
    return Check("msprof", "ok", program)
