"""The verb ``run``: a program whose trainings are recorded, without a change of code.

The program is a child process: started without a shell, signals passed on, its status kept. What
its processes are is asked while they run: which record, and which Python cannot.
"""

import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import argument, option
from lightning_rlprof.cli.open_run import complete_problem
from lightning_rlprof.errors import ConfigError, RecorderError, RlprofError
from lightning_rlprof.integrations.doors.unrecorded import advice, sentence
from lightning_rlprof.integrations.end_of_run import print_summary
from lightning_rlprof.records.records import FOLDER_VARIABLE, JOB_VARIABLE, SIGNS_VARIABLE
from lightning_rlprof.records.run_directory import rank_files, read_trace
from lightning_rlprof.system.location import local_path
from lightning_rlprof.system.process import check_records

if TYPE_CHECKING:
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.nsys import CaptureRange

INJECT = Path(__file__).parents[1] / "integrations" / "inject"
"""Folder whose ``sitecustomize`` opens the doors."""

_OVERRIDE = re.compile(r"\+?\w[\w.]*=")
_HOW = (
    "Options come before KEY=VALUE, then the program: rlprof run -- python train.py, or "
    "python -m train"
)
_NOTHING = (
    "See which frameworks are recorded: rlprof doctor. A loop of your own needs with step(): "
    "around each turn."
)
_FAILED = "Look at its own messages first."
_ISOLATED = re.compile(r"-[a-zA-Z]*[IES][a-zA-Z]*")
_MOST_PROCESSES = 10_000  # Processes that one look covers.
# Seconds between two looks, which take some milliseconds in large trainings.
_FIRST_S, _LAST_S = 0.1, 10.0
_LONGEST_TEXT = 200  # Characters shown of a text.
_PYTHONPATH = "Extend it in the script: PYTHONPATH=FOLDER:$PYTHONPATH"
_DEVICES = Path("/dev")
_INSTALL = (
    "Install Nsight Systems (https://developer.nvidia.com/nsight-systems, or nsight-systems-cli "
    "from NVIDIA's package repositories). To see the command only, add --dry-run."
)
_SECRETS = (
    "a report contains the environment variables of the training and of other processes, with "
    "every token: do not share it"
)
_NO_REPORT = (
    "Did the training reach a captured step? Does it use a ProfilerCallback, or --config here? "
    "Without GPU work it needs --capture-range nvtx."
)
_RLPROF_OPTIONS = {
    "capture-range": "--capture-range",
    "nvtx-capture": "--capture-range nvtx",
    "force-overwrite": "--force",
    "output": "-o",
}
# These variables choose captured steps.
_STEPS = ("RLPROF__STEPS", "RLPROF__INTEGRATED__PROFILE_STEP")

Words = Annotated[
    list[str],
    argument(
        "[KEY=VALUE]... -- COMMAND",
        "Keys to lay over the file, then the program: stage=actor_update -- python train.py …",
    ),
]
Config = Annotated[
    Path | None,
    option("FILE", "Config file; without it, the one that RLPROF_CONFIG names", parser=local_path),
]
Stages = Annotated[
    list[str] | None, option("STAGE", "Stage to capture (repeatable); spans are always recorded")
]
Applied = Annotated[
    list[str] | None,
    option(
        "ID",
        "Remedy that this training applies (repeatable); rlprof findings says what it brought",
        autocompletion=complete_problem,
    ),
]


