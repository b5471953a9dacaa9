"""One check of a machine, and helpers that read versions and small files."""

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

State = Literal["ok", "missing", "warn", "broken"]
"""Result of a check; ``warn`` if it may work, or could not be checked."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: What was checked.
        state: ``ok``, ``missing``, ``warn`` or ``broken`` (installed, but does not work).
        message: What was found.
        fix: How to install or repair it; empty if there is nothing to do.
    """

    name: str
    state: State
    message: str
    fix: str = ""


def installed(package: str) -> str | None:
    """Return the version of a package, None if it is not installed; imports nothing."""
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
    """Return the text of a small file, None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
