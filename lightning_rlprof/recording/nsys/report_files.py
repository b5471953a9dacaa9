"""Find the reports that nsys writes for Ray's workers, wait until they are whole, fetch them.

Ray starts a worker as a child of ``nsys`` and names the report after the worker's process:
``worker_process_<PID>.nsys-rep``. With capture ranges nsys makes a report of each,
``worker_process_<PID>.<n>.nsys-rep``, and range n is the n-th capture of that process.
"""

import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from lightning_rlprof.config.blocks import NsightConfig
from lightning_rlprof.records.notes import Code, Notes
from lightning_rlprof.records.records import Header, Note
from lightning_rlprof.system.files import make_folder, new_folder

log = logging.getLogger(__name__)

_SUFFIX = ".nsys-rep"
_LOOK_S = 1.0
_GROWS = "is still being written"
_EMPTY = "is empty: nsys is still writing it, or was killed"
REPORT_WAIT_S = 30.0
"""How long to wait for reports that nsys is still writing."""

_AGAIN = "fetch it later with lightning_rlprof.integrations.ray.collect_reports(run)"


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
        return [number for number in self.captures if not (number in there or self._home(number))]

    def _home(self, number: int) -> bool:
        return (self.home / f"{self.stem(number)}{_SUFFIX}").exists()


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
    except AttributeError:  # an older Ray, which has no public way to tell
        node = getattr(sys.modules.get("ray._private.worker"), "_global_node", None)
        told = getattr(node, "get_session_dir_path", None)
        return latest_folder() if told is None else Path(told(), "logs", "nsight")


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
    with suppress(OSError), os.scandir(source.folder) as entries:  # no folder yet: no reports
        for entry in entries:
            match = name.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                facts = entry.stat(follow_symlinks=False)
                if facts.st_mtime_ns >= source.header.unix_ns:
                    look = _Look(Path(entry.path), facts.st_size, facts.st_mtime_ns)
                    found[int(match[1] or 0)] = look
    return found


def _move(source: Source, number: int, path: Path) -> Path | None:
    try:
        new_folder(source.home.parent, 0o600)
        make_folder(source.home.parent, source.home)
        for again in count(1):
            suffix = f"_{again}{_SUFFIX}" if again > 1 else _SUFFIX
            target = source.home / f"{source.stem(number)}{suffix}"
            with suppress(FileExistsError):
                _place(path, target)
                return target
    except OSError as error:
        text = f"{path} could not be moved ({error.strerror})"
        source.note(Code.NSYS_REPORT_MISSING, text, report=str(path))
    return None


def _place(path: Path, target: Path) -> None:
    """Move a file to a name that is free, else raise FileExistsError; also between file systems."""
    try:
        os.link(path, target)
    except FileExistsError:
        raise
    except OSError:  # another file system, or one without links
        _copy(path, target)
    with suppress(OSError):  # a file system without modes
        target.chmod(0o600)  # it contains the whole environment
    try:
        path.unlink()
    except OSError:
        target.unlink()  # one of the two stays: the original
        raise


def _copy(path: Path, target: Path) -> None:
    with path.open("rb") as source, target.open("xb") as file:
        try:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            target.unlink()
            raise