def run(words: Words, config: Config = None, stage: Stages = None, applied: Applied = None) -> None:
    """Record a program's trainings without a change of its code.

    It knows Lightning, TRL, verl and others (rlprof doctor lists them), and plain PyTorch loops.

    The exit status is that of the program. Processes that it starts are recorded as well.

    Example: rlprof run --config rlprof.yaml -- torchrun --nproc-per-node 8 train.py
    """
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import from_overrides, from_words

    check_records("rlprof run")
    overrides, command = _split(words)
    laid = from_words(overrides)
    if stage and "stage" in laid:
        raise RlprofError("--stage and stage= both choose stages", hint="Give one of them.")
    if stage:
        laid["stage"] = stage[0] if len(stage) == 1 else stage
    if applied:
        from lightning_rlprof.analysis.diagnosis.diagnosis import known_id

        laid["applied"] = [known_id(each).id for each in applied]
    given = from_overrides(laid, tuple(ProfilerConfig.model_fields))
    file = str(config) if config else os.environ.get("RLPROF_CONFIG") or None
    checked = ProfilerConfig.build(file, **given)
    folder = checked.save_path
    before = _entries(folder)
    if is_isolated(command):
        text = f"'{shlex.join(command[:2])}' ignores PYTHONPATH"
        console.say(f"warning: {text}, so only Lightning is recorded", "yellow", err=True)
    with TemporaryDirectory(prefix="rlprof-run-", ignore_cleanup_errors=True) as signs:
        processes = Processes(Path(signs))
        code = run_child(command, _environment(file, given, Path(signs)), processes.look)
        runs, why, seen = processes.runs(), processes.why_nothing(), processes.seen()
    # Runs of other hosts are known by their folder alone.
    runs = [path for path in runs or sorted(_entries(folder) - before) if rank_files(path)]
    try:
        _say_recorded(runs, folder, code, why, seen)
    except BrokenPipeError:  # The exit code is the program's, even if the reader has gone.
        console.without_readers()
    raise typer.Exit(code)


def _say_recorded(
    runs: Sequence[Path], folder: Path, code: int, why: str, seen: Mapping[str, Any]
) -> None:
    """Name the new runs, or say why there is none, and what a program did instead."""
    if not runs:
        failed = f", and the program ended with status {code}" if code else ""
        text = f"{sentence(seen)}{failed}, so {_from_here(folder)} has no new run"
        nothing = _FAILED if code else _NOTHING
        first, *more = advice(seen) if seen and not why else [why or nothing]
        console.say(f"warning: {text}. {first}", "yellow", err=True)
        for line in more:
            console.say(line, err=True)
    for path in runs:
        trace, here = read_trace(rank_files(path)[0]), _from_here(path)
        says = trace.header.config.get("summary", True)
        # Workers of Ray are killed, so they have not printed a summary. A server prints none.
        printed = trace.header.rank == 0 and trace.status is not None
        if says and not code and not printed:
            print_summary(here, "finished")
        elif code or not says:  # Its summary may not have named the directory.
            console.say(f"Recorded {here}", err=True)


def _from_here(path: Path) -> Path:
    """Return a path as it may be typed here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return leading KEY=VALUE words, and the command behind them."""
    at = next((at for at, word in enumerate(words) if not _OVERRIDE.match(word)), len(words))
    command = list(words[at:])
    if command[:1] == ["--"]:
        command.pop(0)
    if not command:
        raise RlprofError("no program to run", hint=_HOW, code="usage")
    if command[0].startswith("-"):
        raise RlprofError(f"'{command[0]}' is an option, not a program", hint=_HOW, code="usage")
    return list(words[:at]), command


