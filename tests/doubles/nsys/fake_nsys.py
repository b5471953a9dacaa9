"""A fake `nsys`: strict about its command line, it runs the target and makes the reports.

What real nsys 2022.4 and 2023.4 do, measured: `stop` and `repeat:N` write their reports when the
last of the ranges has ended, everything else when the target has; a report whose file exists
already goes to the temporary directory (here: that of the log); SIGINT and SIGTERM go on to the
target, which is in a group of its own, and a second one loses the reports. Told by variables:

FAKE_NSYS_LOG      a JSON line per call goes here: argv, pid, cwd, environment
FAKE_NSYS_VERSION  as in `nsys --version`
FAKE_NSYS_FAIL     a status to end with, before the target starts
FAKE_NSYS_RANGES   capture ranges that the target opens (1)
FAKE_NSYS_REPORT   full, empty or none (full)
FAKE_NSYS_AFTER    seconds after the target's start when the reports begin to be written, growing
                   for as long again; unset, they are there when the target has ended
FAKE_NSYS_EXPORT   an SQLite file that `nsys export` copies
"""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from options import SHORT, refusal

VERSION = os.environ.get("FAKE_NSYS_VERSION", "2025.3.1.90-253135822126v0")
REPORT = b"a report of the fake nsys\n" * 40


class RefusedError(Exception):
    """The command line is wrong; the text is for standard error."""


def known_version() -> tuple[int, int]:
    """Year and release; an odd version string is that of the newest nsys."""
    found = re.match(r"(\d{4})\.(\d+)", VERSION)
    return (int(found[1]), int(found[2])) if found else (9998, 0)


