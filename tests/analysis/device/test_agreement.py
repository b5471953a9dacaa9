"""One truth: first screen, findings, ledger, breakdown, idle and critical path agree."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.analysis.device.device_critical_path import device_critical_path
from lightning_rlprof.analysis.device.timeline import device_timeline, idle
from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from lightning_rlprof.analysis.ledger.ledger import compute_accounts, ledger
from lightning_rlprof.analysis.steps.time_categories import NO_CATEGORY, Category, category_of
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.summary import summary
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.device_jobs import jobs
from tests.builders.device_work import Job, spans_of
from tests.builders.diagnosed import found
from tests.effort import examples
from tests.places import SHARED_DATA

TRACES = [
    *("kineto/alexnet.json.gz", "kineto/cuda_event_sync.json.gz", "kineto/nccl.json.gz"),
    *("kineto/h100_qwen1.5-0.5b.json.gz", "kineto/mi300_bert-small.json.gz"),
    *("kineto/ns_resolution_rank-0.json.gz", "kineto/sglang_qwen3-8b_decode.json.gz"),
    *("kineto/vllm_prefill_decode_graph.json.gz", "kineto/two_ranks/rank-0.json.gz"),
    *("kineto/two_ranks/rank-1.json.gz", "kineto/cpu_only_rank-34.json.gz"),
    *("nsys/h100_2gpu_1s.sqlite", "nsys/t4_power_iteration.sqlite"),
    *("ascend/text_level1_rank0", "ascend/text_level1_rank1", "ascend/db_level1_rank0"),
]
BUSY = ("compute", "exposed communication", "exposed memcpy")
IDLE = ("host-bound idle", "launch latency", "collective wait", "unattributed idle")


def totals(table: Table, name: str, value: str = "total") -> Counter[str]:
    found: Counter[str] = Counter()
    if table.abstained is None:
        for each, ns in zip(table.column(name), table.column(value), strict=True):
            found[str(each)] += int(ns or 0)
    return found


def whole(spans: Spans) -> dict[str, int]:
    """Return the last row of the breakdown; nothing without device work."""
    table = breakdown(spans)
    if table.abstained is not None:
        return {}
    names = [column.name for column in table.columns]
    cells = dict(zip(names, table.rows[-1], strict=True))
    return {name: int(cells[name] or 0) for name in names[3:]}


def check_idle(spans: Spans) -> None:
    cells, causes = whole(spans), totals(idle(spans), "kind")
    assert sum(causes.values()) == cells.get("idle", 0)


def check_ledger(spans: Spans) -> bool:
    """Compare what kernels say in both, or return False where a stated rule tells them apart."""
    cells, causes = whole(spans), totals(idle(spans), "kind")
    accounts, table = compute_accounts(spans), ledger(spans)
    by_kernels = {each.text: int(accounts.kernels_ns[each]) for each in Category}
    if not cells:
        assert not any(by_kernels.values())
        return False
    timeline = device_timeline(spans)
    lanes = timeline.lanes
    if len({lane.rank for lane in lanes}) < len(lanes):
        return False  # said on the page: several devices of one rank count once
    if "Device work before or after" in table.note:
        return False
    if accounts.job_ns[:, [Category.EVALUATION, Category.WARM_UP]].any():
        return False  # said on the page: all in these belongs to them
    busy, gaps = sum(cells[name] for name in BUSY), sum(causes.values())
    assert sum(by_kernels.values()) == busy + gaps - accounts.idle_ns
    assert accounts.idle_ns == 0 or "which count as what the host did then" in table.note
    known = {category_of(span.name) for span in spans if span.kind in ("stage", "region")}
    assert accounts.idle_ns == 0 or known - {NO_CATEGORY, Category.COMPUTE}
    launched = {code for lane in lanes for code in lane.work.stage.tolist() if code >= 0}
    if {category_of(timeline.stages[code]) for code in launched} - {NO_CATEGORY, Category.COMPUTE}:
        return False  # said on the page: work that a rollout launched belongs to it
    assert by_kernels["compute"] == cells["compute"]
    assert by_kernels["exposed memcpy"] == cells["exposed memcpy"]
    for name in ("host-bound idle", "launch latency", "unattributed idle"):
        assert by_kernels[name] <= causes[name] <= by_kernels[name] + accounts.idle_ns
    if accounts.idle_ns == 0:
        waits = by_kernels["collective wait"] - causes["collective wait"]
        assert by_kernels["exposed communication"] + waits == cells["exposed communication"]
    return True


SHARES = {
    "communication": Category.COMMUNICATION,
    "unmatched-collectives": Category.COMMUNICATION,
    "collective-wait": Category.COLLECTIVE_WAIT,
    "memcpy": Category.MEMCPY,
    "launch-latency": Category.LAUNCH_LATENCY,
    "unattributed-idle": Category.UNATTRIBUTED_IDLE,
}


def check_findings(spans: Spans) -> None:
    """What is said to be lost of a category that kernels show is at most the ledger's total."""
    accounts = compute_accounts(spans)
    for name, category in SHARES.items():
        for own in found(spans, name):
            if accounts.sources.get(category) == "kernels" and not len(spans.rows(kind="step")):
                assert own.weight <= 1.01 * accounts.job_ns[:, category].sum()
            if name == "unmatched-collectives":
                assert "have no counterpart" in ledger(spans).note
    if device_timeline(spans).lanes:
        assert findings(spans).abstained is None


