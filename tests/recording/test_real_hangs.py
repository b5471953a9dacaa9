"""Real processes that hang in gloo, Python, C and a DataLoader, caught and named.

Each is looked at while it hangs; the analysis is that of ``rlprof hang``.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_rlprof.analysis.hangs import Hang, find_hang
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.live_run import hang_evidence
from tests.builders.hanging import HANGS_IN
from tests.places import ROOT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are of Linux' /proc"),
]
PROGRAM = ROOT / "tests" / "builders" / "hanging.py"
HANGS = HANGS_IN + 1  # steps count from 1
PATIENCE_S = 120


class Training:
    """The processes of one case, and what is known of them."""

    def __init__(self, folder: Path, case: str, world: int) -> None:
        self.run = folder / "run"
        self.output = folder / "output.txt"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.output.open("wb") as output:
            self.ranks = [
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), case, str(rank), str(world), str(folder)],
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # DataLoader workers, too
                )
                for rank in range(world)
            ]

    def hang(self) -> Hang:
        return find_hang(hang_evidence(self.run), time.time_ns())

    def wait_for(self, known: Callable[[Hang], object]) -> Hang:
        """Look until something is known; a rank reports after one or two seconds."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                found = self.hang()
            except TraceError:  # the ranks have not started
                found = None
            if found is not None and known(found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{found}\n{self.output.read_text()}")

    def kill(self) -> None:
        for process in self.ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[[str, int], Training]]:
    started: list[Training] = []

    def start(case: str, world: int = 1) -> Training:
        started.append(Training(tmp_path, case, world))
        return started[0]

    yield start
    for each in started:
        each.kill()


def reported(hang: Hang) -> bool:
    """Whether all ranks have reported that they hang, in the step in which they are made to.

    On a busy machine a rank may get no CPU for a second, and reports an earlier step, too.
    """
    return all(
        each.state in ("hangs", "waits") and each.report is not None and each.report.step == HANGS
        for each in hang.ranks
    )


def test_a_rank_that_skips_an_all_reduce_is_named_while_it_hangs_and_after_it_was_killed(training):
    job = training("deadlock", 2)

    hang = job.wait_for(reported)
    job.kill()
    after = job.hang()

    for found in (hang, after):
        assert [each.rank for each in found.causes] == [1]
        assert found.causes[0].at.function == "skip_all_reduce"
        assert found.causes[0].at.text == "time.sleep(3600)"
        assert found.headline.startswith(
            "Rank 1 has not come to gloo:all_reduce #6 of group 0, is in compute_reward, at "
            "builders/hanging.py:"
        )
        assert "Rank 0 waits in gloo:all_reduce #6 of group 0." in found.headline
        row = dict(zip(found.table().column("rank"), found.table().column("in"), strict=True))
        assert row == {0: "actor_update", 1: "compute_reward"}
    assert "no progress for" in job.output.read_text()


def test_an_endless_loop_in_a_reward_is_named_with_its_line(training):
    hang = training("loop").wait_for(reported)
    (cause,) = hang.causes
    assert cause.at.function == "parse_for_ever"
    assert cause.report.threads[0].cpu_share > 0.05, "it computes, on whatever machine"


def test_a_rank_that_was_killed_is_named(training):
    hang = training("killed", 2).wait_for(lambda found: found.causes)
    assert (hang.causes[0].rank, hang.causes[0].state) == (1, "killed")


def test_a_rank_that_is_stopped_is_named_and_is_no_hang_when_it_continues(training):
    job = training("stopped", 2)

    def waits(found: Hang) -> bool:
        first = found.ranks[0]
        return first.state == "waits" and first.report is not None and first.report.step == HANGS

    hang = job.wait_for(waits)
    assert [(each.rank, each.state) for each in hang.causes] == [(1, "stopped")]
    assert "Rank 0 waits in gloo:all_reduce #6 of group 0." in hang.headline
    assert hang.hints == (f"Continue it: kill -CONT {job.ranks[1].pid}",)
    job.ranks[1].send_signal(signal.SIGCONT)

    assert [process.wait(PATIENCE_S) for process in job.ranks] == [0, 0]
    after = job.hang()
    assert after.headline.startswith("Progress came back after")
    assert after.ranks[1].state == "finished", "the time in which it was stopped does not count"


def test_a_worker_of_a_data_loader_that_stands_still_is_named(training):
    # In the step before, if the worker is stopped before its last batch has left it.
    def stopped(found: Hang) -> bool:
        reports = [each.report for each in found.causes if each.report is not None]
        return any(child.state == "T" for report in reports for child in report.children)

    hang = training("loader").wait_for(stopped)
    (cause,) = hang.causes
    assert cause.waits_in == "a DataLoader worker"
    assert cause.report.spans[-1].name == "data_fetch"
    (child,) = [each for each in cause.report.children if each.state == "T"]
    assert f"child process {child.pid} is stopped" in hang.headline


def test_c_code_that_keeps_pythons_lock_is_seen_by_the_missing_signs_of_life(training, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.analysis.hangs._MIN_SILENCE_S", 3)
    hang = training("lock").wait_for(lambda found: found.causes)
    assert hang.causes[0].state == "silent"
    assert "or C code holds Python's lock" in hang.headline
