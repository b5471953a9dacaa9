"""Open a capture range of Nsight Systems per capture; fetch its reports when training is over."""

import os
import re
from pathlib import Path
from typing import Any

import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.nsys import (
    REPORT_WAIT_S,
    Source,
    capture_range_end,
    fetch,
    folder_of,
    ranged,
)
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Header

_DOMAIN, _RANGE = "rlprof", "rlprof.capture"
_ALONE = "no Nsight Systems is attached to this process"
_CURE = (
    "so nsight captures nothing: start it with `rlprof nsys run -- python …`, or in Ray with "
    "runtime_env=ray_runtime_env(config, 'worker')"
)
_LATER = (
    "nsys may write it after this process ends; then call "
    "lightning_rlprof.integrations.ray.collect_reports(run). A killed worker loses "
    "its report"
)
_NO_GPU = "this process sees no GPU, and capture-range cudaProfilerApi makes no report without one"


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank."""
    return NsightRecorder(config, header)


class NsightRecorder(Recorder):
    """Tell Nsight Systems where each capture begins and ends.

    That is the NVTX range ``rlprof.capture@rlprof``, and with CUDA ``cudaProfilerStart`` and
    ``cudaProfilerStop`` around it: nsys opens its captures by one of the two. It has to be around
    the process already (``rlprof nsys run``, or ``ray_runtime_env`` in Ray); where it is not, one
    warning says so and nothing else happens.

    In Ray, `finish` moves reports into the rank's folder, after at most
    30 seconds. Reports written after the process ends: use `collect_reports`.

    Args:
        config: Says how many ranges nsys expects, and where and how long to look for reports.
        header: Whose reports.
    """

    def __init__(self, config: ProfilerConfig, header: Header) -> None:
        self._config, self._header = config, header
        self._home = Path()
        self._captures: dict[int, str] = {}
        self._cuda = False
        self._open: Any = None  # The NVTX domain in which a range is open.

    def open(self, out: Path) -> None:
        """Begin a range; the first one warns where no nsys is attached."""
        if not self._captures and not _attached():
            self.note(Code.NSYS_ABSENT, f"{_ALONE}, {_CURE}")
            self.why_nothing = _ALONE
        import nvtx

        domain = nvtx.get_domain(_DOMAIN)
        # A message must be registered, or nsys opens no capture: nvtx registers it, unlike
        # torch.cuda.nvtx.
        event = domain.get_event_attributes(message=_RANGE)
        # This is checked first: without CUDA, torch raises five kinds of exceptions from the calls.
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.profiler.start()
        domain.push_range(event)
        self._open = domain
        number = len(self._captures) + 1
        self._home, self._captures[number] = out.parent, out.name
        if _attached():
            text = f"nsys range {number} is {out.name}"
            self.note(Code.NSYS_RANGE, text, number=number, capture=out.name)

    def close(self) -> None:
        """End the range, after the work that the device still has to do."""
        domain, self._open = self._open, None
        if domain is None:
            return
        try:
            if self._cuda:
                torch.cuda.synchronize()  # Kernels that run on would be missing in the report.
        finally:
            domain.pop_range()
            if self._cuda:
                torch.cuda.profiler.stop()

    def finish(self) -> None:
        """Fetch this process's reports, or say where they will be."""
        if not (self._captures and _attached()):
            return
        config = self._config.nsight
        folder = folder_of(config)
        if folder is None:
            text = "nsys writes its reports to its own output directory after this process ends"
            self.note(Code.NSYS_REPORTS_ELSEWHERE, text)
        else:
            in_ranges = ranged(config, self._header.role)
            captures = self._captures if in_ranges else {}
            why = _LATER if self._cuda or not in_ranges else _NO_GPU
            source = Source(self._header, self._home, folder, captures, why, self.note)
            fetch([source], REPORT_WAIT_S if in_ranges and self._writes_now() else 0.0)

    def _writes_now(self) -> bool:
        """Tell whether nsys writes before the process ends: after the last range that it expects.

        Measured with nsys 2022.4 and 2023.4. Without a GPU it sees no range.
        """
        end = capture_range_end(self._config)
        number = re.match(r"repeat(?:-shutdown)?:(\d+)", end)
        enough = int(number[1]) <= len(self._captures) if number else end.startswith("stop")
        return self._cuda and enough


def _attached() -> bool:
    return "NSYS_PROFILING_SESSION_ID" in os.environ
