"""Damage to files: of any bytes, of values in JSON and CSV, of cells and pages in SQLite.

Each takes a source of chance, which may be hypothesis's, and so be made small where a test fails.
"""

import csv
import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

_DEEP: Any = []
for _ in range(60):
    _DEEP = [_DEEP, {"a": _DEEP}] if len(str(_DEEP)) < 500 else [_DEEP]

ODD: list[Any] = [
    *(None, True, False, 0, -1, 0.5, -0.0, 1e300, -1e300, 5e-324, 1e18, float("nan"), float("inf")),
    *(2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40),
    *("", " ", "0", "-1", "1e9", "9" * 400, "NaN", "\0", "\ud800", "é", "\u202e", "x" * 10_000),
    *("0.1.2", "1,5", "²", "\uff11", "-9223372036854775808", "ProfilerStep#99999999999999999999"),
    *([], {}, [[]], {"a": {}}, [1, "a", None], {"": ""}, _DEEP),
]
"""What may stand where something else is expected."""

_CHUNKS: list[bytes] = [
    *(b"\0", b"\xff", b"\xff\xfe", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\n", b"\r", b":"),
    *(b"NaN", b"-Infinity", b"1e999", b"null", b"9" * 30, b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b'"\\ud800"', b"[" * 3_000, b'{"a":' * 3_000, b"{}" * 200, b"\0" * 512, b"-", b"''"),
]


def damage(data: bytes, noise: Random) -> bytes:
    """Flip, cut, remove, repeat, exchange or insert some bytes."""
    changed = bytearray(data)
    for _ in range(noise.randint(1, 4)):
        size = len(changed)
        first = noise.randint(0, size)
        last = min(first + noise.choice([1, 2, 8, 60, 600, 5_000]), size)
        kind = noise.randint(0, 6)
        if kind == 0 and first < size:
            changed[first] ^= 1 << noise.randint(0, 7)
        elif kind == 1:
            del changed[first:]
        elif kind == 2:
            del changed[first:last]
        elif kind == 3:
            changed[first:first] = changed[first:last] * noise.choice([1, 2, 50])
        elif kind == 4:
            changed[first:last] = noise.choice(_CHUNKS)
        elif kind == 5:
            changed[first:first] = noise.choice(_CHUNKS)
        else:
            changed[first:last] = bytes(last - first)
    return bytes(changed)


def damage_values_of(file: Path, noise: Random) -> None:
    """Damage what a file says, so that its form stays whole."""
    if file.suffix in (".sqlite", ".db"):
        _damage_cells(file, noise)
    elif file.suffix == ".csv":
        file.write_bytes(_damage_sheet(file.read_bytes(), noise))
    elif file.suffix in (".json", ".jsonl"):
        file.write_bytes(_damage_json(file.read_bytes(), noise))
    else:
        file.write_bytes(damage(file.read_bytes(), noise))


def _damage_json(data: bytes, noise: Random) -> bytes:
    """Put odd values into JSON, or a line of it, and remove, repeat and exchange what is there."""
    lines = data.split(b"\n") if data.startswith(b'{"format"') else [data]
    for _ in range(noise.randint(1, 5)):
        at = noise.randrange(len(lines))
        try:
            tree = json.loads(lines[at])
        except ValueError:
            continue
        changed = _changed(tree, noise)
        lines[at] = json.dumps(changed, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"\n".join(lines)


def _changed(tree: Any, noise: Random) -> Any:
    """Change one thing at any depth of a tree."""
    if not isinstance(tree, dict | list) or not tree or noise.random() < 0.05:
        return noise.choice(ODD)
    key = noise.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    kind = noise.randint(0, 9)
    if kind == 0:
        del tree[key]
    elif kind == 1 and isinstance(tree, list):
        tree[key:key] = [tree[key]] * noise.choice([1, 3, 40])
    elif kind == 1:
        tree[noise.choice(["args", "ts", "dur", "id", "name", ""])] = tree[key]
    else:
        tree[key] = _changed(tree[key], noise)
    return tree


def _damage_sheet(data: bytes, noise: Random) -> bytes:
    """Put odd values into cells of a CSV file, and remove, repeat and rename its columns."""
    rows = list(csv.reader(io.StringIO(data.decode())))
    for _ in range(noise.randint(1, 5)):
        at, odd = noise.randrange(len(rows)), str(noise.choice(ODD))
        column = noise.randrange(len(rows[0]))
        kind = noise.randint(0, 5)
        if kind == 0:
            rows = [row[:column] + row[column + 1 :] for row in rows]
        elif kind == 1:
            rows[at:at] = [rows[at]] * noise.choice([1, 30])
        elif kind == 2:
            rows[0] = [odd if number == column else name for number, name in enumerate(rows[0])]
        elif kind == 3:
            rows[at] = rows[at] + [odd, '"', "a,b", "c\nd"][: noise.randint(1, 4)]
        else:
            rows[at] = [odd if number == column else cell for number, cell in enumerate(rows[at])]
        if not rows[0]:
            break
    made = io.StringIO()
    # Python 3.10 writes no zero
    csv.writer(made).writerows([cell.replace("\0", "\\0") for cell in row] for row in rows)
    return made.getvalue().encode("utf-8", "surrogatepass")


def _damage_cells(path: Path, noise: Random) -> None:
    """Put odd values into cells of an SQLite file, and remove or rename tables and columns."""
    with closing(sqlite3.connect(path)) as database:
        found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = [name for (name,) in found]
        for _ in range(noise.randint(1, 5)):
            table = noise.choice(tables)
            info = database.execute(f'PRAGMA table_info("{table}")')
            columns = [row[1] for row in info]
            sql, values = _statement(table, noise.choice(columns), noise)
            try:
                database.execute(sql, values)
            except (sqlite3.Error, OverflowError):
                continue
            tables = [name for name in tables if not sql.startswith(f'DROP TABLE "{name}"')]
            if not tables:
                break
        database.commit()


def _statement(table: str, column: str, noise: Random) -> tuple[str, list[Any]]:
    odd = noise.choice(ODD)
    if isinstance(odd, str):
        odd = noise.choice([odd.encode("utf-8", "surrogatepass"), odd.encode(errors="replace")])
        odd = noise.choice([odd, odd.decode(errors="replace")])
    odd = json.dumps(odd) if isinstance(odd, list | dict) else odd
    where = noise.choice(["", f" WHERE rowid % 3 = {noise.randint(0, 2)}", " WHERE rowid = 1"])
    kinds: list[Callable[[], tuple[str, list[Any]]]] = [
        lambda: (f'UPDATE "{table}" SET "{column}" = ?{where}', [odd]),
        lambda: (f'UPDATE "{table}" SET "{column}" = CAST(? AS TEXT){where}', [odd]),
        lambda: (f'UPDATE "{table}" SET "{column}" = -"{column}"{where}', []),
        lambda: (f'INSERT INTO "{table}" SELECT * FROM "{table}"{where}', []),
        lambda: (f'DELETE FROM "{table}"{where}', []),
        lambda: (f'ALTER TABLE "{table}" DROP COLUMN "{column}"', []),
        lambda: (f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column} x"', []),
        lambda: (f'DROP TABLE "{table}"', []),
    ]
    return noise.choice([*kinds[:3] * 4, *kinds])()