def check_path(spans: Spans) -> None:
    """The path lies in the profiled time: on it no kind of work takes longer than it ran."""
    parts = totals(device_critical_path(spans), "part")
    cells = whole(spans)
    ran = {
        "kernel": cells.get("compute", 0),
        "communication": cells.get("exposed communication", 0)
        + cells.get("overlapped communication", 0),
        "copy": cells.get("exposed memcpy", 0) + cells.get("overlapped memcpy", 0),
    }
    for part, ns in ran.items():
        assert parts[part] <= ns
    if not cells:
        assert device_critical_path(spans).abstained is not None


def check_first_screen(spans: Spans) -> None:
    cells, found = whole(spans), summary(spans, captures=True)
    if len(spans.rows(kind="stage")) or not cells:
        assert not found.device
        return
    assert found.device == {
        name: cells[name] / cells["wall"] for name in (*BUSY, "idle", "unknown") if cells[name]
    }
    causes = totals(idle(spans), "kind").most_common()
    if causes:
        assert found.idle_cause in {cause for cause, ns in causes if ns == causes[0][1]}


def check_ranks(spans: Spans) -> None:
    """All name the ranks without device work in the same words."""
    notes = [table.note for table in (breakdown(spans), idle(spans)) if table.abstained is None]
    if notes:
        text = "Device work was recorded on"
        tables = [*notes, ledger(spans).note]
        assert len({text in note for note in tables}) == 1


CHECKS = [
    *(check_idle, check_ledger, check_findings),
    *(check_path, check_first_screen, check_ranks),
]


@settings(max_examples=examples(150), deadline=None)
@given(jobs())
def test_of_random_runs_and_traces_all_say_the_same(job: Job) -> None:
    spans = spans_of(job)
    for check in CHECKS:
        check(spans)


@cache
def loaded(name: str) -> Spans:
    return load(SHARED_DATA / name)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
@pytest.mark.deep
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", TRACES)
def test_of_real_traces_all_say_the_same(name: str, check: Any) -> None:
    check(loaded(name))


def test_random_jobs_cover_what_the_checks_compare() -> None:
    """Without this, a builder that draws no idle time would let everything pass."""
    seen: Counter[str] = Counter()

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(jobs())
    def look(job: Job) -> None:
        spans = spans_of(job)
        cells, causes = whole(spans), totals(idle(spans), "kind")
        seen.update(name for name, ns in (cells | causes).items() if ns)
        seen["compared"] += check_ledger(spans)

    look()
    assert {*BUSY, "idle", "unknown", *IDLE[:2], IDLE[3]} <= {*seen}
    assert min(seen[name] for name in (*BUSY, "compared")) > 5
