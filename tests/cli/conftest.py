import sys
from collections.abc import Callable

import pytest

from lightning_rlprof.cli.app import main


@pytest.fixture
def rlprof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; returns exit status, stdout, stderr."""

    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlprof", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make standard error a terminal, on which commands suggest the next one."""
    monkeypatch.setattr("lightning_rlprof.cli.console.on_terminal", lambda: True)
