"""Unpack an archive of traces, .zip, .tar or .tar.gz, into a temporary folder to read it.

An archive comes from anyone: it may hold links, paths that lead out, or a bomb. Only files are
written, only below the folder, and no more than a packed trace may expand to.
"""

import lzma
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.chrome_events import BOMB_BYTES, BOMB_RATIO, Source
from lightning_rlprof.loaders.framework_logs import opened
from lightning_rlprof.system.remote_files import Fetched, copy_stream, free_space, size_text
from lightning_rlprof.tables.table import Cut, Loss

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # With files, and empty.
_TAR, _TAR_AT, _BLOCK = b"ustar", 257, 512
_MAX_FILES = 10_000
_IGNORED = "__MACOSX"  # In this folder, macOS packs attributes of the other files.
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError),
    *(RuntimeError, NotImplementedError, OverflowError, OSError),
)


class _Member(NamedTuple):
    """A file of an archive, or what it holds in place of one."""

    name: str
    is_file: bool
    size: int
    open: Callable[[], Any]


def is_archive(path: Path) -> bool:
    """Return by its first bytes whether a file is an archive of several."""
    head = bytearray(_BLOCK)
    try:
        with Source(path) as source:
            source.readinto(memoryview(head))
    except TraceError:
        return False
    return head.startswith(_ZIP) or head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR


def unpack(path: Path) -> tuple[Fetched, list[str]]:
    """Unpack an archive into a folder with its name, which goes with what is returned first.

    Returns:
        The files, and what is left out of them.

    Raises:
        TraceError: It is damaged from the beginning, encrypted, too large, or has no file.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlprof-"))
    try:
        files, size, remarks = _write(path, folder / path.name)
        if not files:
            raise TraceError("; ".join([f"{path}: an archive without a file", *remarks]))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Fetched(folder, folder / path.name, files, size), remarks


def _write(path: Path, folder: Path) -> tuple[int, int, list[str]]:
    """Write the files of an archive; return how many, their bytes, and what is left out."""
    folder.mkdir()
    left = room = min(max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size), free_space(folder))
    files, outside, damage = 0, 0, []
    try:
        for member in _members(path):
            target = _target(folder, member)
            if target is None:
                outside += 1
                continue
            files += 1
            fits = files <= _MAX_FILES and member.size <= left
            if fits:
                target.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as stream:
                    left -= copy_stream(stream, target, left)
            if not fits or left < 0:
                most = f"more than {_MAX_FILES:,} files, or {size_text(room)} in them"
                raise TraceError(f"{path}: has {most}; unpack it yourself if it holds traces")
    except _DAMAGE as error:
        why = f"{path}: the archive cannot be read ({' '.join(str(error).split())})"
        if left == room:
            raise TraceError(why) from error
        damage = [Cut(f"{why}: what follows {size_text(room - left)} of its files is missing")]
    lost = [Loss(f"{outside} links or paths out of the archive are left out")] if outside else []
    return files, room - left, [*damage, *lost]


def _target(folder: Path, member: _Member) -> Path | None:
    """Return where a member is written; None for a link, a device, or a path that leads out."""
    name = PureWindowsPath(member.name)  # It takes both kinds of slashes.
    leads_out = name.anchor or ".." in name.parts or "\0" in member.name or not name.parts
    return folder.joinpath(*name.parts) if member.is_file and not leads_out else None


def _members(path: Path) -> Iterator[_Member]:
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP[0])) in _ZIP
    for member in _of_zip(path) if is_zip else _of_tar(path):
        last = member.name.rpartition("/")[2]
        if _IGNORED not in member.name.split("/") and not last.startswith("._"):
            yield member


def _of_zip(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as archive:
        for each in archive.infolist():
            is_file = stat.S_IFMT(each.external_attr >> 16) in (0, stat.S_IFREG)
            if not each.is_dir():
                open_ = partial(archive.open, each)
                yield _Member(each.filename, is_file, each.file_size, open_)


def _of_tar(path: Path) -> Iterator[_Member]:
    with opened(path) as (source, stream):
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK) as archive:
            for each in archive:
                if not each.isdir():
                    open_ = partial(archive.extractfile, each)
                    yield _Member(each.name, each.isreg(), each.size, open_)
        while rest := stream.read(_BLOCK):
            if any(rest):  # A damaged header looks like the end to the tarfile module.
                raise tarfile.ReadError("a header is damaged")
        if source.problem:
            raise tarfile.ReadError(source.problem)
