"""Run torch_npu's offline analysis for many ranks at once, and trust only what it left behind."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_rlprof.errors import RecorderError, TraceError
from lightning_rlprof.loaders.ascend.capture_folder import OUTPUT, find_captures
from lightning_rlprof.loaders.ascend.output_check import check_content, device_data, has_raw_data
from lightning_rlprof.system.subprocess_python import Interpreter, InterpreterError, ask

GET_TORCH_NPU = (
    'pip install "lightning-rlprof[npu]" on a machine with CANN and source its set_env.sh; '
    "raw data can be moved to a machine that has both"
)
"""How people get what the analysis needs."""

Export = Literal["text", "db"]
"""Formats that torch_npu's analysis writes."""

State = Literal["analysed", "already", "failed"]
"""What became of a directory; see `Outcome`."""

_SUFFIX = "_ascend_pt"
_PAUSE_S = 0.1
_LONGEST = 300
_ANSWERS_S = 300.0
_PARAMETERS = """
import inspect
from torch_npu.profiler.profiler import analyse
answer["parameters"] = list(inspect.signature(analyse).parameters)
"""
# It forks, sets the start method of multiprocessing, and refuses in daemons: so it has a process of
# its own that is no daemon.
_ANALYSE = """
import json
from torch_npu.profiler.profiler import analyse
analyse(sys.argv[1], **json.loads(sys.argv[2]))
"""
_PREFIX = re.compile(r"^\[[-\d :]+\] \[ERROR\] \[\d+\] \S+: ")


@dataclass(frozen=True)
class Outcome:
    """What came of one ``…_ascend_pt`` directory.

    Attributes:
        path: The directory.
        rank: Whose data it is, None where nothing tells.
        state: ``analysed``, ``already`` (what is there verifies) or ``failed``.
        wrote: Names of the files in its output folder.
        said: Why it failed, or what its data lacks and the tool complained of.
        seconds: How long its analysis took.
    """

    path: Path
    rank: int | None
    state: State
    wrote: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0


class Options(NamedTuple):
    """How to analyse.

    Attributes:
        jobs: How many directories at a time; each uses several processes, and memory of a few
            times its data.
        timeout_s: Longest time of one.
        exports: Formats to write; those that each was recorded for where empty.
        force: Analyse again what verifies.
    """

    jobs: int = 1
    timeout_s: float = 3600.0
    exports: Sequence[Export] = ()
    force: bool = False


def ascend_directories(paths: Sequence[Path]) -> list[Path]:
    """Return every ``…_ascend_pt`` directory that is, or lies in, one of the paths; sorted, once.

    Links inside are not followed.

    Raises:
        TraceError: One of the paths is no directory, or holds none of them.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise TraceError(f"{path}: {'is a file' if path.exists() else 'no such directory'}")
        mine = list(_below(path))
        if not mine:
            raise TraceError(
                f"{path}: holds no {_SUFFIX} directory, which torch_npu.profiler makes per window"
            )
        for directory in mine:
            found.setdefault(directory.resolve(), directory)
    return sorted(found.values())


def _below(path: Path) -> Iterator[Path]:
    if path.resolve().name.endswith(_SUFFIX):
        yield path if path.name.endswith(_SUFFIX) else path.resolve()
        return
    for folder, names, _ in os.walk(path):
        for name in [name for name in names if name.endswith(_SUFFIX)]:
            names.remove(name)
            if not (directory := Path(folder, name)).is_symlink():
                yield directory


def analyse(
    directories: Sequence[Path],
    options: Options,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Analyse what is not analysed yet, several directories at a time.

    Each has a process of its own, that is killed with its children when it takes too long, and when
    this process ends. What an analysis left is looked into as `check_content` does, before as well:
    so a second call goes on where the first one was stopped. An analysis begins with emptying the
    directory's output folder. ``progress`` is called with (directories done, directories in all).

    Raises:
        RecorderError: There is something to do, and torch_npu or CANN cannot do it here.
    """
    outcomes = {each: found for each in directories if (found := _without(each, options))}
    todo = [each for each in directories if each not in outcomes]
    keywords = _keywords(todo, options.exports) if todo else {}
    report = progress or (lambda done, total: None)
    report(len(outcomes), len(directories))
    for done in _run(todo, keywords, options):
        outcomes[done.path] = done
        report(len(outcomes), len(directories))
    return [outcomes[directory] for directory in directories]


