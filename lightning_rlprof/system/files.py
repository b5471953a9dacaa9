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
