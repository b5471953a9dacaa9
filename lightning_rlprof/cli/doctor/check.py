"""One finding about a machine, and how findings are made of files and packages."""

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

State = Literal["ok", "missing", "unknown", "broken"]
"""What came of a check; unknown where it could not be made."""


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        state: ``ok``, ``missing``, ``unknown`` (it cannot be told) or ``broken``.
        says: What was found.
        cure: How to get it, or to mend it; empty where there is nothing to do.
    """

    name: str
    state: State
    says: str
    cure: str = ""


def installed(package: str) -> str | None:
    """Return the version of a package, None where it is not installed; imports nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the front of a version, to compare.

    Example::

        >>> numbers("2.13.0+cpu") > numbers("2.6")
        True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def content(path: Path) -> str | None:
    """Return what a small text file holds, None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
