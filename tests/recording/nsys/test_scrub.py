"""Exports without their environment: on exports made here, and on real ones with one planted."""

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.recording.nsys.scrub import Removed, scrub_export
from tests.places import SHARED_DATA

SHARED = SHARED_DATA / "nsys"
REAL = sorted(SHARED.rglob("*.sqlite"))
NONE_HERE = pytest.param(Path("none"), marks=pytest.mark.skip("no ../shared/data/nsys here"))
EXPORTS = [pytest.param(path, id=path.stem) for path in REAL] or [NONE_HERE]

# As nsys declares them; its comments say which numbers stand for strings.
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_CAPTURE (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, name TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE ProcessStreams (
    globalPid    INTEGER NOT NULL,   -- Serialized GlobalId.
    filenameId   INTEGER NOT NULL,   -- REFERENCES StringIds(id) -- File name
    contentId    INTEGER NOT NULL    -- REFERENCES StringIds(id) -- Stream content
);
CREATE TABLE ANALYSIS_FILE (
    id           INTEGER NOT NULL PRIMARY KEY,
    filename     TEXT,
    contentId    INTEGER             -- REFERENCES StringIds(id) -- File content
);
CREATE TABLE NVTX_EVENTS (
    start        INTEGER NOT NULL,
    text         TEXT,
    textId       INTEGER             -- REFERENCES StringIds(id) -- Registered string
);
"""
PLANTED = {"HF_TOKEN": "hf_zyxwvu98765", "EMPTY": "", "ODD": 'a "b" = c, d', "SHLVL": "1"}
OTHERS = {"HF_TOKEN": "hf_zyxwvu98765", "AWS_SECRET": "of-another-process"}
SECRETS = [b"hf_zyxwvu98765", b"of-another-process", b"printed text", b"SHLVL=", b"ODD="]


def block(variables: dict[str, str], between: str) -> str:
    return between.join(f"{name}={value}" for name, value in variables.items())


def plant(path: Path, between: str = "\0") -> Path:
    """Put into an export what nsys puts there, wherever it has the tables for it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        (first,) = database.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM StringIds").fetchone()
        strings = ["printed text", "/tmp/stdout.log", block(OTHERS, "\0"), block(TWO, "\0")]
        rows = list(enumerate(strings, first))
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
        if "ProcessStreams" in tables:
            stream = (first + 1, first)
            database.execute("INSERT INTO ProcessStreams VALUES (7, ?, ?)", stream)
        if "META_DATA_CAPTURE" in tables:
            quoted = [(f'{name}="{value}"',) for name, value in PLANTED.items()]
            sql = "INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', ?)"
            database.executemany(sql, quoted)
        change = "UPDATE TARGET_INFO_SYSTEM_ENV SET value = ? WHERE name = 'DeviceEnvironment'"
        assert database.execute(change, (block(PLANTED, between),)).rowcount == 1
    return path


TWO = {"PATH": "/usr/bin", "HOME": "/somewhere"}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Make an export in which nothing is planted yet."""
    path = tmp_path / "export.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript(SCHEMA)
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, 'Hostname', 'box')")
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, 'DeviceEnvironment', '')")
        database.execute("INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:COMMAND', 'python')")
        names = [(1, "actor_update"), (2, "step=3"), (3, "kernel<bool = true>"), (4, "unused")]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        events = [(0, None, 1), (5, None, 2), (9, "inline=1", None)]
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?)", events)
    return path


def tables(path: Path, leaving_out: Iterable[str] = ()) -> dict[str, list[tuple[object, ...]]]:
    """Return the rows of every table."""
    with closing(sqlite3.connect(path)) as database:
        database.text_factory = bytes
        found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        names = [name.decode() for (name,) in found if name.decode() not in leaving_out]
        return {name: database.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}


def change(path: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA secure_delete = OFF")  # Debian's SQLite has it on
        database.execute(sql, values)


@pytest.mark.parametrize("between", ["\0", ";"])
def test_the_environment_and_what_was_printed_are_gone_from_the_bytes(
    export: Path, tmp_path: Path, between: str
) -> None:
    before = tables(export)
    plant(export, between)
    assert all(secret in export.read_bytes() for secret in SECRETS)

    removed = scrub_export(export, tmp_path / "out.sqlite")

    assert removed == Removed(values=7, texts=1)
    found = (tmp_path / "out.sqlite").read_bytes()
    assert [secret for secret in SECRETS if secret in found] == []
    after = tables(tmp_path / "out.sqlite")
    assert [row for row in after["StringIds"] if row[1]] == before["StringIds"]
    assert {**after, "StringIds": None} == {**before, "StringIds": None}


def test_the_source_stays_as_it_is(export: Path, tmp_path: Path) -> None:
    plant(export)
    before = export.read_bytes()
    scrub_export(export, tmp_path / "out.sqlite")
    assert export.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export.sqlite", "out.sqlite"]


def test_no_freed_page_keeps_what_was_deleted_before(export: Path, tmp_path: Path) -> None:
    long = "hf_zyxwvu98765 " * 2000
    change(export, "INSERT INTO StringIds VALUES (99, ?)", long)
    change(export, "DELETE FROM StringIds WHERE id = 99")
    assert b"hf_zyxwvu98765" in export.read_bytes()
    scrub_export(export, tmp_path / "out.sqlite")
    assert b"hf_zyxwvu98765" not in (tmp_path / "out.sqlite").read_bytes()


def test_a_printed_text_that_names_a_range_too_stays(export: Path, tmp_path: Path) -> None:
    change(export, "INSERT INTO ProcessStreams VALUES (7, 4, 1)")
    assert scrub_export(export, tmp_path / "out.sqlite") == Removed(0, 1)
    assert tables(tmp_path / "out.sqlite")["StringIds"][0] == (1, b"actor_update")
    assert tables(tmp_path / "out.sqlite")["StringIds"][3] == (4, b"")


def test_files_that_nsys_kept_are_emptied(export: Path, tmp_path: Path) -> None:
    change(export, "INSERT INTO ANALYSIS_FILE VALUES (1, '/etc/x', 4)")
    change(export, "INSERT INTO ANALYSIS_FILE VALUES (2, '/etc/y', NULL)")
    assert scrub_export(export, tmp_path / "out.sqlite") == Removed(0, 2)
    after = tables(tmp_path / "out.sqlite")
    assert (after["ANALYSIS_FILE"], after["StringIds"][3]) == ([], (4, b""))


def test_an_environment_of_one_variable_is_told_from_a_name_by_its_use(
    export: Path, tmp_path: Path
) -> None:
    change(export, "INSERT INTO StringIds VALUES (9, 'ONLY=one')")
    assert scrub_export(export, tmp_path / "out.sqlite") == Removed(1, 0)
    strings = dict(tables(tmp_path / "out.sqlite")["StringIds"])
    assert (strings[9], strings[2]) == (b"", b"step=3")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("train.py --token hf_zyxwvu98765", "HF_TOKEN"),
        ('ODD="a "b" = c, d', "ODD"),
        ('env ODD=a "b" = c, d hf_zyxwvu98765', "HF_TOKEN, ODD"),
    ],
)
def test_a_secret_that_stands_elsewhere_too_is_named_and_no_copy_is_left(
    export: Path, tmp_path: Path, text: str, names: str
) -> None:
    plant(export)
    change(export, "INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ARGUMENT_0', ?)", text)
    with pytest.raises(TraceError, match=f"no copy was written, for what {names} held") as caught:
        scrub_export(export, tmp_path / "out.sqlite")
    assert "hf_zyxwvu98765" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["export.sqlite"]


def test_what_is_no_secret_may_stand_elsewhere(export: Path, tmp_path: Path) -> None:
    change(
        export, "UPDATE TARGET_INFO_SYSTEM_ENV SET value = 'TOKENIZERS_PARALLELISM=false;PWD=/x'"
    )
    change(export, "INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:WORKING_DIR', '/x')")
    change(export, "INSERT INTO META_DATA_CAPTURE VALUES ('RESUME', 'false')")
    change(export, "UPDATE TARGET_INFO_SYSTEM_ENV SET name = 'DeviceEnvironment'")
    assert scrub_export(export, tmp_path / "out.sqlite") == Removed(2, 0)


def test_a_clean_export_is_copied_with_nothing_to_count(export: Path, tmp_path: Path) -> None:
    assert scrub_export(export, tmp_path / "out.sqlite") == Removed(0, 0)
    assert tables(tmp_path / "out.sqlite") == tables(export)


def test_an_export_can_be_scrubbed_in_place_and_keeps_its_mode(export: Path) -> None:
    plant(export).chmod(0o640)
    scrub_export(export, export)
    assert b"hf_zyxwvu98765" not in export.read_bytes()
    assert export.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.nsys-rep", b"x", "only nsys itself can open its reports; run `nsys export --type sql"),
        ("a.sqlite", b"", "not an SQLite export of Nsight Systems"),
        ("a.sqlite", b"SQLite format 3\0" + b"x" * 200, "cannot be read as SQLite"),
        ("a.sqlite", None, "cannot be read (No such file or directory)"),
    ],
)
def test_what_cannot_be_scrubbed_is_one_line(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError) as caught:
        scrub_export(tmp_path / name, tmp_path / "out.sqlite")
    assert str(caught.value).startswith(f"{tmp_path / name}: {said}")
    assert not (tmp_path / "out.sqlite").exists()


def test_another_database_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    with pytest.raises(TraceError, match=r"not an export of Nsight Systems \(its tables: users\)"):
        scrub_export(tmp_path / "a.sqlite", tmp_path / "out.sqlite")


def test_a_schema_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute('CREATE TABLE "users" (name TEXT)')
    path.write_bytes(path.read_bytes().replace(b"users", b"\xd4sers"))
    with pytest.raises(TraceError, match="cannot be read as SQLite"):
        scrub_export(path, tmp_path / "out.sqlite")


@pytest.mark.parametrize("real", EXPORTS)
def test_a_real_export_loses_what_was_planted_and_nothing_else(real: Path, tmp_path: Path) -> None:
    source = tmp_path / "export.sqlite"
    shutil.copyfile(real, source)
    source.chmod(0o644)
    plant(source)
    scrub_export(source, tmp_path / "out.sqlite")

    found = (tmp_path / "out.sqlite").read_bytes()
    assert [secret for secret in SECRETS if secret in found] == []
    emptied = ("StringIds", "ProcessStreams", "ANALYSIS_FILE", "TARGET_INFO_SYSTEM_ENV")
    before, after = tables(real, emptied), tables(tmp_path / "out.sqlite", emptied)
    assert list(after) == list(before)
    assert [name for name in before if before[name] != after[name]] == []
    assert len(tables(tmp_path / "out.sqlite")["StringIds"]) == len(tables(source)["StringIds"])


@pytest.mark.parametrize("real", EXPORTS)
def test_a_scrubbed_export_reads_as_the_real_one(real: Path, tmp_path: Path) -> None:
    from lightning_rlprof.loaders.load import load

    scrub_export(real, tmp_path / "out.sqlite")
    before, after = load(real), load(tmp_path / "out.sqlite")
    assert (len(after), list(after.name)) == (len(before), list(before.name))
    assert after.start_ns.tolist() == before.start_ns.tolist()


TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le", "UTF-16be"])
@pytest.mark.parametrize("kind", ["TEXT", "BLOB"])
@pytest.mark.parametrize("without", ["", " WITHOUT ROWID"])
def test_a_secret_in_a_value_is_found_wherever_sqlite_puts_its_parts(
    tmp_path: Path, encoding: str, kind: str, without: str
) -> None:
    path = tmp_path / "export.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA encoding = '{encoding}'")
        database.executescript(SCHEMA)
        row = ("%ENVIRONMENT_VARIABLE%:0", f"HF_TOKEN={TOKEN}")
        database.execute("INSERT INTO META_DATA_CAPTURE VALUES (?, ?)", row)
        database.execute(f'CREATE TABLE "a""b" (id INTEGER PRIMARY KEY, "c d" {kind}){without}')
        rows = [(at, ("x" * at + TOKEN).ljust(10_000, "y")) for at in range(1780, 1820, 4)]
        sql = f'INSERT INTO "a""b" VALUES (?, CAST(? AS {kind}))'
        database.executemany(sql, rows)

    with pytest.raises(TraceError, match="what HF_TOKEN held stands elsewhere"):
        scrub_export(path, tmp_path / "out.sqlite")
    assert [each.name for each in tmp_path.iterdir()] == ["export.sqlite"]

    change(path, 'DROP TABLE "a""b"')
    assert scrub_export(path, tmp_path / "out.sqlite") == Removed(values=1, texts=0)


def test_the_command_for_a_report_can_be_pasted(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"--output 'a b\.sqlite' 'a b\.nsys-rep'`"):
        scrub_export(Path("a b.nsys-rep"), tmp_path / "out.sqlite")
