"""Reports of Nsight Systems turned into SQLite exports by nsys itself."""

import shlex
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.nsys_export import Export, is_sqlite

__all__ = ["REPORT", "open_export"]

REPORT = ".nsys-rep"
"""How the names of reports end."""

_SECONDS = 1800  # gigabytes take nsys minutes; it has hung on reports that a crash cut short
_EXPORT = ("export", "--type", "sqlite", "--force-overwrite", "true", "--output")


def open_export(path: Path) -> Export:
    """Open an SQLite export, or a report, which ``nsys export`` turns into one first.

    The export of a report lies in a temporary folder, for its owner alone, until the `Export` goes.

    Raises:
        TraceError: There is no nsys here, or it fails, or the file is no export.
    """
    if path.suffix != REPORT or is_sqlite(path):
        return Export(path)
    nsys = shutil.which("nsys")
    if nsys is None:
        files = (f"./{name}" for name in (path.with_suffix(".sqlite").name, path.name))
        command = shlex.join(["nsys", *_EXPORT, *files])
        raise TraceError(
            f"{path}: only nsys itself reads its reports and there is none on PATH; where there "
            f"is one, run `{command}` and load what it writes"
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
