"""The door for trainings on Ray: start processes under Nsight Systems, and fetch its reports."""

import logging
import os
import re
import socket
import time
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from lightning_rlprof.config.blocks import NsightConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.validation import near
from lightning_rlprof.errors import ConfigError, TraceError
from lightning_rlprof.recording.nsys import (
    REPORT_WAIT_S,
    Source,
    capture_range_end,
    captures_in,
    fetch,
    folder_of,
    latest_folder,
    ranged,
)
from lightning_rlprof.records.notes import Code, Fact, Level, level_of
from lightning_rlprof.records.records import Note
from lightning_rlprof.records.run_directory import (
    RankTrace,
    append_note,
    rank_directory,
    rank_files,
    read_trace,
)

log = logging.getLogger(__name__)

_Process = Literal["controller", "worker"]
_PROCESSES = get_args(_Process)

# Ray puts the path into a shell command without quotes.
_FOLDER = re.compile(r"/[A-Za-z0-9_.,:/@%+=-]*")


def ray_runtime_env(config: ProfilerConfig, process: _Process) -> dict[str, dict[str, str]]:
    """Return the ``runtime_env`` with which Ray starts an actor under ``nsys profile``.

    It holds ``nsight.controller`` or ``nsight.worker``; a ``role`` in the configuration is the
    actor's. Workers open captures by ``cudaProfilerApi``, which without a GPU makes no report.
    Whether *this* machine has a GPU, or Ray, plays no part. While captures are off, or ``tools``
    has no ``nsight``, it is ``{}``, which starts an actor plainly. Asked for workers, it logs host
    and PID of the process that asks: that is the controller, whose report bears the PID.

    Raises:
        ConfigError: The process does not exist, or a shell would not take ``nsight.reports``.

    Example::

        >>> config = ProfilerConfig(tools=["nsight"], steps=[2, 5])
        >>> ray_runtime_env(config, "worker")["nsight"]["capture-range-end"]
        'repeat:2'
    """
    if process not in _PROCESSES:
        close = near(str(process), _PROCESSES)
        raise ConfigError(f"unknown process={process!r} (allowed: controller, worker){close}")
    if process == "worker":
        log.info("the controller is on host %s, PID %d", socket.gethostname(), os.getpid())
    if not config.captures or "nsight" not in (config.tools or ()):
        return {}
    return {"nsight": _options(config, process)}


def _options(config: ProfilerConfig, process: _Process) -> dict[str, str]:
    given = config.nsight.worker if process == "worker" else config.nsight.controller
    options = {key: value for key, value in given.items() if value is not None}
    if process == "worker":
        options.setdefault("capture-range-end", capture_range_end(config))
    # Ray appends an -o unless there is an option of this name.
    if "output" in options:
        options["o"] = options.pop("output")
    folder = config.nsight.reports
    if folder is not None and "o" not in options:
        if not _FOLDER.fullmatch(folder):
            raise ConfigError(
                f"nsight.reports={folder!r} must be an absolute path with only "
                f"letters, digits and _.,:/@%+=-: a shell reads it on every node"
            )
        options["o"] = f"{folder.rstrip('/')}/worker_process_%p"
    return options


def collect_reports(run: str | Path) -> list[Path]:
    """Fetch the reports of all ranks of a run that recorded on this host, into their folders.

    Call it in the driver when the workers have ended: nsys writes the last report of a process
    after the process ends. It waits up to 30 seconds in total. A missing report
    becomes a warning in its rank's file, with the reason. Call it again to fetch late reports.

    Returns:
        The files, now in the run directory.

    Raises:
        TraceError: The directory holds no run.
    """
    files = rank_files(Path(run))
    if not files:
        raise TraceError(
            f"no run in {run} (expected rank-*.jsonl); give the run directory of a training"
        )
    found = [each for each in map(_expected, files) if each is not None]
    return fetch(found, REPORT_WAIT_S) if found else []


def _expected(file: Path) -> Source | None:
    """Return what there is to fetch for a rank; None if nothing."""
    try:
        trace = read_trace(file)
        given = trace.header.config.get("nsight") or {}
        known = {key: given[key] for key in given if key in NsightConfig.model_fields}
        return _source(trace, NsightConfig.model_validate(known))
    except (TraceError, AttributeError, TypeError, ValueError) as error:
        # A header may contain anything.
        log.warning("%s: its reports are not collected: %s", file, " ".join(str(error).split()))
    return None


def _source(trace: RankTrace, config: NsightConfig) -> Source | None:
    """Return what there is to fetch for a rank; None if nothing, or nothing on this host."""
    header = trace.header
    if header.host != socket.gethostname() or "nsight" not in (header.config.get("tools") or ()):
        return None
    captures = captures_in(trace.notes)
    if not captures and trace.status is not None:
        return None  # The process ended well, and captured nothing.
    return Source(
        header=header,
        home=rank_directory(trace.path.parent, header.rank),
        folder=folder_of(config) or latest_folder(),
        captures=captures if ranged(config, header.role) else {},
        why_missing=_fate(header.pid, trace.status),
        note=partial(_remark, trace),
    )


def _fate(pid: int, status: str | None) -> str:
    if Path(f"/proc/{pid}").exists():
        return f"process {pid} still runs, and nsys writes after it ends: collect again later"
    if status is None:
        return f"process {pid} was killed or crashed, so nsys lost what it had not written"
    return (
        "nsys may still be writing (then collect again), or recorded no range: "
        "capture-range cudaProfilerApi needs a GPU"
    )


def _remark(trace: RankTrace, code: Code | Level, text: str, /, **facts: Fact) -> None:
    """Keep a remark in a rank's file, once however often it is made."""
    level = level_of(code)
    log.log(getattr(logging, level.upper()), "%s", text)
    if all(note.text != text for note in trace.notes):
        now_ns = time.time_ns() - trace.header.unix_ns + trace.header.clock_ns
        name = code.value if isinstance(code, Code) else ""
        try:
            append_note(trace.path, Note(now_ns, level, text, name, facts))
        except OSError as error:
            log.warning("%s: the note cannot be saved (%s)", trace.path, error.strerror)
