"""Bounds that reading a file of any content must keep: an answer, in time, in little memory."""

import gc
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans

SECONDS = 20
"""Of processor time, for a file below a megabyte on any machine."""

MEGABYTES = 300
"""Of memory, above what was in use; what is reserved and not used may be ten times as much."""

_PROC = Path("/proc/self")


class Answer(NamedTuple):
    """What was read: spans, rows by table, and all that was said of what is missing."""

    spans: Spans
    rows: dict[str, int]
    told: frozenset[str]


class TooMuchError(AssertionError):
    """A bound of time or memory did not hold."""


@contextmanager
def bounded(seconds: int = SECONDS, megabytes: int = MEGABYTES) -> Iterator[None]:
    """Raise where the block takes more processor time or memory, or does not end."""
    gc.collect()
    before = signal.signal(signal.SIGVTALRM, _too_long)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    reserved, used = _kilobytes("VmSize"), _reset_peak()
    resource.setrlimit(resource.RLIMIT_AS, ((reserved + 10 * megabytes * 1024) * 1024, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    took = (_kilobytes("VmHWM") - used) // 1024
    if took > megabytes:
        raise TooMuchError(f"took {took} MB")


def read(path: Path) -> Answer | None:
    """Read a run and every table of it; None where it is refused. Anything else raises.

    Raises:
        AssertionError: An error has several lines, or columns contradict each other.
    """
    try:
        spans = load(path)
    except TraceError as error:
        _one_line(str(error))
        return None
    assert (spans.end_ns >= spans.start_ns).all()
    assert (np.diff(spans.rank) >= 0).all()
    assert len(spans.names) == 0 or int(spans.name.max(initial=0)) < len(spans.names)
    told = {*(each.text for each in spans.warnings), *map(str, spans.statuses.items())}
    rows = {name: _read_table(spans, name, told) for name in spans.tables}
    return Answer(spans, rows, frozenset(told))


def _read_table(spans: Spans, name: str, told: set[str]) -> int:
    try:
        table = spans.table(name)
    except TraceError as error:
        _one_line(str(error))
        told.add(str(error))
        return 0
    told |= {table.note, table.abstained or ""}
    lengths = {len(table.column(column.name)) for column in table.columns}
    assert lengths <= {len(table.rows)}
    for row in table.rows[:50]:
        assert len(row) == len(table.columns)
    return len(table.rows)


def _one_line(text: str) -> None:
    assert text
    assert "\n" not in text, text


def _too_long(*_: Any) -> None:
    raise TooMuchError("takes too long, or for ever")


def _kilobytes(name: str) -> int:
    lines = (_PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _reset_peak() -> int:
    """Let the kernel forget the peak of memory so far; return what is in use."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:  # a container may forbid it: then only what exceeds the old peak is seen
        return _kilobytes("VmHWM")
    return _kilobytes("VmRSS")
