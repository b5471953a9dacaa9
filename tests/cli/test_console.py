"""What verbs print on terminals of any width, and into a pipe."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lightning_rlprof.cli import console
from tests.builders.runs import grpo_run
from tests.cli.test_stragglers import recorded

Run = Callable[..., tuple[int, str, str]]
ANSWERS = {
    "compare RUN OTHER": ("adjusted (CI)", "verdict"),
    "whatif RUN": ("saved",),
    "show RUN critical_path": ("per step", "total"),
    "stragglers RUN": ("rank", "slowdown (CI)"),
    "summary RUN": ("slowest rank", "share"),
}


def test_json_is_one_line_for_programs_and_many_for_people(tmp_path: Path) -> None:
    grpo_run(tmp_path)
    words = [sys.executable, "-m", "lightning_rlprof", "ls", str(tmp_path), "--json"]
    piped = subprocess.run(words, capture_output=True, check=True).stdout
    ours, terminal = pty.openpty()
    with subprocess.Popen(words, stdout=terminal) as process:
        os.close(terminal)
        shown = b""
        while part := _read(ours):
            shown += part
    os.close(ours)
    assert process.returncode == 0
    assert (piped.count(b"\n"), b": " in piped) == (1, False)
    assert shown.count(b"\n") > 20
    assert json.loads(shown) == json.loads(piped)


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_the_json_of_a_summary_has_no_empty_tables(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path)
    tables = json.loads(rlprof("summary", tmp_path, "--json")[1])["tables"]
    assert "stages" in {table["name"] for table in tables}
    assert all(table["rows"] for table in tables)
    (table,) = json.loads(rlprof("show", tmp_path, "kernels", "--json")[1])["tables"]
    assert table["abstained"]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("words", ANSWERS)
def test_no_terminal_is_too_narrow_for_the_answer(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, width: int
) -> None:
    runs = {"RUN": recorded(tmp_path / "a", steps=20, slow={2: 0.15})}
    runs["OTHER"] = recorded(tmp_path / "b", steps=20, slow={})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, _ = rlprof(*(runs.get(word, word) for word in words.split()))
    assert status == 0
    lines = out.splitlines()
    rule = next(at for at, line in enumerate(lines) if line.startswith("──"))
    heads = " ".join(" ".join(lines[at] for at in range(max(rule - 3, 0), rule)).split())
    hidden = out.partition(" hidden (")[2].partition(")")[0]
    for name in ANSWERS[words]:
        assert all(word in heads for word in name.split()), name
        assert name.removesuffix(" (CI)") not in hidden.split(", ")
    assert len(lines[rule]) <= width
    if words.startswith("compare"):  # whose legend explains no column that is hidden
        legend = out.partition(" hidden (")[2].partition(")")[2]
        assert [name for name in hidden.split(", ") if name and f"{name}:" in legend] == []


def test_a_quiet_command_has_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    console.use_output(quiet=True)
    with console.progress_bar("warm start") as update:
        update(1, 2, "reward 0.1")
    console.use_output()
    assert capsys.readouterr() == ("", "")


def test_progress_says_what_is_done_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(console, "_console", lambda **_: screen)
    with console.progress_bar("warm start") as update:
        before = shown.getvalue()
        for step in (1, 2, 3):
            update(step, 4, "reward 0.1")
    assert "warm start" in before
    assert "reward 0.1" in shown.getvalue()
    assert "3/4" in shown.getvalue()
