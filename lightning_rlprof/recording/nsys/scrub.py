"""Take the environment, and what the processes printed, out of an SQLite export of nsys.

Nsight Systems keeps the whole environment of the process that it started, with every token in it,
in META_DATA_CAPTURE and TARGET_INFO_SYSTEM_ENV. StringIds holds it once more, and beside it that of
every other process which nsys may look at on the machine (seen with 2022.4 and 2023.4), and what
the processes printed.
"""

import mmap
import os
import re
import shlex
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.system.files import open_file

_MAGIC = b"SQLite format 3\0"
_SIGNS = {"META_DATA_EXPORT", "EXPORT_META_DATA", "META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV"}
_CAPTURE, _SYSTEM = ("%ENVIRONMENT_VARIABLE%",), ("DeviceEnvironment",)
_BYTES = "CAST(COALESCE(value, '') AS TEXT)"  # in UTF-8, whatever the file keeps
# Tables of texts that a process printed, or that nsys keeps of it, as numbers of StringIds.
_TEXTS = {"ProcessStreams": ("contentId", "filenameId"), "ANALYSIS_FILE": ("contentId",)}
_REFERENCE = re.compile(r'^\s*"?(\w+)"?\s+INTEGER[^\n]*--\s*REFERENCES StringIds\(id\)', re.M)
# Between variables stands a NUL, and in TARGET_INFO_SYSTEM_ENV of later versions a semicolon.
_NEXT = re.compile(rb"[\0;](?=[A-Za-z_][\w%().]*=)")
_VARIABLE = re.compile(rb"(?:^|\0)[A-Za-z_][\w%().]*=")
_SECRET = re.compile(rb"KEY|TOKEN|SECRET|PASS|CRED|AUTH", re.I)
_SHORT = 8  # bytes; TOKENIZERS_PARALLELISM=false would be found in every file
_ENCODINGS = ("utf-8", "utf-16le", "utf-16be")
_CELL = """CASE WHEN typeof({0}) IN ('text', 'blob') THEN {0} END"""
_ROWS = 10_000  # searched at once

Environment = dict[bytes, set[bytes]]


class Removed(NamedTuple):
    """What is no longer in a copy: values of variables, and texts that processes printed."""

    values: int
    texts: int


def scrub_export(source: Path, target: Path) -> Removed:
    """Write a copy of an export without its environment, and look for it in the copy.

    The copy is rebuilt, so that no freed page keeps anything. It appears under its name only when
    no ``NAME=value`` of the environment is left in it, nor the value of a variable that by its
    name holds a secret, neither in its bytes nor in a value: SQLite may keep a long text in parts.
    Rows of kernels, ranges and threads stay as they are.

    Raises:
        TraceError: No such file, no SQLite export of nsys, or a secret is left, in a range's name
            or on the command line, say; then there is no copy.
        OSError: The copy cannot be written.
    """
    _check(source)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    copy = Path(name)
    try:
        shutil.copyfile(source, copy)
        environment, removed = _removed_from(copy, source)
        if left := _left(copy, environment):
            raise TraceError(
                f"{source}: no copy was written, for what {', '.join(sorted(left))} held stands "
                "elsewhere in it, too (the command line, or a range's name?)"
            )
        shutil.copymode(source, copy)
        copy.replace(target)
    finally:
        copy.unlink(missing_ok=True)
    return removed


def _check(source: Path) -> None:
    if source.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        output = str(source.with_suffix(".sqlite"))
        command = shlex.join(
            ["nsys", "export", "--type", "sqlite", "--output", output, str(source)]
        )
        raise TraceError(
            f"{source}: only nsys itself can open its reports; run `{command}` and scrub what it "
            "writes"
        )
    try:
        with open_file(source) as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise TraceError(f"{source}: cannot be read ({error.strerror})") from error
    if magic != _MAGIC:
        raise TraceError(f"{source}: not an SQLite export of Nsight Systems")


def _removed_from(copy: Path, source: Path) -> tuple[Environment, Removed]:
    """Remove in place; return what the environment was, and the counts."""
    try:
        with closing(sqlite3.connect(copy, isolation_level=None)) as database:
            database.text_factory = bytes
            # No journal in a file of its own, and zeros where something was.
            for pragma in ("journal_mode=MEMORY", "secure_delete=ON", "trusted_schema=OFF"):
                database.execute(f"PRAGMA {pragma}")
            found = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
            tables = {name.decode(): sql.decode() for name, sql in found}
            if not _SIGNS & tables.keys():
                names = ", ".join(sorted(tables)[:5]) or "none"
                raise TraceError(f"{source}: not an export of Nsight Systems (its tables: {names})")
            variables = _take_environment(database, tables)
            texts, more = _take_texts(database, tables)
            database.execute("VACUUM")
    except (sqlite3.Error, UnicodeError) as error:
        raise TraceError(f"{source}: cannot be read as SQLite ({error})") from error
    environment = _parsed(variables + more)
    return environment, Removed(sum(map(len, environment.values())), texts)


