"""Download a run or trace from s3://, gs://, hdfs:// or any other store of fsspec.

Only the files that loaders read are copied, into a temporary folder, before reading starts.
Errors and messages show URLs without credentials.
"""

import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_rlprof.errors import TraceError
from lightning_rlprof.system.location import RemotePath, redact

T = TypeVar("T")

_CHUNK = 1 << 22
_SPARE = 1 << 28  # Bytes that stay free on the disk.
_FEW = 8
# Loaders read these. Raw profiler data is many times larger, and only the profiler can read it.
_READ = (".jsonl", ".json", ".json.gz", ".sqlite", ".nsys-rep", ".csv", ".db")
_RAW = re.compile(r"PROF_\d.*|FRAMEWORK|\..*")  # Folders; hidden ones contain caches.
_RANK_FILE = re.compile(r"rank-\d+\.jsonl")


class Fetched:
    """Copies of remote or packed files, removed by ``close()`` or when nothing refers to this.

    Attributes:
        path: Local path to read.
        files: Number of copies.
        size: Their bytes.
    """

    def __init__(self, folder: Path, path: Path, files: int, size: int) -> None:
        self.path, self.files, self.size = path, files, size
        self.close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


class _Listing(NamedTuple):
    """Files of a remote file system by path below ``name``: remote path and size."""

    system: Any
    name: str
    files: dict[str, tuple[str, int | None]]


@contextmanager
def local(path: Path) -> Iterator[Path]:
    """Yield a local path with the files of a path or URL; copies are removed at the end.

    Raises:
        TraceError: As `fetch`.
    """
    if not isinstance(path, RemotePath):
        yield path
        return
    with closing(fetch(path)) as fetched:
        yield fetched.path


def fetch(path: RemotePath) -> Fetched:
    """Copy the files of a run, a trace or a capture that loaders read into a temporary folder.

    A folder with several runs is refused: downloading each costs time and money.

    Raises:
        TraceError: It does not exist, is too large for the disk, ended early, or a package is
            missing; the message is one line without credentials.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlprof-"))
    try:
        listing = attempt(path, "read", partial(_listed, path))
        size = _copied(path, listing, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Fetched(folder, folder / listing.name, len(listing.files), size)


def attempt(path: RemotePath, done: str, action: Callable[[], T]) -> T:
    """Call fsspec; any error becomes a TraceError of one line, without credentials."""
    try:
        return action()
    except TraceError as error:
        text = str(error)
    except Exception as error:  # Each store raises errors of its library.
        said = " ".join(redact(str(error)).split()) or "no reason given"
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        text = f"{path}: cannot be {done} ({kind}{said})"
    # Raised in the handler, it would be shown with everything that the first error says.
    raise TraceError(text)


def opened(path: RemotePath) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        text = f'{path}: fsspec is not installed: pip install "lightning-rlprof[remote]"'
        raise TraceError(text) from error
    system, root = url_to_fs(path.url)
    system.invalidate_cache()
    return system, root


def _listed(path: RemotePath) -> _Listing:
    """List the remote files, and choose those that loaders read."""
    system, root = opened(path)
    name = "run" if path.name in ("", "..") else path.name
    # A web server gives no other sign of a folder.
    folder = path.url.partition("?")[0].endswith("/")
    if not folder and (info := system.info(root))["type"] != "directory":
        return _Listing(system, name, {"": (root, info.get("size"))})
    start = root.rstrip("/") + "/"
    found: dict[str, tuple[str, int | None]] = {}
    for remote, info in system.find(root, detail=True).items():
        inside = remote.removeprefix(start)
        if info["type"] == "file" and remote.startswith(start) and _is_read(inside):
            found[inside] = (remote, info.get("size"))
    # A report that also exists as SQLite is not needed: loaders read that without nsys.
    exported = {f"{file.removesuffix('sqlite')}nsys-rep" for file in found}
    found = {file: at for file, at in found.items() if file not in exported}
    return _Listing(system, name, _of_one_run(path, found))


def _is_read(inside: str) -> bool:
    parts = inside.split("/")
    strange = not {"", ".", ".."}.isdisjoint(parts) or "\0" in inside
    return inside.endswith(_READ) and not strange and not any(map(_RAW.fullmatch, parts[:-1]))


def _of_one_run(
    path: RemotePath, found: dict[str, tuple[str, int | None]]
) -> dict[str, tuple[str, int | None]]:
    if any(map(_RANK_FILE.fullmatch, found)):
        return found
    folders = [file.partition("/") for file in found]
    runs = sorted({folder for folder, _, file in folders if _RANK_FILE.fullmatch(file)})
    if len(runs) > 1:
        some = ", ".join(runs[-_FEW:])
        raise TraceError(f"{path}: contains {len(runs)} runs, pass one of them: {some}")
    if not found:
        raise TraceError(f"{path}: not found, or without a file that rlprof reads")
    return {file: at for file, at in found.items() if not runs or file.startswith(f"{runs[0]}/")}


def _copied(path: RemotePath, listing: _Listing, folder: Path) -> int:
    """Copy the files into a folder; return how many bytes they are."""
    room = left = free_space(folder)
    listed_bytes = sum(size or 0 for _, size in listing.files.values())
    too_large = f"{path}: its {files_text(len(listing.files))} take {{}}, but there is space for "
    too_large += f"{size_text(room)} in {folder.parent}: set TMPDIR to a larger disk"
    if listed_bytes > room:
        raise TraceError(too_large.format(size_text(listed_bytes)))
    for inside, (remote, size) in listing.files.items():
        target = folder / listing.name / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        took = attempt(path, "read", partial(_stream, listing.system, remote, target, left))
        if took > left:
            raise TraceError(too_large.format("more than listed"))
        if took < (size or 0):
            file = inside or listing.name
            raise TraceError(f"{path}: {file} ended after {took:,} of {size:,} bytes; try again")
        left -= took
    return room - left


def _stream(system: Any, remote: str, target: Path, most: int) -> int:
    with system.open(remote, "rb") as source:
        return copy_stream(source, target, most)


def copy_stream(source: Any, target: Path, most: int) -> int:
    """Copy what is read to a file, a little more than allowed at most; return how many bytes."""
    took = 0
    with target.open("wb") as copy:
        while took <= most and (chunk := source.read(_CHUNK)):
            copy.write(chunk)
            took += len(chunk)
    return took


def free_space(folder: Path) -> int:
    """Return how many bytes copies may take on the disk of a folder."""
    return max(shutil.disk_usage(folder).free - _SPARE, 0)


def files_text(count: int) -> str:
    """Return a number of files as text: ``1 file``."""
    return "1 file" if count == 1 else f"{count:,} files"


def size_text(count: int) -> str:
    """Return a number of bytes as text: ``1.2 GB``."""
    for unit, bytes_in in (("GB", 1e9), ("MB", 1e6)):
        if count >= bytes_in:
            return f"{count / bytes_in:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
