"""Runs of our own with many ranks and steps, and what each verb takes of them."""

from pathlib import Path

import msgspec
import numpy as np

from lightning_rlprof.records.records import FORMAT, Header

__all__ = ["write_run"]

_MS = 1_000_000
_STAGES = {
    "weight_sync": 2,
    "actor_generate": 50,
    "compute_reward": 3,
    "actor_compute_log_prob": 9,
    "compute_advantage": 1,
    "actor_update": 40,
}
"""Stages of a step, and how many milliseconds each takes."""
_GAP_NS = 20_000
_TOKENS = 4_096
_THREAD = 7_001


def write_run(folder: Path, ranks: int, steps: int) -> Path:
    """Write a run of GRPO of which all ranks leave the update together; return where it is."""
    run = folder / f"{ranks}x{steps}"
    if run.exists():
        return run
    run.mkdir(parents=True)
    random, names = np.random.default_rng(0), list(_STAGES)
    usual = np.array([*_STAGES.values()]) * _MS
    common = usual * random.normal(1, 0.02, (steps, len(usual))).clip(0.9)
    began = (np.arange(steps) * (usual.sum() * 1.2)).astype(np.int64)
    for rank in range(ranks):
        header = Header(
            FORMAT, "job", rank, ranks, "actor", "host", 1, "cpu", 10**18, 0, {"spans": True}
        )
        took = (common * random.normal(1, 0.01, common.shape)).astype(np.int64)
        ends = began[:, None] + np.cumsum(took + _GAP_NS, axis=1)
        ends[:, -1] = began + int(usual.sum() * 1.15)  # They leave together.
        starts = np.column_stack([began + _GAP_NS, ends[:, :-1] + _GAP_NS])
        tokens = random.integers(_TOKENS, 2 * _TOKENS, steps).tolist()
        rows = zip(starts.tolist(), ends.tolist(), tokens, began.tolist(), strict=True)
        with (run / f"rank-{rank:05d}.jsonl").open("wb") as file:
            file.write(msgspec.json.encode(header) + b"\n")
            file.write(f'["thread",{_THREAD},"MainThread"]\n'.encode())
            for step, (start, end, count, first) in enumerate(rows, start=1):
                number = (step - 1) * (len(names) + 1)
                file.write(_step(names, step, start, end, count, first, number).encode())
            file.write(f'["end",{ends[-1, -1] + _MS},"finished"]\n'.encode())
    return run


def _step(
    names: list[str], step: int, start: list[int], end: list[int], count: int, first: int, own: int
) -> str:
    lines = []
    for at, name in enumerate(names):
        counters = f'{{"tokens":{count}}}' if name == "actor_generate" else "null"
        lines.append(
            f'["span","{name}","stage",{step},{start[at]},{end[at]},{_THREAD},'
            f"{own + at + 2},{own + 1},{counters}]\n"
        )
    last = end[-1] + _GAP_NS
    lines.append(f'["span","step","step",{step},{first},{last},{_THREAD},{own + 1},null,null]\n')
    return "".join(lines)
