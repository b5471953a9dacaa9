"""A training of a few quick steps that then hangs: ``python hanging.py CASE RANK WORLD FOLDER``.

Ranks meet through a file in the folder, and record into the run ``FOLDER/run``.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

from lightning_rlprof import stage, start_session, step
from lightning_rlprof.records.hang_reports import read_beat

STEPS, HANGS_IN = 6, 5


class Prompts(Dataset):
    """Prompts, of which one stops the worker that loads it."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> int:
        if CASE == "loader" and index == HANGS_IN:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def reward(number: int) -> None:
    """Score, and hang on the last rank in one step."""
    if number != HANGS_IN or RANK != WORLD - 1:
        return
    if CASE == "loop":
        parse_for_ever()
    if CASE == "deadlock":
        skip_all_reduce()
    if CASE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if CASE == "lock":
        while read_beat(Path(FOLDER, "run"), RANK) is None:  # it gives a sign of life
            time.sleep(0.1)
        re.match(r"(a+)+$", "a" * 40 + "b")  # in C for hours, with Python's lock


def parse_for_ever() -> None:
    depth = 0
    while depth >= 0:
        depth += 1


def skip_all_reduce() -> None:
    time.sleep(3600)


CASE, RANK, WORLD, FOLDER = "", 0, 1, ""

if __name__ == "__main__":
    CASE, RANK, WORLD, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if WORLD > 1:
        store = f"file://{FOLDER}/store"
        distributed.init_process_group("gloo", store, rank=RANK, world_size=WORLD)
    session = start_session(
        profile_save_path=FOLDER,
        name="run",
        rank=RANK,
        world_size=WORLD,
        hang_timeout=1,
        summary=False,
    )
    batches = iter(DataLoader(Prompts(), num_workers=CASE == "loader"))
    for number in range(STEPS):
        with step():
            with stage("data_fetch"):
                next(batches)
            with stage("compute_reward"):
                reward(number)
            with stage("actor_update", tokens=8):
                if WORLD > 1:
                    distributed.all_reduce(torch.ones(8))
    session.close()
