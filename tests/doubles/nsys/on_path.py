"""Put the fake nsys first on PATH, tell it what to do, and read what it was called with."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("fake_nsys.py")


class FakeNsys:
    """The fake `nsys` of a test; processes that the test starts find it, too.

    Args:
        folder: Gets the program and its log.
        monkeypatch: Takes everything back after the test.
        **told: What `fake_nsys.py` is told: ``version="2022.4.2"``, ``report="empty"``.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **told: object) -> None:
        self.bin, self._log, self._monkeypatch = folder / "bin", folder / "nsys.jsonl", monkeypatch
        self.bin.mkdir(parents=True, exist_ok=True)
        program = self.bin / "nsys"
        words = shlex.join([sys.executable, str(PROGRAM)])
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        self.tell(log=self._log, **told)

    def tell(self, **told: object) -> None:
        """Tell it something else from now on."""
        for name, value in told.items():
            self._monkeypatch.setenv(f"FAKE_NSYS_{name.upper()}", str(value))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Every call so far: ``argv``, ``pid``, ``cwd``, ``env``."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [json.loads(line) for line in lines]

    def call(self, command: str = "profile") -> dict[str, Any]:
        """The only call of one command."""
        (found,) = (call for call in self.calls if call["argv"][:1] == [command])
        return found
