"""Capture with torch_npu.profiler: one output directory per window, checked after every call.

What torch_npu is told is checked first: whatever would not take effect is refused before training.
Captures are analyzed once training is over, in a process that can be stopped.
"""

import inspect
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.records.notes import Code, Notes
from lightning_rlprof.records.records import Header, Kind
from lightning_rlprof.records.run_directory import make_capture_folder

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "lightning_rlprof", "ascend", "parse")

_LATER = "run `rlprof ascend parse` later"
_MAX_PARSE_S = 3600.0

# With these variables of msprof's command line, torch_npu.profiler does nothing.
_MSPROF = ("PROFILING_MODE", "PROFILER_SAMPLECONFIG")

_FILTERS = ("mstx_domain_include", "mstx_domain_exclude")
_OF_THE_HOST = {"gc_detect_threshold"}
_CHOSEN_BY = {
    "profiler_level": "profile_level",
    "export_type": "profile_export_type",
    "mstx": "mstx",
    "msprof_tx": "mstx",
}

# An unsuitable option is reset by torch_npu, which prints a line about it.
_CURES = {
    "aic_metrics": "needs integrated.profile_level: level1 or level2",
    "op_attr": "needs integrated.profile_export_type: db",
    **dict.fromkeys(_FILTERS, "needs integrated.mstx: true"),
}


def analyse_captures(
    captures: Sequence[Path],
    timeout_s: float,
    note: Notes,
    command: Sequence[str] = _COMMAND,
) -> None:
    """Run ``rlprof ascend parse`` on capture directories and wait; what goes wrong becomes a note.

    Not in this process: torch_npu's analysis forks, changes how multiprocessing starts processes,
    may wait for ever, and takes about a minute per captured step. What it prints is logged then.

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
    except subprocess.TimeoutExpired:
        note(Code.ASCEND_NOT_PARSED, f"parsing was stopped after {timeout_s:g} s; {_LATER}")
    else:
        if status:
            text = f"parsing failed with status {status} ({last}); {_LATER}"
            note(Code.ASCEND_NOT_PARSED, text)


def _run(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Log what a command says; return its status and its last words."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        finally:  # Ctrl-C must end the process, too.
            if process.poll() is None:
                with suppress(OSError):  # The process may have ended meanwhile.
                    os.killpg(process.pid, signal.SIGKILL)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for line in lines:
        log.info("analyse: %s", line)
    return process.returncode, lines[-1] if lines else "no output"


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
        self, profiler: Any, options: Mapping[str, Any], config: ProfilerConfig, header: Header
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
            # Otherwise `__del__` stops a profile that never ran, and writes elsewhere.
            profile.stopped = True
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
            profile.step()  # This ends the schedule; a stop in the middle of it prints a warning.
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
            analyse_captures(self._made, _MAX_PARSE_S, self.note)

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
            **self._options,
            schedule=self._schedule(self._step),
            on_trace_ready=handler,
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


def npu_options(config: ProfilerConfig, profiler: Any) -> dict[str, Any]:
    """Return the keywords of ``torch_npu.profiler.profile`` but for schedule and handler.

    Raises:
        RecorderError: Something was asked for that this version does not know, or that would have
            no effect together with the rest.
    """
    block, kind = config.integrated, profiler.ProfilerActivity
    activities = [kind.CPU] if block.profile_with_cpu else []
    activities += [kind.NPU] if block.profile_with_npu else []
    return {
        "activities": activities,
        "record_shapes": block.profile_record_shapes,
        "profile_memory": block.profile_with_memory,
        "with_modules": block.profile_with_module,
        "with_stack": config.with_stack,
        "experimental_config": _experimental(config, profiler),
    }


def _experimental(config: ProfilerConfig, profiler: Any) -> Any:
    made, block = profiler._ExperimentalConfig, config.integrated
    known = inspect.signature(made).parameters
    given = _given(config, profiler)
    for name, value in given.items():
        if name not in known:
            _refuse(f"npu.experimental.{name}")
        if isinstance(known[name].default, bool) and not isinstance(value, bool):
            raise RecorderError(f"npu.experimental.{name}={value!r} is neither true nor false")
    deep = block.profile_level in ("level1", "level2")
    metrics = profiler.AiCMetrics
    # The level level_none records only markers, and torch_npu turns them on.
    markers = block.mstx or block.profile_level == "level_none" or "mstx" in (config.tools or ())
    formats = {"text": profiler.ExportType.Text, "db": profiler.ExportType.Db}
    asked = {
        "profiler_level": getattr(profiler.ProfilerLevel, block.profile_level.capitalize()),
        "aic_metrics": metrics.PipeUtilization if deep else metrics.AiCoreNone,
        "export_type": formats[block.profile_export_type],
        "data_simplification": True,
        "mstx" if "mstx" in known else "msprof_tx": markers,
        **given,
    }
    experimental = made(**asked)
    _check_kept(experimental, asked)
    return experimental


def _given(config: ProfilerConfig, profiler: Any) -> dict[str, Any]:
    """Return `npu.experimental`, with torch_npu's members in place of their names."""
    block, given = config.integrated, dict(config.npu.experimental)
    for name, ours in _CHOSEN_BY.items():
        if name in given:
            raise RecorderError(f"npu.experimental.{name} is chosen by integrated.{ours}")
    for name in given:
        needs = "profile_with_cpu" if name in _OF_THE_HOST else "profile_with_npu"
        if not getattr(block, needs):
            raise RecorderError(f"npu.experimental.{name} needs integrated.{needs}: true")
    if "host_sys" in given:
        names = given["host_sys"] if isinstance(given["host_sys"], list) else [given["host_sys"]]
        systems = profiler.HostSystem
        given["host_sys"] = [_member(systems, str(each).upper(), "host_sys") for each in names]
    if "aic_metrics" in given:
        name = str(given["aic_metrics"])
        given["aic_metrics"] = _member(profiler.AiCMetrics, name, "aic_metrics")
    return given


def _member(enum: Any, name: str, key: str) -> Any:
    if not hasattr(enum, name):
        _refuse(f"npu.experimental.{key} {name}")
    return getattr(enum, name)


def _check_kept(experimental: Any, asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        kept = getattr(experimental, f"_{name}", getattr(experimental, name, value))
        if _comparable(kept) != _comparable(value):
            cure = _CURES.get(name, "leave it out, or try another version")
            raise RecorderError(
                f"{name}={value!r} would have no effect: torch_npu makes {kept!r} of it; {cure}"
            )


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else [value]


def _refuse(what: str) -> NoReturn:
    raise RecorderError(
        f"{what} is not known to the installed torch_npu: leave it out, or install a newer version"
    )


def npu_module(name: str) -> Any:
    """Return the module ``torch_npu.<name>``.

    Raises:
        RecorderError: torch_npu or CANN is missing or broken.
    """
    try:
        return import_module(f"torch_npu.{name}")
    except Exception as error:
        # Without CANN it raises an ImportError, a RuntimeError or a bare Exception.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RecorderError(
            f"torch_npu on a machine with CANN is required ({reason[0]}): "
            'pip install "lightning-rlprof[npu]", and source set_env.sh of CANN'
        ) from error
