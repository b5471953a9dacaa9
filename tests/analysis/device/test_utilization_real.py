"""Breakdown and idle time of real traces: sums to the nanosecond, and what the tools say."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.analysis.device.timeline import device_timeline, idle
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from tests.places import SHARED_DATA

DATA = SHARED_DATA
NAMES = [
    *("kineto/alexnet.json.gz", "kineto/h100_qwen1.5-0.5b.json.gz", "kineto/nccl.json.gz"),
    *("kineto/mi300_bert-small.json.gz", "kineto/ns_resolution_rank-0.json.gz"),
    *("kineto/sglang_qwen3-8b_decode.json.gz", "kineto/vllm_prefill_decode_graph.json.gz"),
    *("kineto/two_ranks/rank-0.json.gz", "kineto/two_ranks/rank-1.json.gz"),
    *("nsys/h100_2gpu_1s.sqlite", "nsys/t4_power_iteration.sqlite"),
    *("ascend/text_level1_rank0", "ascend/db_level1_rank0"),
]
PARTS = ("compute", "exposed communication", "exposed memcpy", "idle", "unknown")
every_trace = pytest.mark.parametrize("name", NAMES)
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no real traces in ../shared/data")


@cache
def loaded(name: str) -> Spans:
    return load(DATA / name)


def total(name: str) -> dict[str, int]:
    return cells_of(loaded(name))


def cells_of(spans: Spans) -> dict[str, int]:
    table = breakdown(spans)
    names = [column.name for column in table.columns]
    cells = dict(zip(names, table.rows[-1], strict=True))
    return {part: int(cells[part] or 0) for part in names[3:]}


@every_trace
def test_parts_add_up_to_the_time_of_all_devices(name: str) -> None:
    cells = total(name)

    lanes = device_timeline(loaded(name)).lanes
    assert cells["wall"] == sum(cells[part] for part in PARTS)
    assert cells["wall"] == sum(lane.end_ns - lane.start_ns for lane in lanes)
    assert cells["compute"] > 0


@every_trace
def test_kinds_of_idle_add_up_to_the_idle_time(name: str) -> None:
    assert sum(map(int, idle(loaded(name)).column("total"))) == total(name)["idle"]


def nanoseconds(event: dict[str, Any], key: str) -> int:
    return int(event[key] * 1000)


def test_kinds_are_those_of_the_launches_in_the_file() -> None:
    """The device of this trace has one stream, and no gap after a launch is longer than 30 us."""
    path = DATA / "kineto/h100_qwen1.5-0.5b.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    calls = {
        event["args"].get("correlation"): nanoseconds(event, "ts")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work.sort(key=lambda event: int(event["ts"] * 1000))
    expected: Counter[str] = Counter()
    for before, after in pairwise(work):
        empty = nanoseconds(before, "ts") + nanoseconds(before, "dur")
        launch = calls.get(after["args"]["correlation"])
        late = (
            "unattributed idle"
            if launch is None
            else "host-bound idle"
            if launch > empty
            else "launch latency"
        )
        expected[late] += nanoseconds(after, "ts") - empty

    table = idle(loaded("kineto/h100_qwen1.5-0.5b.json.gz"))
    assert dict(zip(table.column("kind"), table.column("total"), strict=True)) == expected


@pytest.mark.parametrize(
    ("folder", "rounding"),
    [
        ("ascend/db_level1_rank0", 0),
        ("ascend/text_level1_rank0", 20),
        ("ascend/text_level1_rank1", 20),
    ],
)
def test_ascends_own_step_trace_says_the_same(folder: str, rounding: int) -> None:
    """Its text has microseconds with three digits; its time begins with the first device work.

    Copies are free time there.
    """
    whole, every = loaded(folder), total(folder)
    spans = replace(whole, tables={k: v for k, v in whole.tables.items() if k != "memcpy"})
    cells = cells_of(spans)
    assert {**every, "exposed memcpy": 0, "overlapped memcpy": 0} == {
        **cells,
        "idle": cells["idle"] - every["exposed memcpy"],
    }
    (lane,) = device_timeline(spans).lanes
    outside = lane.work.start_ns.min() - lane.start_ns + lane.end_ns - lane.work.end_ns.max()

    theirs = {name: spans.table("step_trace").column(name)[0] for name in ("computing", "free")}
    for name in ("communication not overlapped", "overlapped"):
        theirs[name] = spans.table("step_trace").column(name)[0]
    assert theirs == pytest.approx(
        {
            "computing": cells["compute"],
            "communication not overlapped": cells["exposed communication"],
            "overlapped": cells["overlapped communication"],
            "free": cells["idle"] - outside,
        },
        abs=rounding,
    )


def test_gaps_inside_of_replays_are_unknown_and_not_idle() -> None:
    assert total("kineto/vllm_prefill_decode_graph.json.gz")["unknown"] > 0
    assert total("kineto/nccl.json.gz")["unknown"] == 0
