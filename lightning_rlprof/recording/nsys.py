"""Nsight Systems around a training: its command line out of a configuration, and its report files.

Ray starts a worker as a child of ``nsys`` and names the report after the worker's process:
``worker_process_<PID>.nsys-rep``. With capture ranges nsys makes a report of each,
``worker_process_<PID>.<n>.nsys-rep``, and range n is the n-th capture of that process.
"""

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_rlprof.config.blocks import NsightConfig
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.records.notes import Code, Notes
from lightning_rlprof.records.records import Header, Note
from lightning_rlprof.system.files import make_folder, new_folder

log = logging.getLogger(__name__)

NVTX_CAPTURE = "rlprof.capture@rlprof"
"""The range, and its domain, around each capture on a machine without a GPU."""

_SETTLED = ("capture-range", "capture-range-end", "nvtx-capture", "output", "force-overwrite")
_FORKED = (
    "trace-fork-before-exec needs about 20 s at the end and loses the last events of each forked "
    "process; spawned ones are traced without it"
)
_ONCE = (
    "at most {} captures, one per stage and step; if a stage runs more often, give --option "
    "capture-range-end=repeat"
)
_SUFFIX = ".nsys-rep"
_LOOK_S = 1.0
_GROWS = "is still being written"
_EMPTY = "is empty: nsys is still writing it, or was killed"

REPORT_WAIT_S = 30.0
"""How long to wait for reports that nsys is still writing."""

_AGAIN = "fetch it later with lightning_rlprof.integrations.ray.collect_reports(run)"

CaptureRange = Literal["cudaProfilerApi", "nvtx", "none"]
"""What opens and closes a collection of nsys."""

Version = tuple[int, int]
"""Year and release of nsys, as in 2025.3."""


class Plan(NamedTuple):
    """A command that can be run, and what to tell people before it runs."""

    argv: list[str]
    remarks: list[str]


def captures(config: ProfilerConfig) -> int | None:
    """Count the captures that a process opens, which is the number of its reports.

    One per wanted step, consecutive ones in one where they are joined; one per wanted stage and
    step where stages were chosen. None where only the training tells: every step, or every stage.
    A stage that begins more than once in a step opens more, a step that never comes opens none.

    Example::

        >>> captures(ProfilerConfig(steps=[1, 2, 5])), captures(ProfilerConfig(steps="all"))
        (3, None)
    """
    if not config.captures:
        return 0
    steps, stages = _step_captures(config), config.integrated.stage
    if steps is None or not config.per_stage:
        return steps
    if stages == "all":
        return None
    return steps * (1 if isinstance(stages, str) else len(stages))


def _step_captures(config: ProfilerConfig) -> int | None:
    joined = config.joins_steps
    if config.steps is None:
        first, end = config.integrated.profile_step_start, config.integrated.profile_step_end
        return 1 if joined else end - first
    if config.steps == "all":
        return 1 if joined else None
    wanted = set(config.steps)
    return sum(not (joined and step - 1 in wanted) for step in wanted)


def capture_range_end(config: ProfilerConfig) -> str:
    """Return the value of ``--capture-range-end``: what was given, else one that fits `captures`.

    ``repeat:N`` matters: with the exact number nsys writes the reports when the last capture has
    closed, and with a larger one, or plain ``repeat``, when the process has ended (measured with
    2022.4 and 2023.4). Neither it nor ``stop`` ends the training, as nsys does left to itself.

    Example::

        >>> [capture_range_end(ProfilerConfig(steps=steps)) for steps in ([3], [3, 5], "all")]
        ['stop', 'repeat:2', 'repeat']
    """
    given = config.nsight.worker.get("capture-range-end")
    if given is not None:
        return given
    number = captures(config)
    if number is None:
        return "repeat"
    return f"repeat:{number}" if number > 1 else "stop"


def plan(
    config: ProfilerConfig,
    target: Sequence[str],
    output: str,
    *,
    opens: CaptureRange,
    force: bool = False,
) -> Plan:
    """Build the `nsys profile` command for a training.

    Options are those of ``nsight.worker``. Sampling of the CPU is off unless asked for: it makes a
    report tens of megabytes larger. Spawned child processes are traced without an option for it.
    Where captures are off, the whole run is recorded.

    Args:
        config: As the training has it, tools included.
        target: The training's program and arguments.
        output: Name of the reports without ``.nsys-rep``; ``%p``, ``%h``, ``%n``, ``%q{NAME}``.
        opens: What opens and closes captures.
        force: Whether existing reports of that name may be replaced.

    Raises:
        ConfigError: An option is given by its short name.
    """
    options, remarks = _options(config, opens)
    words = [f"--{key}={value}" for key, value in options.items()]
    words += ["--force-overwrite=true"] if force else []
    return Plan(["nsys", "profile", *words, f"--output={output}", *target], remarks)


