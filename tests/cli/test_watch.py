"""`rlprof watch`: in one page, in lines, on a terminal, and beside a training."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.report.terminal import percent
from tests.builders.runs import grpo_run
from tests.cli.test_capture import TRAIN, writer


def finish(run: Path) -> TraceWriter:
    made = writer(run)
    made.write([("end", 9, "finished")])
    return made


def test_once_prints_all_tables_and_ends(rlprof, tmp_path):
    made = writer(tmp_path)
    made.write([("note", 5, "warning", "disk \x1b[31m full")])
    code, out, err = rlprof("watch", tmp_path, "--once")
    assert (code, err) == (0, "")
    assert "· 1 rank · step 3 · median 8.00 ms" in out
    assert "warning  0      disk \\x1b[31m full" in out
    assert "stages: no data" not in out
    assert "3 steps on 1 rank, median 8.00 ms, mean 8.00 ms" in out


def test_the_headline_names_the_largest_row(rlprof, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    grpo_run(tmp_path)
    out = rlprof("watch", tmp_path, "--once")[1]
    (table,) = (
        each
        for each in json.loads(rlprof("watch", tmp_path, "--json")[1])["tables"]
        if each["name"] == "stages"
    )
    share = [column["name"] for column in table["columns"]].index("share")
    largest = max(table["rows"], key=lambda row: row[share])
    assert out.splitlines()[0].endswith(f" · {largest[0]} {percent(largest[share])}")


def test_elsewhere_than_on_a_terminal_each_refresh_is_a_line(rlprof, tmp_path, monkeypatch):
    made, waits = writer(tmp_path), []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            made.write([("end", 9, "finished")])

    monkeypatch.setattr("lightning_rlprof.cli.live_commands.time.sleep", wait)
    code, out, _ = rlprof("watch", tmp_path)
    assert code == 0
    assert len(waits) == 2
    lines = [line.partition("  ")[2] for line in out.splitlines()]
    assert lines == [
        "1 rank · step 3 · median 8.00 ms",
        "1 rank · step 3 · median 8.00 ms",
        "1 rank, all ended · step 3 · median 8.00 ms",
    ]


def test_ctrl_c_ends_it(rlprof, tmp_path, monkeypatch):
    writer(tmp_path)

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_rlprof.cli.live_commands.time.sleep", interrupted)
    code, out, err = rlprof("watch", tmp_path)
    assert (code, len(out.splitlines()), err) == (0, 1, "")


def test_the_newest_run_of_a_directory_is_shown(rlprof, tmp_path):
    for at, name in enumerate(("b", "a")):
        finish(tmp_path / name)
        os.utime(tmp_path / name, (9 - at, 9 - at))
    code, out, _ = rlprof("watch", tmp_path, "--once")
    assert code == 0
    assert out.startswith("b · 1 rank, all ended")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("missing", "no such run"),
        (".", "is not a run of rlprof"),
        ("s3://bucket/run", "is not a directory of this machine"),
    ],
)
def test_what_cannot_be_watched_is_refused(given, said, rlprof, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = rlprof("watch", given)
    assert code == 2
    assert said in err


@pytest.mark.deep
def test_a_training_is_watched_on_a_terminal_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = subprocess.Popen([sys.executable, "-c", TRAIN])
    main, other = pty.openpty()
    watching = None
    try:
        until = time.monotonic() + 120
        while not list(tmp_path.glob("profiler_data/*/rank-00000.jsonl")):
            assert time.monotonic() < until
            time.sleep(0.1)
        command = [sys.executable, "-m", "lightning_rlprof", "watch"]
        watching = subprocess.Popen(command, stdout=other, stderr=subprocess.PIPE, text=True)
        os.close(other)  # so that reading fails when the command has ended
        shown = b""
        while b"actor_update" not in shown:
            shown += os.read(main, 65_536)
            assert time.monotonic() < until
        Path("stop").touch()
        while b"all ended" not in shown:
            shown += os.read(main, 65_536)
            assert time.monotonic() < until
        _, err = watching.communicate(timeout=120)
    finally:
        Path("stop").touch()
        training.wait(120)
        if watching is not None and watching.poll() is None:
            watching.kill()
    assert (watching.returncode, err) == (0, "")
