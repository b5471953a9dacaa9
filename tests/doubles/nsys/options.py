"""What `nsys profile` knows: options, their values, and the versions that do not know them yet.

From the help of the real nsys 2022.4.2 and 2023.4.4 and the user guide of 2026; options of other
systems (Windows, Tegra, QNX) and of graphics are left out, and so refused.
"""

import re

NEVER = (0, 0)
OLD, MIDDLE = (2022, 4), (2023, 4)

SHORT = {
    "b": "backtrace",
    "c": "capture-range",
    "d": "duration",
    "e": "env-var",
    "f": "force-overwrite",
    "n": "inherit-environment",
    "o": "output",
    "p": "nvtx-capture",
    "s": "sample",
    "t": "trace",
    "w": "show-output",
    "x": "stop-on-exit",
    "y": "delay",
    "Y": "start-later",
}

_ANY, _NUMBER, _BOOL = r".+", r"\d+", "true|false"
_TREE = "process-tree|system-wide|none"

# Name: what its value has to look like as a whole, and the last version seen without it.
OPTIONS: dict[str, tuple[str, tuple[int, int]]] = {
    "after-collection-start": (_ANY, MIDDLE),
    "after-report-ready": (_ANY, MIDDLE),
    "backtrace": ("auto|fp|lbr|dwarf|none", NEVER),
    "capture-range": ("none|cudaProfilerApi|nvtx|hotkey", NEVER),
    "capture-range-end": (
        r"none|stop|stop-shutdown|repeat|(repeat|repeat-shutdown):\d+(:(sync|async|defer))?",
        NEVER,
    ),
    "cpu-core-events": (_ANY, NEVER),
    "cpuctxsw": (_TREE, NEVER),
    "cuda-event-trace": ("auto|true|false", MIDDLE),
    "cuda-flush-interval": (_NUMBER, NEVER),
    "cuda-graph-trace": ("(graph|node)(:(host-only|host-and-device))?", NEVER),
    "cuda-memory-usage": (_BOOL, NEVER),
    "cuda-trace-all-apis": (_BOOL, MIDDLE),
    "cuda-trace-scope": ("process-tree|system-wide", MIDDLE),
    "cuda-um-cpu-page-faults": (_BOOL, NEVER),
    "cuda-um-gpu-page-faults": (_BOOL, NEVER),
    "cudabacktrace": (r"((all|none|kernel|memory|sync|other)(:\d+)?,?)+", NEVER),
    "delay": (_NUMBER, NEVER),
    "discard-environment": (_BOOL, MIDDLE),
    "duration": (_NUMBER, NEVER),
    "env-var": (r"\w+=.*", NEVER),
    "event-sample": ("system-wide|none", NEVER),
    "export": ("((none|sqlite|hdf|text|json|jsonlines|arrow|arrowdir|parquetdir),?)+", NEVER),
    "flush-on-cudaprofilerstop": (_BOOL, OLD),
    "force-overwrite": (_BOOL, NEVER),
    "gpu-metrics-device": (r"none|all|help|[\d,]+", NEVER),
    "gpu-metrics-devices": (r"none|all|cuda-visible|help|[\d,]+", MIDDLE),
    "gpu-metrics-frequency": (_NUMBER, NEVER),
    "gpuctxsw": (_BOOL, NEVER),
    "inherit-environment": (_BOOL, NEVER),
    "kill": (r"none|sigkill|sigterm|\d+", NEVER),
    "mpi-impl": ("openmpi|mpich", NEVER),
    "nccl-trace": (_ANY, MIDDLE),
    "nic-metrics": ("true|false|none|lf|hf", NEVER),
    "nvtx-capture": (_ANY, NEVER),
    "nvtx-domain-exclude": (_ANY, NEVER),
    "nvtx-domain-include": (_ANY, NEVER),
    "osrt-threshold": (_NUMBER, NEVER),
    "output": (_ANY, NEVER),
    "python-backtrace": ("cuda|none|false", OLD),
    "python-functions-trace": (_ANY, MIDDLE),
    "python-sampling": (_BOOL, OLD),
    "python-sampling-frequency": (_NUMBER, OLD),
    "pytorch": (r"((autograd|autograd-shapes)-nvtx|functions-trace(-shapes)?|none|,)+", MIDDLE),
    "resolve-symbols": (_BOOL, NEVER),
    "run-as": (_ANY, NEVER),
    "sample": (_TREE, NEVER),
    "samples-per-backtrace": (_NUMBER, NEVER),
    "sampling-period": (_NUMBER, NEVER),
    "session-new": (r"[A-Za-z][ -~]*", NEVER),
    "show-output": (_BOOL, NEVER),
    "start-later": (_BOOL, OLD),
    "stats": (_BOOL, NEVER),
    "stop-on-exit": (_BOOL, NEVER),
    "trace": (_ANY, NEVER),
    "trace-fork-before-exec": (_BOOL, NEVER),
    "wait": ("primary|all", NEVER),
}

_ALWAYS = (
    "cuda nvtx cublas cublas-verbose cusparse cusparse-verbose mpi oshmem ucx osrt cudnn opengl "
    "opengl-annotations openacc openmp nvvideo vulkan vulkan-annotations none"
)
TRACES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_ALWAYS.split(), NEVER),
    "python-gil": OLD,
    **dict.fromkeys(
        ["cuda-sw", "cusolver", "cusolver-verbose", "gds", "nccl", "s3", "syscall"], MIDDLE
    ),
}


def refusal(option: str, given: str, version: tuple[int, int]) -> str:
    """Say what the real nsys says to an option, by its long name, that it does not take; or ''."""
    pattern, without = OPTIONS.get(option, ("", (9999, 0)))
    if version <= without:
        return f"unrecognised option '--{option}={given}'"
    for api in given.split(",") if option == "trace" else []:
        if version <= TRACES.get(api, (9999, 0)):
            return f"Illegal --trace argument '{api}'"
    if not re.fullmatch(pattern, given):
        return f"Illegal --{option} argument: {given}."
    return ""
