"""Real Ray with a fake nsys: how processes are started, and where their reports get to."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_rlprof.records.run_directory import RankTrace, read_trace
from tests.doubles.nsys.on_path import FakeNsys
from tests.places import ROOT

PATIENCE_S = 120
RANKS = {"good": 0, "early": 1, "empty": 2, "killed": 3}

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install lightning-rlprof[ray]"),
    pytest.mark.skipif(sys.platform != "linux", reason="Ray starts nsys on Linux only"),
]


class Training(NamedTuple):
    """What became of a training: facts, the calls of nsys, the run directory."""

    facts: dict[str, Any]
    calls: list[list[str]]
    run: Path

    def reports(self, who: str) -> dict[str, bytes]:
        """Return the files of a worker's folder by name, without that of this host."""
        host = self.trace(who).header.host
        folder = self.run / f"rank-{RANKS[who]:05d}"
        paths = sorted(folder.iterdir()) if folder.exists() else []
        return {path.name.replace(f"_{host}_", "_HOST_"): path.read_bytes() for path in paths}

    def trace(self, who: str) -> RankTrace:
        return read_trace(self.run / f"rank-{RANKS[who]:05d}.jsonl")

    def said(self, who: str) -> list[str]:
        """Return what a worker's file says of reports that are not there."""
        texts = [note.text for note in self.trace(who).notes if note.level == "warning"]
        return [text for text in texts if text.startswith(("no nsys report", "/"))]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    out = tmp_path_factory.mktemp("ray")
    # A short path: Ray puts sockets below it, whose names may have 107 bytes.
    temporary = tempfile.mkdtemp(prefix="rl")
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            fake = FakeNsys(out / "nsys", monkeypatch)
            _quiet(monkeypatch, temporary)
            # Ray starts `python` from the PATH under nsys.
            folders = [str(fake.bin), str(Path(sys.executable).parent), os.environ["PATH"]]
            monkeypatch.setenv("PATH", os.pathsep.join(folders))
            command = [
                sys.executable,
                str(ROOT / "tests" / "builders" / "ray_training.py"),
                str(out),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            facts = json.loads((out / "facts.json").read_text())
            yield Training(facts, [call["argv"] for call in fake.calls], out / "run")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _quiet(monkeypatch: pytest.MonkeyPatch, temporary: str) -> None:
    """Keep Ray off the network and out of the home directory."""
    monkeypatch.setenv("RAY_TEMPORARY", temporary)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def test_nsys_is_given_exactly_the_options_that_are_configured(training: Training) -> None:
    output = ["-o", f"{training.facts['folder']}/worker_process_%p"]
    controller = ["--cuda-memory-usage=true", "--trace=nvtx", *output]
    worker = [
        "--capture-range-end=repeat:2",
        "--capture-range=cudaProfilerApi",
        "--cuda-graph-trace=graph",
        "--cuda-memory-usage=true",
        "--kill=none",
        "--trace=nvtx,osrt",
        *output,
    ]
    # Ray tries the options on an empty program of its own before, `python -c` in older ones.
    started = [argv for argv in training.calls if "python" in argv and "-c" not in argv]
    lines = [argv[1 : argv.index("python")] for argv in started]
    given = [[*sorted(options[:-2]), *options[-2:]] for options in lines]
    assert given == [controller, worker, worker, worker, worker]


def test_every_process_has_ended_and_the_pids_are_those_of_the_run(training: Training) -> None:
    assert training.facts["left running"] == []
    for who in RANKS:
        assert training.trace(who).header.pid == training.facts["pids"][who]


def test_what_nsys_wrote_after_the_worker_is_collected_by_the_driver(training: Training) -> None:
    reports = training.reports("good")
    assert list(reports) == ["actor_HOST_rank0_step1.nsys-rep", "actor_HOST_rank0_step3.nsys-rep"]
    assert all(report.startswith(b"a report of the fake nsys") for report in reports.values())
    host = training.trace("good").header.host
    assert training.facts["collected"] == [name.replace("HOST", host) for name in reports]
    assert training.trace("good").status == "finished"


def test_what_nsys_wrote_before_is_fetched_by_the_worker_itself(training: Training) -> None:
    assert training.reports("early") == {"actor_HOST_rank1_step1.nsys-rep": b"early"}
    in_the_worker, in_the_driver = training.said("early")
    start = f"no nsys report for step-000003 in {training.facts['folder']}: "
    assert in_the_worker.startswith(f"{start}this process sees no GPU")
    assert in_the_driver.startswith(f"{start}nsys may still be writing")


def test_an_empty_report_stays_and_is_a_line_in_the_run(training: Training) -> None:
    assert training.reports("empty") == {}
    names = [f"worker_process_{training.facts['pids']['empty']}.{n}.nsys-rep" for n in (1, 2)]
    said = [text for text in training.said("empty") if text.startswith("/")]
    for name, text in zip(names, said, strict=True):
        assert text.startswith(
            f"{training.facts['folder']}/{name} is empty: nsys is still writing it"
        )
        assert name in training.facts["left"]


def test_a_killed_workers_missing_reports_are_lines_in_the_run(training: Training) -> None:
    assert (training.reports("killed"), training.trace("killed").status) == ({}, None)
    pid = training.facts["pids"]["killed"]
    assert training.said("killed") == [
        f"no nsys report for {step} in {training.facts['folder']}: process {pid} was killed or "
        "crashed, so nsys lost what it had not written"
        for step in ("step-000001", "step-000003")
    ]


def test_the_controllers_report_bears_its_pid_and_stays_with_ray(training: Training) -> None:
    name = f"worker_process_{training.facts['pids']['controller']}.nsys-rep"
    assert name in training.facts["left"]


def test_what_runs_on_finish_is_not_killed_with_the_worker(training: Training) -> None:
    until = time.monotonic() + PATIENCE_S
    while len(found := {path.name for path in training.run.glob("late-*")}) < 3:
        assert time.monotonic() < until, found
        time.sleep(0.1)
    assert found == {"late-0", "late-1", "late-2"}