def _options(config: ProfilerConfig, opens: CaptureRange) -> tuple[dict[str, str], list[str]]:
    given = config.nsight.worker
    for key in given:
        if len(key) == 1:
            raise ConfigError(f"nsight.worker.{key} is a short option: use the long name")
    options = {k: v for k, v in given.items() if v is not None and k not in _SETTLED}
    # If --sample is on, nsys takes --cpuctxsw from it.
    quiet = ("sample", "cpuctxsw") if "sample" not in given else ()
    options |= {key: "none" for key in quiet if key not in given}
    remarks = [_FORKED] if options.get("trace-fork-before-exec") == "true" else []
    if not config.captures:
        remarks.append(f"captures are off ({config.why_off}), so nsys records the whole run")
        return options, remarks
    if opens == "none":
        return options, [*remarks, "no capture range is set, so nsys records the whole run"]
    options["capture-range"] = opens
    if opens == "nvtx":
        options["nvtx-capture"] = NVTX_CAPTURE
    options["capture-range-end"] = end = capture_range_end(config)
    limited = config.per_stage and not given.get("capture-range-end") and end != "repeat"
    return options, remarks + ([_ONCE.format(captures(config))] if limited else [])


def tools(config: ProfilerConfig) -> list[str]:
    """Return the tools of a training under nsys: nsight, and those given without torch_profiler.

    A GPU tells only one of the two what it does.
    """
    given = [*(config.tools or (["memory"] if config.memory.level else ()))]
    if "nsight" in given:
        return given
    return ["nsight", *(tool for tool in given if tool != "torch_profiler")]


def variables(config: ProfilerConfig, file: str | None) -> dict[str, str]:
    """Return what to add to the training's environment so that it opens captures for nsys.

    ``RLPROF__TOOLS`` where the configuration does not name nsight; with a file also
    what makes every Lightning training record itself as the file says.
    """
    added = {"RLPROF": "1", "RLPROF_CONFIG": file} if file else {}
    if "nsight" not in (config.tools or ()):
        added["RLPROF__TOOLS"] = json.dumps(tools(config))
    return added


def report_pattern(
    output: str, environment: Mapping[str, str], host: str
) -> tuple[Path, re.Pattern[str]]:
    """Return the directory of an output's reports, and what the name of each matches.

    nsys puts in the target's process (``%p``), a free number (``%n``), the host (``%h``) and
    variables, and appends the number of the capture where ranges repeat. A report that it could
    not convert keeps the suffix ``.qdstrm``.
    """
    texts = {"%%": "%", "%h": host, "%p": "\0", "%n": "\0"}
    parts = re.split(r"(%%|%h|%p|%n|%q\{\w+\})", output)
    path = Path(
        "".join(
            environment.get(part[3:-1], "") if part.startswith("%q{") else texts.get(part, part)
            for part in parts
        )
    )
    # The %n is left as it is by nsys 2022.4.
    name = r"(?:\d+|%n)".join(map(re.escape, path.name.split("\0")))
    return path.parent, re.compile(name + r"(\.\d+)?\.(nsys-rep|qdstrm)")


def installed_version(program: str) -> Version | None:
    """Ask a program for its version; None when it does not tell one."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"version (\d{4})\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class Source:
    """The reports of one rank: whose they are, where they appear and where they go.

    Attributes:
        header: The rank's.
        home: Its folder in the run directory; made when there is something to put into it.
        folder: Where nsys writes.
        captures: Names of the captures by the number of their range, from 1. None: a report of the
            whole process is expected, or its captures are unknown.
        why_missing: What to tell of a report that does not come, as the rest of a sentence.
        note: Keeps a remark in the run.
    """

    header: Header
    home: Path
    folder: Path
    captures: Mapping[int, str]
    why_missing: str
    note: Notes

    def stem(self, number: int) -> str:
        """Return a report's name at home; one without a number, 0, is of the first range."""
        window = self.captures.get(number or 1, f"range{number}" if number else "")
        step = re.sub("^step-0*", "step", window)
        words = (self.header.role, self.header.host, f"rank{self.header.rank}", step)
        return re.sub(r"[^\w.=+-]", "-", "_".join(filter(None, words)))

    def missing(self, found: "_Looks") -> list[int]:
        """Return the numbers of the reports that are neither there nor at home."""
        if not self.captures:
            return [] if found or any(self.home.glob(f"*{_SUFFIX}")) else [0]
        there = {number or 1 for number in found}
        there |= {n for n in self.captures if (self.home / f"{self.stem(n)}{_SUFFIX}").exists()}
        return [number for number in self.captures if number not in there]


class _Look(NamedTuple):
    path: Path
    size: int
    mtime_ns: int


_Looks = dict[int, _Look]


