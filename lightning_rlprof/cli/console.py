"""What commands print, in which format, and which files they may write.

`use_output` is called once per command with its output options; everything else reads them.
"""

import csv
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.run_directory import rank_files
from lightning_rlprof.system.location import RemotePath

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_rlprof.tables.table import Table

Step = Callable[[int, int], None]

# Rows. More are not read on a terminal, and each takes a millisecond. Other formats have all.
# With one of these, rich takes any stream for a terminal.
_TERMINALS = {"FORCE_COLOR", "TTY_COMPATIBLE"}
_MOST_ROWS = 200


# Profilers write such files. rlprof's exports are recognized by content; CANN's .csv never counts.
_RECORDED = (".jsonl", ".json", ".json.gz", ".json.zst", ".db", ".sqlite", ".nsys-rep", ".pickle")


Format = Literal["table", "json", "csv", "markdown"]
"""How a command prints its tables."""

_PANEL = "Output"
_LINE = re.compile(r"( *)(\d+\. )?(.*)", re.S)  # Its indent, its number, its text.


@dataclass
class _Output:
    format: Format = "table"
    quiet: bool = False
    hints: bool = True
    limit: int | None = None
    root: Path | None = None


_output = _Output()


def option(
    metavar: str, text: str, *names: str, panel: str | None = None, **more: Any
) -> typer.models.OptionInfo:
    """Return an option of a verb that takes a value; ``more`` is as of `typer.Option`."""
    found: typer.models.OptionInfo = typer.Option(
        *names, metavar=metavar, help=text, rich_help_panel=panel, **more
    )
    return found


def argument(metavar: str, text: str, **more: Any) -> typer.models.ArgumentInfo:
    """Return an argument of a verb; ``more`` is as of `typer.Argument`."""
    found: typer.models.ArgumentInfo = typer.Argument(metavar=metavar, help=text, **more)
    return found


class CheckFailedError(RlprofError):
    """A check that the user asked for failed: exit status 1 instead of 2."""


def use_output(
    output_format: Annotated[
        Format, option("FORMAT", "table, json, csv or markdown", "--format", panel=_PANEL)
    ] = "table",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON", rich_help_panel=_PANEL)
    ] = False,
    limit: Annotated[
        int | None, option("N", "Maximum rows of each table", "-n", "--limit", panel=_PANEL, min=1)
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q", "--quiet", help="No warnings, progress or hints", rich_help_panel=_PANEL
        ),
    ] = False,
    no_hints: Annotated[
        bool,
        typer.Option("--no-hints", help="Don't suggest the next command", rich_help_panel=_PANEL),
    ] = False,
) -> None:
    """Set how this process prints, until the next call; the parameters are options of verbs."""
    _output.format = "json" if as_json else output_format
    _output.quiet, _output.hints, _output.limit = quiet, not no_hints, limit


def confine(root: Path) -> None:
    """Let this process write nothing, no cache either, and read only below a directory."""
    _output.root = root


def root() -> Path | None:
    """Return the directory that `confine` was called with; None if it was not."""
    return _output.root


def limit(for_people: int | None = None) -> int | None:
    """Return the most rows of a table: what ``--limit`` says, else all, or some for people."""
    return _output.limit or (for_people if _output.format in ("table", "markdown") else None)


def is_json() -> bool:
    """Return whether standard output is one JSON document."""
    return _output.format == "json"


def is_csv() -> bool:
    """Return whether standard output is CSV, which has room for nothing but tables."""
    return _output.format == "csv"


def is_table() -> bool:
    """Return whether standard output is for people."""
    return _output.format == "table"


def say(text: str, style: str = "", *, err: bool = False) -> None:
    """Print one line, never cut; control characters are escaped."""
    from lightning_rlprof.system.location import plain

    stream = sys.stderr if err else sys.stdout
    if not stream.isatty() and _TERMINALS.isdisjoint(os.environ):
        print(
            plain(text), file=stream, flush=True
        )  # Rich takes long to be loaded, and adds nothing.
        return
    from rich.text import Text

    _console(err=err).print(Text(plain(text), style=style), soft_wrap=True)


def line(text: str, style: str = "") -> None:
    """Print one line of an answer, which Markdown has as an item of a list.

    Spaces before it nest the item.
    """
    if is_table() or not text:
        say(text, style)
        return
    from lightning_rlprof.report.terminal import escape_markdown

    indent, number, own = _LINE.fullmatch(text).groups(default="- ")  # type: ignore[union-attr]
    own = f"`{own}`" if own.startswith("rlprof ") else escape_markdown(own)
    sys.stdout.write(f"{indent}{number}{f'**{own}**' if style == 'bold' else own}\n")


def status(text: str, style: str = "") -> None:
    """Print a line about progress or a written file; not with ``--quiet`` or ``--json``."""
    if not _output.quiet and _output.format == "table":
        say(text, style)


def warn(text: str) -> None:
    """Print a warning: with the tables for people, on standard error for programs."""
    _message(f"warning: {text}", "yellow")


def note(text: str) -> None:
    """Print a remark that needs no action."""
    _message(f"note: {text}", "dim")


def _message(text: str, style: str) -> None:
    if not _output.quiet and not is_json():
        say(text, style, err=_output.format != "table")


def next_command(*words: str | Path) -> None:
    """Suggest a command, ready for a shell, on standard error and only on a terminal."""
    wanted = _output.format == "table" and _output.hints and not _output.quiet
    if wanted and on_terminal():
        say(f"next: {shlex.join(map(str, words))}", "dim", err=True)


