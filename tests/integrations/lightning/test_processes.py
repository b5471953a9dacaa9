"""Several processes: ranks under three launchers, signals, and crashes of one rank."""

import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from tests.builders.models import (
    PACKAGES,
    Tiny,
    cut_steps,
    loader,
    make_trainer,
    module_of,
    only_run,
    steps_of,
)
from tests.places import ROOT

SECONDS = 300

# Lightning runs the ranks of one machine; gloo finds its address by itself.
two_ranks = {"devices": 2, "use_distributed_sampler": False}


def train(folder: Path, what: str, package: Any = PACKAGES[0], **variables: str) -> Any:
    command = [sys.executable, "-m", "tests.builders.train", package.__name__, str(folder), what]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def check_two_ranks(folder: Path) -> None:
    traces = only_run(folder)
    assert [trace.header.rank for trace in traces] == [0, 1]
    assert {trace.header.world_size for trace in traces} == {2}
    assert len({trace.header.run_id for trace in traces}) == 1
    assert len({trace.header.pid for trace in traces}) == 2
    assert [trace.status for trace in traces] == ["finished"] * 2
    assert [steps_of(trace) for trace in traces] == [[1, 2, 3, 4]] * 2
    assert load(folder).warnings == ()


class FailsOn(Tiny):
    """Raises in the third step, on the ranks that it is given."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank in self.ranks:
            raise ValueError(f"rank {self.global_rank} breaks")
        return super().training_step(batch, batch_idx)


def test_ranks_that_are_forked_write_one_run(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback, strategy="ddp_fork", **two_ranks).fit(Tiny(), loader())
    check_two_ranks(tmp_path)


def test_a_callback_whose_ranks_were_forked_can_fit_again(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "two"))
    make_trainer(callback, strategy="ddp_fork", **two_ranks).fit(Tiny(), loader())
    assert callback.run is None  # what the ranks know stays with them
    make_trainer(callback).fit(Tiny(), loader())
    assert callback.run is not None
    assert len(list((tmp_path / "two").iterdir())) == 2


@pytest.mark.deep
def test_ranks_that_are_spawned_write_one_run(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback, strategy="ddp_spawn", **two_ranks).fit(Tiny(), loader())
    check_two_ranks(tmp_path)


@pytest.mark.deep
def test_ranks_that_are_scripts_write_one_run(tmp_path: Path) -> None:
    done = train(tmp_path, "ddp")
    assert done.returncode == 0, done.stderr
    check_two_ranks(tmp_path)
    (run,) = tmp_path.iterdir()
    (file,) = run.glob("rank-*/step-*/*")  # of rank 1 alone, and it says so
    assert file.parents[1].name == "rank-00001"
    assert "1" in file.name


def test_a_rank_beyond_two_ranks_is_refused_by_every_rank(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path), ranks=[1, 2], steps=[1])
    with pytest.raises(Exception, match=r"holds rank 2, .* has 2 \(allowed: 0 to 1\)"):
        make_trainer(callback, strategy="ddp_fork", **two_ranks).fit(Tiny(), loader())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        *[("fork", (0, 1)), ("fork", (1,)), ("fork", (0,))],
        pytest.param("spawn", (1,), marks=pytest.mark.deep),
    ],
)
def test_an_exception_in_ranks_that_lightning_starts_leaves_every_finished_step_of_one(
    start: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="ValueError: rank"):
        make_trainer(callback, strategy=f"ddp_{start}", **two_ranks).fit(FailsOn(*ranks), loader())
    traces = only_run(tmp_path)
    assert len(traces) == 2
    found = [steps_of(trace) for trace in traces]
    assert [1, 2] in found
    # Lightning sends SIGTERM to the other one, which may not get to write the last 100 ms.
    assert all(steps in ([1], [1, 2]) for steps in found)
    assert [trace.lost_lines for trace in traces] == [0, 0]
    assert set(load(tmp_path).statuses) == {0, 1}


@pytest.mark.deep
def test_an_exception_on_rank_1_of_two_scripts_leaves_both_files(tmp_path: Path) -> None:
    done = train(tmp_path, "ddp_breaks")
    assert done.returncode != 0
    assert "ValueError: only here" in done.stderr
    first, second = only_run(tmp_path)
    assert (steps_of(second), cut_steps(second)) == ([1, 2], [3])
    assert second.status == "interrupted by ValueError"
    assert steps_of(first) == [1, 2]


def fit_and_signal(folder: Path, number: int, package: Any) -> None:
    module = module_of(package)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored behind nohup
    module.on_batch = lambda batch_idx: os.kill(os.getpid(), number) if batch_idx == 2 else None
    callback = ProfilerCallback(profile_save_path=str(folder))
    make_trainer(callback, package=package).fit(module, loader())


def signalled(folder: Path, number: int, package: Any = PACKAGES[0]) -> tuple[int | None, Any]:
    """Train in a process of its own that gets a signal in its third step."""
    process = get_context("fork").Process(target=fit_and_signal, args=(folder, number, package))
    process.start()
    process.join(SECONDS)
    (trace,) = only_run(folder)
    return process.exitcode, trace


UNTIL_KILLED = """
import os, signal, sys, time
from lightning_rlprof import ProfilerCallback
from tests.builders.models import Tiny, loader, make_trainer

