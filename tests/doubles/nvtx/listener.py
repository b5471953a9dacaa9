"""Build the NVTX tool ``listener.c``, run a script under it, and read what it heard."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("listener.c")
FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC")
SECONDS = 120

_NO_PAYLOAD, _INT64 = 0, 2
# Of other tools, and of a tool that the tests themselves may run under.
_ATTACHED = ("NVTX", "NSYS", "LISTENER")


class Call(NamedTuple):
    """One NVTX call.

    Attributes:
        verb: ``create | category | register | mark | push | pop | start | end``.
        number: Id of a started range, or of the category that gets its name.
        category: The name of the event's category, empty without one.
        color: ARGB.
        payload: A 64-bit integer, or None without one.
    """

    verb: str
    process: int
    thread: int
    domain: str
    number: int
    category: str
    color: int
    payload: int | None
    message: str


def build(folder: Path, *flags: str) -> Path:
    """Return the compiled tool; skips the test where there is no gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc here to build the NVTX tool with")
    library = folder / "listener.so"
    command = [gcc, *FLAGS, "-fvisibility=hidden", *flags, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


def run(
    script: str, folder: Path, tool: Path | None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process with the tool attached, or with none.

    ``more`` are environment variables; unless they say otherwise, warnings are errors.
    """
    variables = {key: value for key, value in os.environ.items() if not key.startswith(_ATTACHED)}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables.get("PYTHONPATH", "")])
    variables["PYTHONWARNINGS"] = "error"
    if tool is not None:
        variables |= {"NVTX_INJECTION64_PATH": str(tool), "LISTENER_FILE": str(folder / "calls")}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**variables, **more},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def heard(script: str, folder: Path, tool: Path, **more: str) -> list[Call]:
    """Return the calls that a script and its children make, in their order."""
    done = run(script, folder, tool, **more)
    assert done.returncode == 0, done.stderr
    return read(folder)


def read(folder: Path) -> list[Call]:
    """Return the calls that were heard of scripts in a folder."""
    rows = [line.split("\t") for line in (folder / "calls").read_text().splitlines()]
    # A process that was forked uses the names that its parent gave.
    names = {(row[3], row[4]): row[9] for row in rows if row[0] == "category"}
    calls = []
    for verb, pid, thread, domain, number, category, color, type_, payload, message in rows:
        assert int(type_) in (_NO_PAYLOAD, _INT64)
        calls.append(
            Call(
                verb,
                int(pid),
                int(thread),
                domain,
                int(number),
                "" if category == "0" else names[domain, category],
                int(color),
                int(payload) if int(type_) else None,
                message,
            )
        )
    return calls


def shown(calls: Iterable[Call]) -> list[str]:
    """Return ranges and marks as words, ``push stage actor_update 3`` and so on."""
    words = []
    for call in calls:
        if call.verb in ("push", "mark", "start"):
            words.append(f"{call.verb} {call.category} {call.message} {call.payload}")
        elif call.verb in ("pop", "end"):
            words.append(call.verb)
    return words


def left_open(calls: Iterable[Call]) -> list[str]:
    """Return the messages of ranges that nobody closed; fails where one is closed twice."""
    stacks: dict[tuple[int, int, str], list[str]] = {}
    started: dict[tuple[int, int], str] = {}
    for call in calls:
        stack = stacks.setdefault((call.process, call.thread, call.domain), [])
        if call.verb == "push":
            stack.append(call.message)
        elif call.verb == "pop":
            stack.pop()
        elif call.verb == "start":
            started[call.process, call.number] = call.message
        elif call.verb == "end":
            del started[call.process, call.number]
    return [message for stack in stacks.values() for message in stack] + list(started.values())
