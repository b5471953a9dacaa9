"""Parts of a weight sync against every nanosecond; bytes, bounds, and what hides a sync."""

import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.communication.weight_sync import PARTS, weight_sync
from lightning_rlprof.analysis.steps.step_selection import warm_up
from lightning_rlprof.analysis.steps.time_categories import Category, category_of
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import Span
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell
from tests.builders.oracle import runs
from tests.builders.runs import MAIN, Row, header, loaded, write_rank
from tests.builders.synced_weights import BYTES, CONVERT_MS, PAUSE_MS, PROBE, RANKS
from tests.effort import examples
from tests.places import ROOT

SIDE = MAIN + 1
NAMES = {
    **{"weight_sync": "rest", "update_weights": "rest", "broadcast_weights": "transfer"},
    **{"Engine.pause_generation": "drain/pause", "all_gather": "gather/reshard"},
    **{"load_weights": "load", "fusing": None, "bucket": None, "actor_update": None},
}


def rows_of(spans: Spans, **given: Any) -> dict[tuple[Cell, Cell], dict[str, Any]]:
    table = weight_sync(spans, **given)
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    return {(row["role"], row["part"]): row for row in rows}


def sync(start: int, end: int, name: str = "weight_sync", **more: Any) -> Row:
    return Row(name, "stage", 1, start, end, **more)


def part(name: str, start: int, end: int, **counters: float) -> Row:
    return Row(name, "region", 1, start, end, counters=counters or None)


def step(start: int, end: int, number: int = 1) -> Row:
    return Row("step", "step", number, start, end)


TYPICAL = [
    step(0, 2000),
    sync(100, 1100),
    part("pause_generation", 100, 200),
    part("gather_params", 200, 300, bytes=1000),
    part("all_gather", 210, 290),
    part("convert_to_hf", 300, 500),
    part("broadcast_weights", 500, 900),
    part("bucket 0", 500, 650, bytes=600),
    part("bucket 1", 660, 880, bytes=400),
    part("load_weights", 900, 1000, bytes=1000),
    part("warming", 1000, 1020),
    part("flush_cache", 1020, 1050),
    part("continue_generation", 1050, 1060),
    part("bandwidth_probe", 1500, 1600, bytes=500),
]


def test_a_sync_is_cut_by_the_names_of_its_spans_and_the_parts_add_up() -> None:
    table = weight_sync(loaded(TYPICAL))
    columns = ("part", "total", "count", "bytes", "bandwidth", "bound", "x of bound")
    found = list(zip(*(table.column(name) for name in columns), strict=True))
    assert found == [
        ("whole sync", 1000, 1, 1000, 1.0, 200, 5.0),
        ("drain/pause", 100, 1, None, None, None, None),
        ("gather/reshard", 100, 1, 1000, 10.0, 200, 0.5),
        ("convert/quantize", 200, 1, None, None, None, None),
        ("transfer", 400, 1, 1000, 2.5, 200, 2.0),
        ("load", 100, 1, 1000, 10.0, None, None),
        ("cache flush", 30, 1, None, None, None, None),
        ("resume", 10, 1, None, None, None, None),
        ("warming", 20, 1, None, None, None, None),
        ("rest", 40, 1, None, None, None, None),
    ]
    assert table.column("share") == [1, 0.1, 0.1, 0.2, 0.4, 0.1, 0.03, 0.01, 0.02, 0.04]
    assert "Measured bandwidth: 5 GB/s." in table.note


def test_without_a_probe_or_bytes_the_note_says_how_to_get_them() -> None:
    table = weight_sync(loaded([sync(0, 10), part("load", 2, 4)]))
    assert "annotate('bandwidth_probe')" in table.note
    assert "call count(bytes=...)" in table.note
    assert table.column("bound") == [None] * 3
    assert table.column("bandwidth") == [None] * 3


def test_without_a_sync_it_abstains() -> None:
    assert "Mark it with stage('weight_sync')" in str(weight_sync(loaded([step(0, 9)])).abstained)


def test_bytes_of_a_sync_are_its_own_else_those_of_its_transfer() -> None:
    own = [sync(0, 100, counters={"bytes": 70}), part("broadcast", 10, 60, bytes=50)]
    found = rows_of(loaded(own))
    assert found["actor", "whole sync"]["bytes"] == 70
    assert found["actor", "transfer"]["bytes"] == 50
    assert found["actor", "rest"]["bytes"] is None
    nested = [sync(0, 100), part("broadcast", 10, 60, bytes=50), part("chunk", 20, 30, bytes=9)]
    found = rows_of(loaded(nested))
    assert found["actor", "whole sync"]["bytes"] == found["actor", "transfer"]["bytes"] == 50


