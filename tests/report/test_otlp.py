"""Runs as lines of OTLP: what OpenTelemetry's own decoder reads, and what we read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.otlp import write_otlp
from lightning_rlprof.run import load as load_run
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import MAIN, Row, grpo_run, header, write_rank

MS = 10**6


def lines(path: Path) -> list[Any]:
    return [json.loads(line)["resourceSpans"][0] for line in path.read_text().splitlines()]


def times(run: Spans) -> list[tuple[Any, ...]]:
    """Return what is known of each span, and by threads that have one number in both runs."""
    known = zip(run.rank.tolist(), run.thread.tolist(), strict=True)
    return [
        (own.name, own.kind, own.rank, own.step, own.duration_ns, own.counters, place)
        for own, place in zip(run, known, strict=True)
    ]


def strange(run: Path) -> None:
    rows = [
        Row("setup", "stage", 0, 0, 5 * MS),
        Row("step", "step", 7, 10 * MS, 110 * MS, counters={"loss": float("nan"), "big": 2**70}),
        Row("Engine.wake-up \ud800", "stage", 7, 20 * MS, 40 * MS, parent=2),
        Row("buffer_starvation", "stage", 7, 45 * MS, 60 * MS, counters={"tokens": 7}),
        Row("data_fetch", "region", 7, 65 * MS, 70 * MS),
        Row("actor_generate", "stage", 7, 15 * MS, 105 * MS, thread=MAIN + 1),
        Row("mark", "mark", 7, 15 * MS, 15 * MS),
    ]
    write_rank(run, header(), rows)


def test_reading_what_was_written_gives_the_same_run(tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=5, ranks=3)
    run = load_run(tmp_path / "run")
    path = tmp_path / "otlp.jsonl"
    written = write_otlp(run, path)
    again = load_run(path)
    assert (written, again.ranks) == (len(again), (0, 1, 2))
    assert [*run.stages().rows] == [*again.stages().rows]
    assert [*run.regions().rows] == [*again.regions().rows]
    kept = [each[:6] for each in times(run) if each[1] != "epoch"]
    assert sorted(kept, key=str) == sorted((each[:6] for each in times(again)), key=str)


def test_spans_of_any_kind_come_back(tmp_path: Path) -> None:
    strange(tmp_path / "run")
    run = load(tmp_path / "run")
    path = tmp_path / "otlp.jsonl.gz"
    assert write_otlp(run, path) == 6
    again = load(path)
    kept = [each for each in times(run) if each[1] != "mark"]
    wanted = [(name.replace("\ud800", "?"), *rest) for name, *rest in kept]
    assert [each[:5] for each in times(again)] == [each[:5] for each in wanted]
    assert [each[6] for each in times(again)] == [each[6] for each in wanted]
    assert again.counters_of(int(again.rows(kind="step")[0])) == {"big": float(2**70)}
    assert again.counters_of(int(again.rows(name="buffer_starvation")[0])) == {"tokens": 7}


def test_names_and_ids_are_those_of_opentelemetry(tmp_path: Path) -> None:
    strange(tmp_path / "run")
    write_otlp(load(tmp_path / "run"), tmp_path / "x.jsonl")
    (only,) = lines(tmp_path / "x.jsonl")
    spans = {each["name"]: each for each in only["scopeSpans"][0]["spans"]}
    assert spans.keys() == {
        "rl.setup",
        "rl.loop",
        "rl.Engine.wake-up ?",
        "rl.idle.buffer_starvation",
        "rl.idle.data_fetch",
        "rl.sample",
    }
    step, sample = spans["rl.loop"], spans["rl.sample"]
    assert step["parentSpanId"] == ""
    assert sample["parentSpanId"] == step["spanId"]
    assert (len(step["traceId"]), len(step["spanId"])) == (32, 16)
    assert {each["traceId"] for each in spans.values()} - {step["traceId"]} == {
        spans["rl.setup"]["traceId"]
    }
    bucket = {"key": "rl.bucket", "value": {"stringValue": "idle"}}
    assert bucket in spans["rl.idle.buffer_starvation"]["attributes"]
    assert bucket not in sample["attributes"]


def test_opentelemetry_reads_every_line(tmp_path: Path) -> None:
    service = pytest.importorskip(
        "opentelemetry.proto.trace.v1.trace_pb2", reason="pip install 'lightning-rlprof[otlp]'"
    )
    from google.protobuf.json_format import Parse

    grpo_run(tmp_path / "run", steps=300, ranks=2)
    count = write_otlp(load(tmp_path / "run"), tmp_path / "x.jsonl")
    found = [
        Parse(line, service.TracesData()).resource_spans[0].scope_spans[0].spans
        for line in (tmp_path / "x.jsonl").read_text().splitlines()
    ]
    assert sum(map(len, found)) == count
    assert max(map(len, found)) == 1000
    ids = [each.span_id for spans in found for each in spans]
    assert len(np.unique(ids)) == count
    assert {each.start_time_unix_nano // 10**18 for spans in found for each in spans} == {1}


def test_a_run_without_a_date_is_refused(tmp_path: Path) -> None:
    run = grpo_run(tmp_path / "run")
    with pytest.raises(TraceError, match="unknown when it was recorded"):
        write_otlp(replace(run, unix_ns=0), tmp_path / "x.jsonl")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