def on_terminal() -> bool:
    """Return whether a person reads standard error."""
    return sys.stderr.isatty()


def put_json(data: Any) -> None:
    """Print JSON in ASCII, the only thing on standard output; a program gets it in one line."""
    layout: dict[str, Any] = {"indent": 2} if sys.stdout.isatty() else {"separators": (",", ":")}
    sys.stdout.write(json.dumps(data, **layout) + "\n")


def print_tables(
    tables: "Iterable[Table]", *, rows: int | None = None, every_column: bool = False
) -> None:
    """Print tables for people, as CSV (a blank line between two), or as Markdown.

    CSV contains every column and exact numbers: nanoseconds, bytes, shares from 0 to 1. Text that
    a spreadsheet would run as a formula begins with an apostrophe there. People see 200 rows of a
    table, or ``rows``, and all see as many as `limit` says.
    """
    from lightning_rlprof.report.terminal import markdown, render
    from lightning_rlprof.tables.table import no_formula

    for at, table in enumerate(tables):
        if _output.format == "table":
            _console().print(
                "", render(table, rows=limit(rows or _MOST_ROWS), every=every_column), sep="\n"
            )
            continue
        if at:
            sys.stdout.write("\n")
        if table.abstained is not None:
            warn(f"{table.name}: no data. {table.abstained}")
        if _output.format == "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(no_formula(column.name) for column in table.columns)
            writer.writerows(map(no_formula, row) for row in table.rows[: limit(rows)])
        else:
            sys.stdout.write(markdown(table, rows=limit(rows)) + "\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'kernels'?``, or an empty text without a close match."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def count(number: int, word: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def destination(
    given: Path | None, source: Path, name: str, *, force: bool, mark: bytes = b""
) -> Path:
    """Return where to write: the given path, or a name derived from the input.

    Derived names are inside a run directory, and next to any other input: inside a folder of traces
    the new file would be read as one more trace. A file of a derived name with ``mark`` in its
    first KB is an earlier one of rlprof's, which is replaced.

    Raises:
        RlprofError: The file exists without ``--force``, is part of the input, or its directory
            does not exist.
    """
    if source.is_dir() and rank_files(source):
        derived = source / name
    else:
        named = source if source.name else source.absolute()
        derived = named.with_name(f"{named.name if named.is_dir() else named.stem}-{name}")
    derived = Path(derived.name) if isinstance(source, RemotePath) else derived
    path = given or derived
    other = "Choose another file with -o."
    if path.is_dir():
        raise RlprofError(f"{path} is a directory", hint="-o takes the name of a file.")
    if path.exists() and not path.is_file():  # Root could replace /dev/null.
        raise RlprofError(f"{path} is not a regular file", hint=other)
    if path.exists() and not force and not (path == derived and _begins_with(path, mark)):
        raise RlprofError(f"{path} exists already", hint=f"Replace it with --force. {other}")
    if not path.parent.is_dir():
        raise RlprofError(f"directory {path.parent} does not exist")
    if path.exists() and path != derived and _is_read(path, source):
        raise RlprofError(f"{path} is part of the input", hint=other)
    return path


def _begins_with(path: Path, mark: bytes) -> bool:
    """Return whether a mark is in the first KB of a file; an empty one is in none."""
    with path.open("rb") as file:
        return bool(mark) and mark in file.read(1024)


def _is_read(path: Path, source: Path) -> bool:
    """Return whether a file is the input, or by place and name a part of it."""
    from lightning_rlprof.loaders.kineto.reader import is_export

    target, read = path.resolve(), source.resolve()
    part = target.is_relative_to(read) and target.name.endswith(_RECORDED)
    return target == read or (part and not is_export(target))


def without_readers() -> None:
    """Let what is still written go nowhere, after a reader of the output has ended."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # A notebook's stream is not a file.
                os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into an error that names the file."""
    try:
        yield
    except OSError as error:
        text = f"cannot write {path} ({error.strerror})"
        raise RlprofError(text, hint="Choose another file with -o.") from error


def wrote(path: Path) -> None:
    """Print the name of a new file."""
    status(f"Wrote {path}")


@contextmanager
def bar(text: str) -> Iterator[Step]:
    """Show progress on standard error while the block runs, if that is a terminal."""
    with progress_bar(text) as update:
        yield lambda done, total: update(done, total, text)


@contextmanager
def progress_bar(text: str) -> "Iterator[Callable[[int, int, str], None]]":
    """Like `bar`, and each update may change the text, which says what is done first."""
    console = _console(err=True)
    if _output.quiet or not console.is_terminal:
        # Rich before 14.3 would print an empty line.
        yield lambda done, total, text: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class _Left(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            """Say how much time is left, once that can be known."""
            known = task.total is not None and task.time_remaining is not None
            return Text.assemble("left ", super().render(task)) if known else Text()

    columns: Sequence[Any] = (TextColumn("{task.description}", markup=False), BarColumn())
    times = (MofNCompleteColumn(), TimeElapsedColumn(), _Left())
    with Progress(*columns, *times, console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total, text: progress.update(
            task, completed=done, total=total, description=text
        )


def _console(*, err: bool = False) -> "Console":
    """Return rich's console, which raises if the reader has ended; its own would exit with 1."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError

    return _Console(highlight=False, emoji=False, markup=False, stderr=err)