def _take_environment(database: sqlite3.Connection, tables: dict[str, str]) -> list[bytes]:
    """Empty the rows that say what the environment was; return its variables."""
    variables: list[bytes] = []
    if "META_DATA_CAPTURE" in tables:
        where = "FROM META_DATA_CAPTURE WHERE name LIKE ?"
        variables += [value for (value,) in database.execute(f"SELECT {_BYTES} {where}", _CAPTURE)]
        database.execute(f"DELETE {where}", _CAPTURE)
    if "TARGET_INFO_SYSTEM_ENV" in tables:
        where = "WHERE name = ?"
        for (value,) in database.execute(
            f"SELECT {_BYTES} FROM TARGET_INFO_SYSTEM_ENV {where}", _SYSTEM
        ):
            variables += _NEXT.split(value)
        database.execute(f"UPDATE TARGET_INFO_SYSTEM_ENV SET value = '' {where}", _SYSTEM)
    return variables


def _take_texts(database: sqlite3.Connection, tables: dict[str, str]) -> tuple[int, list[bytes]]:
    """Empty the tables of texts, and every string that only they use or that is an environment."""
    ours: set[int] = set()
    count = 0
    for table in _TEXTS.keys() & tables.keys():
        for column in _TEXTS[table]:
            found = database.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL")
            ours.update(number for (number,) in found)
        count += database.execute(f"DELETE FROM {table}").rowcount
    if "StringIds" not in tables:
        return count, []
    found = database.execute(f"SELECT id, {_BYTES} FROM StringIds WHERE value LIKE '%=%'")
    blocks = {number: value for number, value in found if _VARIABLE.search(value)}
    used = _used(database, tables)
    # A name of something never holds a NUL, but may well be like NAME=value.
    environments = {n for n, block in blocks.items() if n not in used or b"\0" in block}
    empty = [(number,) for number in (ours - used) | environments]
    database.executemany("UPDATE StringIds SET value = '' WHERE id = ?", empty)
    return count, [part for n in sorted(environments) for part in blocks[n].split(b"\0")]


def _used(database: sqlite3.Connection, tables: dict[str, str]) -> set[int]:
    """Return the strings that other tables use, as nsys's own comments in the schema say."""
    used: set[int] = set()
    for table in tables.keys() - _TEXTS.keys():
        for column in _REFERENCE.findall(tables[table]):
            found = database.execute(f'SELECT DISTINCT "{column}" FROM "{table}"')
            used.update(number for (number,) in found if number is not None)
    return used


def _parsed(variables: list[bytes]) -> Environment:
    environment: Environment = defaultdict(set)
    for variable in variables:
        name, equals, value = variable.strip(b"\0").partition(b"=")
        if name and equals:
            quoted = len(value) > 1 and value[:1] == value[-1:] == b'"'
            environment[name].add(value[1:-1] if quoted else value)
    return environment


def _left(path: Path, environment: Environment) -> set[str]:
    """Return the names of variables that can still be read in a file's bytes or values."""
    try:
        with closing(sqlite3.connect(path)) as database:
            database.text_factory = bytes
            database.execute("PRAGMA trusted_schema=OFF")
            ((encoding,),) = database.execute("PRAGMA encoding")
            left = set[str]()
            for values in _values(database):
                left |= set[str]().union(*(_found(values, environment, e) for e in _ENCODINGS))
    except sqlite3.Error as error:
        raise TraceError(f"{path}: its copy cannot be searched ({error})") from error
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        kept = encoding.decode().lower()
        return left.union(*(_found(data, environment, e) for e in {"utf-8", kept}))


def _values(database: sqlite3.Connection) -> Iterator[bytes]:
    """Yield all texts, in UTF-8, and blobs of a database, and its schema, many at once.

    What a virtual table holds, such as the words of an index, is in plain tables of its own; the
    module that could read it may not be here.
    """
    found = database.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
    )
    for table in ["sqlite_master", *(name.decode() for (name,) in found.fetchall())]:
        empty = database.execute(f"SELECT * FROM {_quoted(table)} LIMIT 0")
        cells = ", ".join(_CELL.format(_quoted(column[0])) for column in empty.description)
        rows = database.execute(f"SELECT {cells} FROM {_quoted(table)}")
        while some := rows.fetchmany(_ROWS):
            yield b"\0\0\0".join(cell for row in some for cell in row if cell is not None)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _found(data: mmap.mmap | bytes, environment: Environment, encoding: str) -> set[str]:
    """Return the names of variables that stand in some bytes."""

    def coded(text: bytes) -> bytes:
        return text if encoding == "utf-8" else text.decode(errors="replace").encode(encoding)

    found = set()
    for name, values in environment.items():
        wanted = [coded(quote + value) for value in values for quote in (b"", b'"') if value]
        bare = [coded(v) for v in values if len(v) >= _SHORT and _SECRET.search(name)]
        if any(data.find(v) >= 0 for v in bare) or _assigned(data, coded(name + b"="), wanted):
            found.add(name.decode(errors="replace"))
    return found


def _assigned(data: mmap.mmap | bytes, name: bytes, values: list[bytes]) -> bool:
    """Tell whether ``NAME=`` stands somewhere with one of the values behind it."""
    start = data.find(name)
    while start >= 0:
        behind = start + len(name)
        if any(data[behind : behind + len(value)] == value for value in values):
            return True
        start = data.find(name, behind)
    return False
