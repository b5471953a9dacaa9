"""Captures of a real 910B, text of two ranks and a database of one, and ways to ask their files.

Text and database are two runs of one program: their counts and bytes agree, their times do not.
None of them marks anything with MSTX.
"""

import csv
import shutil
import sqlite3
from contextlib import closing
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

from lightning_rlprof.tables.spans import Spans
from tests.places import SHARED_DATA

DATA = SHARED_DATA / "ascend"
TEXT = [DATA / f"text_level1_rank{rank}" for rank in range(2)]
DATABASE = DATA / "db_level1_rank0"
CAPTURES = [*TEXT, DATABASE]
OUTPUT = "ASCEND_PROFILER_OUTPUT"
MAIN_DATABASE = DATABASE / OUTPUT / "ascend_pytorch_profiler_0.db"
ABSENT = "the recorded captures are not here"


def sheet(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / OUTPUT / name).open(newline="") as file:
        return list(csv.DictReader(file))


def ask(sql: str) -> list[tuple[Any, ...]]:
    uri = f"file:{MAIN_DATABASE}?mode=ro&immutable=1"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        return database.execute(sql).fetchall()


def ns(text: Any) -> int:
    """Microseconds as nanoseconds, in decimals."""
    return int((Decimal(str(text).strip()) * 1000).to_integral_value(ROUND_HALF_EVEN))


def column(run: Spans, table: str, name: str) -> list[Any]:
    return run.table(table).column(name)


def table_rows(run: Spans, name: str) -> list[dict[str, Any]]:
    table = run.table(name)
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def copied(source: Path, target: Path) -> Path:
    """Copy a capture to where it may be changed."""
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755)
    return target
