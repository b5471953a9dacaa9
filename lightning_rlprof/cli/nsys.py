"""The commands around Nsight Systems: run a training under nsys, and clean what it exported."""

import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli.console import destination, next_command, say, writing, wrote
from lightning_rlprof.cli.open_run import Output
from lightning_rlprof.errors import ConfigError, RecorderError, RlprofError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.nsys.command_line import CaptureRange


_DEVICES = Path("/dev")
_GET_NSYS = (
    "nsys is not on PATH: install Nsight Systems (https://developer.nvidia.com/nsight-systems, or "
    "nsight-systems-cli from NVIDIA's package repositories); --dry-run shows what would run"
)
_SECRETS = (
    "a report holds the whole environment of the training and of other processes on this machine, "
    "with every token in it: before you share one, export it and run `rlprof nsys scrub`"
)
_WHY_NONE = (
    "did the training reach a wanted step, and does it record at all (a ProfilerCallback, or "
    "--config)?"
)
_WHY_NONE_BY = {
    "cudaProfilerApi": " A training that does not use the GPU needs --capture-range nvtx.",
    "nvtx": " nsys 2023.4 and older hears nothing from the package nvtx 0.2.12 and newer.",
    "none": "",
}
_OWN = {
    **{"capture-range": "--capture-range", "nvtx-capture": "--capture-range nvtx"},
    **{"force-overwrite": "--force", "output": "-o"},
}
# Variables that say which steps are captured.
_STEPS = ("RLPROF__STEPS", "RLPROF__INTEGRATED__PROFILE_STEP")
# What goes on to nsys, which hands INT and TERM to the training. It drops the reports when one of
# them comes twice (measured with 2022.4 and 2023.4). The last three are for the training, too, as
# SLURM sends them; what nsys does with them was not measured.
_PASSED_ON = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGTERM),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
}


class _Range(str, Enum):
    """What --capture-range takes."""

    CUDA = "cudaProfilerApi"
    NVTX = "nvtx"
    NONE = "none"


Files = dict[Path, tuple[int, int]]
Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND", help="The training: python train.py …")
]
Config = Annotated[
    Path | None,
    typer.Option(help="YAML file by which every Lightning training in COMMAND records itself"),
]
Name = Annotated[
    str | None,
    typer.Option("-o", "--output", help="Name of the reports; may hold %p, %h, %q{RANK}"),
]
Option = Annotated[
    list[str] | None,
    typer.Option(help="An option of nsys profile as key=value; can be repeated"),
]
Range = Annotated[
    _Range | None, typer.Option(help="What opens a capture; unset, by whether there is a GPU")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the command")]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists")]