def _environment(file: str | None, given: dict[str, Any], signs: Path) -> dict[str, str]:
    """Return the program's variables: ours, with keys laid over those of the same name."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.config.sources import PREFIX, from_environment, merge

    known = from_environment(os.environ, tuple(ProfilerConfig.model_fields))[0]
    laid = merge(known, given)
    names = {key: PREFIX + key.upper() for key in given}
    inner = tuple(f"{name}__" for name in names.values())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(inner)}
    kept |= {name: json.dumps(laid[key], default=str) for key, name in names.items()}
    if file:
        kept["RLPROF_CONFIG"] = os.path.abspath(file)  # The program may change its directory.
    kept |= {SIGNS_VARIABLE: str(signs)}
    return {FOLDER_VARIABLE: os.getcwd(), **kept, **launched(kept)}


def _entries(folder: Path) -> set[Path]:
    return {*folder.iterdir()} if folder.is_dir() else set()


def run_child(
    argv: Sequence[str],
    environment: Mapping[str, str],
    look: Callable[[int], object] | None = None,
) -> int:
    """Run a command, pass signals on, and return its status as a shell does.

    Ctrl-C on a terminal reaches the child directly; a signal from a process reaches only rlprof.

    Args:
        argv: The command.
        environment: Its variables.
        look: Called with its process id about once a second while it runs, and more often at first.

    Raises:
        RlprofError: The program cannot be started.
    """
    try:
        process = subprocess.Popen(argv, env=environment)
    except OSError as error:
        raise RlprofError(
            f"cannot run {argv[0]}: {error.strerror}",
            hint=f"A script needs its interpreter: python {argv[0]}"
            if argv[0].endswith(".py")
            else "",
        ) from error
    wait_s = _FIRST_S
    with _passed_on(process) as wait:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                wait(wait_s)
            wait_s = min(2 * wait_s, 1.0)
            if look is not None:
                look(process.pid)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def _passed_on(process: "subprocess.Popen[bytes]") -> Iterator[Callable[[float], object]]:
    """Pass signals on to a child; yields what waits for one, or the child's end, for some seconds.

    nsys drops the reports if one of them arrives twice (measured with 2022.4 and 2023.4). SLURM
    sends the last three to the training; what nsys does with them was not measured.
    """
    of_terminals = {signal.SIGINT, signal.SIGQUIT}
    every = {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *of_terminals}

    def wait(seconds: float) -> None:
        arrived = signal.sigtimedwait({*every, signal.SIGCHLD}, seconds)
        # If si_code is above 0, the kernel sent the signal for the terminal, so the child has it
        # already.
        if arrived and arrived.si_signo in every and arrived.si_code <= 0:
            process.send_signal(arrived.si_signo)

    if hasattr(signal, "sigtimedwait"):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*every, signal.SIGCHLD})
        try:
            yield wait
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return

    # On macOS the sender is unknown: what a terminal can send counts as sent to the child, too.
    def pass_on(number: int, _: object) -> None:
        if number not in of_terminals:
            process.send_signal(number)

    before = {each: signal.signal(each, pass_on) for each in every}
    try:
        yield process.wait
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Processes:
    """The processes of one launch, by what they say, and by what Linux says of those that do not.

    Args:
        signs: Folder in which a Python under ``rlprof run`` says what it is, and what it records.
    """

    def __init__(self, signs: Path) -> None:
        self._signs = signs
        self._seen: set[int] = set()
        self._why: list[str] = []  # Reasons why a Python process does not load rlprof.
        self._wait_s, self._look_at = _FIRST_S, 0.0

    def look(self, pid: int) -> None:
        """Look at a process and all that descend from it, those that run now, until one records."""
        if time.monotonic() < self._look_at or self._of("run"):
            return
        self._look_at = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LAST_S)
        for each in itertools.islice(_family(pid), _MOST_PROCESSES):
            with suppress(OSError):  # It has ended, or belongs to another user.
                if each not in self._seen and _is_python(os.readlink(f"/proc/{each}/exe")):
                    self._seen.add(each)
                    if why := _why_deaf(_words(each, "cmdline"), _variables(each)):
                        self._why.append(why)

    def runs(self) -> list[Path]:
        """Return the run directories that sessions of this host recorded into, by name."""
        lines = {line for path in self._of("run") for line in path.read_text("utf-8").splitlines()}
        return sorted(map(Path, lines), key=lambda run: run.name)

    def why_nothing(self) -> str:
        """Say which Python could not record, and what to do; empty if each of them could."""
        if self._why:
            return self._why[0]
        if python := min((path.read_text("utf-8") for path in self._of("without")), default=""):
            install = f"{python} -m pip install lightning-rlprof"
            return f"{python} has no lightning-rlprof. Install it there: {install}"
        if self._of("with"):
            return ""
        return (
            "No Python that it started has loaded rlprof: PYTHONPATH must keep the folder of "
            f"rlprof run. {_PYTHONPATH}. Leave out python -I, -E and -S"
        )

    def seen(self) -> Mapping[str, Any]:
        """Return what the process did that trained most, of those without a step."""
        found: list[dict[str, Any]] = []
        for path in self._of("seen"):
            with suppress(OSError, ValueError):
                found.append(json.loads(path.read_text(encoding="utf-8")))
        return max(found, key=lambda each: sum(each["counts"].values()), default={})

    def _of(self, kind: str) -> list[Path]:
        return sorted(self._signs.glob(f"{kind}-*"))


def is_isolated(command: Sequence[str]) -> bool:
    """Return whether a Python is told to ignore the variables or folders that doors need.

    Example::

        >>> is_isolated(["python3", "-Im", "train"]), is_isolated(["python", "train.py", "-I"])
        (True, False)
    """
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    return _is_python(command[0]) and any(map(_ISOLATED.fullmatch, options))


def _why_deaf(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return why a Python with these arguments and variables does not hear of rlprof."""
    path, name = variables.get("PYTHONPATH", ""), shlex.join(command[:2])[:_LONGEST_TEXT]
    if is_isolated(command):
        return f"'{name}' ignores PYTHONPATH: leave that option out"
    if str(INJECT) in path.split(os.pathsep):
        return ""
    if SIGNS_VARIABLE not in variables:
        return f"'{name}' was started without the variables of rlprof run. Pass them on"
    given = f"PYTHONPATH={path[:_LONGEST_TEXT]}" if path else "an empty PYTHONPATH"
    return f"'{name}' was started with {given}, which replaces that of rlprof run. {_PYTHONPATH}"


