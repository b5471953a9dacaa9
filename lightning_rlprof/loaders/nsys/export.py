"""Open SQLite exports of Nsight Systems; reports are exported by nsys first."""

import shlex
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.sqlite_tables import SqliteTables, is_sqlite

STRINGS = "StringIds"
"""The table that holds the texts which other columns name by number."""

# Any of these is in every export from 2019 on; none is in another tool's database.
_SIGNS = {"EXPORT_META_DATA", "META_DATA_EXPORT", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL"}


class Export(SqliteTables):
    """Read tables of one SQLite export; each call opens the file and closes it again.

    Args:
        path: The SQLite file.
        source: What the user named, where that is another file; errors name it.

    Raises:
        TraceError: The file is not an SQLite database that nsys wrote; also from any method
            when the file turns out to be damaged.
    """

    def __init__(self, path: Path, source: Path | None = None) -> None:
        if not is_sqlite(path):
            raise TraceError(f"{source or path}: not an SQLite export of Nsight Systems")
        super().__init__(path, source)
        if not _SIGNS & self.columns.keys():
            found = ", ".join(sorted(self.columns)[:5]) or "none"
            raise TraceError(
                f"{self.source}: not an export of Nsight Systems (its tables: {found})"
            )

    def least(self, table: str, group: str, name: str) -> dict[int, int]:
        """Return the smallest integer of a column for each integer in another one."""
        if not {group, name} <= self.columns.get(table, frozenset()):
            return {}
        kinds = f"typeof(\"{group}\") = 'integer' AND typeof(\"{name}\") = 'integer'"
        sql = f'SELECT "{group}", MIN("{name}") FROM "{table}" WHERE {kinds} GROUP BY "{group}"'
        return dict(self.rows(sql))


REPORT = ".nsys-rep"
"""How the names of reports end."""

_SECONDS = 1800  # gigabytes take nsys minutes; it has hung on reports that a crash cut short
_EXPORT = ("export", "--type", "sqlite", "--force-overwrite", "true", "--output")


def open_export(path: Path) -> Export:
    """Open an SQLite export, or a report, which ``nsys export`` turns into one first.

    The export of a report lies in a temporary folder, for its owner alone, until the `Export` goes.

    Raises:
        TraceError: nsys is not installed or fails, or the file is not an export.
    """
    if path.suffix != REPORT or is_sqlite(path):
        return Export(path)
    nsys = shutil.which("nsys")
    if nsys is None:
        files = (f"./{name}" for name in (path.with_suffix(".sqlite").name, path.name))
        command = shlex.join(["nsys", *_EXPORT, *files])
        raise TraceError(
            f"{path}: reading a report needs nsys, which is not on PATH. Where nsys is installed, "
            f"run `{command}` and load its output"
        )
    folder = Path(tempfile.mkdtemp(prefix="rlprof-nsys-"))
    try:
        _export(nsys, path, folder / "report.sqlite")
        export = Export(folder / "report.sqlite", source=path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(export, shutil.rmtree, folder, ignore_errors=True)
    return export


def _export(nsys: str, report: Path, into: Path) -> None:
    command = [nsys, *_EXPORT, str(into), str(report.absolute())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"{report}: nsys export took more than {_SECONDS} s") from error
    except OSError as error:
        raise TraceError(f"{report}: {nsys} cannot be run ({error.strerror})") from error
    if done.returncode or not into.exists():
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        last = next((line.strip() for line in reversed(said) if line.strip()), "it says nothing")
        raise TraceError(f"{report}: nsys export failed with code {done.returncode}: {last}")
