"""Capture torch.profiler traces: one per window, or one per cycle of mini-batches in it.

See that torch.profiler gets CUPTI, which gives a GPU's events to one listener per process.
"""

import logging
import os
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from lightning_rlprof.config.blocks import TorchProfilerConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.torch_profiler import (
    Budget,
    Cycle,
    HostMemory,
    Plan,
    Tools,
    TorchWindow,
    TraceExporter,
    available_bytes,
    event_bytes,
    trace_name,
)
from lightning_rlprof.records.notes import Code, Fact, Level
from lightning_rlprof.records.records import Header, Kind
from lightning_rlprof.records.run_directory import make_capture_folder

log = logging.getLogger(__name__)

_INJECTION = "NVTX_INJECTION64_PATH"
_KEEP = ("RLPROF_KEEP_NVTX_INJECTION", "VERL_KEEP_NVTX_INJECTION")
_NOWHERE = "/nonexistent/set-aside-by-rlprof.so"


def refuse_nsys(environment: MutableMapping[str, str] = os.environ) -> None:
    """Raise where Nsight Systems traces CUDA in this process.

    Raises:
        RecorderError: It does; the text says what to change.
    """
    # nsys sets the second one only with cuda among the things that it traces.
    if "NSYS_PROFILING_SESSION_ID" in environment and environment.get("CUDA_INJECTION64_PATH"):
        raise RecorderError(
            "torch.profiler cannot record the GPU under an nsys that traces CUDA: CUPTI serves one "
            "profiler per process; start nsys without cuda in --trace, remove one of the two, "
            "or set integrated.profile_with_npu (device) to false"
        )