def profile(
    command: Command,
    config: Config = None,
    output: Name = None,
    option: Option = None,
    capture_range: Range = None,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Run a training under Nsight Systems, with one report per captured step or stage.

    Example: rlprof nsys --config rlprof.yaml -- python train.py

    Clean an export before you share it: rlprof nsys scrub report.sqlite
    """
    from lightning_rlprof.recording.nsys.command_line import installed_version, plan, variables

    program = shutil.which("nsys")
    if program is None and not dry_run:
        raise RecorderError(_GET_NSYS)
    file = _file(config)
    given, settings = _settings(file, option or [])
    opens: CaptureRange = capture_range.value if capture_range else _by_device()
    name = _name(output, settings, force=force)
    _check(command)
    version = installed_version(program) if program else None
    argv, remarks = plan(settings, command, name, opens=opens, version=version, force=force)
    _announce(added := variables(given, file), argv, remarks)
    if not dry_run:
        raise typer.Exit(_recorded(argv, added, name, opens))


def _check(command: list[str]) -> None:
    if command[0].startswith("-"):
        raise RlprofError(f"{command[0]}: is no program; options of nsys are --option key=value")


def scrub(
    file: Annotated[
        Path, typer.Argument(parser=local_path, metavar="FILE", help="An SQLite export of nsys")
    ],
    output: Output = None,
    force: Force = False,
) -> None:
    """Copy an SQLite export of nsys without the environment and the output of its processes.

    Example: rlprof nsys scrub report.sqlite

    A .nsys-rep has to be exported first: nsys export --type sqlite report.nsys-rep
    """
    from lightning_rlprof.recording.nsys.scrub import scrub_export

    path = destination(output, file, "scrubbed.sqlite", force=force)
    with writing(path):
        removed = scrub_export(file, path)
    say(f"Removed {removed.values} values of variables and {removed.texts} texts of processes")
    wrote(path)
    next_command("rlprof", "summary", path)


def _file(given: Path | None) -> str | None:
    """Return the configuration's file: what was given, else what RLPROF=1 reads."""
    if given is None and os.environ.get("RLPROF") == "1":
        return os.environ.get("RLPROF_CONFIG")
    return None if given is None else str(given)


def _settings(file: str | None, options: list[str]) -> tuple["ProfilerConfig", "ProfilerConfig"]:
    """Return the configuration as it was given, and as the training under nsys will have it."""
    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.nsys.command_line import tools

    worker = {}
    for word in options:
        key, equals, value = word.removeprefix("--").partition("=")
        key = key.replace("_", "-")
        if not (key and equals):
            raise ConfigError(f"--option {word}: write key=value, such as sample=process-tree")
        if key in _OWN:
            raise ConfigError(f"--option {word}: give {_OWN[key]} instead")
        worker[key] = value
    added: dict[str, Any] = {"nsight": {"worker": worker}} if worker else {}
    given = ProfilerConfig.build(file, **added)
    told = file is not None or any(name.startswith(_STEPS) for name in os.environ)
    if not told and given.nsight.worker.get("capture-range-end") is None:
        # The training's own code may say which steps are captured, and so how many.
        added = {"nsight": {"worker": {**worker, "capture-range-end": "repeat"}}}
    return given, ProfilerConfig.build(file, tools=tools(given), **added)


def _name(given: str | None, config: "ProfilerConfig", *, force: bool) -> str:
    """Return the name of the reports, which no others have, in a directory that is there.

    Otherwise nsys would put them into /tmp, after the training.
    """
    if given is None:
        folder = Path(config.integrated.profile_save_path)
        now = f"nsys-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        return str(folder / now).replace("%", "%%")
    name = given.removesuffix(".nsys-rep")
    try:
        if name.endswith("/") or Path(name).is_dir():
            raise RlprofError(f"{given}: is a directory; -o takes the name of a report in it")
    except OSError as error:
        raise RlprofError(f"{given}: cannot be written ({error.strerror})") from error
    folder, pattern = _place(name)
    if not folder.is_dir():
        raise RlprofError(f"{given}: there is no directory {folder}")
    there = _reports(folder, pattern)
    if there and not force and not re.search("%[pn]", name):
        text = "exists already; --force replaces it, -o gives another name"
        raise RlprofError(f"{min(there)}: {text}")
    return name


def _by_device() -> "CaptureRange":
    """Choose by whether this machine shows a GPU, without loading torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "nvtx"
    if any(_DEVICES.glob("nvidia[0-9]*")):
        return "cudaProfilerApi"
    try:  # where devices have other names, as in WSL
        done = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "nvtx"
    return "cudaProfilerApi" if done.returncode == 0 and "GPU " in done.stdout else "nvtx"


def _announce(added: Mapping[str, str], argv: list[str], remarks: list[str]) -> None:
    """Print the command as a shell takes it, and what to know before it runs."""
    words = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    say(" ".join([*words, shlex.join(argv)]))
    for remark in remarks:
        say(f"note: {remark}", "dim")
    say(f"! {_SECRETS}", "yellow")


def _recorded(argv: list[str], added: Mapping[str, str], name: str, opens: "CaptureRange") -> int:
    """Run nsys, say which reports are new or why none is, and return the training's status."""
    folder, pattern = _place(name)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    before = _reports(folder, pattern)
    status = _run(argv, added)
    after = _reports(folder, pattern)
    new = {path: facts for path, facts in after.items() if before.get(path) != facts}
    whole = [path for path, (size, _) in sorted(new.items()) if size and path.suffix != ".qdstrm"]
    for path in sorted(new):
        if path in whole:
            wrote(path)
        elif path.suffix == ".qdstrm":
            say(f"! {path}: nsys could not convert it; its own words are above", "yellow")
        else:
            say(f"! {path} is empty: nsys was stopped while it wrote", "yellow")
    if not new:
        failed = f", and nsys or the training ended with status {status}" if status else ""
        say(f"! no report appeared{failed}: {_WHY_NONE}{_WHY_NONE_BY[opens]}", "yellow")
    if whole:
        next_command("rlprof", "summary", whole[0])
    return status


def _run(argv: list[str], added: Mapping[str, str]) -> int:
    """Run a command, pass signals on, and return its status as a shell does.

    Ctrl-C on a terminal reaches nsys by itself; what a process sent reaches only this one.
    """
    try:
        process = subprocess.Popen(argv, env=os.environ | dict(added))
    except OSError as error:
        raise RlprofError(f"{argv[0]} cannot be run: {error.strerror}") from error
    wanted = {*_PASSED_ON, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        while process.poll() is None:
            arrived = signal.sigtimedwait(wanted, 1.0)
            # si_code: above 0 the kernel sent it, for the terminal
            if arrived and arrived.si_signo in _PASSED_ON and arrived.si_code <= 0:
                process.send_signal(arrived.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _place(name: str) -> tuple[Path, re.Pattern[str]]:
    """Return the directory of the reports, and what their names match."""
    from lightning_rlprof.recording.nsys.command_line import report_pattern

    return report_pattern(name, os.environ, socket.gethostname())


def _reports(folder: Path, pattern: re.Pattern[str]) -> Files:
    """Return size and time of every report that is there; none where the training removed them."""
    found = {}
    for name in os.listdir(folder) if folder.is_dir() else ():
        if pattern.fullmatch(name) and (folder / name).is_file():
            facts = (folder / name).stat()
            found[folder / name] = (facts.st_size, facts.st_mtime_ns)
    return found
