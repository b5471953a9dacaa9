"""Run verbs of rlprof as they are, then once more as on Windows or macOS; print what each said.

``python other_system.py win32|darwin FOLDER COMMANDS`` runs each command of a JSON list in FOLDER,
which is made again between the two. Its last line is a JSON list: of each command the two answers,
of status, standard output and standard error. Commands that record are run the second time alone;
``loop`` records a loop in this process.

What is imitated, for the code of rlprof alone:

- The names of the standard library are those that typeshed knows for that system: functions,
  flags, signals, whole modules such as fcntl, and ``sys.platform``.
- /proc and /sys are not there.

On Windows, also for the standard library and pathlib:

- A file that is open can be neither replaced nor removed, nor its folder. `os.rename` replaces
  nothing.
- Every file is of user 0, and all may read and write it.

On Windows, for the code of rlprof alone:

- `os.open` knows no ``dir_fd``, opens no folder, and changes newlines unless O_BINARY is given.
  `os.fsync` refuses a file that is open for reading.
- There is no PosixPath, no C library without a name, no ``pass_fds``, no `add_signal_handler`.

What is not imitated: paths with backslashes and drives, processes, the console, junctions, the
Windows of duckdb and other libraries, and what the standard library does differently inside.
"""

import ast
import asyncio
import builtins
import ctypes
import errno
import fcntl
import functools
import io
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mypy

_STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
_O_BINARY = 1 << 30
_HIDDEN = ("/proc", "/sys")
_RECORD = ("demo", "loop", "nsys", "run")
_imitating = False  # True while the second round runs, and rlprof is asking.


# ---- names


def _names(body: Sequence[ast.stmt], system: str) -> Iterator[str]:
    known = {"sys": SimpleNamespace(platform=system, version_info=sys.version_info)}
    for each in body:
        if isinstance(each, ast.If):
            test = compile(ast.Expression(each.test), "stub", "eval")
            yield from _names(each.body if eval(test, known) else each.orelse, system)
        elif isinstance(each, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            targets = [each.target] if isinstance(each, ast.AnnAssign) else each.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(each, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in each.names)


@functools.cache
def _missing(module: str, system: str) -> frozenset[str] | None:
    """Return the names that a module lacks on a system; None if it does not exist."""
    place = _STUBS / module.replace(".", "/")
    stub = place / "__init__.pyi" if place.is_dir() else place.with_suffix(".pyi")
    if not stub.is_file():
        return frozenset()
    body = ast.parse(stub.read_text("utf-8")).body
    here, there = set(_names(body, "linux")), set(_names(body, system))
    imports = [each for each in body if isinstance(each, ast.ImportFrom | ast.Import)]
    imported = {*_names(imports, system)}
    is_gone = here - imported and not there - imported
    return None if is_gone else frozenset(here - there)


class _Imitation(ModuleType):
    """A module without some names, and with others; the rest is the real one's."""

    def __init__(self, real: ModuleType, without: frozenset[str], **instead: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _without=without, **instead)

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._real, name, value)


# ---- Windows


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    _without_number(dir_fd)
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    assert flags & _O_BINARY or flags & os.O_EXCL, f"{path} is opened as text"
    return os.open(path, flags & ~_O_BINARY, mode)


def _without_number(*folders: int | None) -> None:
    if any(folder is not None for folder in folders):
        raise NotImplementedError("dir_fd unavailable on this platform")


def _synced(file: int) -> None:
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    os.fsync(file)


def _open_files() -> list[str]:
    found = []
    _looking.own = True
    try:
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{number}"))
    finally:
        _looking.own = False
    return found


def _guarded(change: Callable[..., Any], *, replaces: bool = True) -> Callable[..., Any]:
    """Return a function that changes names of files, as Windows does it."""

    def changed(*paths: Any, **places: Any) -> Any:
        if _imitating and "dir_fd" not in places:
            _without_number(places.pop("src_dir_fd", None), places.pop("dst_dir_fd", None))
            files = _open_files()
            for path in paths:
                full = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
                if any(file == full or file.startswith(f"{full}/") for file in files):
                    raise PermissionError(errno.EACCES, "used by another process", str(path))
            if len(paths) == 2 and os.path.lexists(paths[1]):
                if not replaces:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(paths[1]))
                if os.path.isdir(paths[1]):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(paths[1]))
        return change(*paths, **places)

    return changed


