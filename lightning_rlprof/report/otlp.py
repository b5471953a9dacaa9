"""Steps, stages and regions of a run as spans of OpenTelemetry: as lines of OTLP, or to be pushed.

All ranks of a step are one trace. Reading the lines gives the same steps and stages, since
`lightning_rlprof.records.otel_names` names both.
"""

import json
import math
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records import otel_names
from lightning_rlprof.records.records import KINDS, Header, bin_in_name
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.system.files import opened_draft
from lightning_rlprof.system.version import VERSION
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

SCOPE = "lightning_rlprof"
"""Who wrote the spans, as OpenTelemetry calls it."""

Value = str | int | float
_KINDS = ("step", "stage", "region")
_SPANS_PER_LINE = 1_000
_TYPES = {str: "stringValue", int: "intValue", float: "doubleValue"}
_NO_DATE = "it is unknown when it was recorded, and spans of OpenTelemetry have a date"


class OtelSpan(NamedTuple):
    """A span with its date and ids, as numbers."""

    rank: int
    name: str
    trace: int
    id: int
    parent: int | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]


def otel_spans(spans: Spans, rows: Int64s | None = None) -> Iterator[OtelSpan]:
    """Yield steps, stages and regions of a run by rank and start.

    Args:
        spans: The run.
        rows: Only these of them; None for all.

    Raises:
        TraceError: The run has no date.
    """
    if not spans.unix_ns:
        raise TraceError(f"{spans.path}: {_NO_DATE}")
    codes = [KINDS.index(kind) for kind in _KINDS]
    every = np.arange(len(spans)) if rows is None else rows
    every = every[np.isin(spans.kind[every], codes)]
    steps = every[spans.kind[every] == codes[0]]
    step_of = dict(
        zip(_pairs(spans.rank, spans.step, steps), spans.id[steps].tolist(), strict=True)
    )
    there = set(_pairs(spans.rank, spans.id, every))
    for row in every.tolist():
        span = spans.span(row)
        header = spans.headers[span.rank]
        parent = span.parent if (span.rank, span.parent) in there else None
        if parent is None and span.kind != "step":
            parent = step_of.get((span.rank, span.step))
        meaning = otel_names.Meaning(span.kind, text(span.name))
        yield OtelSpan(
            span.rank,
            otel_names.name_of(meaning),
            _hashed(16, header.run_id, span.step),
            _hashed(8, header.run_id, span.rank, span.id),
            None if parent is None else _hashed(8, header.run_id, span.rank, parent),
            spans.unix_ns + span.start_ns,
            spans.unix_ns + span.end_ns,
            _attributes(meaning, span.step, span.thread, span.counters or {}),
        )


def resource_of(header: Header) -> dict[str, Value]:
    """Return what OpenTelemetry calls a resource: the process of a rank."""
    return {
        otel_names.SERVICE: "rlprof",
        otel_names.RUNS[0]: text(header.run_id),
        otel_names.ROLE: text(header.role),
        otel_names.RANK: header.rank,
        otel_names.WORLD_SIZE: header.world_size,
        otel_names.HOST: text(header.host),
        otel_names.PROCESS: header.pid,
    }


def write_otlp(spans: Spans, path: Path) -> int:
    """Write spans as a collector's file exporter does, whole or not at all; return how many.

    Args:
        spans: The run.
        path: The file, compressed if its name ends with ``.gz``; one that exists is replaced.

    Raises:
        TraceError: The run has no date.
        OSError: The file cannot be written.
    """
    count = 0
    with opened_draft(path, mode_made_of(spans.path)) as file:
        for rank in spans.ranks:
            resource = {"attributes": _encoded(resource_of(spans.headers[rank]))}
            left = otel_spans(spans, spans.rows(rank=rank))
            while some := [*islice(left, _SPANS_PER_LINE)]:
                scope = {
                    "scope": {"name": SCOPE, "version": VERSION},
                    "spans": [*map(_as_json, some)],
                }
                lines = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
                file.write(json.dumps(lines, ensure_ascii=False).encode() + b"\n")
                count += len(some)
    return count


def text(value: str) -> str:
    """Return text that UTF-8 can encode."""
    return value.encode("utf-8", "replace").decode()


def _attributes(
    meaning: otel_names.Meaning, step: int, thread: int, counters: Mapping[str, Any]
) -> dict[str, Value]:
    own: dict[str, Value] = {
        otel_names.KIND: meaning.kind,
        otel_names.NAME: meaning.name,
        otel_names.STEP: step,
        otel_names.THREAD: thread,
    }
    if otel_names.is_wait(meaning):
        own[otel_names.BUCKET] = otel_names.IDLE
    for name, value in counters.items():
        if bin_in_name(name) is None and math.isfinite(value):
            own[text(otel_names.COUNTER_PREFIX + name)] = (
                value if abs(value) < 2**63 else float(value)
            )
    return own


def _pairs(one: Int64s, other: Int64s, rows: Int64s) -> Iterator[tuple[int, int]]:
    return zip(one[rows].tolist(), other[rows].tolist(), strict=True)


def _hashed(size: int, *parts: object) -> int:
    """Return the same number for the same parts, so that a span that is sent twice is one."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=size).digest(), "big")


def _as_json(span: OtelSpan) -> dict[str, Any]:
    """Return a span in the JSON encoding of OTLP: ids in hex, 64-bit integers as texts."""
    return {
        "traceId": f"{span.trace:032x}",
        "spanId": f"{span.id:016x}",
        "parentSpanId": "" if span.parent is None else f"{span.parent:016x}",
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _encoded(span.attributes),
        "status": {},
    }


def _encoded(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {_TYPES[type(own)]: str(own) if type(own) is int else own}}
        for name, own in attributes.items()
    ]
