"""One of two processes that broadcast a state dict of 50 MB by a script over gloo; not a test.

Usage: ``python -m tests.builders.synced_weights FOLDER RANK``. Each process writes what it measured
of itself, a JSON line per step, beside the run: of every part the nanoseconds inside of its marker
and around it.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import annotate, count, stage
from lightning_rlprof.recording.start import start_session
from tests.builders.roles import measure

RANKS, STEPS = 2, 40
PAUSE_MS, CONVERT_MS = 40, 60
TENSORS, BYTES = 4, 50_000_000
PROBE = "bandwidth_probe"


def broadcast(weights: dict[str, torch.Tensor]) -> None:
    """Broadcast the tensors, and count their bytes."""
    for tensor in weights.values():
        dist.broadcast(tensor, 0)
        count(bytes=tensor.nbytes)


def sync(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Pause, convert, broadcast and load."""
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def load() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)

    parts = {
        "pause_generation": lambda: time.sleep(PAUSE_MS / 1e3),
        "convert_weights": lambda: time.sleep(CONVERT_MS / 1e3),
        "broadcast_weights": lambda: broadcast(weights),
        "load_weights": load,
    }
    with stage("weight_sync"):
        return {name: measure(annotate(name), work) for name, work in parts.items()}


def probe(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Broadcast the same tensors alone, after as long a sleep: CPUs are slow for a while then."""
    time.sleep((PAUSE_MS + CONVERT_MS) / 1e3)
    return {PROBE: measure(annotate(PROBE), lambda: broadcast(weights))}


def main(folder: Path, rank: int) -> None:
    """Sync weights in each step, before or after a raw broadcast of them."""
    file = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=RANKS)
    weights = {f"layer.{at}": torch.rand(BYTES // 4 // TENSORS) for at in range(TENSORS)}
    config = ProfilerConfig.build(profile_save_path=str(folder / "runs"))
    with (
        (folder / f"measured-{rank}.jsonl").open("w") as measured,
        start_session(config, name="run", rank=rank, world_size=RANKS) as session,
    ):
        for step in range(1, STEPS + 1):
            session.begin_step(step)
            took: dict[str, tuple[int, int]] = {}
            for part in (probe, sync) if step % 2 else (sync, probe):
                dist.barrier()
                took |= part(weights)
            session.end_step()
            measured.write(json.dumps(took) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