def _as_windows_sees(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    def asked(*given: Any, **options: Any) -> os.stat_result:
        found = ask(*given, **options)
        if not _imitating:
            return found
        cells, more = list(found), found.__reduce__()[1][1]
        cells[0] = stat.S_IFMT(found.st_mode) | (0o777 if stat.S_ISDIR(found.st_mode) else 0o666)
        cells[4] = cells[5] = 0
        return os.stat_result(cells, more)

    return asked


class _Library(ctypes.CDLL):
    def __init__(self, name: str | None, *more: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        super().__init__(name, *more, **options)


class _Process(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, *given: Any, **options: Any) -> None:
        assert not options.get("pass_fds"), "pass_fds not supported on Windows."
        assert options.get("preexec_fn") is None
        options.pop("start_new_session", None)
        super().__init__(*given, **options)


class _PosixPath(pathlib.PosixPath):
    def __new__(cls, *_: object) -> "_PosixPath":
        raise NotImplementedError(f"cannot instantiate {cls.__name__!r} on your system")


def _no_handler(*_: object) -> None:
    raise NotImplementedError


def _like_windows() -> dict[str, dict[str, Any]]:
    os.replace, os.rename = _guarded(os.replace), _guarded(os.rename, replaces=False)
    os.remove, os.unlink, os.rmdir = map(_guarded, (os.remove, os.unlink, os.rmdir))
    os.stat, os.lstat, os.fstat = map(_as_windows_sees, (os.stat, os.lstat, os.fstat))
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    asyncio.SelectorEventLoop.add_signal_handler = _no_handler  # type: ignore[assignment]
    own = {"open": _open, "fsync": _synced, "O_BINARY": _O_BINARY, "name": "nt"}
    return {
        "os": {**own, "supports_dir_fd": set(), "supports_fd": set()},
        "ctypes": {"CDLL": _Library},
        "subprocess": {"Popen": _Process},
        "pathlib": {"PosixPath": _PosixPath},
    }


# ---- both


_looking = threading.local()  # Whether this file itself looks into /proc.


def _hide(event: str, given: tuple[Any, ...]) -> None:
    if not _imitating or event not in ("open", "os.listdir", "os.scandir"):
        return
    is_path = isinstance(given[0], str | bytes)
    if is_path and os.fsdecode(given[0]).startswith(_HIDDEN) and _is_asked_by_rlprof():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), given[0])


def _is_asked_by_rlprof() -> bool:
    if getattr(_looking, "own", False):
        return False
    frame: Any = sys._getframe(2)
    for _ in range(4):  # A function of pathlib or os may lie between.
        if frame is not None and _is_ours(frame.f_globals):
            return True
        frame = frame.f_back if frame is not None else None
    return False


def _is_ours(names: Any) -> bool:
    return str(names.get("__name__", "")).partition(".")[0] == "lightning_rlprof"


def _hidden(ask: Callable[..., Any]) -> Callable[..., Any]:
    def asked(path: Any, *more: Any, **options: Any) -> Any:
        is_path = not isinstance(path, int)
        if _imitating and is_path and os.fspath(path).startswith(_HIDDEN) and _is_asked_by_rlprof():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return ask(path, *more, **options)

    return asked


def _imitate(system: str) -> None:
    """From here on, each module of rlprof that is imported sees another system."""
    global _imitating
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_rlprof"]:
        del sys.modules[name]
    instead = _like_windows() if system == "win32" else {}
    instead["sys"] = {"platform": system}
    os.stat, os.lstat, os.readlink = map(_hidden, (os.stat, os.lstat, os.readlink))
    sys.addaudithook(_hide)
    known: dict[str, ModuleType] = {}
    real = builtins.__import__

    def found(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        module = real(name, globals, locals, fromlist, level)
        if level or globals is None or not _is_ours(globals):
            return module
        own = name if fromlist else name.partition(".")[0]
        without = _missing(name, system)
        if without is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        without = _missing(own, system) or frozenset()
        if own not in known and (without or own in instead):
            known[own] = _Imitation(module, without, **instead.get(own, {}))
        return known.get(own, module)

    builtins.__import__ = found
    _imitating = True


# ---- commands


def _answer(words: list[str]) -> tuple[int, str, str]:
    from lightning_rlprof.cli.app import main

    sys.argv = ["rlprof", *words]
    # A console of Windows cannot print every character.
    out, err = (io.TextIOWrapper(io.BytesIO(), "cp1252", write_through=True) for _ in range(2))
    err.reconfigure(errors="backslashreplace")
    is_done = threading.Event()
    client = threading.Thread(target=_read_a_page, args=(out, is_done))
    if words[0] in ("serve", "open"):
        client.start()
    before, status = (sys.stdout, sys.stderr), 0
    sys.stdout, sys.stderr = out, err
    try:
        _record_a_loop() if words[0] == "loop" else main()
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.stdout, sys.stderr = before
        is_done.set()
    if client.ident is not None:
        client.join()
    return status, _said(out), _said(err)


def _record_a_loop() -> None:
    from lightning_rlprof import ConfigError, stage, start_session, step

    options: Any = {"profile_save_path": "loops", "name": None, "world_size": 1, "rank": 0}
    try:
        with start_session(**options, background_metrics=True, hang_timeout=60.0):
            for number in range(3):
                with step(), stage("actor_update"):
                    print("step", number)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _said(stream: io.TextIOWrapper) -> str:
    return stream.buffer.getvalue().decode("cp1252")  # type: ignore[attr-defined]


def _read_a_page(out: io.TextIOWrapper, is_done: threading.Event) -> None:
    """Open the address that the command prints, then press Ctrl-C."""
    while not (address := re.search(r"http://\S+", _said(out))):
        if is_done.wait(0.02):
            return
    try:
        jar = urllib.request.HTTPCookieProcessor()
        with urllib.request.build_opener(jar).open(address[0], timeout=60) as page:
            out.write(f"a page of {page.status}\n")
    except OSError as error:
        out.write(f"no page: {error}\n")
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Run all commands twice."""
    global _imitating
    system, folder, commands = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    answers = []
    for is_other in (False, True):
        place = folder / "work"
        shutil.copytree(folder / "given", place)
        os.chdir(place)
        if is_other:
            _imitate(system)
        answers.append(
            [None if not is_other and words[0] in _RECORD else _answer(words) for words in commands]
        )
        os.chdir(folder)
        _imitating = False
        shutil.rmtree(place)
    print(json.dumps(list(zip(*answers, strict=True))))


if __name__ == "__main__":
    main()
