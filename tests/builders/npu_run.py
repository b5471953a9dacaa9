"""Sessions recorded on the fake torch_npu, and what came of them; not a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.recorders.base import build_recorders
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.run_directory import RankTrace, read_trace
from lightning_rlprof.testing import FakeClock, make_header
from tests.doubles.torch_npu.fake import Device

STAGES = ("actor_generate", "actor_update")


@contextmanager
def session_of(folder: Path, rank: int = 0, **options: Any) -> Iterator[Session]:
    """Record on a fake NPU with the recorders that the configuration chooses."""
    config = ProfilerConfig.build(device_time=False, **options)
    header = replace(make_header(rank, 8, "npu"), role="critic")
    with Session(config, folder, header, build_recorders(config, header), FakeClock()) as session:
        yield session


def record(folder: Path, steps: int = 4, rank: int = 0, **options: Any) -> RankTrace:
    """Run some steps with two stages each, and read what was written."""
    with session_of(folder, rank, **options) as session:
        for step in range(1, steps + 1):
            session.begin_step(step)
            for name in STAGES:
                with stage(name):
                    pass
            session.end_step()
    return read_trace(folder / f"rank-{rank:05d}.jsonl")


def shown(device: Device) -> list[str]:
    """Return what reached CANN, one line a call: ``+ actor_update`` and ``- actor_update``."""
    names: dict[int, str] = {}
    lines = []
    for call in device.calls:
        if call[0] == "start":
            names[call[1]] = call[2]
            lines.append(f"+ {call[2]}")
        elif call[0] == "end":
            lines.append(f"- {names[call[1]]}")
        else:
            lines.append(f"{call[0]} {call[1]}")
    return lines


def notes(trace: RankTrace, level: str = "warning") -> list[str]:
    """Return the texts of a run's notes."""
    return [note.text for note in trace.notes if note.level == level]


def windows(folder: Path, rank: int = 0) -> list[str]:
    """Return the names of a rank's capture folders that hold data of torch_npu."""
    found = (folder / f"rank-{rank:05d}").glob("*/*_ascend_pt")
    return sorted(path.parent.name for path in found)
