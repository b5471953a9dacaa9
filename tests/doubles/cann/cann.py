"""Build the CANN double and say how to start a process in which the real torch_npu finds it."""

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

# What torch_npu 2.13.0 links or opens by name; all symbols live in the first.
_FIRST = "libascendcl"
_OTHERS = (
    "libhccl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
    "libms_tools_ext",
    "libmsprofiler",
    "libopapi",
    "libnnopbase",
    "libascend_ml",
    "libmspti",
    "libascend_hal",
)


def build(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Make what `ASCEND_HOME_PATH` may point to; needs gcc, takes a second.

    Args:
        folder: Where it goes.
        without: Libraries to leave out, as in a broken installation.
    """
    for name in ("lib64", "opp", "runtime", "compiler", "tools/profiler/bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    libraries = folder / "lib64"
    shared = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    _run([*shared, _soname(_FIRST), "-o", libraries / f"{_FIRST}.so", HERE / "runtime.c"])
    linked = [f"-L{libraries}", "-Wl,--no-as-needed", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
    for name in set(_OTHERS) - set(without):
        out = libraries / f"{name}.so"
        _run([*shared, "-x", "c", os.devnull, _soname(name), *linked, "-o", out])
    msprof = folder / "tools/profiler/bin/msprof"
    shutil.copy(HERE / "msprof.py", msprof)
    msprof.chmod(0o755)
    # Where torch_npu looks for the exporter's own code before it trusts the command.
    script = folder / "tools/profiler/profiler_tool/analysis/msprof/msprof.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.touch()
    return folder


def environment(cann: Path, torch_npu: Path, log: Path, *, devices: int = 1) -> dict[str, str]:
    """Return the variables of a process that runs on the double.

    Args:
        cann: What `build` made.
        torch_npu: The folder that holds the package ``torch_npu``, outside of the environment:
            installed beside torch it would break every ``import torch`` on a machine without CANN.
        log: Where the calls go, one JSON object per line.
        devices: How many NPUs there seem to be.
    """
    path = [str(ROOT), str(torch_npu), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
        "LD_LIBRARY_PATH": str(cann / "lib64"),
        "PATH": f"{cann / 'tools/profiler/bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "CANN_DOUBLE_DEVICES": str(devices),
        "CANN_DOUBLE_LOG": str(log),
        "CANN_DOUBLE_PROF": "1",
        "CUDA_VISIBLE_DEVICES": "",  # beside a GPU that torch sees, torch_npu refuses to start
        # Asynchronous, an operator that the double refuses would come out as a wrong number.
        "TASK_QUEUE_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
    }


def _soname(name: str) -> str:
    return f"-Wl,-soname,{name}.so"


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr}")
