"""A category is reported only for its own time; lost events never add a finding."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_rlprof.analysis.device.launches import UnmatchedLaunches, unmatched_launches
from lightning_rlprof.analysis.findings.finding import KERNELS_LOST, Finding, NotChecked, RunData
from lightning_rlprof.analysis.findings.rules import CATEGORY_RULES
from lightning_rlprof.analysis.findings.run_evidence import category_shares
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.tables.spans import Spans
from tests.builders.device_trace import CALLS, KERNELS, Cells, table, thinned
from tests.builders.runs import Row, header, loaded
from tests.builders.scripted import Script, play, without

STEP_NS = 1_000_000
PIECE_NS = 10_000
MOVES = "Communication is not overlapped"
WAITS = "Ranks wait for the slowest one"
UNTRACED = "A large share of the time is untraced"


def device(compute: float = 1.0, talk: float = 0.0) -> tuple[list[Cells], list[Cells]]:
    """Return kernels and launches of 12 steps: collectives at their start, compute to the end."""
    kernels: list[Cells] = []
    for at in range(12 * STEP_NS // PIECE_NS):
        start = at * PIECE_NS
        part = start % STEP_NS / STEP_NS
        for stream, name, share in ((7, "gemm", compute), (9, "ncclDevKernel_AllReduce", talk)):
            if (part >= 1 - share) if stream == 7 else (part < share):
                place = {"rank": 0, "device": 0, "stream": stream, "kernel": name}
                time = {"start": start, "duration": PIECE_NS, "launch": max(0, start - 5_000)}
                kernels.append({**place, **time, "launch": time["launch"] + stream})
    calls = [
        {"rank": 0, "name": "cudaLaunchKernel", "kind": "runtime", "start": row["launch"]}
        for row in kernels
    ]
    return kernels, [{**call, "duration": 100} for call in calls]


def trained(kernels: Sequence[Cells], calls: Sequence[Cells] = ()) -> Spans:
    rows = []
    for number in range(1, 13):
        start, end = (number - 1) * STEP_NS, number * STEP_NS
        rows += [Row("step", "step", number, start, end)]
        rows += [Row("actor_update", "stage", number, start, end)]
    tables = {"kernels": lambda: table("kernels", KERNELS, kernels)}
    if calls:
        tables["calls"] = lambda: table("calls", CALLS, calls)
    return replace(loaded(rows), tables=tables)


def results(spans: Spans) -> list[Finding | NotChecked]:
    return list(category_shares(RunData(spans)))


def claims(spans: Spans) -> set[str]:
    return {each.title for each in results(spans) if isinstance(each, Finding)}


def why(spans: Spans, rule: str) -> str:
    return next(
        each.why for each in results(spans) if isinstance(each, NotChecked) and each.rule == rule
    )


def test_exposed_transfer_by_kernels_is_charged_from_its_threshold_where_none_are_lost() -> None:
    kernels, calls = device(compute=0.85, talk=0.15)
    assert claims(trained(kernels, calls)) == {MOVES}


def test_if_lost_kernels_cannot_be_detected_the_threshold_is_a_fifth() -> None:
    kernels, _ = device(compute=0.85, talk=0.15)
    assert claims(trained(kernels)) == set()
    kernels, _ = device(compute=0.7, talk=0.3)
    assert claims(trained(kernels)) == {MOVES}


def test_where_kernels_were_lost_it_abstains() -> None:
    kernels, calls = device(compute=0.7, talk=0.3)
    spans = trained(thinned(kernels, 0.2, 1), calls)
    assert claims(spans) == set()
    assert why(spans, "exposed communication") == KERNELS_LOST
    assert unmatched_launches(spans) == UnmatchedLaunches(
        len(calls), len(calls) - len(thinned(kernels, 0.2, 1))
    )


UNKNOWN_SPLIT = "Collectives are not overlapped with compute; transfer or waiting is unknown"


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_without_enough_steps_the_parts_of_the_captured_time_decide(steps: int) -> None:
    kernels, calls = device(compute=0.5, talk=0.5)
    spans = trained(kernels, calls)
    keep = [each for each in spans if each.kind != "step" or each.step <= steps]
    rows = [Row(each.name, each.kind, each.step, each.start_ns, each.end_ns) for each in keep]
    spans = replace(loaded(rows), tables=spans.tables)
    (found,) = (each for each in results(spans) if isinstance(each, Finding))
    assert found.title == MOVES
    totals = dict(zip(*(ledger(spans).column(name) for name in ("category", "total")), strict=True))
    assert found.cost == totals["exposed communication"]
    assert found.evidence == "50% of the captured time"


def test_of_one_rank_of_eight_it_is_not_said_that_collectives_move_data() -> None:
    kernels, calls = device(compute=0.5, talk=0.5)
    spans = trained(kernels, calls)
    alone = replace(spans, headers={0: header(0, 8)})
    assert claims(alone) == {UNKNOWN_SPLIT, UNTRACED}
    assert "Device work was recorded on rank 0 only, of 8 ranks." in ledger(alone).note
    assert UNKNOWN_SPLIT in claims(replace(spans, headers={0: header(0, 1, config={})}))


def fed(late: int | None, count: int = 1_000) -> Spans:
    """Return a device that runs half of the time, and when its work was launched."""
    kernels = [
        {
            **{"rank": 0, "device": 0, "stream": 7, "kernel": "gemm", "start": at * PIECE_NS},
            **{"duration": PIECE_NS // 2, "launch": late and max(0, at * PIECE_NS - late)},
        }
        for at in range(count)
    ]
    return trained(kernels)


def test_idle_time_that_launches_take_or_nothing_explains_is_a_finding_of_its_own() -> None:
    launches, unknown = (
        CATEGORY_RULES[each].title for each in (Category.LAUNCH_LATENCY, Category.UNATTRIBUTED_IDLE)
    )
    assert claims(fed(PIECE_NS)) == {launches}
    assert claims(fed(None)) == {unknown}
    kernels, calls = device(compute=1.0)
    assert claims(trained(kernels, calls)) == set()
    assert why(fed(None, 150), "unattributed idle") == "needs 200 kernels, has 150"


def test_if_kernels_show_the_host_the_category_is_not_checked() -> None:
    kernels, calls = device(compute=0.5)
    spans = trained(kernels, calls)
    assert claims(spans) == set()
    assert not any("host" in each[0] for each in results(spans))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("known", [False, True])
def test_losing_a_fifth_of_the_kernels_blames_no_collective_that_was_hidden(
    seed: int, known: bool
) -> None:
    kernels, calls = device(compute=1.0, talk=1.0)
    lost = thinned(kernels, 0.2, seed)
    assert claims(trained(lost, thinned(calls, 0.2, seed + 50) if known else ())) == set()


def meeting(late: float, count: int = 4, steps: int = 30) -> Spans:
    """Return ranks that meet at each step's end, to which the last one comes late."""
    ranks = []
    for rank in range(count):
        rows = []
        for number in range(1, steps + 1):
            start, end = (number - 1) * STEP_NS, number * STEP_NS
            came = end - 10_000 - (0 if rank == count - 1 else int(late * STEP_NS))
            rows += [Row("step", "step", number, start, end)]
            rows += [Row("actor_update", "stage", number, start, came)]
            rows += [Row("all_reduce", "region", number, came, end)]
        ranks.append(rows)
    return loaded(*ranks)


def test_waiting_is_charged_to_waiting() -> None:
    assert claims(meeting(0.4)) == {WAITS}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spans", [meeting(0.4), meeting(0.95, 8, 300)], ids=["few", "many"])
def test_losing_a_fifth_of_the_spans_never_turns_waiting_into_transfer(
    spans: Spans, seed: int
) -> None:
    assert claims(without(spans, 0.2, seed)) <= {WAITS, UNTRACED}


@pytest.mark.parametrize("seed", range(20))
def test_losing_a_fifth_of_the_spans_adds_no_claim_but_that_they_are_missing(seed: int) -> None:
    spans = play(Script(uneven=0.3, steps=40, slow={1: 0.1} if seed % 2 else {}), seed).spans
    assert claims(without(spans, 0.2, seed)) <= claims(spans) | {UNTRACED}
