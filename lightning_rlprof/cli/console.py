"""What the commands say and where they write: one voice, derived names, nothing overwritten."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.run_directory import rank_files
from lightning_rlprof.system.location import RemotePath

Step = Callable[[int, int], None]

# What tools record into; our own exports are told by content, and our .csv is none of CANN's.
_RECORDED = (".jsonl", ".json", ".json.gz", ".json.zst", ".db", ".sqlite", ".nsys-rep", ".pickle")


def show(*parts: RenderableType) -> None:
    """Print rich renderables; colours only on a terminal."""
    for part in parts:
        _console().print(part)


def say(text: str, style: str = "") -> None:
    """Print one line of text, in which nothing can steer the terminal; never cut."""
    from lightning_rlprof.report.terminal import plain

    _console().print(Text(plain(text), style=style), soft_wrap=True)


def put_json(data: Any) -> None:
    """Print JSON in ASCII, the only thing on standard output."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def destination(given: Path | None, source: Path, name: str, *, force: bool) -> Path:
    """Return where to write: what was given, or a name derived from the input.

    In a run's directory, and beside all else: in a folder of traces it would be one more of them.

    Raises:
        RlprofError: The file exists and was not to be replaced, or is one of those that are read,
            or its directory does not exist.
    """
    if source.is_dir() and rank_files(source):
        derived = source / name
    else:
        beside = source if source.name else source.absolute()
        own = beside.name if beside.is_dir() else beside.stem
        derived = beside.with_name(f"{own}-{name}")
    derived = Path(derived.name) if isinstance(source, RemotePath) else derived
    path = given or derived
    if path.is_dir():
        raise RlprofError(f"{path}: is a directory; -o takes the name of a file")
    if path.exists() and not path.is_file():  # such as /dev/null, which root could replace
        raise RlprofError(f"{path}: is no regular file; -o names another file")
    if path.exists() and not force:
        raise RlprofError(f"{path}: exists already; --force replaces it, -o names another file")
    if not path.parent.is_dir():
        raise RlprofError(f"{path}: there is no directory {path.parent}")
    if path.exists() and path != derived and _is_read(path, source):
        raise RlprofError(f"{path}: is part of what is read; -o names another file")
    return path


def _is_read(path: Path, source: Path) -> bool:
    """Tell whether a file is what is read or, as far as its place and name tell, a part of it."""
    from lightning_rlprof.loaders.kineto.reader import is_export

    own = path.resolve()
    if own in map(Path.resolve, rank_files(own.parent)):
        return True
    if isinstance(source, RemotePath) or not source.exists():
        return False
    if not source.is_dir():
        return own.samefile(source)
    inside = own.is_relative_to(source.resolve())
    return inside and own.name.endswith(_RECORDED) and not is_export(own)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one line for people."""
    try:
        yield
    except OSError as error:
        raise RlprofError(
            f"{path}: cannot be written ({error.strerror}); -o names another file"
        ) from error


def wrote(path: Path) -> None:
    """Say which file is new."""
    say(f"Wrote {path}")


def next_command(*words: str | Path) -> None:
    """Say what to type next, ready for a shell."""
    say(f"Next: {shlex.join(map(str, words))}")


@contextmanager
def bar(text: str) -> Iterator[Step]:
    """Show progress on the terminal's standard error while the block runs; gone afterwards."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:  # where rich before 14.3 leaves an empty line
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _console() -> Console:
    return Console(highlight=False, emoji=False, markup=False)