folder, times = sys.argv[1:]
callback = ProfilerCallback(profile_save_path=folder)

with open(times, "w", buffering=1) as file:

    def on_batch(batch_idx):
        now = time.perf_counter()
        print(now, file=file)
        if now - start > 0.4:
            os.kill(os.getpid(), signal.SIGKILL)

    module = Tiny()
    module.on_batch = on_batch
    start = time.perf_counter()
    make_trainer(callback).fit(module, loader(100_000))
"""


@pytest.mark.deep
def test_kill_9_loses_the_steps_of_the_last_100_ms_at_most(tmp_path: Path) -> None:
    run, times = tmp_path / "runs", tmp_path / "times"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", UNTIL_KILLED, str(run), str(times)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    (trace,) = only_run(run)
    began = [float(line) for line in times.read_text().split()]
    # Step n ended before step n + 1 began. If a later step ended 100 ms after that, both are there.
    sure = max((n for n in range(1, len(began)) if began[-2] - began[n] > 0.1), default=0)
    found = steps_of(trace)
    assert found == list(range(1, len(found) + 1))
    assert max(sure, 1) <= len(found) < len(began)
    assert (trace.status, trace.lost_lines, cut_steps(trace)) == (None, 0, [])
    assert load(run).statuses == {0: None}
    memory = [span.counters["host_rss_bytes"] for span in trace.spans if span.counters
              and "host_rss_bytes" in span.counters]  # fmt: skip
    assert memory[-1] > 2**20
    assert {"python", "torch", "lightning-rlprof"} <= trace.header.versions.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_sigterm_ends_the_step_and_the_run_says_so(package: Any, tmp_path: Path) -> None:
    _, trace = signalled(tmp_path, signal.SIGTERM, package)
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2, 3], [])
    assert trace.status == "interrupted by SIGTERMException"


def test_a_ctrl_c_is_noted_and_lightnings_exit_status_stays(tmp_path: Path) -> None:
    code, trace = signalled(tmp_path, signal.SIGINT)
    assert code == 1
    assert (steps_of(trace), cut_steps(trace)) == ([1, 2], [3])
    assert trace.status == "interrupted by KeyboardInterrupt"


def test_an_unwritable_directory_is_refused_in_forked_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    callback = ProfilerCallback(profile_save_path=str(tmp_path / "file" / "runs"))
    with pytest.raises(Exception, match=ConfigError.__name__):
        make_trainer(callback, strategy="ddp_fork", **two_ranks).fit(Tiny(), loader())
