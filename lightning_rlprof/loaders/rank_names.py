"""Find ranks in file names, name missing ranks, and write ranks as text."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from lightning_rlprof.records.notes import Code
from lightning_rlprof.tables.spans import RunWarning

_RANK = re.compile(r"(?<![a-z])rank[-_]?(\d{1,7})(?![0-9a-z])", re.IGNORECASE)
_VERL = re.compile(
    r"((?!step\d+_)[^_]+)?(?:_(?!step\d+_)[^_]+)?_?(?:step(\d{1,15})_)?"
    r"rank\d+(?:-of-\d+)?_(?:[a-z0-9-]+_)?pid\d+_\d{17}(?!\d)"
)


# As tensorboard_trace_handler of torch names them: worker, time, suffix.
_WORKER = re.compile(r"(.+)\.\d{13,19}\.pt\.trace\.json(?:\.gz)?")


def worker_in_name(name: str) -> str | None:
    """Return the worker in the name that torch's handler gives a trace: its host and process.

    Example::

        >>> worker_in_name("node-1_4711.1719853884123456789.pt.trace.json")
        'node-1_4711'
    """
    found = _WORKER.fullmatch(name)
    return found[1] if found else None


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


class Remark(NamedTuple):
    """What one or more ranks have to say; ``who`` is empty for the whole run."""

    who: str
    text: str

    def __str__(self) -> str:
        """Return it with its ranks in front."""
        return f"{self.who}: {self.text}" if self.who else self.text


def by_cause(said: Iterable[tuple[int | None, str]]) -> list[Remark]:
    """Return each text once, with all ranks that say it; None is the whole run.

    Example::

        >>> [str(each) for each in by_cause([(0, "no clock"), (1, "no clock"), (None, "a")])]
        ['ranks 0-1: no clock', 'a']
    """
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank, text in said:
        groups.setdefault((rank is None, text), []).extend([] if rank is None else [rank])
    return [Remark(named_ranks(ranks), text) for (_, text), ranks in groups.items()]


def named_ranks(ranks: list[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0-7, 9``, and nothing for none."""
    return f"rank{'s' * (len(set(ranks)) > 1)} {as_ranges(ranks)}" if ranks else ""


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