def parse(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split into options by long name and the target."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name = SHORT.get(name, name)
            if equals or not rest:
                raise RefusedError(f"unrecognised option '{word}'")
        if not equals:
            value = rest.pop(0) if rest else ""
        if text := refusal(name, value, known_version()):
            raise RefusedError(text)
        if name in options and name not in ("env-var", "export"):
            raise RefusedError(f"option '--{name}' cannot be specified more than once")
        options[name] = value
    return options, rest


def expanded(name: str, pid: int) -> str:
    """Put process, host, variables and a free number into the name of a report."""
    for number in range(1, 1000):
        texts = {"%%": "%", "%p": str(pid), "%h": socket.gethostname(), "%n": str(number)}
        path = re.sub(
            r"%[%phn]|%q\{(\w+)\}",
            lambda found: texts.get(found[0]) or os.environ.get(found[1], ""),  # noqa: B023
            name,
        ).removesuffix(".nsys-rep")
        if "%n" not in name or not Path(f"{path}.nsys-rep").exists():
            return path
    raise RefusedError(f"no free number for {name}")


def report_names(options: dict[str, str], pid: int) -> list[str]:
    """Name the reports: one per range where ranges repeat, one in all other cases."""
    name = expanded(options.get("output", "report%n"), pid)
    if options.get("capture-range", "none") == "none":
        return [f"{name}.nsys-rep"]
    ranges = int(os.environ.get("FAKE_NSYS_RANGES", "1"))
    end = options.get("capture-range-end", "stop-shutdown").split(":")
    if not end[0].startswith("repeat"):
        return [f"{name}.nsys-rep"][:ranges]
    if len(end) > 1:
        ranges = min(ranges, int(end[1]))
    return [f"{name}.{number}.nsys-rep" for number in range(1, ranges + 1)]


def write(options: dict[str, str], pid: int, seconds: float) -> None:
    """Write every report; each grows for so long."""
    kind = os.environ.get("FAKE_NSYS_REPORT", "full")
    made = []
    for name in report_names(options, pid) if kind != "none" else []:
        path = Path(name)
        overwrite = options.get("force-overwrite") == "true"
        if not path.parent.is_dir() or (path.exists() and not overwrite):
            print(f"Failed to create '{path.absolute()}': File exists.", file=sys.stderr)
            folder = Path(os.environ.get("FAKE_NSYS_LOG") or tempfile.mkdtemp()).parent
            path = folder / f"nsys-report-{os.urandom(2).hex()}.nsys-rep"
        with path.open("wb") as file:
            if kind == "full":
                file.write(REPORT[: len(REPORT) // 2])
                file.flush()
                time.sleep(seconds)
                file.write(REPORT[len(REPORT) // 2 :])
        made.append(path)
    print("Generated:", *(f"\n    {path.absolute()}" for path in made), flush=True)


def profile(words: list[str]) -> int:
    """Run the target under the options and return its status as a shell does."""
    options, target = parse(words)
    if not target:
        raise RefusedError("Error: no target application was specified.")
    if not shutil.which(target[0]):
        raise RefusedError(f"Program not found: {target[0]}")
    session = os.environ | {"NSYS_PROFILING_SESSION_ID": "1"}
    process = subprocess.Popen(target, env=session, start_new_session=True)
    after, writer = os.environ.get("FAKE_NSYS_AFTER"), None
    if after is not None:
        writer = threading.Timer(float(after), write, [options, process.pid, float(after)])
        writer.start()
    interrupted = wait_for(process)
    if writer:
        writer.join()
    elif interrupted < 2:
        write(options, process.pid, 0)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def wait_for(process: "subprocess.Popen[bytes]") -> int:
    """Wait, pass the first signal on, and return how many came; a handler would merge two."""
    number, wanted = 0, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    while process.poll() is None:
        arrived = signal.sigtimedwait(wanted, 1.0)
        if arrived and arrived.si_signo != signal.SIGCHLD:
            number += 1
            if number == 1:
                process.send_signal(arrived.si_signo)
    return number


def export(words: list[str]) -> int:
    """Write an SQLite file for a report; none over another one unless told to."""
    pairs = {"type": "", "output": "", "force-overwrite": "false"}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).lstrip("-").partition("=")
        name = {"t": "type", "o": "output", "f": "force-overwrite"}.get(name, name)
        if name not in pairs:
            raise RefusedError(f"unrecognised option '--{name}'")
        pairs[name] = value if equals else rest.pop(0)
    if pairs["type"] != "sqlite":
        raise RefusedError(f"Unsupported export type option: '{pairs['type']}'.")
    if len(rest) != 1 or not Path(rest[0]).is_file():
        raise RefusedError(f"Exportation error: File not found: '{' '.join(rest)}'.")
    if not Path(rest[0]).stat().st_size:
        raise RefusedError("Exportation error: Cannot read from stream.")
    path = Path(pairs["output"] or Path(rest[0]).with_suffix(".sqlite"))
    if path.exists() and pairs["force-overwrite"] != "true":
        raise RefusedError(f"Exportation error: File already exists: '{path}'.")
    path.unlink(missing_ok=True)
    if source := os.environ.get("FAKE_NSYS_EXPORT"):
        shutil.copyfile(source, path)
        return 0
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
        row = ("EXPORT_PRODUCT_VERSION", VERSION)
        database.execute("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", row)
    database.close()
    return 0


def main(words: list[str]) -> int:
    """Log the call and do it."""
    if log := os.environ.get("FAKE_NSYS_LOG"):
        call = {"argv": words, "pid": os.getpid(), "cwd": str(Path.cwd()), "env": dict(os.environ)}
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(call) + "\n")
    if words in (["--version"], ["-v"]):
        print(f"NVIDIA Nsight Systems version {VERSION}")
        return 0
    if status := int(os.environ.get("FAKE_NSYS_FAIL", "0")):
        print("the fake nsys was told to fail", file=sys.stderr)
        return status
    try:
        if words[:1] == ["profile"]:
            return profile(words[1:])
        if words[:1] == ["export"]:
            return export(words[1:])
        raise RefusedError(f"Unknown command: {' '.join(words[:1])}")
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
