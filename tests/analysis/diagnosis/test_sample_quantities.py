"""Growing memory is a finding without a cost in time; setup, plateaus and noise are not findings.

A straggler is a finding on exactly that rank; inconclusive verdicts are not findings.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.findings.finding import Finding, NotChecked, RunData
from lightning_rlprof.analysis.findings.run_evidence import (
    hangs,
    memory_growth,
    out_of_memory,
    slow_ranks,
    straggler_finding,
)
from lightning_rlprof.analysis.stragglers.verdicts import SLOW_HOST, SLOW_UNCOUNTED
from lightning_rlprof.records.notes import Code
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import RankNote, Spans
from tests.builders.device_trace import Cells, table, thinned
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play, without

COLUMNS = ("rank", "device", "component", "time", "allocated", "reserved")
GIB, MIB = 2**30, 2**20
STEP_NS = 1_000_000


def counted(held: list[int], ranks: int = 1) -> Spans:
    """Return steps that counted what the device held as they ended; of rank 1 half of that."""
    return loaded(
        *(
            [
                Row(
                    "step",
                    "step",
                    at + 1,
                    at * STEP_NS,
                    (at + 1) * STEP_NS,
                    counters={"device_allocated_bytes": bytes_ // (rank + 1)},
                )
                for at, bytes_ in enumerate(held)
            ]
            for rank in range(ranks)
        )
    )


def sampled(held: list[int]) -> list[Cells]:
    """Return the table of a device tool: three samples a step, the lowest in the middle."""
    return [
        {
            **{"rank": 0, "device": 0, "component": "CUDA", "reserved": 9 * GIB},
            **{"time": at * STEP_NS + part * 250_000, "allocated": bytes_ + more},
        }
        for at, bytes_ in enumerate(held)
        for part, more in ((1, GIB), (2, 0), (3, GIB // 2))
    ]


def with_table(rows: list[Cells], steps: int) -> Spans:
    marks = [Row("step", "step", n + 1, n * STEP_NS, (n + 1) * STEP_NS) for n in range(steps)]
    return replace(loaded(marks), tables={"memory": lambda: table("memory", COLUMNS, rows)})


def leaking(steps: int = 24) -> list[int]:
    return [4 * GIB + 50 * MIB * at for at in range(steps)]


def results(spans: Spans) -> list[Finding | NotChecked]:
    return list(memory_growth(RunData(spans)))


def test_it_fires_on_a_leak_that_spans_counted_and_its_link_returns_the_samples() -> None:
    spans = counted(leaking(), ranks=2)
    (claim,) = results(spans)
    assert isinstance(claim, Finding)
    assert claim.title == "Memory grows every step: torch on rank 0 and 1 more"
    assert (claim.cost, claim.low, claim.high) == (None, None, None)
    assert claim.evidence.startswith("50 MiB per step (99% CI 50–50) over 24 steps")
    found = Run.of(spans).sql(claim.query)
    assert found.column("step") == list(range(1, 25))
    assert found.column("device_allocated_bytes") == leaking()
    assert claim.place is not None
    assert (claim.place.rank, claim.place.step) == (0, 24)


def test_it_fires_on_a_leak_in_a_tools_table_and_its_link_returns_the_samples() -> None:
    spans = with_table(sampled(leaking()), 24)
    (claim,) = results(spans)
    assert isinstance(claim, Finding)
    assert "50 MiB per step" in claim.evidence
    assert len(Run.of(spans).sql(claim.query).rows) == 3 * 24


def test_its_evidence_names_the_stage_that_leaks() -> None:
    rows = [
        Row(name, kind, at + 1, at * STEP_NS + start, at * STEP_NS + end, counters=counts)  # type: ignore[arg-type]
        for at, bytes_ in enumerate(leaking(30))
        for name, kind, start, end, own in (
            ("actor_generate", "stage", 0, 10, bytes_),
            ("actor_update", "stage", 10, 20, bytes_ + 50 * MIB),
            ("step", "step", 0, STEP_NS, bytes_ + 50 * MIB),
        )
        for counts in [{"host_rss_bytes": own}]
    ]
    (claim,) = results(loaded(rows))
    assert isinstance(claim, Finding)
    assert claim.evidence.endswith("over 30 steps, added by actor_update")


@pytest.mark.parametrize(
    "held",
    [
        [4 * GIB] * 24,
        [4 * GIB + at * 1_000 for at in range(24)],
        [4 * GIB - at * 50 * MIB for at in range(24)],
    ],
)
def test_it_is_silent_where_nothing_grows_that_matters(held: list[int]) -> None:
    assert results(counted(held)) == []


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (leaking(15), "needs 16 steps with memory data, has 15"),
        ([GIB + 200 * MIB * min(at, 14) for at in range(24)], "it nearly stopped"),
        (
            [4 * GIB + int(e) for e in np.random.default_rng(1).normal(0, 2e9, 24)],
            "steps differ too much",
        ),
    ],
)
def test_it_abstains_where_steps_are_few_or_it_stopped_or_is_noise(
    held: list[int], why: str
) -> None:
    (found,) = results(counted(held))
    assert isinstance(found, NotChecked)
    assert why in found.why


def test_where_no_memory_was_recorded_it_says_nothing() -> None:
    assert results(loaded([Row("step", "step", 1, 0, 9)])) == []


@pytest.mark.parametrize("seed", range(40))
def test_noise_is_never_a_leak_also_where_a_fifth_of_it_is_lost(seed: int) -> None:
    random = np.random.default_rng(seed)
    held = [4 * GIB + int(each) for each in random.normal(0, GIB, 40)]
    rows = thinned(sampled(held), 0.2, seed)
    assert not [each for each in results(with_table(rows, 40)) if isinstance(each, Finding)]


ROW: dict[str, Any] = {
    "rank": None,
    "verdict": SLOW_HOST,
    "slowdown": None,
    "stages": "not known",
    "peer time lost": 5_000,
    "steps": "2-9",
    "CI low": None,
    "CI high": None,
    "p-value": 0.001,
    "group": "actor ranks 1, 2",
}


def test_it_fires_on_the_slow_rank_with_a_price_and_a_link_to_its_stages() -> None:
    spans = play(Script(slow={3: 0.2}), 5).spans
    (claim,) = slow_ranks(RunData(spans))
    assert claim.title.startswith("Rank 3 is a straggler (slow")
    assert claim.cost is not None
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low < claim.cost < claim.high
    found = Run.of(spans).sql(claim.query)
    assert set(found.column("rank")) == {3}
    assert set(found.column("kind")) == {"stage"}
    assert claim.place is not None
    assert (claim.place.rank, claim.place.from_ns) == (3, found.column("start_ns")[0])


@pytest.mark.parametrize("script", [Script(), Script(uneven=0.3), Script(more={2: 1.5})])
def test_it_is_silent_without_a_straggler_or_with_load_imbalance(script: Script) -> None:
    assert list(slow_ranks(RunData(play(script, 5).spans))) == []


def test_it_abstains_with_too_few_steps() -> None:
    assert list(slow_ranks(RunData(play(Script(slow={3: 0.3}, steps=8), 5).spans))) == []


def test_where_one_of_several_is_meant_all_are_named_and_it_is_less_sure() -> None:
    spans = play(Script(ranks=4, steps=12), 1).spans
    claim = straggler_finding(spans, ROW)
    assert claim.title == "One of ranks 1, 2 is a straggler (slow host)"
    assert (claim.cost, claim.low, claim.high, claim.confidence) == (5_000, None, None, "medium")
    found = Run.of(spans).sql(claim.query)
    assert set(found.column("rank")) == {1, 2}
    assert set(found.column("step")) == set(range(2, 10))
    single = straggler_finding(
        spans, {**ROW, "rank": 1, "verdict": SLOW_UNCOUNTED, "group": "actor"}
    )
    assert single.confidence == "medium", "the work was not counted"


@pytest.mark.parametrize("seed", range(5))
def test_deleting_a_fifth_of_the_events_of_a_healthy_run_names_no_rank(seed: int) -> None:
    spans = without(play(Script(uneven=0.3, steps=40), seed).spans, 0.2, seed)
    assert list(slow_ranks(RunData(spans))) == []


def stopped(status: str | None) -> Spans:
    """Return a run whose second step ended with that status, in its second stage."""
    held = {"device_allocated_bytes": 3 * GIB}
    rows = [
        Row("actor_generate", "stage", 1, 0, 400_000),
        Row("step", "step", 1, 0, STEP_NS),
        Row("actor_generate", "stage", 2, STEP_NS, 1_400_000, counters=held),
        Row("actor_update", "stage", 2, 1_400_000, 1_500_000),
        Row("step", "step", 2, STEP_NS, 1_500_000, counters={"interrupted": 1}),
    ]
    return replace(loaded(rows), statuses={0: status})


def test_a_rank_out_of_memory_is_named_with_its_step_its_stage_and_its_last_memory() -> None:
    (found,) = out_of_memory(RunData(stopped("interrupted by OutOfMemoryError")))
    assert isinstance(found, Finding)
    assert found.title == "Rank 0 ran out of memory in step 2, in or after actor_update"
    assert (
        found.evidence == "it raised OutOfMemoryError; torch memory 3,072 MiB after actor_generate"
    )
    assert found.cost is None


HUNG = (
    RankNote(1, 7, "warning", "", Code.NO_PROGRESS, {"quiet_s": 300.0, "span": "a, b", "step": 3}),
    RankNote(0, 8, "warning", "", Code.NO_PROGRESS, {"quiet_s": 301.0, "step": 3}),
)


def test_a_hang_that_did_not_end_is_named_with_the_place_of_each_rank() -> None:
    (found,) = hangs(RunData(replace(stopped(None), notes=HUNG)))
    assert isinstance(found, Finding)
    assert found.title == "The run hung in step 3"
    assert found.evidence == (
        "rank 0 made no progress for 301 s; rank 1 made no progress for 300 s in a, b"
    )


def test_of_many_ranks_that_hang_the_first_are_named() -> None:
    notes = [HUNG[1]._replace(rank=rank) for rank in range(9)]
    (found,) = hangs(RunData(replace(stopped(None), notes=tuple(notes))))
    assert isinstance(found, Finding)
    assert found.evidence.endswith("rank 3 made no progress for 301 s; and 5 more ranks")


def test_a_hang_that_ended_is_no_finding() -> None:
    again = RankNote(0, 9, "info", "", Code.PROGRESS_AGAIN, {"quiet_s": 310.0})
    assert hangs(RunData(replace(stopped(None), notes=(HUNG[1], again)))) == []
    assert hangs(RunData(replace(stopped("finished"), notes=HUNG[1:]))) == []
    assert hangs(RunData(stopped(None))) == []


@pytest.mark.parametrize("status", ["finished", "interrupted by KeyboardInterrupt", None])
def test_a_rank_that_ended_otherwise_is_not_out_of_memory(status: str | None) -> None:
    assert not out_of_memory(RunData(stopped(status)))