def test_ranks_that_count_no_bytes_do_not_slow_the_bandwidth_of_the_others() -> None:
    found = rows_of(loaded([sync(0, 100, counters={"bytes": 50})], [sync(0, 900)]))
    assert found["actor", "whole sync"]["bandwidth"] == 0.5
    assert found["actor", "whole sync"]["bytes"] == 50
    assert found["actor", "whole sync"]["time per sync"] == 500


def test_a_sync_on_another_thread_is_hidden_behind_the_stages_of_the_training_thread() -> None:
    rank = [
        step(0, 1000),
        Row("actor_update", "stage", 1, 0, 300),
        Row("wait_for_rollout", "stage", 1, 300, 500),
        sync(100, 700, thread=SIDE),
        Row("load_weights", "region", 1, 200, 400, thread=SIDE),
    ]
    found = rows_of(loaded(rank))
    shown = {key[1]: (row["exposed"], row["hidden"]) for key, row in found.items()}
    assert shown == {"whole sync": (400, 200), "load": (100, 100), "rest": (300, 100)}


def test_roles_have_rows_of_their_own(tmp_path: Path) -> None:
    for rank, role in enumerate(("trainer", "rollout")):
        rows = [
            sync(0, 100, counters={"bytes": 50}),
            part("bandwidth_probe", 200, 300, bytes=100),
        ]
        write_rank(tmp_path, header(rank, 2, role=role), rows)
    found = rows_of(load(tmp_path))
    assert found["trainer", "whole sync"]["bound"] == 50
    assert found["rollout", "whole sync"]["bound"] == 50


def test_syncs_of_excluded_steps_are_left_out() -> None:
    rows = [
        row
        for n in range(12)
        for row in (
            Row("step", "step", n + 1, 100 * n, 100 * n + 100, counters={"capture": int(n == 3)}),
            Row("weight_sync", "stage", n + 1, 100 * n, 100 * n + (90 if n == 3 else 10)),
        )
    ]
    found = rows_of(loaded(rows))
    assert found["actor", "whole sync"]["time per sync"] == 10
    assert found["actor", "whole sync"]["count"] == 11


SPANS = st.lists(
    st.tuples(
        st.sampled_from([*NAMES]),
        st.sampled_from(["stage", "region"]),
        st.integers(0, 40),
        st.integers(0, 25),
        st.sampled_from([MAIN, SIDE]),
        st.none() | st.integers(0, 9),
    ),
    max_size=14,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=2))
def test_parts_of_any_nesting_agree_with_every_nanosecond(drawn: list[list[Any]]) -> None:
    spans = loaded(
        *[
            [step(0, 50)]
            + [
                Row(name, kind, 1, at, at + size, thread, counters=amount and {"bytes": amount})
                for name, kind, at, size, thread, amount in rank
            ]
            for rank in drawn
        ]
    )
    for rank in spans.ranks:
        found = rows_of(spans, ranks=[rank])
        expected, hidden = walked(spans, rank)
        totals = {name: row["total"] for (_, name), row in found.items() if row["total"]}
        whole = totals.pop("whole sync", 0)
        assert totals == dict(expected)
        assert whole == sum(expected.values())
        for (_, name), row in found.items():
            assert row["exposed"] + row["hidden"] == row["total"]
            if name != "whole sync":
                assert row["hidden"] == hidden[name]


def walked(spans: Spans, rank: int) -> tuple[Counter[str], Counter[str]]:
    """Return the time of each part, and how much of it is hidden, instant by instant."""
    own = [s for s in spans if s.rank == rank and s.kind in ("stage", "region")]
    total, hidden = Counter[str](), Counter[str]()
    for thread in (MAIN, SIDE):
        here = [s for s in own if s.thread == thread]
        syncs = [s for s in here if category_of(s.name) == Category.WEIGHT_SYNC]
        syncs = [s for s in syncs if not any(contains(o, s, here) for o in syncs)]
        inside = {s.id for s in here if s in syncs or holder(s, syncs)}
        members = [s for s in here if s.id in inside]
        for now in range(70):
            if not any(s.start_ns <= now < s.end_ns for s in syncs):
                continue
            top = max(
                (s for s in members if s.start_ns <= now < s.end_ns),
                key=lambda s: (s.start_ns, s.id),
            )
            name = part_of(top, members)
            total[name] += 1
            hidden[name] += thread == SIDE and busy(own, now)
    return total, hidden


