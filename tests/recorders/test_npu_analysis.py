"""The analysis after training, with stand-ins for `rlprof analyse` that keep to its interface."""

import logging
import os
import sys
import time
from pathlib import Path

import pytest

from lightning_rlprof.recorders import npu_analysis
from lightning_rlprof.recorders.npu_analysis import analyse_captures

ECHO = "import sys; print('parsing', *sys.argv[1:]); print(); print('done', file=sys.stderr)"
FAILS = "import sys; print('msprof: no space'); sys.exit(3)"
# The analyser forks: a child that lives on holds the output open.
FORKS = "import os, time; os.fork(); print('forked', flush=True); time.sleep(600)"


def said(script: str, captures: list[Path], timeout_s: float = 60.0) -> list[tuple[str, str]]:
    notes: list[tuple[str, str]] = []
    command = (sys.executable, "-c", script)
    analyse_captures(captures, timeout_s, lambda *note: notes.append(note), command)
    return notes


def test_it_gets_the_captures_as_arguments_and_its_progress_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=npu_analysis.__name__):
        notes = said(ECHO, [Path("one_ascend_pt"), Path("a b; $(c)_ascend_pt")])
    assert notes == [("info", "analysing 2 captures, for at most 60 s")]
    assert set(caplog.messages) == {
        "analyse: parsing one_ascend_pt a b; $(c)_ascend_pt",
        "analyse: done",
    }


def test_a_failure_is_noted_with_its_last_words() -> None:
    _, (level, text) = said(FAILS, [Path("one_ascend_pt")])
    assert level == "warning"
    assert text == (
        "the analysis failed with status 3 (msprof: no space); rlprof analyse does it at any later "
        "time"
    )


def test_after_its_limit_it_is_stopped_with_what_it_forked() -> None:
    before = time.monotonic()
    _, (level, text) = said(FORKS, [Path("one_ascend_pt")], timeout_s=1.0)
    assert time.monotonic() - before < 60
    assert level == "warning"
    assert text.startswith("the analysis was stopped, its limit is 1 s; rlprof analyse does it")


def test_what_cannot_be_started_is_noted() -> None:
    notes: list[tuple[str, str]] = []
    command = (os.devnull,)
    analyse_captures([Path("x")], 1.0, lambda *note: notes.append(note), command)
    assert notes[1][0] == "warning"
    assert notes[1][1].startswith("the analysis could not be started ([Errno 13]")


def test_by_default_it_is_rlprof_analyse_of_this_interpreter() -> None:
    expected = (sys.executable, "-m", "lightning_rlprof", "analyse")
    assert expected == npu_analysis._COMMAND
