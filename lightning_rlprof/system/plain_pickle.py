"""Pickles of strangers, read as data: numbers, text and containers, and never code."""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning_rlprof.errors import TraceError
from lightning_rlprof.system.files import open_file

_MOST_BYTES = 1 << 26


# The one in C allocates as much as a number in the file says; this one has a dict.
class _Plain(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names an object outside of the file")


def read_plain_pickle(path: Path) -> Any:
    """Return what a pickle holds if that is lists, dicts, tuples, sets, text and numbers.

    Raises:
        TraceError: It cannot be read, is larger than 64 MiB, or names anything else. Nothing that
            it names is imported or called.
    """
    try:
        with open_file(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise pickle.UnpicklingError("it is larger than 64 MiB")
        return _Plain(BytesIO(data)).load()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise TraceError(f"{path}: is not a pickle of plain data ({error})") from error
