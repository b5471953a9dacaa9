"""The run directory on disk: what a rank appends while it trains, and how it is read back.

One file per rank, ``rank-00000.jsonl``. Line 1 is the header, an object. Every other line is an
array whose first item says what it is::

    ["span", name, kind, step, start_ns, end_ns, thread, id, parent, counters]
    ["thread", ident, name]
    ["count", id, counters]          numbers of a span that became known later
    ["experts", id, {layer: [tokens, …]}]    tokens of each expert in a span, by layer
    ["note", clock_ns, level, text, code, facts]
    ["sample", id, prompt, group, attempt]
    ["metrics", since_ns, clock_ns, device, rates, values]           background metrics
    ["clock", rank, [[sent, arrived, answered, received], …]]    its clock, by ping-pongs with it
    ["end", clock_ns, status]

Lines are appended when complete, so a crash leaves at most half a last line. Readers skip and count
what they cannot read.

The header ends with spaces, which a full disk lets overwrite: there a rank says what it lost, and
how it ended.
"""

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from operator import and_
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import msgspec

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.records.notes import NO_FACTS, Code, Fact, Level, level_of
from lightning_rlprof.records.records import (
    FORMAT,
    Header,
    Kind,
    Note,
    Number,
    as_number,
    expert_name,
)
from lightning_rlprof.system.files import (
    check_file,
    make_folder,
    new_folder,
    open_file,
    set_mode,
)
from lightning_rlprof.system.location import plain

CACHE_FOLDER = ".rlprof-cache"
"""Where caches of a run are kept: in its directory, or beside a single file."""

_SUFFIX = ".jsonl"
_RESERVE = 400  # Bytes behind the header.
_MOST_WAITING = 8 << 20  # Bytes in memory; they contain some 8,000 steps.
_NEWLINE = ord("\n")
_LONGEST_LINE = 1 << 24  # Bytes; the longest lines that were seen have some thousand.
_TOO_LONG = b"["  # It stands for a line that is too long, and cannot be decoded either.
_AT_ONCE = 1 << 24  # Bytes that are read and decoded together.
_LAST_STEPS = 20  # Steps whose median is the time of a step.
_HEAD = 1 << 16  # Bytes; they contain the header and the first step.
_LONGEST_NOTE = 4_000  # Characters.
_Reading = tuple[int, int, int, int]


class SpanLine(msgspec.Struct, array_like=True, tag="span", frozen=True, gc=False):
    """One completed span as it stands in the file; see `lightning_rlprof.records.records.Span`."""

    name: str
    kind: Kind
    step: int
    start_ns: int
    end_ns: int
    thread: int
    id: int
    parent: int | None
    counters: dict[str, Number | None] | None = None  # None stands for a number that is not finite.


class ThreadLine(msgspec.Struct, array_like=True, tag="thread", frozen=True):
    """What a thread is called."""

    ident: int
    name: str


class CountLine(msgspec.Struct, array_like=True, tag="count", frozen=True, gc=False):
    """Numbers of a span that became known after it was written."""

    id: int
    counters: dict[str, Number | None]


class ExpertsLine(msgspec.Struct, array_like=True, tag="experts", frozen=True, gc=False):
    """Tokens of each expert in a span, by layer."""

    id: int
    tokens: dict[int, list[int]]


class SampleLine(msgspec.Struct, array_like=True, tag="sample", frozen=True, gc=False):
    """What a sample is called; its phases are spans with its number."""

    id: int
    prompt: str
    group: str
    attempt: int


class ClockLine(msgspec.Struct, array_like=True, tag="clock", frozen=True):
    """One meeting of two clocks: the other rank, and what both read."""

    rank: int
    readings: list[_Reading]


class MetricsLine(msgspec.Struct, array_like=True, tag="metrics", frozen=True, gc=False):
    """One sample of background metrics: rates since the one before, and values at its time."""

    since_ns: int
    clock_ns: int
    device: int | None
    rates: dict[str, float | None]
    values: dict[str, Number | None]


class EndLine(msgspec.Struct, array_like=True, tag="end", frozen=True):
    """How the recording ended."""

    clock_ns: int
    status: str


_Line = (
    SpanLine
    | CountLine
    | ExpertsLine
    | ThreadLine
    | SampleLine
    | MetricsLine
    | Note
    | ClockLine
    | EndLine
)


