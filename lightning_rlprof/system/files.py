"""Files in folders that others may write, too: no link is followed, nothing waits, files are whole.

A run folder is a border: another user who may write there can put a link, a pipe or a huge file in
the place of a name that rlprof reads or writes. So each of these names is opened relative to its
folder, which is opened first: between a check and its use, the folder cannot be swapped for a link.
The run folder itself may be reached by a link, as you named it. Folders of captures are only
checked when they are made: profilers take a path.

Windows cannot open a file relative to a folder, nor refuse a link while it opens one. There, each
folder is looked at before, and the file is compared with its name before and after.
"""

import errno
import gzip
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

IS_POSIX = os.open in os.supports_dir_fd
"""Whether files have modes and users, and can be opened relative to a folder: not on Windows."""

# Without O_NONBLOCK, opening a pipe waits for a writer. Without O_BINARY, Windows changes newlines.
_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
# With O_PATH, a folder that may be entered but not read can also be opened.
_ROOT = _FOLDER | getattr(os, "O_PATH", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_PRIVATE = 0o600
_OF_FOLDERS = 0o050  # Rights that a folder takes over from the one around it.
_NO_FOLDER = "not a directory, or a link to one"
_IS_ANOTHER_NAME = 0x2000_0000  # Bit of what Windows calls the tag of a link or a junction.


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; of a pipe or a device, which may never end, none is made.

    Raises:
        OSError: It cannot be read, or is not a file.
    """
    return _regular(os.open(path, os.O_RDONLY | _WITHOUT_WAITING), path)


def open_without_link(path: Path, flags: int, folder: int | None = None) -> int:
    """Open a file that is not a link, and a pipe without waiting; it is private if it is made.

    Args:
        path: The file.
        flags: As of `os.open`, for reading, writing and making.
        folder: An open folder that the path starts at.

    Raises:
        OSError: It cannot be opened, or is a link.
    """
    if _NO_LINK:
        return os.open(path, flags | _NO_LINK | _WITHOUT_WAITING, _PRIVATE, dir_fd=folder)
    _refuse_link(path)
    opened = os.open(path, flags | _WITHOUT_WAITING, _PRIVATE)
    try:
        _refuse_link(path, os.fstat(opened))
    except OSError:
        os.close(opened)
        raise
    return opened


def _refuse_link(path: Path, opened: os.stat_result | None = None) -> None:
    """Raise OSError if a path is a link, or is not what was opened."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        if opened is not None:
            raise
        return
    if _is_link(found) or (opened is not None and not os.path.samestat(found, opened)):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_link(found: os.stat_result) -> bool:
    tag = getattr(found, "st_reparse_tag", 0)
    return stat.S_ISLNK(found.st_mode) or bool(tag & _IS_ANOTHER_NAME)


def _regular(opened: int, path: Path) -> BinaryIO:
    try:
        check_file(opened, path)
    except OSError:
        os.close(opened)
        raise
    return os.fdopen(opened, "rb")


def check_file(opened: int, path: Path) -> None:
    """Refuse what was opened and is not a regular file; raises OSError."""
    kind = os.fstat(opened).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def owners_of(path: Path) -> frozenset[int]:
    """Return the users whose files count as this process's: itself, root, and a file's owner.

    The file is one that this process has just written: some file systems show another user.
    """
    found = {0, user()}
    with suppress(OSError):
        found.add(os.lstat(path).st_uid)
    return frozenset(found)


def user() -> int:
    """Return the user of this process, as a number; 0 on Windows, where all files are of 0."""
    return os.geteuid() if IS_POSIX else 0


def asked_mode() -> int:
    """Return the mode of a file that asks a training for something, which may be another user's.

    Only root may ask another user's training, which must be able to read it.
    """
    return _PRIVATE if user() else 0o644


def stamp_of(path: Path, owners: Collection[int] | None = None) -> tuple[int, int] | None:
    """Return what changes with each `write_inside`; None without a file, or of other owners."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if owners is not None and found.st_uid not in owners:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def folder_inside(
    root: Path, path: Path, make: int | None = None
) -> Iterator[tuple[Path, int | None]]:
    """Open a folder that lies in another one, without following a link below that.

    Yields what precedes the names in it, and what is passed to `os.open` as ``dir_fd``: an empty
    path and the open folder. On Windows, they are its path and None.

    Args:
        root: The folder around it, which must exist.
        path: The folder, or ``root`` itself.
        make: With which mode to make folders that are missing; 0 for that of the folder around,
            without rights to write or of others.

    Raises:
        OSError: It cannot be opened or made, or is a link.
    """
    if not IS_POSIX:
        _check_folders(root, path, make)
        yield path, None
        return
    folder = os.open(root, _ROOT)
    try:
        for name in path.relative_to(root).parts:
            inner = _opened(folder, name, make)
            os.close(folder)
            folder = inner
        yield Path(), folder
    finally:
        os.close(folder)


def _check_folders(root: Path, path: Path, make: int | None) -> None:
    for name in path.relative_to(root).parts:
        root /= name
        if make is not None:
            with suppress(FileExistsError):
                root.mkdir(0o700)
        found = os.lstat(root)
        if _is_link(found) or not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, _NO_FOLDER, name)


def _opened(folder: int, name: str, make: int | None) -> int:
    is_new = False
    if make is not None:
        mode = make or 0o700 | os.fstat(folder).st_mode & _OF_FOLDERS
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
            is_new = True
    try:
        inner = os.open(name, _FOLDER | _NO_LINK, dir_fd=folder)
    except NotADirectoryError as error:  # A link is refused with this error, too.
        raise NotADirectoryError(error.errno, _NO_FOLDER, name) from error
    if is_new:
        with suppress(OSError):  # The file system may have no modes.
            os.fchmod(inner, stat.S_IMODE(os.fstat(inner).st_mode) | mode)  # This keeps setgid.
    return inner


def make_folder(root: Path, path: Path, mode: int = 0) -> None:
    """Make a folder in another one, and those between; see `folder_inside` for modes and errors."""
    with folder_inside(root, path, mode):
        pass


def new_folder(path: Path, files: int | None) -> None:
    """Make a folder, if there is none, for files of a mode; None leaves it to the umask.

    Who may read the files may open the folder. The umask decides on folders around it.
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    if files is None:
        path.mkdir(exist_ok=True)
    else:
        make_folder(path.parent, path, files | (files & 0o444) >> 2)


def read_inside(root: Path, path: Path, most: int, owners: Collection[int] | None = None) -> bytes:
    """Read a small file below a folder.

    Args:
        root: The folder, see `folder_inside`.
        path: The file.
        most: Its largest size in bytes.
        owners: The users of whom it may be; None for any.

    Raises:
        OSError: It cannot be read, is a link, is not a file, is larger, or is of another user.
    """
    with folder_inside(root, path.parent) as (at, folder):
        try:
            opened = open_without_link(at / path.name, os.O_RDONLY, folder)
        except OSError as error:
            text = "is a link" if error.errno == errno.ELOOP else error.strerror
            raise OSError(error.errno, text, str(path)) from error
    with _regular(opened, path) as file:
        owner = os.fstat(opened).st_uid
        if owners is not None and owner not in owners:
            raise PermissionError(errno.EPERM, f"belongs to another user, {owner}", str(path))
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    return data


def write_inside(root: Path, path: Path, data: bytes, mode: int = _PRIVATE) -> None:
    """Write a file below a folder, whole or not at all; it takes the place of whatever is there.

    Args:
        root: The folder, see `folder_inside`.
        path: The file; its folder must exist.
        data: Its content.
        mode: Of the file, whatever the umask says.

    Raises:
        OSError: It cannot be written.
    """
    draft = f"{path.name}.{secrets.token_hex(4)}.partial"
    with folder_inside(root, path.parent) as (at, folder):
        file = open_without_link(at / draft, _NEW, folder)
        try:
            with os.fdopen(file, "wb") as stream:
                set_mode(file, mode)
                stream.write(data)
            os.replace(at / draft, at / path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(at / draft, dir_fd=folder)
            raise


def overwrite_inside(root: Path, path: Path, data: bytes, mode: int = _PRIVATE) -> None:
    """Overwrite the beginning of a file in place, which costs less than `write_inside`.

    Whatever else has its name, such as a link, is replaced. Raises OSError.
    """
    try:
        with folder_inside(root, path.parent) as (at, folder):
            file = open_without_link(at / path.name, os.O_WRONLY, folder)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:  # It may have a second name.
                raise OSError(errno.EINVAL, "not a file of its own", str(path))
            os.write(file, data)
        finally:
            os.close(file)
    except OSError:
        write_inside(root, path, data, mode)


def remove_inside(root: Path, path: Path) -> None:
    """Remove a file below a folder, or the link that has its name; raises OSError."""
    with folder_inside(root, path.parent) as (at, folder):
        os.unlink(at / path.name, dir_fd=folder)


def lock(file: BinaryIO) -> None:
    """Wait until no other process has this lock on a file, which ends when it is closed.

    Windows has no such lock, and does not wait.
    """
    with suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def set_mode(file: int, mode: int) -> None:
    """Give an open file a mode that the umask may have taken from it."""
    if stat.S_IMODE(os.fstat(file).st_mode) != mode:
        with suppress(OSError, AttributeError):  # The file system, or Windows, may have no modes.
            os.fchmod(file, mode)


@contextmanager
def draft_of(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a new file beside ``path``, whose place it takes in the end: whole or not at all.

    Args:
        path: The file; one that exists is replaced.
        mode: Of the new file, None for that of the umask.

    Raises:
        OSError: The file cannot be written.
    """
    part = path.with_name(f".rlprof-{os.getpid()}-{secrets.token_hex(4)}.part")
    file = os.open(part, _NEW, 0o666 if mode is None else _PRIVATE)
    try:
        if mode is not None:
            set_mode(file, mode)
        os.close(file)
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def opened_draft(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open what `draft_of` yields; a name that ends in ``.gz`` is compressed, without a date."""
    with draft_of(path, mode) as part, part.open("wb") as file:
        if path.suffix == ".gz":
            packed: Any = gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0)
            with packed:
                yield packed
        else:
            yield file
