"""Capture with torch_npu.profiler: one output directory per window, checked after every call.

Analyse Ascend captures once training is over, in a process that can be stopped.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.npu_profiler import NpuOptions, npu_module, npu_options
from lightning_rlprof.records.notes import Code, Notes
from lightning_rlprof.records.records import Header, Kind
from lightning_rlprof.records.run_directory import make_capture_folder

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "lightning_rlprof", "ascend", "parse")


def analyse_captures(
    captures: Sequence[Path],
    timeout_s: float,
    note: Notes,
    command: Sequence[str] = _COMMAND,
) -> None:
    """Run ``rlprof ascend parse`` on capture directories and wait; what goes wrong becomes a note.

    Not in this process: torch_npu's analysis forks, changes how multiprocessing starts processes,
    may wait for ever, and takes about a minute per captured step. What it prints is logged.

    Args:
        captures: Directories ``…_ascend_pt``.
        timeout_s: After this it is stopped with all that it started.
        note: Keeps a note in the run.
        command: The command line before the directories.
    """
    text = f"parsing {len(captures)} captures, for at most {timeout_s:g} s"
    note(Code.ASCEND_PARSING, text, captures=len(captures))
    try:
        status, last = _run([*command, *map(str, captures)], timeout_s)
    except OSError as error:
        note(Code.ASCEND_NOT_PARSED, f"parsing could not be started ({error}); {_LATER}")
        return
    if status == -signal.SIGKILL:
        note(Code.ASCEND_NOT_PARSED, f"parsing was stopped after {timeout_s:g} s; {_LATER}")
    elif status:
        note(Code.ASCEND_NOT_PARSED, f"parsing failed with status {status} ({last}); {_LATER}")


_LATER = "run `rlprof ascend parse` later"
_LONGEST_PARSE_S = 3600.0


def _run(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Log what a command says as it comes; return its status and its last words."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(timeout_s, _kill, [process])
    timer.daemon = True
    timer.start()
    said = deque(["no output"], maxlen=1)
    assert process.stdout is not None
    try:
        with process.stdout as output:
            for line in filter(str.strip, output):
                log.info("analyse: %s", line.rstrip())
                said.append(line.strip())
        return process.wait(), said[0]
    finally:  # Ctrl-C, too
        timer.cancel()
        if process.poll() is None:
            _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    with suppress(OSError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)


# Under msprof's command line these make torch_npu.profiler do nothing.
_MSPROF = ("PROFILING_MODE", "PROFILER_SAMPLECONFIG")


def build(config: ProfilerConfig, header: Header) -> Recorder:
    """Return the recorder of this rank.

    Raises:
        RecorderError: torch_npu is missing, finds no device, is not the one that profiles, or an
            option would have no effect.
    """
    profiler, npu = npu_module("profiler"), npu_module("npu")
    if not npu.is_available():
        raise RecorderError(
            "torch_npu.profiler finds no NPU in this process: check npu-smi info and "
            "ASCEND_RT_VISIBLE_DEVICES; integrated.profile: false records spans only"
        )
    if outside := [name for name in _MSPROF if os.environ.get(name)]:
        raise RecorderError(
            f"{outside[0]} is set, so msprof profiles this process and "
            f"torch_npu.profiler does nothing: unset it, or record only markers with "
            f"tools: [mstx]"
        )
    return NpuProfilerRecorder(profiler, npu_options(config, profiler), config, header)


class NpuProfilerRecorder(Recorder):
    """Write one ``…_ascend_pt`` directory per window, whose ``ProfilerStep#3`` is step 3.

    torch_npu prints its failures and continues. So after the start it is asked whether it runs, and
    the device's data is looked for after the stop. Both happen on the thread that trains.

    Args:
        profiler: The module ``torch_npu.profiler``.
        options: What it is told.
        config: Says which steps share a window, and whether to analyse.
        header: Describes this rank.
    """

    def __init__(
        self, profiler: Any, options: NpuOptions, config: ProfilerConfig, header: Header
    ) -> None:
        self._module, self._options = profiler, options
        self._config, self._header = config, header
        self._profile: Any = None
        self._step = 0
        self._made: list[Path] = []
        self._empty: list[Path] = []

    def open(self, out: Path) -> None:
        """Start a new profiler; an old one cannot always be started again."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RecorderError(
                "another profiler is active on this thread, and torch_npu.profiler inside of it "
                "crashes when it stops: remove one of them"
            )
        make_capture_folder(out)
        self._step = int(out.name.split("-")[1])
        profile = self._new_profile(out)
        profile.step_num = self._step
        profile.start()
        folder = Path(profile.prof_if.prof_path or os.devnull)
        runs = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if not runs or out.resolve() not in folder.parents:
            if runs:
                profile.stop()
            profile.stopped = True  # else __del__ stops what never ran, and writes elsewhere
            raise RecorderError(
                f"torch_npu.profiler did not start in {out}; its line [ERROR] on the terminal says "
                "why: a directory that it may not write, a library of CANN that is missing"
            )
        self._profile = profile
        self._made.append(folder)
        self._describe(out)

    def enter(self, name: str, kind: Kind, step: int) -> object:
        """Go on to the window's next step; other spans are shown by MSTX."""
        if kind == "step" and step != self._step and self._profile is not None:
            self._step, self._profile.step_num = step, step - 1
            self._profile.step()
        return None

    def close(self) -> None:
        """Stop the profiler and look for the device's data."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if profile.current_action == self._module.ProfilerAction.RECORD_AND_SAVE:
            profile.step()  # ends the schedule; a stop in the middle of it prints a warning
        profile.stop()
        folder = self._made[-1]
        if self._config.integrated.profile_with_npu and not list(folder.glob("PROF_*")):
            self._empty.append(folder)
            if len(self._empty) == 1:
                self.note(
                    Code.CAPTURE_WITHOUT_DEVICE,
                    f"{folder.name} has no device data (no PROF_ directory): CANN did not "
                    "profile; its messages are on the terminal and in ~/ascend/log",
                    captures=1,
                )

    def finish(self) -> None:
        """Say how many captures are empty; analyse them all, if that was asked for."""
        if len(self._empty) > 1:
            text = f"{len(self._empty)} of {len(self._made)} captures have no device data"
            self.note(Code.CAPTURE_WITHOUT_DEVICE, text, captures=len(self._empty))
        if self._config.integrated.profile_analysis and self._made:
            analyse_captures(self._made, _LONGEST_PARSE_S, self.note)

    def _new_profile(self, out: Path) -> Any:
        module = self._module
        # Without a handler the data is deleted together with the profiler.
        handler = module.tensorboard_trace_handler(str(out), analyse_flag=False)
        if handler is None:
            raise RecorderError(
                f"torch_npu.profiler cannot write into {out}; its line [ERROR] on the terminal "
                "says why"
            )
        return module.profile(
            **self._options.profile,
            schedule=self._schedule(self._step),
            on_trace_ready=handler,
            experimental_config=self._options.experimental,
        )

    def _schedule(self, first: int) -> Callable[[int], Any]:
        """Return what torch_npu does at a step: record up to the window's last one, which it saves.

        It counts from ``first``, but asks for its 0 once before it is told so.
        """
        action, goes_on = self._module.ProfilerAction, self._goes_on

        def decide(number: int) -> Any:
            if number > first and not goes_on(number - 1):
                return action.NONE
            return action.RECORD if goes_on(max(number, first)) else action.RECORD_AND_SAVE

        return decide

    def _goes_on(self, step: int) -> bool:
        return self._config.joins_steps and self._config.wants_step(step + 1)

    def _describe(self, out: Path) -> None:
        """Put what tells captures apart into profiler_metadata.json."""
        header = self._header
        for key, value in (
            ("role", header.role),
            ("rlprof_run", header.run_id),
            ("rlprof_rank", str(header.rank)),
            ("rlprof_window", out.name),
        ):
            self._profile.add_metadata(key, value)
