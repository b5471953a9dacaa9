"""Recorders of Nsight Systems and captures made by hand; a CUDA where there is none."""

import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nvtx
import pytest
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.nsight import NsightRecorder
from lightning_rlprof.records.notes import level_of
from lightning_rlprof.testing import make_header

ATTACHED = "NSYS_PROFILING_SESSION_ID"


class FakeCuda:
    """A CUDA and an NVTX tool that are said to be there: which calls are made, which one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fails = ""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", partial(self._call, "synchronize"))
        for name in ("start", "stop"):
            monkeypatch.setattr(torch.cuda.profiler, name, partial(self._call, name))
        monkeypatch.setattr(nvtx, "get_domain", lambda name: self)

    def get_event_attributes(self, *, message: str) -> str:
        return message

    def push_range(self, event: str) -> None:
        self._call(f"push {event}")

    def pop_range(self) -> None:
        self._call("pop")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError(f"asked to fail at {name}")


def noted(recorder: NsightRecorder) -> list[tuple[str, str]]:
    notes: list[tuple[str, str]] = []
    recorder.note = lambda code, text, **facts: notes.append((level_of(code), text))
    return notes


def recorder_of(role: str = "actor", **nsight: Any) -> NsightRecorder:
    """Return the recorder of a process that captures one step."""
    config = ProfilerConfig.build(None, tools=["nsight"], steps=[1], nsight=nsight)
    header = replace(make_header(), pid=os.getpid(), host=socket.gethostname(), role=role)
    return NsightRecorder(config, header)


def capture(recorder: NsightRecorder, run: Path, *names: str) -> None:
    for name in names:
        recorder.open(run / "rank-00000" / name)
        recorder.close()
