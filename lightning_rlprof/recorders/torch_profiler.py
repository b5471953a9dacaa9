"""Capture a torch.profiler trace per window; the slow part of it runs off the training thread."""

import gzip
import logging
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.model import Header, Kind
from lightning_rlprof.recorders.base import Recorder

__all__ = ["TorchProfilerOptions", "TorchProfilerRecorder", "build"]

log = logging.getLogger(__name__)

# Level 1 is ten times as fast as gzip's default and a trace is written once and read a few times.
_GZIP_LEVEL = 1
_DEVICE_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank."""
    block = config.integrated
    options = TorchProfilerOptions(
        device=header.device,
        role=header.role,
        rank=header.rank,
        world_size=header.world_size,
        with_cpu=block.profile_with_cpu,
        with_device=block.profile_with_npu,
        record_shapes=block.profile_record_shapes,
        with_memory=block.profile_with_memory,
        with_modules=block.profile_with_module,
    )
    return TorchProfilerRecorder(options)


@dataclass(frozen=True)
class TorchProfilerOptions:
    """What a torch.profiler capture contains, and the words that tell its files apart."""

    device: str
    role: str
    rank: int
    world_size: int
    with_cpu: bool = True
    with_device: bool = True
    record_shapes: bool = False
    with_memory: bool = False
    with_modules: bool = False

    def activities(self) -> list[ProfilerActivity]:
        """Return what torch.profiler shall watch on this device."""
        found = [ProfilerActivity.CPU] if self.with_cpu else []
        if self.with_device and self.device in _DEVICE_ACTIVITIES:
            found.append(_DEVICE_ACTIVITIES[self.device])
        return found


class TorchProfilerRecorder(Recorder):
    """Write one Chrome trace per window, ``<window>_<role>_rank0-of-8_pid4.trace.json.gz``.

    Stopping collects the events on the training thread; they are written and compressed on a
    thread of its own, which `finish` awaits.

    Args:
        options: What to capture.

    Raises:
        RecorderError: No activity is left to capture on this device.
    """

    def __init__(self, options: TorchProfilerOptions) -> None:
        if not options.activities():
            raise RecorderError(
                f"torch.profiler has nothing to capture on {options.device!r}: "
                "set integrated.profile_with_cpu or integrated.profile_with_npu (device) to true"
            )
        self._options = options
        self._profiler: Any = None
        self._out = Path()
        self._exports: list[threading.Thread] = []
        self._errors: list[Exception] = []

    def open(self, out: Path) -> None:
        """Start the profiler, unless another one is active in this process."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RecorderError("another torch profiler is active; stop it or drop this capture")
        self._out = out
        out.mkdir(parents=True, exist_ok=True)
        options = self._options
        profiler = torch.profiler.profile(
            activities=options.activities(),
            record_shapes=options.record_shapes,
            profile_memory=options.with_memory,
            with_modules=options.with_modules,
            # Eager modules are seen by the stack tracer only; with_modules alone knows TorchScript.
            with_stack=options.with_modules,
        )
        profiler.start()
        self._profiler = profiler

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Open a record_function row."""
        row = torch.profiler.record_function(name)
        row.__enter__()
        return row

    def exit(self, token: object) -> None:
        """Close the record_function row."""
        token.__exit__(None, None, None)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop the profiler and hand the trace to a thread that writes it."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        path = self._out / self._file_name()
        thread = threading.Thread(target=self._export, args=(profiler, path), name="rlprof-export")
        thread.start()
        self._exports.append(thread)

    def finish(self) -> None:
        """Wait for the files; raises what their writing raised."""
        waiting = [thread for thread in self._exports if thread.is_alive()]
        if waiting:
            log.info("waiting for %d traces to be written", len(waiting))
        for thread in self._exports:
            thread.join()
        self._exports.clear()
        if self._errors:
            raise self._errors.pop(0)

    def _file_name(self) -> str:
        o = self._options
        who = f"{o.role}_rank{o.rank}-of-{o.world_size}_pid{os.getpid()}"
        return f"{self._out.name}_{who}.trace.json.gz"

    def _export(self, profiler: Any, path: Path) -> None:
        plain = path.with_suffix("")
        part = path.with_suffix(".gz.part")
        try:
            profiler.export_chrome_trace(str(plain))
            with (
                plain.open("rb") as source,
                gzip.open(part, "wb", compresslevel=_GZIP_LEVEL) as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            part.replace(path)
        except Exception as error:
            self._errors.append(error)
        finally:
            for leftover in (plain, part):
                with suppress(OSError):  # the folder itself may be gone
                    leftover.unlink()
