"""Doubles of what AReaL writes: the shapes of its writer, with given times."""

from collections.abc import Mapping, Sequence
from typing import Any

ZERO = 1_795_644_411.5


def session(
    task: int,
    number: int,
    start: float,
    phases: Mapping[str, Sequence[tuple[float, float | None]]],
    status: str = "accepted",
    rank: int = 0,
    role: str = "rollout",
) -> dict[str, Any]:
    """Return a record as ``SessionRecord.to_dict`` makes it; times are seconds after `ZERO`."""
    ends = [end for parts in phases.values() for _, end in parts if end is not None]
    record: dict[str, Any] = {"task_id": task, "session_id": number, "rank": rank, "role": role}
    record |= {"status": status, "submit_ts": ZERO + start}
    if status != "pending":
        record["finalized_ts"] = ZERO + max(ends, default=start) + 0.25
    if status not in ("accepted", "pending"):
        record["reason"] = "rejected"
    told = {
        name: [
            {"start_ts": ZERO + begin, "end_ts": None if end is None else ZERO + end}
            for begin, end in parts
        ]
        for name, parts in phases.items()
    }
    return record | {"phases": told}