def set_injection_aside(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Keep a leftover NVTX tool from taking CUPTI, and say so in the log; must come before CUDA.

    Images and Ray workers inherit ``NVTX_INJECTION64_PATH`` from an earlier profiling. The library
    that it names subscribes to CUPTI first, and traces of torch.profiler hold no kernel then, which
    no error tells. ``RLPROF_KEEP_NVTX_INJECTION=1`` leaves it, as verl's
    ``VERL_KEEP_NVTX_INJECTION=1`` does; so does nsys, whose own variable it is.

    Returns:
        What was done, for the run's notes; None where there was nothing to do.
    """
    named = environment.get(_INJECTION)
    kept = any(environment.get(key) == "1" for key in _KEEP)
    if not named or named == _NOWHERE or kept or "NSYS_PROFILING_SESSION_ID" in environment:
        return None
    environment[_INJECTION] = _NOWHERE
    text = (
        f"{_INJECTION}={named} was replaced: its tool would take CUPTI from torch.profiler; "
        f"{_KEEP[0]}=1 keeps it"
    )
    if torch.cuda.is_initialized():
        text += (
            "; CUDA is already initialized, so this may be too late: unset the variable "
            "before the training starts"
        )
    log.warning("%s", text)
    return text


_DEVICE_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
# How many ranks share a host where no launcher tells: few hosts hold more than 8 devices.
_RANKS_PER_HOST = 8
_MOST_EVENTS = 20_000_000
_CURE = (
    "at {}; the events so far are kept. Capture fewer steps, one stage or "
    "torch_profiler.schedule, or "
    "leave out stacks and shapes"
)


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank.

    Raises:
        RecorderError: Nothing can be watched here, or nsys has the GPU's events.
    """
    block = config.integrated
    return TorchProfilerRecorder(
        TorchProfilerOptions(
            device=header.device,
            role=header.role,
            rank=header.rank,
            world_size=header.world_size,
            with_cpu=block.profile_with_cpu,
            with_device=block.profile_with_npu,
            record_shapes=block.profile_record_shapes,
            with_memory=block.profile_with_memory,
            with_modules=block.profile_with_module,
            tool=config.torch_profiler,
        )
    )


@dataclass(frozen=True)
class TorchProfilerOptions:
    """What a capture contains, and the words that tell its files apart.

    Attributes:
        device: Kind of the device.
        role: Role of the process.
        rank: Its global rank.
        world_size: Number of ranks.
        with_cpu: Operators and the rows of spans; without it a GPU's events alone, which is cheap.
        with_device: Events of the device.
        record_shapes: Shapes of the operators' inputs.
        with_memory: Allocations.
        with_modules: Rows of ``nn.Module``, by way of Python stacks.
        tool: Stacks, and the schedule.
        max_events: A capture ends early at about this number.
    """

    device: str
    role: str
    rank: int
    world_size: int
    with_cpu: bool = True
    with_device: bool = True
    record_shapes: bool = False
    with_memory: bool = False
    with_modules: bool = False
    tool: TorchProfilerConfig = field(default_factory=TorchProfilerConfig)
    max_events: int = _MOST_EVENTS

    @property
    def with_stack(self) -> bool:
        """Whether Python calls are watched; torch sees modules outside of TorchScript by them."""
        return self.tool.with_stack or self.with_modules

    @property
    def on_device(self) -> bool:
        """Whether events of a device are collected."""
        return self.with_device and self.device in _DEVICE_ACTIVITIES

    def activities(self) -> list[ProfilerActivity]:
        """Return what torch.profiler shall watch on this device."""
        found = [ProfilerActivity.CPU] if self.with_cpu else []
        return [*found, _DEVICE_ACTIVITIES[self.device]] if self.on_device else found

    def plan(self) -> Plan | None:
        """Return torch's schedule, or None where everything is collected."""
        if not self.tool.schedule.active:
            return None
        with warnings.catch_warnings():
            # "won't be using warmup": who sets none wants none
            warnings.simplefilter("ignore")
            plan: Plan = torch.profiler.schedule(**self.tool.schedule.model_dump())
        return plan

    def max_bytes(self) -> int | None:
        """Return the most that stopping may take: this rank's part of half of what is available."""
        available = available_bytes()
        told = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(told) if told.isdigit() else min(self.world_size, _RANKS_PER_HOST)
        return None if available is None else available // 2 // max(1, ranks)


class TorchProfilerRecorder(Recorder):
    """Write one Chrome trace per window, ``<window>_<role>_rank0-of-8_pid4.pt.trace.json.gz``.

    With a schedule it is one per cycle of mini-batches, ``…_pid4_mb3-4.pt.trace.json.gz``. Each
    span is a row. Stopping and writing take 5 to 8 µs per event on the training thread; a thread of
    its own compresses, and `finish` awaits it. What fails there is noted, and costs that trace
    alone.

    Args:
        options: What to capture.

    Raises:
        RecorderError: No activity is left to capture on this device, or nsys traces CUDA.
    """

    def __init__(self, options: TorchProfilerOptions) -> None:
        if not options.activities():
            raise RecorderError(
                f"torch.profiler has nothing to capture on {options.device!r}: "
                "set integrated.profile_with_cpu or integrated.profile_with_npu (device) to true"
            )
        self._options = options
        self._remark: str | None = None
        if options.on_device and options.device == "cuda":
            refuse_nsys()
            self._remark = set_injection_aside()
        self._out = Path()
        self._window: TorchWindow | None = None
        self._memory = HostMemory()
        self._exporter = TraceExporter(self._tell, self._memory.release)

    def __reduce__(self) -> tuple[Callable[..., Recorder], tuple[TorchProfilerOptions]]:
        return (TorchProfilerRecorder, (self._options,))

    def open(self, out: Path) -> None:
        """Start the profiler, unless another one is active in this process."""
        if self._remark is not None:
            self.note(Code.INJECTION_REPLACED, self._remark)
            self._remark = None
        self._out = out
        make_capture_folder(out)
        tools = Tools(self._profiler, self._budget, self._written, self._tell)
        self._window = TorchWindow(tools, self._options.plan())

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Open a row; without host activity there are none."""
        if self._window is None or not self._options.with_cpu:
            return None
        return self._window.enter(name, kind, step)

    def exit(self, token: object) -> None:
        """Close the row."""
        if self._window is not None and token is not None:
            self._window.exit(token)  # type: ignore[arg-type]

    def mark(self, name: str, step: int) -> None:
        """Put in a row without length."""
        if self._window is not None and self._options.with_cpu:
            self._window.mark(name)

    def close(self) -> None:
        """Stop the profiler and write the trace."""
        window, self._window = self._window, None
        if window is None:
            return
        window.close()
        if window.scheduled and not window.reached:
            plan = self._options.tool.schedule
            self.note(
                Code.CAPTURE_WITHOUT_TRACE,
                f"{self._out.name} has no trace: torch_profiler.schedule starts after "
                f"{plan.skip_first + plan.wait + plan.warmup} mini-batches (skip_first, wait, "
                f"warmup), and there were {window.mini_batches} (optimizer steps)",
                capture=self._out.name,
            )

    def finish(self) -> None:
        """Wait for the files."""
        self._exporter.finish()

    def _tell(self, code: Code | Level, text: str, /, **facts: Fact) -> None:
        """Keep a note where the session wants it by then: it puts its own function here later."""
        self.note(code, text, **facts)

    def _profiler(self) -> Any:
        options = self._options
        # Not torch.profiler.profile: it is part of a circle of references, and would keep its
        # events, 1.4 kB each, until Python's collector comes by.
        return _KinetoProfile(
            activities=options.activities(),
            record_shapes=options.record_shapes,
            profile_memory=options.with_memory,
            with_stack=options.with_stack,  # with_modules is for TorchScript, and warns since 2.15
        )

    def _budget(self) -> Budget:
        options = self._options
        size = event_bytes(with_stack=options.with_stack, record_shapes=options.record_shapes)
        return Budget(self._memory, size, options.max_events, options.max_bytes())

    def _written(self, cycle: Cycle) -> None:
        options, window = self._options, self._out.name
        name = trace_name(window, options.role, options.rank, options.world_size, cycle.batches)
        if cycle.over:
            text = f"{window} ended early, {_CURE.format(cycle.over)}"
            self.note(Code.CAPTURE_CUT_SHORT, text, capture=window)
        if cycle.device_full and options.on_device:
            self.note(
                Code.CAPTURE_WITHOUT_KERNELS,
                f"{name}: kernels are missing from its end, since torch's buffer for them was "
                "full; take fewer steps, one stage or torch_profiler.schedule",
                trace=name,
            )
        held, cycle.profiler = [cycle.profiler], None
        if cycle.taken:
            text = f"{name} was not written: another torch profiler ran during the capture"
            self.note(Code.TRACE_LOST, text, trace=name)
            self._memory.release(held)
            return
        self._exporter.write(held, self._out / name, kernels=options.on_device)
