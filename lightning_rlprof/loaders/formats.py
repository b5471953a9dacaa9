"""Recognize the format of a file or capture folder: rlprof, Ascend, Nsight Systems or Kineto."""

from pathlib import Path
from typing import Literal

from lightning_rlprof.loaders.ascend.capture_folder import is_ascend
from lightning_rlprof.loaders.kineto.reader import is_chrome_trace
from lightning_rlprof.loaders.sqlite_tables import is_sqlite

Format = Literal["rlprof", "ascend", "nsys", "kineto"]

NSYS_SUFFIXES = (".sqlite", ".nsys-rep")
"""Of Nsight Systems; an export is preferred to the report it was made from."""

KINETO_SUFFIXES = (".json", ".json.gz", ".json.zst")
"""Of torch.profiler and other writers of Chrome traces; plain files are preferred."""


def identify(path: Path) -> Format | None:
    """Return the format by name and content; None if nothing recognizes the path.

    A file with a suffix of Kineto has that format even if it is damaged: reading it says why.

    Raises:
        TraceError: The file cannot be read.
    """
    if path.suffix == ".jsonl":
        return "rlprof"
    if is_ascend(path):
        return "ascend"
    if path.suffix in NSYS_SUFFIXES or is_sqlite(path):
        return "nsys"
    if path.name.endswith(KINETO_SUFFIXES) or is_chrome_trace(path):
        return "kineto"
    return None