def _is_python(path: str) -> bool:
    return Path(path).name.startswith(("python", "pypy"))


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants on Linux; elsewhere, the process alone."""
    left = [pid]
    while left:
        pid = left.pop()
        yield pid
        threads: list[str] = []
        with suppress(OSError):
            threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            with suppress(OSError):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text("ascii")
                left += map(int, children.split())


def _words(pid: int, name: str) -> list[str]:
    data = Path(f"/proc/{pid}/{name}").read_bytes()
    return data.decode("utf-8", "replace").rstrip("\0").split("\0")


def _variables(pid: int) -> dict[str, str]:
    pairs = (word.partition("=") for word in _words(pid, "environ"))
    return {name: value for name, equals, value in pairs if equals}


def nsys_run(
    command: Annotated[list[str], argument("COMMAND", "Training to run: python train.py …")],
    config: Annotated[
        Path | None, option("FILE", "Config file; also turns rlprof on inside COMMAND")
    ] = None,
    output: Annotated[
        str | None,
        option("NAME", "Name of the reports; may contain %p, %h, %q{RANK}", "-o", "--output"),
    ] = None,
    option: Annotated[
        list[str] | None, option("KEY=VALUE", "Option of nsys profile (repeatable)")
    ] = None,
    capture_range: Annotated[
        Literal["cudaProfilerApi", "nvtx", "none"] | None,
        option(
            "RANGE",
            "What opens a capture: cudaProfilerApi (default with a GPU), nvtx (without), none",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command, run nothing")
    ] = False,
    force: Annotated[bool, typer.Option("-f", "--force", help="Overwrite existing files")] = False,
) -> None:
    """Run a training under Nsight Systems, with one report per captured step or stage.

    Example: rlprof nsys run --config rlprof.yaml -- python train.py
    """
    from lightning_rlprof.integrations.lightning.autoload import is_on
    from lightning_rlprof.recording.nsys import plan, variables

    check_records("rlprof nsys run")
    if shutil.which("nsys") is None and not dry_run:
        raise RecorderError("nsys is not on PATH", hint=_INSTALL, code="no_nsys")
    if command[0].startswith("-"):
        hint = "Options of nsys: --option key=value"
        raise RlprofError(f"'{command[0]}' is an option, not a program", hint=hint)
    file = str(config) if config else None
    if file is None and is_on():
        file = os.environ.get("RLPROF_CONFIG")
    given, settings = _settings(file, option or [])
    opens = capture_range or _by_device()
    name = _name(output, settings, force=force)
    argv, remarks = plan(settings, command, name, opens=opens, force=force)
    added = variables(given, file)
    words = [f"{variable}={shlex.quote(value)}" for variable, value in added.items()]
    console.say(" ".join([*words, shlex.join(argv)]))
    for remark in remarks:
        console.note(remark)
    console.warn(_SECRETS)
    if not dry_run:
        raise typer.Exit(_recorded(argv, added, name, opens))


def _settings(file: str | None, options: list[str]) -> tuple["ProfilerConfig", "ProfilerConfig"]:
    """Return the configuration as given, and as the training under nsys will read it."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.nsys import tools

    worker = {}
    for word in options:
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("_", "-")
        if not (key and equals):
            raise ConfigError(f"--option {word} is not key=value; for example sample=process-tree")
        if key in _RLPROF_OPTIONS:
            raise ConfigError(f"--option {word}: use {_RLPROF_OPTIONS[key]} instead")
        worker[key] = value
    added: dict[str, Any] = {"nsight": {"worker": worker}} if worker else {}
    given = ProfilerConfig.build(file, **added)
    known = file is not None or any(name.startswith(_STEPS) for name in os.environ)
    if not known and given.nsight.worker.get("capture-range-end") is None:
        # The training's code may choose the captured steps, so their number is unknown here.
        added = {"nsight": {"worker": {**worker, "capture-range-end": "repeat"}}}
    return given, ProfilerConfig.build(file, tools=tools(given), **added)


