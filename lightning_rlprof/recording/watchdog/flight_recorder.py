"""The last collectives, as torch's flight recorder knows them.

torch keeps the last 2,000 collectives of NCCL and gloo by default, and can be asked while they
hang. Its functions are private, and differ between versions: what is missing is remarked.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_rlprof.records.hang_reports import (
    Collective,
    Ranges,
    as_collectives,
    dump_file,
    rank_ranges,
)
from lightning_rlprof.system.files import read_inside, write_inside

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_VARIABLES = (
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_HCCL_DEBUG_INFO_TEMP_FILE",
)
_MOST_BYTES = 1 << 26

Known = tuple[tuple[Collective, ...], dict[str, Ranges], tuple[str, ...]]


def last_collectives() -> Known:
    """Return the last collectives, the ranks of each group, and what could not be found out.

    It takes a millisecond or, if the recorder is full, some 60.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    torch = sys.modules.get("torch")
    if distributed is None or torch is None:
        return (), {}, ()
    module = getattr(torch._C, "_distributed_c10d", None)
    found: list[Collective] = []
    remarks: tuple[str, ...] = ()
    for name in _DUMPS:
        dump = getattr(module, name, None)
        if dump is None:
            continue
        try:
            found += as_collectives(json.loads(dump(True, False)))
        except Exception as error:  # of another version
            remarks += (f"torch's flight recorder: {error}",)
    if not any(hasattr(module, name) for name in _DUMPS):
        remarks += ("this version of torch has no flight recorder",)
    return tuple(dict.fromkeys(found)), _groups(distributed), remarks


def _groups(distributed: Any) -> dict[str, Ranges]:
    with suppress(Exception):  # private names
        world = distributed._world
        ranks = world.pg_group_ranks
        named = world.pg_names.items()
        return {str(name): rank_ranges(sorted(ranks[group])) for group, name in named}
    return {}


def keep_dump(run: Path, rank: int, since_unix_s: float, mode: int = 0o600) -> None:
    """Copy the file that torch writes when a collective times out, once, to the run directory.

    torch ends the process soon after. A file from before ``since_unix_s`` is another training's,
    and one of another user in a folder for all, such as ``/tmp``, is not read.
    """
    copy = dump_file(run, rank)
    if os.path.lexists(copy):
        return
    for prefix in (*map(os.environ.get, _VARIABLES), _default()):
        if not prefix:
            continue
        path = Path(f"{prefix}{rank}")
        with suppress(OSError):
            if path.lstat().st_mtime < since_unix_s:
                continue
            if data := read_inside(path.parent, path, _MOST_BYTES, (os.geteuid(),)):
                write_inside(run, copy, data, mode)
                return


def _default() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "torch", "comm_lib_trace_rank_")
