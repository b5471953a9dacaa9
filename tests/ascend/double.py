"""Processes in which the real torch_npu runs on the CANN double, and what the double heard."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlprof.records.run_directory import RankTrace, read_trace
from tests.doubles.cann import cann

SECONDS = 300
Call = dict[str, Any]
Run = Callable[..., "Process"]


@dataclass(frozen=True)
class Process:
    """What a process printed, told the double, and left behind in its folder."""

    folder: Path
    status: int
    output: str
    calls: list[Call]

    def part(self, name: str) -> list[Call]:
        """Return the calls of one part of `tests.ascend.training`."""
        found, inside = [], False
        for call in self.calls:
            if call["call"] == "part":
                inside = call["name"] == name
            elif inside:
                found.append(call)
        return found

    def raised(self, name: str) -> str:
        """Return what a part raised, empty when nothing."""
        lines = [line for line in self.output.splitlines() if line.startswith('{"part"')]
        said = {one["part"]: one["raised"] for one in map(json.loads, lines)}
        return said.get(name, "")

    def run(self, name: str) -> Path:
        """Return the run directory of a part."""
        (found,) = (self.folder / "runs" / name).iterdir()
        return found

    def trace(self, name: str, rank: int = 0) -> RankTrace:
        """Return what rlprof itself recorded in a part."""
        return read_trace(self.run(name) / f"rank-{rank:05d}.jsonl")

    def captures(self, name: str, rank: int = 0) -> dict[str, Path]:
        """Return the directories of torch_npu in a part, by window."""
        found = (self.run(name) / f"rank-{rank:05d}").glob("*/*_ascend_pt")
        return {path.parent.name: path for path in sorted(found)}

    def info(self, name: str) -> dict[str, Any]:
        """Return profiler_info.json of a part with one capture."""
        (capture,) = self.captures(name).values()
        found: dict[str, Any] = json.loads((capture / "profiler_info.json").read_text())
        return found


def run(
    words: Sequence[str], folder: Path, library: Path, torch_npu: Path, **changes: str | None
) -> Process:
    """Run a command of this interpreter in a folder, on the double.

    Args:
        words: Arguments of python.
        folder: Where it runs.
        library: What `cann.build` made.
        torch_npu: The folder with the package.
        **changes: Variables; None takes one away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "calls.jsonl"
    given = cann.environment(library, torch_npu, log) | changes
    # A rank of another launcher would be taken for this process's.
    env = {key: value for key, value in given.items() if value is not None and key != "RANK"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env=env | {key: value for key, value in changes.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = log.read_text().splitlines() if log.is_file() else []
    return Process(folder, done.returncode, done.stdout, [json.loads(line) for line in lines])


def shown(calls: Iterable[Call]) -> list[str]:
    """Return MSTX and the profiler's start and stop, a line each: ``+ rlprof actor_update``."""
    names: dict[tuple[int, int], str] = {}
    lines = []
    for call in calls:
        if call["call"] == "mstxRangeStart":
            names[call["pid"], call["id"]] = f"{call['domain']} {call['message']}"
            lines.append(f"+ {call['domain']} {call['message']}")
        elif call["call"] == "mstxRangeEnd":
            begun = names.pop((call["pid"], call["id"]), "what never began")
            assert begun.split()[0] == call["domain"], f"{begun} ended in {call['domain']}"
            lines.append(f"- {begun}")
        elif call["call"] == "mstxMark":
            lines.append(f"! {call['domain']} {call['message']}")
        elif call["call"] in ("aclprofStart", "aclprofStop"):
            lines.append(call["call"].removeprefix("aclprof").lower())
    return lines


def left_open(calls: Iterable[Call]) -> list[str]:
    """Return the ranges that are open when the profiler stops, or for ever."""
    running: list[str] = []
    lost = []
    for line in shown(calls):
        sign, _, name = line.partition(" ")
        if sign == "+":
            running.append(name)
        elif sign == "-":
            running.remove(name)
        elif sign == "stop":
            lost += running
    return lost + running


def find_torch_npu() -> Path | None:
    """Return the folder that holds torch_npu for these tests: RLPROF_TORCH_NPU, or .npu here."""
    given = os.environ.get("RLPROF_TORCH_NPU")
    folder = Path(given) if given else cann.ROOT / ".npu"
    return folder if (folder / "torch_npu" / "__init__.py").is_file() else None


def find_msprof_analyze() -> Path | None:
    """Return the command: RLPROF_MSPROF_ANALYZE, or that of .npu/tools here."""
    given = os.environ.get("RLPROF_MSPROF_ANALYZE")
    found = Path(given) if given else cann.ROOT / ".npu/tools/bin/msprof-analyze"
    return found if found.is_file() else None
