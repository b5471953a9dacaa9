"""Build the NVTX tool ``listener.c``, run a script under it, and read what it heard."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("listener.c")
FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC")


class Call(NamedTuple):
    """One NVTX call: ``create | mark | push | pop | start | end``."""

    verb: str
    thread: int
    domain: str
    number: int
    message: str


def build(folder: Path) -> Path:
    """Return the compiled tool; skips the test where there is no gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc here to build the NVTX tool with")
    library = folder / "listener.so"
    hidden = "-fvisibility=hidden"
    subprocess.run([gcc, *FLAGS, hidden, "-o", str(library), str(SOURCE)], check=True)
    return library


def run(script: str, folder: Path, tool: Path | None) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process with the tool attached, or with none."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("NVTX")}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables.get("PYTHONPATH", "")])
    variables["PYTHONWARNINGS"] = "error"
    if tool is not None:
        variables |= {"NVTX_INJECTION64_PATH": str(tool), "LISTENER_FILE": str(folder / "calls")}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def heard(script: str, folder: Path, tool: Path) -> list[Call]:
    """Return the calls that a script makes, in their order."""
    done = run(script, folder, tool)
    assert done.returncode == 0, done.stderr
    lines = (folder / "calls").read_text().splitlines()
    fields = [line.split("\t") for line in lines]
    return [Call(verb, int(tid), where, int(n), text) for verb, tid, where, n, text in fields]