def captures_in(notes: Iterable[Note]) -> dict[int, str]:
    """Return the names of captures by the number of their range, as a rank noted them.

    Example::

        >>> facts = {"number": 1, "capture": "step-000003"}
        >>> captures_in([Note(0, "info", "", Code.NSYS_RANGE, facts)])
        {1: 'step-000003'}
    """
    facts = (note.facts for note in notes if note.code == Code.NSYS_RANGE)
    return {int(each["number"]): str(each["capture"]) for each in facts}


def ranged(config: NsightConfig, role: str) -> bool:
    """Tell whether Ray starts a process of this role with a range per capture, as it does workers.

    Example::

        >>> ranged(NsightConfig(), "actor"), ranged(NsightConfig(), "controller")
        (True, False)
    """
    return role != "controller" or config.controller.get("capture-range") not in (None, "none")


def folder_of(config: NsightConfig) -> Path | None:
    """Return where the reports of this process appear; None if only its command line knows.

    That is ``nsight.reports`` or, in a process of Ray, the session's ``logs/nsight``. Ray is asked
    only where this process has imported it already.
    """
    if config.reports is not None:
        return Path(config.reports)
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    try:
        return Path(context.get_temp_dir(), context.get_session_name(), "logs", "nsight")
    except AttributeError:  # An older Ray has no public way to get it.
        return latest_folder()


def latest_folder() -> Path:
    """Return where reports appear in the session of Ray that was started last on this host."""
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(temporary, "ray", "session_latest", "logs", "nsight")


def fetch(
    sources: Sequence[Source], timeout_s: float, pause: Callable[[float], object] = time.sleep
) -> list[Path]:
    """Move reports home once they are whole, and note the others; nothing is ever overwritten.

    A report is whole when it holds something and two looks, a second apart, find the same.

    Args:
        sources: Whose reports.
        timeout_s: How long to wait, for all of them together; two looks are always taken.
        pause: Lets seconds pass.

    Returns:
        The files at home.
    """
    before, now = _settled(sources, timeout_s, pause)
    fetched = []
    for source, earlier, later in zip(sources, before, now, strict=True):
        for number, look in sorted(later.items()):
            if not look.size or earlier.get(number) != look:
                text = f"{look.path} {_GROWS if look.size else _EMPTY}; {_AGAIN}"
                source.note(Code.NSYS_REPORT_MISSING, text, report=str(look.path))
            elif path := _move(source, number, look.path):
                fetched.append(path)
        for number in source.missing(later):
            which = source.captures.get(number, f"process {source.header.pid}")
            text = f"no nsys report for {which} in {source.folder}: {source.why_missing}"
            source.note(Code.NSYS_REPORT_MISSING, text, capture=which)
    return fetched


def _settled(
    sources: Sequence[Source], timeout_s: float, pause: Callable[[float], object]
) -> tuple[list[_Looks], list[_Looks]]:
    """Return the last two looks at every source: when all is whole, or when time is up."""
    before: list[_Looks] = []
    now = [_look(source) for source in sources]
    if timeout_s and any(map(Source.missing, sources, now)):
        log.info("waiting up to %g s for nsys reports", timeout_s)
    for _ in range(max(1, math.ceil(timeout_s / _LOOK_S))):
        pause(_LOOK_S)
        before, now = now, [_look(source) for source in sources]
        empty = any(not look.size for looks in now for look in looks.values())
        if before == now and not (empty or any(map(Source.missing, sources, now))):
            break
    return before, now


def _look(source: Source) -> _Looks:
    """Return this process's reports by number; what is older, another process of that PID left."""
    name = re.compile(rf"worker_process_{source.header.pid}(?:\.(\d+))?{re.escape(_SUFFIX)}")
    found = {}
    with suppress(OSError), os.scandir(source.folder) as entries:  # There may be no folder.
        for entry in entries:
            match = name.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                facts = entry.stat(follow_symlinks=False)
                if facts.st_mtime_ns >= source.header.unix_ns:
                    look = _Look(Path(entry.path), facts.st_size, facts.st_mtime_ns)
                    found[int(match[1] or 0)] = look
    return found


def _move(source: Source, number: int, path: Path) -> Path | None:
    """Move a report to a name at home that is free, also between file systems."""
    stem = source.stem(number)
    names = (f"{stem}_{again}" if again > 1 else stem for again in count(1))
    try:
        new_folder(source.home.parent, 0o600)
        make_folder(source.home.parent, source.home)
        home = next(each for name in names if not (each := source.home / (name + _SUFFIX)).exists())
        part = home.with_suffix(".part")
        try:
            shutil.move(path, part)
        except OSError:
            part.unlink(missing_ok=True)  # Only the original must stay.
            raise
        with suppress(OSError):  # Some file systems have no modes.
            part.chmod(0o600)  # A report contains the whole environment.
        return part.rename(home)
    except OSError as error:
        text = f"{path} could not be moved ({error.strerror})"
        source.note(Code.NSYS_REPORT_MISSING, text, report=str(path))
    return None
