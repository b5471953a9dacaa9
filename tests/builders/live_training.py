"""A training that runs in a process of its own, beside a command that is tried on it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_rlprof.loaders.live_run import progress
from tests.places import ROOT

_PATIENCE_S = 120


@contextmanager
def live_training(*program: str) -> Iterator[None]:
    """Train in this directory from the end of the first step on, until the file ``stop`` is there.

    Args:
        program: What Python runs; it records below this directory.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    training = subprocess.Popen([sys.executable, *program], env={**os.environ, "PYTHONPATH": path})
    try:
        until = time.monotonic() + _PATIENCE_S
        while not any(each.last_step for run in Path().glob("*/*") for each in progress(run)):
            assert time.monotonic() < until
            assert training.poll() is None
            time.sleep(0.1)
        yield
    finally:
        Path("stop").touch()
        training.wait(_PATIENCE_S)
