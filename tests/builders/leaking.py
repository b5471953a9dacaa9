"""A process that records steps whose update keeps memory in some way; not a test.

Usage: ``python -m tests.builders.leaking FOLDER HOW STEPS``; ``HOW`` is bytes to leak per step,
``sawtooth`` or ``plateau``.
"""

import mmap
import random
import sys
import time
from pathlib import Path

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.start import start_session

LEAKS = "actor_update"
STAGES = ("actor_generate", "compute_reward", LEAKS)


def work(sizes: random.Random) -> None:
    """Take memory of changing size for two milliseconds, and free it.

    Large buffers go back to the system, as those of tensors. Small ones stay in the heap, where a
    later stage takes them.
    """
    end = time.perf_counter_ns() + 2_000_000
    small = [b"x" * sizes.randint(100, 20_000) for _ in range(20)]
    with mapped(sizes.randint(100_000, 2_000_000)):
        while time.perf_counter_ns() < end:
            small[0] = small[-1]


def mapped(size: int) -> mmap.mmap:
    """Return resident memory that is not of the heap."""
    memory = mmap.mmap(-1, size)
    memory[:: mmap.PAGESIZE] = b"x" * -(-size // mmap.PAGESIZE)
    return memory


def main(folder: Path, how: str, steps: int) -> None:
    """Record the steps.

    What leaks is mapped: in the heap it would take what an earlier stage freed, and a later stage
    would grow instead, which depends on the length of paths and variables.
    """
    sizes, kept = random.Random(0), list[mmap.mmap]()
    size = int(how) if how.isdigit() else 256_000
    config = ProfilerConfig.build(profile_save_path=str(folder), summary=False)
    with start_session(config, name="run", rank=0, world_size=1) as session:
        for step in range(1, steps + 1):
            session.begin_step(step)
            for name in STAGES:
                with stage(name):
                    work(sizes)
                    if name == LEAKS and size and not (how == "plateau" and step > steps // 3):
                        kept.append(mapped(size))
                    if how == "sawtooth" and step % 40 == 0:
                        kept.clear()
            session.end_step()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