def _name(given: str | None, config: "ProfilerConfig", *, force: bool) -> str:
    """Return a unique name for the reports, in an existing directory.

    nsys writes reports to /tmp, after the training, if the directory does not exist.
    """
    if given is None:
        folder = Path(config.integrated.profile_save_path)
        now = f"nsys-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        return str(folder / now).replace("%", "%%")
    name = given.removesuffix(".nsys-rep")
    if name.endswith("/") or Path(name).is_dir():
        raise RlprofError(f"{given} is a directory", hint="-o takes the name of a report in it.")
    folder, there = _reports(name)
    if not folder.is_dir():
        raise RlprofError(f"{given}: directory {folder} does not exist")
    if there and not force and not re.search("%[pn]", name):
        hint = "Replace it with --force, or choose another name with -o."
        raise RlprofError(f"{min(there)} exists already", hint=hint)
    return name


def _by_device() -> "CaptureRange":
    """Choose by whether this machine has a GPU, without loading torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "nvtx"
    return "cudaProfilerApi" if any(_DEVICES.glob("nvidia[0-9]*")) else "nvtx"


def _recorded(argv: list[str], added: Mapping[str, str], name: str, opens: "CaptureRange") -> int:
    """Run nsys, print new reports or why there are none, and return the training's status."""
    folder, before = _reports(name)
    with console.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    code = run_child(argv, os.environ | dict(added))
    new = {path: facts for path, facts in _reports(name)[1].items() if before.get(path) != facts}
    complete = []
    for path, (size, _) in sorted(new.items()):
        if path.suffix == ".qdstrm":
            console.warn(f"nsys could not convert {path}; its messages are above")
        elif size:
            console.wrote(path)
            complete.append(path)
        else:
            console.warn(f"{path} is empty: nsys was stopped while it wrote")
    if not new:
        failed = f", and nsys or the training ended with status {code}" if code else ""
        console.warn(f"no report was written{failed}. {_NO_REPORT}")
    if complete:
        console.next_command("rlprof", "summary", complete[0])
    return code


def _reports(name: str) -> tuple[Path, dict[Path, tuple[int, int]]]:
    """Return the directory of a name's reports, and size and time of those that are there."""
    from lightning_rlprof.recording.nsys import report_pattern

    folder, pattern = report_pattern(name, os.environ, socket.gethostname())
    found = {}
    for path in folder.glob("*"):
        if pattern.fullmatch(path.name) and path.is_file():
            found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return folder, found


def launched(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables to lay over those of a program, by which its processes record one run.

    A Python without rlprof isn't disturbed by any of them.

    Example::

        >>> found = launched({"PYTHONPATH": "/mine", "RLPROF_JOB": "7"})
        >>> found["RLPROF"], found["RLPROF_JOB"], found["PYTHONPATH"].endswith("inject:/mine")
        ('1', '7', True)
    """
    paths = [
        path
        for path in environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path != str(INJECT)
    ]
    return {
        "RLPROF": "1",
        JOB_VARIABLE: environ.get(JOB_VARIABLE) or secrets.token_hex(8),
        "PYTHONPATH": os.pathsep.join([str(INJECT), *paths]),
    }
