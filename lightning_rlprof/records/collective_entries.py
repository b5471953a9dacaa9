"""What torch's flight recorder writes, as JSON or as a pickle, as collectives."""

from collections.abc import Mapping
from typing import Any

from lightning_rlprof.records.hang_reports import Collective

_PER_GROUP = 8
_MOST = 400
_LONGEST = 200


def as_collectives(dump: Any) -> list[Collective]:
    """Return the last eight collectives of each group, and all that are not complete.

    What is not an entry is left out, as in a file of another program.

    Example::

        >>> entry = {"process_group": ["0", ""], "collective_seq_id": 6, "state": "scheduled",
        ...          "profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "retired": False}
        >>> (found,) = as_collectives({"entries": [entry]})
        >>> found.name, found.seq, found.is_done
        ('gloo:all_reduce', 6, False)
    """
    entries = dump.get("entries") if isinstance(dump, Mapping) else None
    found = [_collective(entry) for entry in entries or () if isinstance(entry, Mapping)]
    kept: list[Collective] = []
    count: dict[str, int] = {}
    for each in reversed(found):
        if each is None or len(kept) >= _MOST:
            continue
        count[each.group] = count.get(each.group, 0) + 1
        if count[each.group] <= _PER_GROUP or not each.is_done:
            kept.append(each)
    return kept[::-1]


def _collective(entry: Mapping[Any, Any]) -> Collective | None:
    group = entry.get("process_group")
    name = group[0] if isinstance(group, list | tuple) and group else entry.get("pg_id")
    is_p2p = entry.get("is_p2p") is True
    seq = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
    if not isinstance(seq, int) or not isinstance(name, str | int):
        return None
    is_done = entry.get("retired") is True or entry.get("state") == "completed"
    operation, sizes = entry.get("profiling_name"), entry.get("input_sizes")
    return Collective(
        group=str(name)[:_LONGEST],
        seq=min(seq, 2**53),
        name=operation[:_LONGEST] if isinstance(operation, str) else "?",
        sizes=_sizes(sizes),
        is_done=is_done,
        is_p2p=is_p2p,
    )


def _sizes(shapes: Any) -> str:
    """Return shapes as text; only what is one, as a file may nest anything."""
    found = [
        [min(size, 2**53) for size in shape[:_PER_GROUP] if isinstance(size, int)]
        for shape in (shapes[:_PER_GROUP] if isinstance(shapes, list | tuple) else ())
        if isinstance(shape, list | tuple)
    ]
    return str(found)[:_LONGEST]
