"""A training on two hosts without a common directory: ``python two_hosts.py RANK FOLDER``.

Rank 0 requests a capture once both ranks listen; both train until both have captured.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from lightning_rlprof import ProfilerConfig, request_capture, stage, start_session, step

PATIENCE_S = 100


def main(rank: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    config = ProfilerConfig.build(None, profile_save_path=str(folder / f"host-{rank}"))
    session = start_session(config, name="run", rank=rank, world_size=2)
    number, asked, end = 0, False, time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        number += 1
        with step(number), stage("actor_update"):
            time.sleep(0.02)
            has = (
                bool(session._windows.capture._captured),
                session._windows.requests._relay is not None,
            )
            seen = torch.tensor([float(each) for each in has])
            distributed.all_reduce(seen)
        captured, listening = seen.tolist()
        if captured == 2:
            break
        if listening == 2 and not asked:
            asked = True
            if rank == 0:
                request_capture(why="a test")
    session.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
