"""See that torch.profiler gets CUPTI, which gives a GPU's events to one listener per process."""

import logging
import os
from collections.abc import MutableMapping

import torch

from lightning_rlprof.errors import RecorderError

__all__ = ["refuse_nsys", "set_injection_aside"]

log = logging.getLogger(__name__)

_INJECTION = "NVTX_INJECTION64_PATH"
_KEEP = ("RLPROF_KEEP_NVTX_INJECTION", "VERL_KEEP_NVTX_INJECTION")
_NOWHERE = "/nonexistent/set-aside-by-rlprof.so"


def refuse_nsys(environment: MutableMapping[str, str] = os.environ) -> None:
    """Raise where Nsight Systems traces CUDA in this process.

    Raises:
        RecorderError: It does; the text says what to change.
    """
    # nsys sets the second one only with cuda among the things that it traces.
    if "NSYS_PROFILING_SESSION_ID" in environment and environment.get("CUDA_INJECTION64_PATH"):
        raise RecorderError(
            "torch.profiler cannot record the GPU under an nsys that traces CUDA: CUPTI has one "
            "listener per process; start nsys without cuda in --trace, drop one of the two tools, "
            "or set integrated.profile_with_npu (device) to false"
        )


def set_injection_aside(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Keep a leftover NVTX tool from taking CUPTI, and say so in the log; must come before CUDA.

    Images and Ray workers inherit ``NVTX_INJECTION64_PATH`` from an earlier profiling. The library
    that it names subscribes to CUPTI first, and traces of torch.profiler hold no kernel then, which
    no error tells. ``RLPROF_KEEP_NVTX_INJECTION=1`` leaves it, as verl's
    ``VERL_KEEP_NVTX_INJECTION=1`` does; so does nsys, whose own variable it is.

    Returns:
        What was done, for the run's notes; None where there was nothing to do.
    """
    named = environment.get(_INJECTION)
    kept = any(environment.get(key) == "1" for key in _KEEP)
    if not named or named == _NOWHERE or kept or "NSYS_PROFILING_SESSION_ID" in environment:
        return None
    environment[_INJECTION] = _NOWHERE
    text = (
        f"{_INJECTION}={named} was set aside: its tool would take CUPTI from torch.profiler; "
        f"{_KEEP[0]}=1 keeps it"
    )
    if torch.cuda.is_initialized():
        text += "; CUDA runs already, so it may be too late: unset it before the training starts"
    log.warning("%s", text)
    return text
