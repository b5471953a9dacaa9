"""Trainings of one or two gloo ranks, in processes of their own, killed at random points."""

import ctypes
import datetime
import faulthandler
import itertools
import os
import signal
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records import run_directory
from tests.chaos.outcomes import Ends, Outcome, judge

SECONDS = 60
_STACKS = "stacks"
_MOST = 50_000  # steps
_LONGEST_S = 0.5  # from the first step to the kill


class Times:
    """When steps ended, in memory that outlives a process."""

    def __init__(self, context: Any) -> None:
        self.before = context.RawArray(ctypes.c_longlong, _MOST)
        self.after = context.RawArray(ctypes.c_longlong, _MOST)
        self.ended = context.RawValue(ctypes.c_longlong)

    def ends(self) -> Ends:
        number = self.ended.value
        return Ends(self.before[:number], self.after[:number])


def train(folder: Path, rank: int, world: int, times: Times, step_s: float) -> None:
    """Take steps until the end of this process; ranks meet in each."""
    if world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=SECONDS / 2),
        )
    config = ProfilerConfig.build(profile_save_path=str(folder))
    options: Any = {"name": "run", "rank": rank, "world_size": world, "recorders": ()}
    weights = torch.zeros(8)
    with start_session(config, **options) as session:
        for step in itertools.count(1):
            session.begin_step(step)
            with stage("actor_generate", tokens=64):
                time.sleep(step_s)
            with stage("actor_update"):
                if world > 1:
                    dist.all_reduce(weights)
            times.before[step - 1] = time.perf_counter_ns()
            session.end_step()
            times.after[step - 1] = time.perf_counter_ns()
            times.ended.value = step


def killed(seed: int, world: int) -> Outcome:
    """Train, kill one rank or all of them at a random point, and read what they have written.

    Every fourth training is killed while it starts. Steps take 0 to 8 ms, or 150 ms.
    """
    noise, context = Random(seed), get_context("fork")
    times = [Times(context) for _ in range(world)]
    step_s = noise.choice([0.0, 0.002, 0.008, 0.15])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            context.Process(target=_quietly, args=(folder, rank, world, times[rank], step_s))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        if seed % 4:
            _wait_for_a_step(times[0], ranks)
        time.sleep(noise.uniform(0, _LONGEST_S))
        first, *others = noise.sample(ranks, world)
        first.kill()
        first.join()
        if noise.random() < 0.5 or not times[0].ended.value:  # a rank waits for one that never came
            for process in others:
                process.kill()
        for process in others:  # or gloo tells them
            process.join(SECONDS)
        if stuck := [process for process in others if process.is_alive()]:
            where = (folder / _STACKS).read_text()  # written after gloo's timeout
            for process in stuck:
                process.kill()
            return Outcome(f"the other rank neither goes on nor ends: {where}")
        # The kernel may cut a long write short when its process is killed.
        return judge(folder / "run", [each.ends() for each in times], most_torn=1)


def _quietly(folder: Path, *arguments: Any) -> None:
    """Train, without a traceback where gloo says that the other rank is gone."""
    try:
        with (folder / _STACKS).open("a") as file:
            faulthandler.dump_traceback_later(SECONDS * 0.75, file=file)
            train(folder, *arguments)
    except (RuntimeError, ValueError):
        os._exit(1)


def _wait_for_a_step(times: Times, ranks: list[Any]) -> None:
    end = time.monotonic() + SECONDS
    while not times.ended.value:
        if time.monotonic() > end or not all(process.is_alive() for process in ranks):
            raise TimeoutError("no step ended")
        time.sleep(0.005)


def killed_while_it_writes(call: int, part: float) -> Outcome:
    """Train, and kill the process in one of its writes, when the disk has taken a part of it."""
    context = get_context("fork")
    times = Times(context)
    with tempfile.TemporaryDirectory() as name:
        arguments = (Path(name), times, call, part)
        process = context.Process(target=_train_until_write, args=arguments)
        process.start()
        process.join(SECONDS)
        if process.exitcode != -signal.SIGKILL:
            return Outcome(f"was not killed: {process.exitcode}")
        return judge(Path(name, "run"), [times.ends()], most_torn=1)


def _train_until_write(folder: Path, times: Times, call: int, part: float) -> None:
    calls, write = itertools.count(), os.write

    def deadly(file: int, data: Any) -> int:
        if next(calls) == call:
            write(file, data[: int(len(data) * part)])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data)

    run_directory.os.write = deadly  # type: ignore[attr-defined]
    train(folder, 0, 1, times, 0.0)
