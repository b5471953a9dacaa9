"""Recorders of torch.profiler with small networks to watch, and what they wrote."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.torch_profiler import TorchProfilerRecorder
from lightning_rlprof.records.notes import level_of
from lightning_rlprof.records.records import Header
from lightning_rlprof.testing import make_header

KEYS = {
    "with_cpu": "profile_with_cpu",
    "with_device": "profile_with_npu",
    "record_shapes": "profile_record_shapes",
    "with_memory": "profile_with_memory",
    "with_modules": "profile_with_module",
}
"""Keys of the configuration, by what the tests call them."""


def options(
    schedule: dict[str, Any] | None = None,
    *,
    device: str = "cpu",
    role: str = "actor",
    rank: int = 0,
    world_size: int = 1,
    **changes: Any,
) -> tuple[ProfilerConfig, Header]:
    """Return what a recorder is made of."""
    own = {KEYS.get(name, name): value for name, value in changes.items()}
    config = ProfilerConfig.build(profile=True, torch_profiler={"schedule": schedule or {}}, **own)
    return config, replace(make_header(rank, world_size, device), role=role)


class Noted(TorchProfilerRecorder):
    """A recorder whose notes are kept instead of logged."""

    def __init__(self, *chosen: Any, **more: Any) -> None:
        super().__init__(*chosen, **more)
        self.notes: list[tuple[str, str]] = []
        self.note = lambda code, text, **facts: self.notes.append((level_of(code), text))

    def window(self, out: Path, work: Callable[[], object], name: str = "actor_update") -> None:
        """Open a window on one stage, work in it, and wait for what is written."""
        self.open(out)
        try:
            token = self.enter(name, "stage", 1)
            work()
            self.exit(token)
        finally:
            self.close()
            self.finish()


def trainer() -> Callable[[], None]:
    """Return one mini-batch: forward, backward and optimizer step of a small network."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def mini_batch() -> None:
        network(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return mini_batch


def ends_of_rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of every row that is ended from now on."""
    ended: list[str] = []
    real = record_function.__exit__

    def end(row: record_function, *error: Any) -> None:
        ended.append(row.name)
        real(row, *error)

    monkeypatch.setattr(record_function, "__exit__", end)
    return ended


def forward() -> None:
    torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())(torch.ones(2, 3))


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def only(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the one file of a folder."""
    (path,) = folder.iterdir()
    return events_of(path)


def rows(path: Path) -> list[str]:
    """Return the rows of spans in order, without those that torch makes of optimizers."""
    found = [e for e in events_of(path) if e.get("cat") == "user_annotation"]
    names = [e["name"] for e in sorted(found, key=lambda e: e["ts"])]
    return [name for name in names if not name.startswith("Optimizer.")]


def batches(folder: Path) -> list[str]:
    """Return the mini-batches that the names of a folder's files tell, sorted."""
    assert all(path.name.endswith(".trace.json.gz") for path in folder.iterdir())
    return sorted(path.name.split(".")[0].rpartition("_")[2] for path in folder.iterdir())
