"""What DuckDB says of our files is what they hold now."""

import os
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.parquet import kept_table, row_count, write_table
from lightning_rlprof.tables.table import Column, ColumnRows, Table

TABLE = Table("a", (Column("n", "count"),), ColumnRows([np.full(9, 3)]))


def test_a_file_that_took_the_place_of_a_damaged_one_of_its_size_and_time_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    write_table(TABLE, "a", path)
    sound, when = path.read_bytes(), path.stat().st_mtime_ns
    footer = bytes(each ^ 0x5A for each in sound[-60:-8])
    path.write_bytes(sound[:-60] + footer + sound[-8:])
    os.utime(path, ns=(when, when))
    with pytest.raises(TraceError):
        row_count([path])

    path.unlink()
    write_table(TABLE, "a", path)

    assert (path.stat().st_size, path.stat().st_mtime_ns) == (len(sound), when)
    assert row_count([path]) == 9
    assert kept_table(path, "a").column("n") == [3] * 9
