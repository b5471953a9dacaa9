"""Files of unknown origin: opened only where they are files."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; of a pipe or a device, which may never end, none is made.

    Raises:
        OSError: It cannot be read, or is not a file.
    """
    # without this flag, opening a pipe waits for a writer
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(opened).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(opened, "rb")
    os.close(opened)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return what changes with each `replace_file`; None without a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def replace_file(path: Path, data: bytes, draft: str) -> None:
    """Write a file that only its owner may read, whole or not at all.

    ``draft`` tells the file in which it is written apart from those of other writers.

    Raises:
        OSError: It cannot be written.
    """
    partial = path.with_name(f"{path.name}.{draft}.partial")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
