"""Variables with which all processes of a program record one run."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from lightning_rlprof.records.records import JOB_VARIABLE

INJECT = Path(__file__).with_name("inject")
"""Folder whose ``sitecustomize`` opens the doors."""


def launched(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables to lay over those of a program, by which its processes record one run.

    A Python without rlprof isn't disturbed by any of them.

    Example::

        >>> found = launched({"PYTHONPATH": "/mine", "RLPROF_JOB": "7"})
        >>> found["RLPROF"], found["RLPROF_JOB"], found["PYTHONPATH"].endswith("inject:/mine")
        ('1', '7', True)
    """
    paths = [
        path
        for path in environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path != str(INJECT)
    ]
    return {
        "RLPROF": "1",
        JOB_VARIABLE: environ.get(JOB_VARIABLE) or secrets.token_hex(8),
        "PYTHONPATH": os.pathsep.join([str(INJECT), *paths]),
    }