@dataclass
class RankTrace:
    """Everything that one rank's file says.

    Attributes:
        path: The file.
        header: Its first line.
        spans: Completed spans in the order in which they ended.
        late: Counters that were written after their span, by its id.
        threads: Names of threads by identity.
        samples: What samples are called.
        metrics: Background metrics.
        notes: What the recording had to say.
        exchanges: Of each meeting the other rank, and `clock.from_exchange` readings.
        status: ``finished``, the reason of an interruption, or None when the file just stops.
        ended_ns: When it ended, on the rank's clock; None when the file just stops.
        lost_lines: Lines that could not be read.
    """

    path: Path
    header: Header
    spans: list[SpanLine] = field(default_factory=list)
    late: dict[int, dict[str, Number | None]] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    samples: list[SampleLine] = field(default_factory=list)
    metrics: list[MetricsLine] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    exchanges: list[tuple[int, list[_Reading]]] = field(default_factory=list)
    status: str | None = None
    ended_ns: int | None = None
    lost_lines: int = 0


class TraceWriter:
    """Append one rank's lines to a file of its own, each call one ``write(2)``.

    What the disk refuses waits in memory for the next call: the newest 8 MB of it.

    Attributes:
        dropped: How many lines no longer wait, as newer ones took their place.

    Args:
        run: The run directory; made if missing.
        header: Written at once as the first line.

    Raises:
        OSError: The directory cannot be written, or another process owns this rank's file.

    Example::

        >>> import tempfile
        >>> header = Header(1, "demo", 0, 1, "actor", "box", 1, "cpu", 0, 0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = TraceWriter(Path(folder), header)
        ...     _ = writer.write([("note", 5, "info", "hello")])
        ...     writer.close()
        ...     read_trace(writer.path).notes[0].text
        'hello'
    """

    def __init__(self, run: Path, header: Header) -> None:
        # Names and notes of the training may be secret, so only its user may read them, unless the
        # configuration allows other users.
        mode = file_mode(header.config)
        new_folder(run, mode)
        self.path = rank_file(run, header.rank)
        # O_EXCL makes two jobs that were given one directory fail here instead of mixing their
        # lines.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._place = self.path.absolute()  # The training may change its directory.
        self._waiting = b""
        self._torn = False  # True if the file ends within a line.
        self.dropped = 0
        self._size = 0
        self._encode = msgspec.json.Encoder().encode_lines
        try:
            set_mode(self._file, mode)
            self._append(_encoded(header) + b" " * _RESERVE + b"\n")
            self._reserved_at = self._size - _RESERVE - 1
        except BaseException:  # An empty file would count as a rank of the run.
            self.discard()
            raise

    def damage(self) -> str:
        """Return what was done to the file from outside, as the rest of a sentence; or nothing.

        Raises OSError.
        """
        found = os.fstat(self._file)
        if found.st_size < self._size:
            return "was truncated: what was cut off is lost"
        if found.st_nlink == 0:
            return "was deleted: what this rank records is lost"
        if not os.path.lexists(self._place):
            return "was moved: this rank still writes to it"
        if os.path.samestat(self._place.lstat(), found):
            return ""
        return "was moved, and another file has its name: this rank still writes to the moved one"

    def write_reserved(self, lines: Sequence[Any]) -> None:
        """Write a few lines into bytes that the file has already, once. Raises OSError."""
        data = b"\n" + self._encode(lines).rstrip(b"\n")
        if len(data) > _RESERVE:
            raise OSError(errno.EFBIG, f"{len(data)} bytes for {_RESERVE}")
        # This opens the file again, because `_file` can only append.
        file = os.open(self._place, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.path.samestat(os.fstat(file), os.fstat(self._file)):
                os.pwrite(file, data, self._reserved_at)
        finally:
            os.close(file)

    @property
    def size(self) -> int:
        """Bytes of the file, and of what waits for it."""
        return self._size + len(self._waiting)

    def write(self, lines: Sequence[Any]) -> bool:
        """Append lines; what JSON has no form for is changed, see `plain_item`.

        Returns:
            Whether nothing had to be changed.

        Raises:
            OSError: They, or a part of them, wait for the next call.
        """
        is_plain = True
        try:
            data = self._encode(lines)
        except (TypeError, ValueError, OverflowError):
            is_plain = False
            data = self._encode([*map(_plain_line, lines)])
        if data or self._waiting:
            self._append(self._waiting + data)
        return is_plain

    def _append(self, data: bytes) -> None:
        try:
            while data:
                written = os.write(self._file, data)
                self._size += written
                self._torn = data[written - 1] != _NEWLINE
                data = data[written:]
        finally:
            self._waiting = data
            if len(data) > _MOST_WAITING:
                self._drop()

    def _drop(self) -> None:
        """Let the oldest lines go."""
        start = self._waiting.find(b"\n", len(self._waiting) - _MOST_WAITING) + 1
        self.dropped += _count_lines(self._waiting[:start])
        # The line that was cut must not swallow the next one.
        self._waiting = b"\n" * self._torn + self._waiting[start:]

    @property
    def waiting(self) -> int:
        """How many lines wait, as the disk took none of them."""
        return _count_lines(self._waiting)

    def close(self) -> None:
        """Close the file; further calls do nothing.

        Raises:
            OSError: A shared file system says only now that it could not keep what it had taken.
        """
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def discard(self) -> None:
        """Close the file and remove it."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            self._place.unlink()


def _encoded(header: Header) -> bytes:
    """Return a header as JSON; bytes of a path that are not UTF-8 become question marks."""
    try:
        return msgspec.json.encode(header)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(header), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def _count_lines(data: bytes) -> int:
    """Count lines that end; an empty one at the start ends what was cut before."""
    return data.count(b"\n") - data.startswith(b"\n")


def _plain_line(line: Any) -> list[Any]:
    """Return the items of a line in the file, each of which JSON can hold."""
    if not isinstance(line, msgspec.Struct):
        return [plain_item(item) for item in line]
    tag = line.__struct_config__.tag
    items = msgspec.structs.astuple(line)
    return [tag, *(plain_item(item, texts=tag == "note") for item in items)]


def note_line(
    clock_ns: int, code: Code | Level, text: str, facts: Mapping[str, Fact] = NO_FACTS
) -> Note:
    """Return the line of a note, which may quote what comes from anywhere.

    Example::

        >>> note_line(5, Code.RUN_RENAMED, "this is another run").level
        'warning'
    """
    own = {name: plain(each) if isinstance(each, str) else each for name, each in facts.items()}
    code_text = code.value if isinstance(code, Code) else ""
    return Note(clock_ns, level_of(code), plain(text), code_text, own)


def plain_item(item: Any, *, texts: bool = False) -> Any:
    """Turn what a caller passed as a name or number into something that JSON can hold.

    ``texts`` are kept in a dictionary of a note's facts; a counter is a number.
    """
    if isinstance(item, str):
        return item.encode("utf-8", "replace").decode()
    if isinstance(item, dict):
        found = {
            plain_item(str(name)): plain_item(value)
            if texts and isinstance(value, str)
            else as_number(value)
            for name, value in item.items()
        }
        kept = {name: value for name, value in found.items() if value is not None}
        return kept if texts else kept or None
    if item is None or isinstance(item, list | tuple):
        return item
    return as_number(item)


def append_note(path: Path, note: Note) -> None:
    """Add a remark to a rank's file, from any process, also when the rank has ended or was killed.

    Raises:
        OSError: The file is not there, or cannot be written.
    """
    facts = plain_item(note.facts, texts=True)
    line = msgspec.structs.replace(note, text=plain_item(note.text), facts=facts)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        check_file(file, path)
        # A torn line would swallow the next one.
        torn = os.pread(file, 1, os.fstat(file).st_size - 1) != b"\n"
        os.write(file, b"\n" * torn + msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)


def file_mode(config: Mapping[str, Any]) -> int:
    """Return the mode of the files of a run with this configuration."""
    return 0o640 if config.get("group_access") else 0o600


def mode_made_of(path: Path) -> int | None:
    """Return the mode of what is made of a run, which is that of its rank files.

    None if there is none in the path, a run directory, a folder of runs or a file of a run: then
    the umask decides.
    """
    folder, modes = path if path.is_dir() else path.parent, []
    for file in rank_files(folder) or folder.glob(f"*/rank-*{_SUFFIX}"):
        with suppress(OSError):
            modes.append(file.stat().st_mode)
    return reduce(and_, modes) & 0o666 | 0o600 if modes else None


def make_capture_folder(folder: Path) -> None:
    """Make the folder of a capture and that of its rank, with the mode of the run's.

    Raises:
        OSError: They cannot be made, or one of them is a link.
    """
    run = folder.absolute().parents[1]
    new_folder(run, 0o600)
    make_folder(run, folder.absolute())


def rank_file(run: Path, rank: int) -> Path:
    """Return the trace file of a rank inside a run directory."""
    return run / f"rank-{rank:05d}{_SUFFIX}"


def rank_directory(run: Path, rank: int) -> Path:
    """Return the folder of a rank's device artefacts inside a run directory."""
    return run / f"rank-{rank:05d}"


# `recording.capture` names captures like this.
_WINDOW = re.compile(r"step-(\d{1,15})(?:-(?!\d+$)(.+?))?(?:-\d+)?")


def capture_in_name(name: str) -> tuple[int, str] | None:
    """Return step and stage of a capture by its folder's name, ``""`` for a whole step.

    Example::

        >>> capture_in_name("step-000003-actor_update-2"), capture_in_name("step-000003")
        ((3, 'actor_update'), (3, ''))
        >>> capture_in_name("oom-step-000003")
    """
    found = _WINDOW.fullmatch(name)
    return (int(found[1]), found[2] or "") if found else None


def is_inside(run: Path, path: Path) -> bool:
    """Return whether a path of a run directory is in it, and not a link to somewhere else."""
    return path.resolve().is_relative_to(run.resolve())


def rank_files(run: Path) -> list[Path]:
    """Return the trace files of a run directory by rank; empty when it holds none."""
    return sorted(file for file in run.glob(f"rank-*{_SUFFIX}") if file.stem[5:].isdecimal())


def read_trace(path: Path) -> RankTrace:
    """Read one rank's file, however it ended.

    Raises:
        TraceError: The file is missing, is not a trace, or was written by a newer format.
    """
    return whole_trace(RankReader(path))


def whole_trace(reader: "RankReader") -> RankTrace:
    """Read a file to its end, as `read_trace`."""
    try:
        while reader.read():
            pass
    except OSError as error:
        raise TraceError(f"{reader.path}: cannot be read ({error.strerror})") from error
    return reader.whole()


class RankReader:
    """Read a rank's file as far as it is written, and go on when more is appended.

    A run that has ended is read to its end by the same steps. Where the file is cut between two
    calls, also within a character, changes nothing. The file is open only during `read`.

    Attributes:
        path: The file.
        trace: What was read; None until the header is whole. A file that was truncated or changed
            in place is read again from its start, into another trace.
        size: How many bytes were read or skipped.
        changed_ns: When the file was changed before it was read last, in Unix time.
        has_skipped: Whether bytes were skipped.

    Example::

        reader = RankReader(Path("my-run/rank-00000.jsonl"))
        while reader.read():  # until the end, as of now
            pass
        reader.trace.spans
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self.changed_ns = 0
        self._begin()

    @property
    def rank(self) -> int:
        """Its number: by the header, or by the name of the file while that is not whole."""
        return int(self.path.stem[5:]) if self.trace is None else self.trace.header.rank

    @property
    def status(self) -> str | None:
        """How the rank ended; None while it records, or if it was killed."""
        return None if self.trace is None else self.trace.status

    @property
    def spans(self) -> list[SpanLine]:
        """What was read of its spans."""
        return [] if self.trace is None else self.trace.spans

    @property
    def notes(self) -> list[Note]:
        """What was read of its notes."""
        return [] if self.trace is None else self.trace.notes

    @property
    def last_step(self) -> int:
        """The last step whose end was read, 0 before the first."""
        return next((line.step for line in reversed(self.spans) if line.kind == "step"), 0)

    @property
    def step_ns(self) -> float | None:
        """Median time of the last steps that were read; None if there is none."""
        steps = (line for line in reversed(self.spans) if line.kind == "step")
        times = [line.end_ns - line.start_ns for line in islice(steps, _LAST_STEPS)]
        return median(times) if times else None

    def _begin(self) -> None:
        self.trace: RankTrace | None = None
        self.size, self.has_skipped = 0, False
        self._rest = bytearray()  # The start of a line whose end is not written yet.
        self._is_cut = False  # True if the start of that line is not in `_rest`.

    def read(self, most: int | None = None) -> bool:
        """Take the next part of what was appended; return whether there is more.

        Args:
            most: Of more bytes than these only the last ones are read, and of a file that is new
                also the first ones, which have the header. None if every line counts.

        Raises:
            OSError: The file cannot be read.
            TraceError: It is not a rank file, or of a newer format.
        """
        found = self.path.stat()
        seen, before = (found.st_ino, found.st_size, found.st_mtime_ns), self._seen
        if seen == before and self.size >= found.st_size:
            return False
        # A file that changed and did not grow was written in place: a full disk lets a rank write
        # its end only into the spaces behind its header.
        if before not in (None, seen) and (seen[0] != before[0] or seen[1] <= before[1]):
            self._begin()
        self._seen, self.changed_ns = seen, found.st_mtime_ns
        with open_file(self.path) as file:
            self._skip(file, found.st_size, most)
            file.seek(self.size)
            data = file.read(min(_AT_ONCE, found.st_size - self.size))
        self.feed(data)
        return bool(data) and self.size < found.st_size

    def _skip(self, file: BinaryIO, size: int, most: int | None) -> None:
        if most is None or size - self.size <= most:
            return
        if not self.size:
            self.feed(file.read(_HEAD))
        if size - most > self.size:
            self.size, self.has_skipped, self._is_cut = size - most, True, True
            self._rest.clear()

    def feed(self, data: bytes) -> None:
        """Take the bytes that follow those of before.

        Raises:
            TraceError: The file is not a rank file, or of a newer format.
        """
        self.size += len(data)
        if b"\n" not in data:
            self._rest += data
        else:
            whole = bytes(self._rest) + data if self._rest else data
            block, _, rest = whole.rpartition(b"\n")
            if self._is_cut:  # The end of a line whose start is gone.
                _, _, block = block.partition(b"\n")
            self._rest, self._is_cut = bytearray(rest), False
            self._take_block(block)
        if len(self._rest) >= _LONGEST_LINE:
            self._take([] if self._is_cut else [_TOO_LONG])
            self._is_cut = True
            self._rest.clear()

    def whole(self) -> RankTrace:
        """Return the trace of a file that nothing is appended to: half a last line is lost.

        Raises:
            TraceError: The file has no header.
        """
        if self.trace is None:
            return self._started(bytes(self._rest))
        self.trace.lost_lines += bool(self._rest) and not self._is_cut
        return self.trace

    def _take_block(self, block: bytes) -> None:
        """Sort in the lines of a block, which ends without the newline of the last one."""
        self._take(block.split(b"\n"))

    def _take(self, lines: list[bytes]) -> None:
        """Sort in whole lines, of which the first of all is the header."""
        if not lines:
            return
        if self.trace is None:
            self.trace = self._started(lines.pop(0))
        found = [line if len(line) < _LONGEST_LINE else _TOO_LONG for line in lines if line]
        decoded = _decode(found, self.trace)
        # Nearly all lines are spans.
        self.trace.spans += [line for line in decoded if type(line) is SpanLine]
        for line in decoded:
            if type(line) is not SpanLine:
                _sort_in(self.trace, line)

    def _started(self, first_line: bytes) -> RankTrace:
        header = _header(self.path, first_line)
        if header.format > FORMAT:
            raise TraceError(
                f"{self.path}: has format {header.format}, but this version reads up to "
                f"{FORMAT}; pip install -U lightning-rlprof"
            )
        return RankTrace(self.path, header)


def read_header(path: Path) -> Header:
    """Read only the header of a rank's file, in whatever format the rest is.

    Raises:
        TraceError: The file is missing or is not a trace.
    """
    try:
        with open_file(path) as file:
            first_line = file.readline(_LONGEST_LINE)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    return _header(path, first_line)


def _header(path: Path, first_line: bytes) -> Header:
    try:
        return msgspec.json.decode(first_line, type=Header)
    except NOT_JSON as error:
        text = f"{path}: is not a rank file of rlprof (its first line is not a header)"
        raise TraceError(text) from error


_ONE = msgspec.json.Decoder(_Line)
_MANY = msgspec.json.Decoder(list[_Line])


def _decode(lines: list[bytes], trace: RankTrace) -> list[_Line]:
    # Decoding all lines at once is four times as fast; damaged files are decoded line by line.
    with suppress(*NOT_JSON):
        found = _MANY.decode(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines):  # Two halves of a torn line would decode as one line.
            return found
    found = []
    for line in lines:
        with suppress(*NOT_JSON):
            found.append(_ONE.decode(line))
    trace.lost_lines += len(lines) - len(found)
    return found


def _cut(text: str) -> str:
    more = len(text) - _LONGEST_NOTE
    return text if more <= 0 else f"{text[:_LONGEST_NOTE]}… and {more:,} more characters"


def _sort_in(trace: RankTrace, line: _Line) -> None:
    match line:
        case CountLine():
            trace.late.setdefault(line.id, {}).update(line.counters)
        case ExpertsLine():
            known = trace.late.setdefault(line.id, {})
            for layer, tokens in line.tokens.items():
                for expert, count in enumerate(tokens):
                    name = expert_name(layer, expert)
                    known[name] = (known.get(name) or 0) + count
        case ThreadLine():
            trace.threads[line.ident] = line.name
        case SampleLine():
            trace.samples.append(line)
        case MetricsLine():
            trace.metrics.append(line)
        case Note():
            facts = {
                name: _cut(value) if isinstance(value, str) else value
                for name, value in line.facts.items()
                if isinstance(value, str | int | float)
            }
            trace.notes.append(msgspec.structs.replace(line, text=_cut(line.text), facts=facts))
        case ClockLine():
            trace.exchanges.append((line.rank, line.readings))
        case EndLine():
            trace.status, trace.ended_ns = line.status, line.clock_ns
