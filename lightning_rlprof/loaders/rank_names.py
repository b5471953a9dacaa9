"""Find ranks in file names, name missing ranks, and write ranks as text."""

import re
from collections.abc import Iterable

from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Header
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


def disagreeing(headers: Iterable[Header]) -> list[RunWarning]:
    """Name ranks of one role that tell different sizes of their world: those of several jobs.

    Roles may have a world each.

    Example::

        >>> from lightning_rlprof.testing import make_header
        >>> disagreeing([make_header(0, 2), make_header(1, 2), make_header(2, 4)])[0].text
        'ranks of role actor have different world sizes (several jobs?): 0-1 of 2, 2 of 4'
    """
    worlds: dict[str, dict[int, list[int]]] = {}
    for each in headers:
        worlds.setdefault(each.role, {}).setdefault(each.world_size, []).append(each.rank)
    text = "ranks of role {} have different world sizes (several jobs?): {}"
    found = []
    for role, own in worlds.items():
        told = ", ".join(f"{as_ranges(ranks)} of {world}" for world, ranks in sorted(own.items()))
        if len(own) > 1:
            found.append(RunWarning(None, text.format(role, told), Code.RUNS_MIXED.value))
    return found


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
