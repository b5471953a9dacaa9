"""Growing memory is a finding without a cost in time; setup, plateaus and noise are not findings.

A straggler is a finding on exactly that rank; inconclusive verdicts are not findings.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.diagnosis.evidence import Evidence
from lightning_rlprof.analysis.diagnosis.problem import Finding, Undecided
from lightning_rlprof.analysis.diagnosis.step_quantities import slow_rank
from lightning_rlprof.analysis.stragglers.verdicts import SLOW_HOST, SLOW_UNCOUNTED
from lightning_rlprof.records.notes import Code
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import RankNote, Spans
from tests.builders.advised import Fact, advised
from tests.builders.diagnosed import found, judged, only, why
from tests.builders.runs import Row, header, loaded
from tests.builders.sampled import sampled_run
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


def leaking(steps: int = 24) -> list[int]:
    return [4 * GIB + 50 * MIB * at for at in range(steps)]


def results(spans: Spans) -> list[Finding | Undecided]:
    return judged(spans, "memory-growth")


def test_it_fires_on_a_leak_that_spans_counted_and_its_link_returns_the_samples() -> None:
    spans = counted(leaking(), ranks=2)
    (claim,) = results(spans)
    assert isinstance(claim, Finding)
    values = {name: fact.value for name, fact in claim.by_name.items()}
    assert (values["component"], values["rank"], values["ranks"]) == ("torch", 0, 2)
    assert values["growth per step"] == pytest.approx(50 * MIB)
    assert claim.price is None
    rows = Run.of(spans).sql(claim.query)
    assert rows.column("step") == list(range(1, 25))
    assert rows.column("device_allocated_bytes") == leaking()
    assert claim.place is not None
    assert (claim.place.rank, claim.place.step) == (0, 24)


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
    assert claim.by_name["added by"].value == "actor_update"


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
    ("held", "reason"),
    [
        (leaking(15), "15 steps with memory; 16 are needed"),
        ([GIB + 200 * MIB * min(at, 14) for at in range(24)], "steps differ too much"),
        (
            [4 * GIB + int(e) for e in np.random.default_rng(1).normal(0, 2e9, 24)],
            "steps differ too much",
        ),
    ],
)
def test_it_abstains_where_steps_are_few_or_it_stopped_or_is_noise(
    held: list[int], reason: str
) -> None:
    assert reason in why(counted(held), "memory-growth")


def test_where_no_memory_was_recorded_it_is_undecided() -> None:
    assert (
        why(loaded([Row("step", "step", 1, 0, 9)]), "memory-growth")
        == "No memory of steps was recorded"
    )


@pytest.mark.parametrize("seed", range(40))
def test_noise_is_never_a_leak(seed: int) -> None:
    random = np.random.default_rng(seed)
    held = [4 * GIB + int(each) for each in random.normal(0, GIB, 40)]
    assert not [each for each in results(counted(held)) if isinstance(each, Finding)]


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
    claim = only(spans, "straggler")
    assert claim.by_name["rank"].value == 3
    assert claim.price is not None
    assert (claim.price.kind, claim.price.low) == ("lost", None), "what was lost is exact"
    rows = Run.of(spans).sql(claim.query)
    assert set(rows.column("rank")) == {3}
    assert set(rows.column("kind")) == {"stage"}
    assert claim.place is not None
    assert (claim.place.rank, claim.place.from_ns) == (3, rows.column("start_ns")[0])


@pytest.mark.parametrize("script", [Script(), Script(uneven=0.3), Script(more={2: 1.5})])
def test_it_is_silent_without_a_straggler_or_with_load_imbalance(script: Script) -> None:
    assert judged(play(script, 5).spans, "straggler") == []


def test_it_abstains_with_too_few_steps() -> None:
    assert judged(play(Script(slow={3: 0.3}, steps=8), 5).spans, "straggler") == []


def test_where_one_of_several_is_meant_all_are_named_and_it_is_less_sure() -> None:
    spans = play(Script(ranks=4, steps=12), 1).spans
    run = Evidence(spans)
    claim = slow_rank(run, ROW)
    assert (claim.facts[0].name, claim.facts[0].value) == ("one of ranks", "1, 2")
    assert (claim.lost_ns, claim.confidence) == (5_000, "medium")
    rows = Run.of(spans).sql(claim.query)
    assert set(rows.column("rank")) == {1, 2}
    assert set(rows.column("step")) == set(range(2, 10))
    single = slow_rank(run, {**ROW, "rank": 1, "verdict": SLOW_UNCOUNTED, "group": "actor"})
    assert single.confidence == "medium", "the work was not counted"


@pytest.mark.parametrize("seed", range(5))
def test_deleting_a_fifth_of_the_events_of_a_healthy_run_names_no_rank(seed: int) -> None:
    spans = without(play(Script(uneven=0.3, steps=40), seed).spans, 0.2, seed)
    assert judged(spans, "straggler") == []


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


def test_a_rank_out_of_memory_is_named_with_its_step_and_its_stage() -> None:
    own = only(stopped("interrupted by OutOfMemoryError"), "out-of-memory")
    values = {name: fact.value for name, fact in own.by_name.items()}
    assert (values["rank"], values["step"], values["stage"]) == (0, 2, "actor_update")
    assert own.price is None


@pytest.mark.parametrize("status", ["finished", "interrupted by KeyboardInterrupt", None])
def test_a_rank_that_ended_otherwise_is_not_out_of_memory(status: str | None) -> None:
    assert judged(stopped(status), "out-of-memory") == []


def test_a_note_that_contains_the_words_ends_no_run() -> None:
    """Advice put "a rank ran out of memory" first for a CPU run that finished."""
    note = RankNote(0, 0, "info", "this says what happens when a device is out of memory")
    assert judged(replace(stopped("finished"), notes=(note,)), "out-of-memory") == []


# ---- samples


def samples(*fates: tuple[str, int], tokens: int = 100, **counters: float) -> Spans:
    """Return a run with so many samples of each fate in each step."""
    own = {"tokens": tokens, **counters}
    spans = {"actor_generate": 0.6, "actor_update": 0.4}
    return advised(Fact(spans=spans, samples=[(fate, own) for fate, n in fates for _ in range(n)]))


def test_a_share_of_responses_at_their_limit_fires_and_few_or_none_do_not() -> None:
    own = only(samples(("truncated", 1), ("trained", 3)), "clipped-responses")
    assert [each.value for each in own.facts if "limit" in each.name] == [0.25]
    below = samples(("trained", 4), tokens=99, response_limit=100)
    assert found(below, "clipped-responses") == []
    assert "no limit was counted" in why(samples(("trained", 4)), "clipped-responses")


def test_tokens_that_train_nothing_fire() -> None:
    own = only(samples(("stale", 2), ("trained", 4)), "discarded-samples")
    assert [each.value for each in own.facts] == [pytest.approx(1 / 3)]
    assert judged(samples(("trained", 4)), "discarded-samples") == []


@pytest.mark.parametrize("behind", [1, 4])
def test_old_samples_fire_beyond_two_versions(behind: int) -> None:
    spans = samples(("trained", 4), version=3, trainer_version=3 + behind)
    assert bool(judged(spans, "stale-samples")) == (behind > 2)


def test_preempted_requests_fire() -> None:
    half = {"actor_generate": 0.6, "actor_update": 0.4}
    for number in (0, 3):
        counters = {"actor_generate": {"num_preempted": number}}
        spans = advised(Fact(spans=half, counters=counters))
        assert bool(judged(spans, "preemptions")) == bool(number)
    assert "not counted" in why(advised(Fact(spans=half)), "preemptions")


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_preempted_requests_of_a_sampled_engine_fire(rate: float) -> None:
    spans = sampled_run([(0, None, {"engine_preemptions_per_s": [rate] * 100})])
    assert bool(found(spans, "preemptions")) == bool(rate)
    assert not rate or only(spans, "preemptions").facts[0].value == pytest.approx(0.5)


def test_preemptions_of_several_engines_are_added_up_in_the_steps_that_were_sampled() -> None:
    """Two engines that preempt 2 and 1 a second, of which 50 of 100 steps know."""
    rates: list[float | None] = [None] * 50
    both = [
        (0, at, {"engine_preemptions_per_s": rates + [rate] * 50})
        for at, rate in ((0, 2.0), (1, 1.0))
    ]
    assert only(sampled_run(both), "preemptions").facts[0].value == pytest.approx(3.0)


@pytest.mark.parametrize("free", [0.05, 0.5])
def test_host_memory_near_its_limit_fires(free: float) -> None:
    spans = advised(Fact(spans={"actor_update": 1.0}, free_host=free))
    assert bool(judged(spans, "host-memory-full")) == (free < 0.1)


# ---- lost data


def test_missing_ranks_and_lost_lines_are_data_that_is_lost() -> None:
    spans = loaded([Row("step", "step", 1, 0, 9)])
    assert judged(spans, "lost-data") == []
    half = replace(spans, headers={0: header(0, 2)})
    assert only(half, "lost-data").by_name["missing ranks"].value == "1"
    note = RankNote(0, 0, "error", "in words", Code.LINES_LOST, {"lines": 7})
    lost = only(replace(spans, notes=(note,)), "lost-data")
    assert lost.by_name["ranks that lost lines"].value == "0"


def test_an_external_trace_of_one_rank_lost_nothing() -> None:
    spans = loaded([Row("step", "step", 1, 0, 9)])
    alone = replace(spans, headers={0: header(0, 8, config={})})
    assert judged(alone, "lost-data") == []
