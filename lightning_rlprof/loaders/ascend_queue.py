"""torch_npu's queue: what one thread hands over another one launches, later."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend_kept import QUEUE, Kept
from lightning_rlprof.loaders.ascend_marks import STRINGS
from lightning_rlprof.loaders.ascend_tasks import Calls, calls_at, last_before, places
from lightning_rlprof.loaders.ascend_times import plausible
from lightning_rlprof.loaders.ascend_trace import TraceView
from lightning_rlprof.loaders.enclosing import innermost
from lightning_rlprof.loaders.kernels import UNKNOWN
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.spans import Int64s

__all__ = ["Ends", "database_queue", "handed_over", "trace_queue"]

_CALLS, _NUMBERS = "PYTORCH_API", "CONNECTION_IDS"
_COLUMNS = ("startNs", "endNs", "globalTid", "connectionId")
_OF_QUEUE = f"type = 50002 AND name IN (SELECT id FROM {STRINGS} WHERE value LIKE '{{}}%')"


class Ends(NamedTuple):
    """Calls at one end of the queue: thread, start, end, and the number of what went through."""

    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s
    number: Int64s

    def sound(self) -> "Ends":
        """Return those whose times can be true and that have a number, by number and start."""
        length = np.where(self.end_ns >= self.start_ns, self.end_ns - self.start_ns, UNKNOWN)
        rows = np.flatnonzero(plausible(self.start_ns, length) & (self.number != UNKNOWN))
        rows = rows[np.lexsort((self.start_ns[rows], self.number[rows]))]
        return Ends(*(column[rows] for column in self))


def database_queue(database: SqliteTables) -> tuple[Ends, Ends]:
    """Return the calls that put something in, and those that take it out."""
    there = {"type", "name", *_COLUMNS} <= database.columns.get(_CALLS, frozenset())
    there = there and STRINGS in database.columns
    pairs = database.numbers(_NUMBERS, "id", "connectionId")
    both = []
    for word in QUEUE:
        where = _OF_QUEUE.format(word) if there else "0"
        rows = database.numbers(_CALLS, *_COLUMNS, where=where)
        at = places(pairs["id"], rows["connectionId"], slack=0)
        thread = calls_at(rows, np.arange(len(at))).thread
        number = np.append(pairs["connectionId"], UNKNOWN)[at]
        both.append(Ends(thread, rows["startNs"], rows["endNs"], number).sound())
    return both[0], both[1]


def trace_queue(view: TraceView) -> tuple[Ends, Ends]:
    """Return the calls that put something in, and those that take it out."""
    rows, threads = view.tables[Kept.QUEUE], view.threads()
    both = []
    for word in QUEUE:
        code = view.names.index(word) if word in view.names else UNKNOWN
        own = {name: column[rows["kind"] == code] for name, column in rows.items()}
        times = (own["start_ns"], own["end_ns"])
        both.append(Ends(threads[own["lane"]], *times, own["number"]).sound())
    return both[0], both[1]


def handed_over(torch: Calls, cann: Calls, queue: tuple[Ends, Ends]) -> Calls:
    """Return torch's operators, and where there is none the call that handed over what CANN did.

    torch_npu tells the operators of kernels itself, of many copies it does not. Both ends of its
    queue have one number: that of the range around CANN's call, and that of the call that is
    wanted.

    Args:
        torch: The operator of each task.
        cann: The call of CANN of each task.
        queue: Both ends.
    """
    given, taken = queue
    around = innermost(*taken[:3], cann.thread, cann.time_ns)
    number, out = (np.append(of, UNKNOWN)[around] for of in (taken.number, taken.start_ns))
    at = last_before(given.number, given.start_ns, number, out)
    before = np.append(given.start_ns, UNKNOWN)[at] <= out
    wanted = (torch.time_ns == UNKNOWN) & (at >= 0) & before
    length = None
    if torch.length_ns is not None:
        lengths = np.append(given.end_ns - given.start_ns, UNKNOWN)[at]
        length = np.where(wanted, lengths, torch.length_ns)
    return Calls(
        np.where(wanted, np.append(given.start_ns, UNKNOWN)[at], torch.time_ns),
        np.where(wanted, np.append(given.thread, UNKNOWN)[at], torch.thread),
        length,
    )
