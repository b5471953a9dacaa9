"""torch_npu's queue in a database: what one thread hands over another one launches, later."""

import numpy as np

from lightning_rlprof.loaders.ascend_marks import STRINGS
from lightning_rlprof.loaders.ascend_tasks import Calls, calls_at, places
from lightning_rlprof.loaders.enclosing import innermost
from lightning_rlprof.loaders.kernels import UNKNOWN
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.spans import Int64s

__all__ = ["handed_over"]

_CALLS, _NUMBERS = "PYTORCH_API", "CONNECTION_IDS"
_COLUMNS = ("startNs", "endNs", "globalTid", "connectionId")
_OF_QUEUE = f"type = 50002 AND name IN (SELECT id FROM {STRINGS} WHERE value LIKE '{{}}')"


def handed_over(database: SqliteTables, torch: Calls, cann: Calls) -> Calls:
    """Return torch's operators, and where there is none the call that handed over what CANN did.

    torch_npu tells the operators of kernels itself, of copies it does not. Both ends of its queue
    have one number: that of the range around CANN's call, and that of the call which is wanted.

    Args:
        database: With the calls of torch.
        torch: The operator of each task.
        cann: The call of CANN of each task.
    """
    if not {"type", *_COLUMNS} <= database.columns.get(_CALLS, frozenset()):
        return torch
    given, taken = (
        database.numbers(_CALLS, *_COLUMNS, where=_OF_QUEUE.format(word))
        for word in ("Enqueue%", "Dequeue%")
    )
    thread = calls_at(taken, np.arange(len(taken["startNs"]))).thread
    around = innermost(thread, taken["startNs"], taken["endNs"], cann.thread, cann.time_ns)
    pairs = database.numbers(_NUMBERS, "id", "connectionId")
    number = np.append(_numbers(pairs, taken), UNKNOWN)[around]
    found = calls_at(given, places(_numbers(pairs, given), number, slack=0))
    unknown = torch.time_ns == UNKNOWN
    columns = ("time_ns", "thread", "length_ns")
    return Calls(*(np.where(unknown, getattr(found, of), getattr(torch, of)) for of in columns))


def _numbers(pairs: dict[str, Int64s], rows: dict[str, Int64s]) -> Int64s:
    at = places(pairs["id"], rows["connectionId"], slack=0)
    return np.append(pairs["connectionId"], UNKNOWN)[at]
