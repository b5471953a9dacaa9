"""Several traces of device tools in one directory: told apart by rank, read, and joined."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.aligned import aligned
from lightning_rlprof.loaders.chrome_head import read_head
from lightning_rlprof.loaders.many import join
from lightning_rlprof.loaders.nsys_export import Export, is_sqlite
from lightning_rlprof.loaders.nsys_ranges import read_ranges
from lightning_rlprof.loaders.ranks import rank_in_name
from lightning_rlprof.spans import Problem, Spans

__all__ = ["read_ranks", "told_ranks"]

_MOST_RANKS = 2**20


class _Distributed(msgspec.Struct):
    rank: int = -1


def told_ranks(path: Path) -> set[int]:
    """Return which ranks a trace is of, as far as it is told; nothing is guessed.

    Of a Chrome trace as torch wrote it before the events, which are not read; of an export of
    Nsight Systems as our own marks say it; else as the file's name does.
    """
    try:
        told = _exported(path) if is_sqlite(path) else _distributed(path)
    except TraceError:
        told = set()
    named = rank_in_name(path.name)
    return told or (set() if named is None else {named})


def _exported(path: Path) -> set[int]:
    if rank_in_name(path.name) is not None:  # which needs no look at all the ranges
        return set()
    return set(read_ranges(Export(path)).ranks.values())


def _distributed(path: Path) -> set[int]:
    top = read_head(path).top
    try:
        told = msgspec.json.decode(top["distributedInfo"], type=_Distributed)
    except (KeyError, *NOT_JSON):
        return set()
    return {told.rank} if 0 <= told.rank < _MOST_RANKS else set()


def read_ranks(
    files: Sequence[Path],
    read: Callable[[Path], Spans],
    progress: Callable[[int, int], None] | None = None,
) -> Spans | None:
    """Read traces that are of different ranks as one run; None where they are not known to be.

    One that cannot be read is a problem of its rank. Raises the first reason where all are such.
    Clocks are compared as `aligned` does it.

    Args:
        files: The traces, all of one tool.
        read: Reads one.
        progress: Called after each with how many are read, and how many there are.
    """
    ranks = {file: told_ranks(file) for file in files}
    if not all(ranks.values()) or len(set().union(*ranks.values())) < 2:
        return None
    parts, broken = [], {}
    for count, file in enumerate(files, start=1):
        try:
            parts.append(read(file))
        except TraceError as error:
            broken[file] = error
        if progress is not None:
            progress(count, len(files))
    if not parts:
        raise broken[files[0]]
    lost = [Problem(rank, str(why)) for at, why in broken.items() for rank in ranks[at]]
    return aligned(join(parts, lost))
