"""Directories as torch_npu.profiler leaves them, and a stand-in for its analysis; not a test.

The stand-in is a package ``torch_npu`` of a few lines. It does in each directory what a file there
tells it, such as to hang, and knows nothing of formats: the real one is in the tests on the double.
"""

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

OUTPUT = "ASCEND_PROFILER_OUTPUT"
HOST = {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": "1.000", "dur": 2, "cat": "cpu_op"}
RANGE = {**HOST, "name": "actor_update", "cat": "", "args": {"event_type": "start/end"}}
TASK = [
    {**HOST, "name": "MatMul", "pid": 99, "cat": ""},
    {"ph": "M", "name": "process_name", "pid": 99, "args": {"name": "Ascend Hardware"}},
]

PACKAGE = '''
"""A stand-in for torch_npu: its analysis does what told.json in the directory says."""
import json, multiprocessing, os, shutil, subprocess, time

def analyse(profiler_path, max_process_number=9{export}):
    multiprocessing.set_start_method("fork", force=True)
    with open(os.path.join(profiler_path, "told.json")) as file:
        told = json.load(file)
    with open(os.path.join(profiler_path, "called.json"), "w") as file:
        daemon = multiprocessing.current_process().daemon
        options = [max_process_number, {given}]
        json.dump({{"pid": os.getpid(), "options": options, "daemon": daemon}}, file)
    out = os.path.join(profiler_path, "ASCEND_PROFILER_OUTPUT")
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    print("|\\b/\\b", *told.get("prints", []), sep="\\n", flush=True)
    if "meets" in told:
        while not os.path.exists(told["meets"]):
            time.sleep(0.01)
    for name in told.get("copies", []):
        shutil.copy(os.path.join(profiler_path, "made", name), out)
    open(os.path.join(out, "analyse.done"), "w").close()
    if told.get("hangs"):
        child = subprocess.Popen(["sleep", "60"])
        with open(os.path.join(profiler_path, "child"), "w") as file:
            file.write(str(child.pid))
        time.sleep(60)
    if "raises" in told:
        raise RuntimeError(told["raises"])
    os._exit(told.get("status", 0))
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, chooses: bool = True) -> None:
    """Put the stand-in where new interpreters find it; `chooses`: it takes ``export_type``."""
    home = folder / "torch_npu" / "profiler"
    home.mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").touch()
    (home / "__init__.py").touch()
    given = "export_type" if chooses else "None"
    code = PACKAGE.format(export=", export_type=None" if chooses else "", given=given)
    (home / "profiler.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def put_msprof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name first on PATH; nobody calls it."""
    folder.mkdir(exist_ok=True)
    (folder / "msprof").write_text("#!/bin/sh\nexit 1\n")
    (folder / "msprof").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def capture(
    directory: Path,
    *,
    exports: Any = "text",
    host: bool = True,
    device: bool = False,
    activities: Sequence[str] = ("CPU", "NPU"),
    tasks: bytes = b"",
    rank: int | None = None,
    **config: Any,
) -> Path:
    """Make a directory with raw data of the host, of the device, or of both.

    ``tasks`` is what CANN's file of tasks holds, ``config`` options such as ``_mstx``.
    """
    directory.mkdir(parents=True)
    common = {"activities": [f"ProfilerActivity.{name}" for name in activities]}
    experimental = {"_profiler_level": "Level0", "_export_type": exports, **config}
    info = {"config": {"common_config": common, "experimental_config": experimental}}
    name = "profiler_info.json" if rank is None else f"profiler_info_{rank}.json"
    (directory / name).write_text(json.dumps(info))
    if host:
        (directory / "FRAMEWORK").mkdir()
        (directory / "FRAMEWORK" / "torch.op_range").write_bytes(b"operators")
    if device:
        data = directory / "PROF_000001_20260101000000000_DOUBLE" / "device_0" / "data"
        data.mkdir(parents=True)
        (data / "stars_soc.data.0.slice_0").write_bytes(tasks)
        (data / "stars_soc.data.0.slice_0.done").write_text("filesize:0")
    return directory


def trace(folder: Path, *events: Any) -> Path:
    """Write a ``trace_view.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace_view.json").write_text(json.dumps(events))
    return folder / "trace_view.json"


def database(folder: Path, *tables: str, empty: Sequence[str] = ()) -> Path:
    """Write an ``ascend_pytorch_profiler_0.db`` with a row in each table but the empty ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ascend_pytorch_profiler_0.db"
    with sqlite3.connect(path) as data:
        for table in (*tables, *empty):
            data.execute(f"CREATE TABLE {table} (startNs INTEGER)")
        for table in tables:
            data.execute(f"INSERT INTO {table} VALUES (1)")
    data.close()
    return path


def tell(directory: Path, *events: Any, tables: Sequence[str] = (), **told: Any) -> Path:
    """Tell the stand-in what to do in a directory: write these events or tables, and the rest.

    ``prints`` lines, ``raises`` a text, ends with ``status``, ``hangs`` with a child, ``meets``:
    waits until that file exists.
    """
    copies = []
    if events:
        copies.append(trace(directory / "made", *events).name)
    if tables:
        copies.append(database(directory / "made", *tables).name)
    (directory / "told.json").write_text(json.dumps({"copies": copies, **told}))
    return directory
