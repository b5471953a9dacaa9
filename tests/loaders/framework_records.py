"""Doubles of what AReaL and slime write: the shapes of their writers, with given times."""

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


Part = tuple[str, float, float, str | None, dict[str, Any]]


def events(trace_id: str, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return what ``trace_span`` appends: a start and an end for each part, in order of time."""
    found = []
    for at, (name, start, end, parent, attrs) in enumerate(parts):
        about = {"name": name, "trace_id": trace_id, "sample_id": 3, "group_id": 1, "attempt": 0}
        about["span_id"] = f"{trace_id}/{name}/{at}"
        begin = {"type": "span_start", "ts": ZERO + start, **about}
        if parent is not None:
            begin["parent_span_id"] = f"{trace_id}/{parent}"
        found.append((start, at, begin))
        last = {"type": "span_end", "ts": ZERO + end, **about}
        found.append((end, -at, last | ({"attrs": attrs} if attrs else {})))
    return [each for _, _, each in sorted(found, key=lambda item: item[:2])]


def sample(
    index: int,
    parts: Sequence[Part],
    *,
    group: int | None = 1,
    status: str = "completed",
    length: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Return what ``Sample.to_dict`` returns, without what the reader never looks at."""
    trace_id = f"{index:032x}"
    trace = {"version": 1, "trace_id": trace_id, "events": events(trace_id, parts)}
    trace |= {"sample_id": index, "group_id": group, "attempt": 0}
    own = {
        "group_index": group, "index": index, "prompt": "2 + 2 =", "tokens": [1] * (length + 4),
        "response": "4", "response_length": length, "reward": 1.0, "status": status,
        "weight_versions": ["3"], "remove_sample": False, "metadata": {}, "trace": trace,
        "spec_info": {"spec_accept_token_num": 0}, "rollout_log_probs": None,
    }  # fmt: skip
    return own | changes


def plain(start: float, end: float, tokens: int) -> list[Part]:
    """Return the spans of one sample as ``generate_and_rm_group`` makes them."""
    return [
        ("generate_and_rm_group", start, end + 0.75, None, {"group_size": 2}),
        ("generate_and_rm", start, end + 0.5, "generate_and_rm_group/0", {}),
        ("sglang_generate", start + 0.25, end, "generate_and_rm/1", {"completion_tokens": tokens}),
        ("reward_model", end, end + 0.5, "generate_and_rm/1", {}),
    ]
