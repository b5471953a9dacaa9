"""Lines of a collector's file exporter, in OTLP's JSON: hex ids, integers as texts."""

from collections.abc import Mapping, Sequence
from typing import Any

MS = 10**6
ZERO = 1_795_644_411 * 10**9
DRIVER = {"service.name": "nemo-rl", "rl.role": "driver", "nv.dl.rank": 0, "nv.dl.world_size": 1}


def attributes(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    def value(own: Any) -> dict[str, Any]:
        if isinstance(own, bool):
            return {"boolValue": own}
        if isinstance(own, int):
            return {"intValue": str(own)}
        return {"doubleValue": own} if isinstance(own, float) else {"stringValue": own}

    return [{"key": name, "value": value(own)} for name, own in told.items()]


def span(
    number: int, name: str, start_ms: float, end_ms: float, parent: int = 0, **told: Any
) -> dict[str, Any]:
    """Return a span; times are milliseconds after `ZERO`, and ``_`` stands for dots in names."""
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": f"{number:016x}",
        "parentSpanId": f"{parent:016x}" if parent else "",
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(ZERO + int(start_ms * MS)),
        "endTimeUnixNano": str(ZERO + int(end_ms * MS)),
        "attributes": attributes({key.replace("_", "."): own for key, own in told.items()}),
        "status": {},
        "flags": 256,
    }


def batch(spans: Sequence[Mapping[str, Any]], of: Mapping[str, Any] = DRIVER) -> dict[str, Any]:
    """Return a line of the file with spans of one process."""
    scope = {"scope": {"name": "nemo.lens"}, "spans": [*spans]}
    resource = {"attributes": attributes(of)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def nemo_step(at: int, length: int = 100) -> list[dict[str, Any]]:
    """Return a step of asynchronous GRPO in NeMo-RL: of 100 ms it waits 40 and trains 30."""
    first, start = 10 * at + 1, length * at
    return [
        span(first + 1, "rl.idle.buffer_starvation", start, start + 40, first, rl_bucket="idle"),
        span(first + 2, "rl.grpo.policy_training", start + 40, start + 70, first),
        span(first + 3, "rl.idle.refit_bubble", start + 70, start + 80, first, rl_bucket="idle"),
        span(first, "rl.grpo.step", start, start + length, rl_iteration=at),
    ]
