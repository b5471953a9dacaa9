"""An export of Nsight Systems opened: its tables as columns of numbers and texts."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.kernels import Coded
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.spans import Int64s

__all__ = ["STRINGS", "Export", "coded", "is_sqlite"]

STRINGS = "StringIds"
"""The table that holds the texts which other columns name by number."""

_MAGIC = b"SQLite format 3\0"
# Any of these is in every export from 2019 on; none is in another tool's database.
_SIGNS = {"EXPORT_META_DATA", "META_DATA_EXPORT", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL"}


def is_sqlite(path: Path) -> bool:
    """Tell by its first bytes whether a file is an SQLite database.

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


class Export(SqliteTables):
    """Read tables of one SQLite export; each call opens the file and closes it again.

    Args:
        path: The SQLite file.
        source: What the user named, where that is another file; errors name it.

    Raises:
        TraceError: The file is no SQLite database, or none that nsys wrote; also from any method
            when the file turns out to be damaged.
    """

    def __init__(self, path: Path, source: Path | None = None) -> None:
        if not is_sqlite(path):
            raise TraceError(f"{source or path}: is no SQLite file, so no export of Nsight Systems")
        super().__init__(path, source)
        if not _SIGNS & self.columns.keys():
            found = ", ".join(sorted(self.columns)[:5]) or "none"
            raise TraceError(f"{self.source}: is no export of Nsight Systems (its tables: {found})")

    def least(self, table: str, group: str, name: str) -> dict[int, int]:
        """Return the smallest integer of a column for each integer in another one."""
        if not {group, name} <= self.columns.get(table, frozenset()):
            return {}
        kinds = f"typeof(\"{group}\") = 'integer' AND typeof(\"{name}\") = 'integer'"
        sql = f'SELECT "{group}", MIN("{name}") FROM "{table}" WHERE {kinds} GROUP BY "{group}"'
        return dict(self.rows(sql))


def coded(ids: Int64s, texts: Mapping[int, str]) -> Coded:
    """Return a column of numbers as a column of the texts that they stand for, each kept once."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    codes: dict[str, int] = {}
    own = [
        codes.setdefault(texts[number], len(codes)) if number in texts else -1
        for number in distinct.tolist()
    ]
    return np.array(own, dtype=np.int64)[inverse], list(codes)