def _without(directory: Path, options: Options) -> Outcome | None:
    """Return the outcome of a directory that needs no analysis, or can have none."""
    raw = has_raw_data(directory)
    capture = find_captures(directory)[0]
    if not (options.force and raw):
        before = check_content(capture, options.exports)
        if not before.lacks:
            return Outcome(directory, capture.rank, "already", before.wrote, before.remark)
    if not raw:
        said = f"{before.lacks}, and there is no raw data (FRAMEWORK, PROF_*) to analyse"
    elif not os.access(directory, os.W_OK):
        said = "it cannot be written: copy it to where you may, and analyse the copy"
    else:
        return None
    return Outcome(directory, capture.rank, "failed", (), said)


def _keywords(todo: Sequence[Path], exports: Sequence[Export]) -> dict[str, Any]:
    """Return what the installed analysis takes of what we tell it.

    Raises:
        RecorderError: torch_npu or msprof is missing, or a format cannot be chosen.
    """
    try:
        known = ask(_PARAMETERS, timeout_s=_ANSWERS_S)["parameters"]
    except InterpreterError as error:
        raise RecorderError(
            f"the analysis needs torch_npu, which cannot be imported ({error}): {GET_TORCH_NPU}"
        ) from error
    if shutil.which("msprof") is None and any(device_data(directory) for directory in todo):
        raise RecorderError(
            f"the analysis needs msprof of CANN, which is not on PATH: {GET_TORCH_NPU}"
        )
    if exports and "export_type" not in known:
        raise RecorderError(
            "--export: the installed torch_npu writes what was recorded and nothing else; leave it "
            "out, or analyse with torch_npu 2.6.0 or later"
        )
    # One directory needs one process; what that starts beyond is not to be told.
    wanted = {"max_process_number": 1, "export_type": list(exports) or None}
    return {key: value for key, value in wanted.items() if key in known and value is not None}


def _run(todo: Sequence[Path], keywords: dict[str, Any], options: Options) -> Iterator[Outcome]:
    waiting, running = list(todo), list[_Analysis]()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(_Analysis(waiting.pop(0), keywords, options))
            for one in [one for one in running if one.ended()]:
                running.remove(one)
                yield one.outcome()
            time.sleep(_PAUSE_S if running else 0)
    finally:
        for one in running:
            one.stop()


class _Analysis:
    """The process that analyses one directory."""

    def __init__(self, directory: Path, keywords: dict[str, Any], options: Options) -> None:
        self._directory, self._options = directory, options
        self._began = time.monotonic()
        path = str(directory.absolute())
        self._process = Interpreter(_ANALYSE, path, json.dumps(keywords))
        self._status: int | None = None

    def ended(self) -> bool:
        self._status = self._process.wait(0)
        return self._status is not None or self._seconds() > self._options.timeout_s

    def stop(self) -> None:
        """Leave nothing of an analysis that did not end: half of its files may be complete."""
        self._process.stop()
        if self._status is None:
            shutil.rmtree(self._directory / OUTPUT, ignore_errors=True)

    def outcome(self) -> Outcome:
        output = self._process.output().replace(f"{self._directory.resolve()}/", "")
        seconds, words = self._seconds(), _last_words(output)
        self.stop()
        capture = find_captures(self._directory)[0]
        content = check_content(capture, self._options.exports)
        told = [content.lacks or content.remark]
        if self._status is None:
            limit = self._options.timeout_s
            told = [f"it took longer than {limit:g} s and was stopped (--timeout)"]
        elif self._status:
            told.append(f"its process ended with status {self._status}")
        # What the tool complained of matters, too, where all is there that was promised.
        told.append(words and f"the tool said: {words}")
        state: State = "failed" if content.lacks else "analysed"
        said = "; ".join(filter(None, told))
        return Outcome(self._directory, capture.rank, state, content.wrote, said, seconds)

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _last_words(output: str) -> str:
    """Return the first two errors that a tool printed, for the others follow from them.

    Without any, its last line where that is an exception's. Spinners are passed over.
    """
    lines = [line.strip().lstrip("|/-\\") for line in re.split(r"[\r\n\b]+", output)]
    errors = [_PREFIX.sub("", line) for line in lines if _PREFIX.match(line)][:2]
    last = next(filter(None, reversed(lines)), "")
    if not errors and re.match(r"[\w.]+(Error|Exception)\b", last):
        errors = [last]
    text = " / ".join(errors)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
