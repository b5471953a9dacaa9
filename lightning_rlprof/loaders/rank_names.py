"""Find ranks in file names, name missing ranks, and write ranks as text."""

import re
from collections.abc import Iterable

from lightning_rlprof.records.notes import Code
from lightning_rlprof.tables.spans import RunWarning

_RANK = re.compile(r"(?<![a-z])rank[-_]?(\d{1,7})(?![0-9a-z])", re.IGNORECASE)
_VERL = re.compile(
    r"((?!step\d+_)[^_]+)?(?:_(?!step\d+_)[^_]+)?_?(?:step(\d{1,15})_)?"
    r"rank\d+(?:-of-\d+)?_(?:[a-z0-9-]+_)?pid\d+_\d{17}(?!\d)"
)


def rank_in_name(name: str) -> int | None:
    """Return the rank that a file's name tells, the last one of several; None where there is none.

    Example::

        >>> rank_in_name("actor_node7_rank3_step2.nsys-rep"), rank_in_name("rank-0.json.gz")
        (3, 0)
    """
    found = _RANK.findall(name)
    return int(found[-1]) if found else None


def labels_of_verl(name: str) -> tuple[str, int]:
    """Return role and step in the name of a trace that verl's profiler wrote; "" and 0 without.

    Example::

        >>> labels_of_verl("actor_train_step3_rank1-of-2_tp0-dp1_pid77_20261101120000123.json.gz")
        ('actor', 3)
        >>> labels_of_verl("step3_rank0_pid77_20261101120000123.json.gz")
        ('', 3)
    """
    found = _VERL.match(name)
    return (found[1] or "", int(found[2] or 0)) if found else ("", 0)


def missing(world: int, seen: Iterable[int | None]) -> list[RunWarning]:
    """Name the ranks of a world that have no trace.

    Example::

        >>> missing(8, [0, 4])[0].text
        'of 8 ranks, these have no trace: 1-3, 5-7'
    """
    gone = set(range(world)).difference(rank for rank in seen if rank is not None)
    text = f"of {world} ranks, these have no trace: {as_ranges(gone)}"
    return [RunWarning(None, text, Code.RANKS_MISSING.value)] if gone else []


def as_ranges(ranks: Iterable[int]) -> str:
    """Return numbers as text: those that follow one another as first and last.

    Example::

        >>> as_ranges([3, 0, 1, 2, 9])
        '0-3, 9'
    """
    runs: list[range] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
