"""Read what a run directory, and this machine, tell of ranks that hang.

Only the first and the last lines of the ranks' files are read.
"""

import os
import pickle
import socket
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.records.collective_entries import as_collectives
from lightning_rlprof.records.hang_reports import (
    Collective,
    RankEvidence,
    dump_file,
    read_beat,
    read_reports,
)
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import is_inside, rank_files, read_header
from lightning_rlprof.system.files import open_file
from lightning_rlprof.system.process import process_state

_TAIL = 1 << 16
_MOST_BYTES = 1 << 26  # of a pickle


def hang_evidence(run: Path) -> tuple[RankEvidence, ...]:
    """Return what is known of each rank of a run, in order, also of those that have no file.

    Raises:
        TraceError: No file of a rank exists, or none can be read.
    """
    files = rank_files(run)
    found: dict[int, RankEvidence] = {}
    problems = [] if files else [f"{run} has no rank-*.jsonl"]
    for path in files:
        try:
            header = read_header(path)
        except TraceError as error:
            problems.append(str(error))
            continue
        found[header.rank] = _of_rank(run, path, header)
    if not found:
        raise TraceError(problems[0])
    first = next(iter(found.values())).header
    if first is not None and not first.open_world:
        for rank in range(min(first.world_size, 1 << 17)):
            found.setdefault(rank, RankEvidence(rank))
    return tuple(found[rank] for rank in sorted(found))


def _of_rank(run: Path, path: Path, header: Header) -> RankEvidence:
    end, last_ns = _last_lines(path, header)
    here = header.host == socket.gethostname()
    return RankEvidence(
        rank=header.rank,
        header=header,
        end=end,
        last_ns=last_ns,
        process=process_state(header.pid) if here and end is None else "",
        beat=read_beat(run, header.rank),
        reports=read_reports(run, header.rank),
        dump=_dump(run, header.rank),
    )


def _dump(run: Path, rank: int) -> tuple[Collective, ...]:
    path = dump_file(run, rank)
    with suppress(TraceError):
        if path.exists() and is_inside(run, path):
            return tuple(as_collectives(read_plain_pickle(path)))
    return ()


def _last_lines(path: Path, header: Header) -> tuple[str | None, int | None]:
    """Return the status of a rank that has ended, and the Unix time of its last line."""
    try:
        with open_file(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
            lines = file.read(_TAIL).splitlines()
    except OSError:
        return None, None
    end, last = None, None
    for raw in lines:
        with suppress(*NOT_JSON):
            match msgspec.json.decode(raw):
                case ["span", _, _, _, _, int(time), *_] | ["note", int(time), *_]:
                    last = max(last or 0, time)
                case ["end", int(time), str(status)]:
                    end, last = status, max(last or 0, time)
    return end, None if last is None else last - header.clock_ns + header.unix_ns


# The one in C allocates as much as a number in the file says; this one has a dict.
class _Plain(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names an object outside of the file")


def read_plain_pickle(path: Path) -> Any:
    """Return what a pickle holds if that is lists, dicts, tuples, sets, text and numbers.

    Raises:
        TraceError: It cannot be read, is larger than 64 MiB, or names anything else. Nothing that
            it names is imported or called.
    """
    try:
        with open_file(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise pickle.UnpicklingError("it is larger than 64 MiB")
        return _Plain(BytesIO(data)).load()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise TraceError(f"{path}: is not a pickle of plain data ({error})") from error