def order(span: Span) -> tuple[int, int, int]:
    return span.start_ns, -span.end_ns, span.id


def contains(outer: Span, inner: Span, among: list[Span]) -> bool:
    holds = outer.start_ns < outer.end_ns and outer.end_ns >= inner.end_ns
    return order(outer) < order(inner) and holds


def holder(span: Span, syncs: list[Span]) -> bool:
    """Tell whether the last sync that is open where a span begins lasts as long."""
    up = [s for s in syncs if s.start_ns <= span.start_ns < s.end_ns]
    return bool(up) and max(up, key=order).end_ns >= span.end_ns


def part_of(span: Span, members: list[Span]) -> str:
    known = NAMES[span.name]
    around = [s for s in members if contains(s, span, members)]
    if known is None and around:
        above = part_of(max(around, key=order), members)
        known = above if above in PARTS else None
    return known or span.name


def busy(own: list[Span], now: int) -> bool:
    """Tell whether the training thread's innermost stage is one that hides a sync."""
    up = [s for s in own if s.thread == MAIN and s.kind == "stage" and now < min(s.end_ns, 50)]
    up = [s for s in up if s.start_ns <= now]
    if not up:
        return False
    top = max(up, key=lambda s: (s.start_ns, s.id))
    here = [s for s in own if s.thread == MAIN]
    syncs = [s for s in here if category_of(s.name) == Category.WEIGHT_SYNC]
    syncs = [s for s in syncs if not any(contains(o, s, here) for o in syncs)]
    return top not in syncs and not holder(top, syncs)


@settings(max_examples=examples(60), deadline=None)
@given(runs(overlapping_steps=True))
def test_it_does_not_fail_on_odd_runs(rows: list[list[Row]]) -> None:
    weight_sync(loaded(*rows))


@pytest.mark.parametrize("odd", [2**63 - 1, -(2**63), 1.7e308, 0])
def test_it_does_not_fail_on_bytes_that_nothing_can_have(odd: float) -> None:
    probe = part("bandwidth_probe", 30, 40, bytes=odd)
    weight_sync(loaded([sync(0, 20), part("broadcast", 0, 0, bytes=odd), probe]))


@pytest.mark.deep
def test_two_gloo_ranks_that_broadcast_50_mb_come_out_as_scripted(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.builders.synced_weights", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": path}
    processes = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=env) for rank in range(RANKS)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait()
    names = {
        **{"drain/pause": "pause_generation", "convert/quantize": "convert_weights"},
        **{"transfer": "broadcast_weights", "load": "load_weights"},
    }
    spans = load(tmp_path / "runs")
    warm = warm_up(spans).tolist()
    rates: dict[str, list[Between]] = {PROBE: [], "broadcast_weights": []}
    for rank in range(RANKS):
        lines = (tmp_path / f"measured-{rank}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        own = [took for step, took in enumerate(steps, 1) if step not in warm]
        found = {part: row for (_, part), row in rows_of(spans, ranks=[rank]).items()}
        whole = found.pop("whole sync")
        for name, marker in names.items():
            least, most = (statistics.mean(took[marker][at] for took in own) for at in (0, 1))
            assert least - 1 <= found[name]["time per sync"] <= most + 1, name
        for name, ms in (("drain/pause", PAUSE_MS), ("convert/quantize", CONVERT_MS)):
            assert found[name]["time per sync"] >= ms * 1e6
        assert found["transfer"]["bytes"] == whole["bytes"] == BYTES
        assert sum(row["total"] for row in found.values()) == whole["total"]
        rates[PROBE] += [rate(took[PROBE]) for took in steps]
        rates["broadcast_weights"] += [rate(took["broadcast_weights"]) for took in own]
    raw, sent = (median(each) for each in rates.values())
    ratio = rows_of(spans)["actor", "transfer"]["x of bound"]
    assert raw[0] / sent[1] <= ratio <= raw[1] / sent[0]


Between = tuple[float, float]


def rate(took: list[int]) -> Between:
    """Return the bandwidth by the time around a marker, and by the time inside of it."""
    inside, around = took
    return BYTES / around, BYTES / inside


def median(between: list[Between]) -> Between:
    least, most = zip(*between, strict=True)
    return statistics.median(least), statistics.median(most)
