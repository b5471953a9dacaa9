"""A category is reported only for its own time; lost events never add a finding."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightning_rlprof.analysis.device.losses import launch_match
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.diagnosis.evidence import Evidence
from lightning_rlprof.analysis.diagnosis.problem import Finding, Undecided
from lightning_rlprof.analysis.diagnosis.step_quantities import lost_in_steps
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.records.notes import Code
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Counter, RankNote, Spans
from tests.analysis.steps.test_waiting import Job
from tests.builders.device_trace import CALLS, KERNELS, Cells, table, thinned
from tests.builders.diagnosed import judged, only
from tests.builders.pairs import run_of
from tests.builders.runs import Row, header, loaded
from tests.builders.scripted import Script, play, without

STEP_NS = 1_000_000
PIECE_NS = 10_000
MOVES, WAITS, UNTRACED = "communication", "collective-wait", "untraced"
UNKNOWN_SPLIT = "unmatched-collectives"
SHARES = (
    *("communication", "unmatched-collectives", "collective-wait", "memcpy", "launch-latency"),
    *("unattributed-idle", "host-work", "rollout", "rollout-tail", "weight-sync", "reward"),
    *("data-wait", "backpressure", "offload", "checkpoint-eval", "untraced"),
)


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


def results(spans: Spans) -> list[Finding | Undecided]:
    return judged(spans, *SHARES)


def claims(spans: Spans) -> set[str]:
    return {each.id for each in results(spans) if isinstance(each, Finding)}


def why(spans: Spans, name: str) -> str:
    found = {each.id: each for each in results(spans) if isinstance(each, Undecided)}
    return found[name].why


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
    assert "launches have no kernel" in why(spans, MOVES)
    lost = len(calls) - len(thinned(kernels, 0.2, 1))
    assert launch_match(spans)[:2] == (len(calls), lost)


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_without_enough_steps_the_parts_of_the_captured_time_decide(steps: int) -> None:
    kernels, calls = device(compute=0.5, talk=0.5)
    spans = trained(kernels, calls)
    keep = [each for each in spans if each.kind != "step" or each.step <= steps]
    rows = [Row(each.name, each.kind, each.step, each.start_ns, each.end_ns) for each in keep]
    spans = replace(loaded(rows), tables=spans.tables)
    (found,) = (each for each in results(spans) if isinstance(each, Finding))
    assert found.id == MOVES
    assert found.by_name["of the captured time"].value == pytest.approx(0.5)
    assert found.price is not None
    assert found.price.share == pytest.approx(0.5, rel=0.02), "what is captured stands for the job"


def test_of_one_rank_of_eight_it_is_not_said_that_collectives_move_data() -> None:
    kernels, calls = device(compute=0.5, talk=0.5)
    spans = trained(kernels, calls)
    alone = replace(spans, headers={0: header(0, 8)})
    assert claims(alone) == {UNKNOWN_SPLIT}
    assert "Device work was recorded on 1 of 8 ranks." in ledger(alone).note
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
    assert claims(fed(PIECE_NS)) == {"launch-latency"}
    assert claims(fed(None)) == {"unattributed-idle"}
    kernels, calls = device(compute=1.0)
    assert claims(trained(kernels, calls)) == set()
    assert why(fed(None, 150), "unattributed-idle").startswith("150 kernels")


def test_if_kernels_show_the_host_the_category_is_not_checked() -> None:
    kernels, calls = device(compute=0.5)
    spans = trained(kernels, calls)
    assert claims(spans) == set()
    assert why(spans, "host-work") == "Kernels show it instead"


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


# ---- waiting for a CPU, and what that explains

CPU_WAITS = "cpu-contention"
USUAL = 1e8


def with_cpu_waits(spans: Spans, ns: np.ndarray) -> Spans:
    """Return the run with what each step waited, one value per row of a step."""
    rows = spans.rows(kind="step")
    return replace(spans, counters={"cpu_wait_ns": Counter(rows, np.asarray(ns, np.int64))})


def ids(spans: Spans) -> list[str]:
    return [each.id for each in diagnose(spans).found]


def undecided(spans: Spans) -> dict[str, str]:
    return {each.id: each.why for each in diagnose(spans).undecided}


def slow_steps(kind: str) -> np.ndarray:
    times = USUAL * np.exp(np.random.default_rng(1).normal(0, 0.02, 60))
    times[slice(40, 41) if kind == "outlier" else slice(40, None)] *= 5
    return times


@pytest.mark.parametrize("kind", ["outlier", "level"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4, 0.0])
def test_a_slow_step_is_listed_unless_half_of_it_was_waiting_for_a_cpu(
    kind: str, share: float
) -> None:
    times = slow_steps(kind)
    spans = with_cpu_waits(run_of({"a": times}), share * np.maximum(times - USUAL, 0))
    name = "outlier-step" if kind == "outlier" else "slower-since"
    assert (name in ids(spans)) == (share < 0.5)
    meanwhile = "Training threads waited for a CPU meanwhile"
    assert (undecided(spans).get(name) == meanwhile) == (share > 0.5)


def test_waiting_for_a_cpu_all_the_time_explains_no_single_step() -> None:
    spans = with_cpu_waits(run_of({"a": slow_steps("outlier")}), np.full(60, 0.5 * USUAL))
    assert ids(spans)[:2] == [CPU_WAITS, "outlier-step"]


def test_a_step_that_says_it_tells_of_those_before_it_by_their_lengths() -> None:
    """A reading takes longer than some steps, which then have none."""
    told = {(0, 4): 30, (0, 8): 50, (1, 2): 70}  # ns by rank and step
    ranks: list[list[Row]] = [[], []]
    for rank, rows in enumerate(ranks):
        end = 0
        for step in range(1, 11):
            start, end = end, end + 1000 * (1 + (3 * step + rank) % 4)
            waited = {"cpu_wait_ns": told[rank, step]} if (rank, step) in told else None
            rows.append(Row("step", "step", step, start, end, counters=waited))
    lost = lost_in_steps(Evidence(loaded(*ranks)), "cpu_wait_ns")
    assert lost is not None
    for (rank, last), ns in told.items():
        first = max((step + 1 for other, step in told if other == rank and step < last), default=1)
        some = (lost.steps >= first) & (lost.steps <= last)
        own, wall = lost.ns[some, rank], lost.wall_ns[some, rank]
        np.testing.assert_allclose(own, ns * wall / wall.sum(), atol=0.5)
    assert (lost.wall_ns > 0).sum(axis=0).tolist() == [8, 2]


def test_the_wait_of_ranks_for_one_without_a_cpu_is_not_listed() -> None:
    job = Job(3, uneven=True)
    steps = job.spans.rows(kind="step")
    assert ids(job.spans)[0] == WAITS
    late = 20e6 * np.random.default_rng(2).integers(0, 2, len(steps))
    assert WAITS not in ids(with_cpu_waits(job.spans, late))
    alike = np.full(len(steps), 20e6)  # then none is later than the others
    assert WAITS in ids(with_cpu_waits(job.spans, alike))


def test_it_comes_first_with_its_price_and_evidence() -> None:
    spans = with_cpu_waits(run_of({"actor_generate": np.full(30, USUAL)}), np.full(30, 0.8 * USUAL))
    assert ids(spans) == [CPU_WAITS, "rollout"]
    own = diagnose(spans).problems[0]
    assert own.price is not None
    assert own.price.ns == 30 * 0.8 * USUAL
    assert own.place is not None
    assert (own.place.rank, own.place.step) == (0, 1)
    assert len(Run.of(spans).sql(own.query).rows) == 30


@pytest.mark.parametrize(("share", "steps"), [(0.01, 30), (0.8, 4)])
def test_it_passes_below_5_percent_and_skips_few_steps(share: float, steps: int) -> None:
    spans = with_cpu_waits(run_of({"a": np.full(steps, USUAL)}), np.full(steps, share * USUAL))
    assert CPU_WAITS not in ids(spans)
    assert (CPU_WAITS in undecided(spans)) == (steps < 5)


# ---- what is inside of data wait


def loading(*inside: str, counters: dict[str, float] | None = None, marks: bool = False) -> Spans:
    """Return steps whose loader takes 60%, with such a region inside; they generate elsewhere."""
    rows = []
    for at in range(12):
        start = at * STEP_NS
        cut, end = start + 6 * STEP_NS // 10, start + STEP_NS
        rows += [Row("step", "step", at + 1, start, end, counters=counters)]
        rows += [Row("data_fetch", "region", at + 1, start, cut)]
        for name in inside:
            rows += [Row(name, "region", at + 1, start + 10, start + STEP_NS // 2)]
        rows += [Row("stack: Loader.step train.py:7", "mark", at + 1, start + 5, start + 5)] * marks
        if not inside:
            rows += [Row("actor_generate", "stage", at + 1, cut, cut + STEP_NS // 10)]
        rows += [Row("actor_update", "stage", at + 1, end - STEP_NS // 10, end)]
    return loaded(rows)


ALONE = {"host_rss_bytes": 1e9, "cpu_wait_ns": 1.0}


def offers(spans: Spans, name: str) -> set[str]:
    own = [each for each in diagnose(spans, "Lightning").problems if each.id == name]
    return {offer.remedy.id for each in own for offer in each.remedies}


def test_workers_are_advised_for_a_loader_that_loads() -> None:
    spans = loading(counters=ALONE)
    assert "data-wait" in ids(spans)
    assert offers(spans, "data-wait") == {"data-workers"}


@pytest.mark.parametrize("spans", [loading("env_step", counters=ALONE), loading(marks=True)])
def test_a_rollout_in_the_loader_is_named_and_workers_are_refused(spans: Spans) -> None:
    """Workers would sample with a copy of the policy that never changes."""
    assert "rollout-in-loader" in ids(spans)
    assert "data-wait" not in ids(spans)
    settings = [each for own in diagnose(spans, "Lightning").found for each in own.remedies]
    knobs = {each.turns for offer in settings for each in offer.settings}
    assert "loader workers" not in knobs


def test_without_any_rollout_it_may_be_in_the_loader_and_nothing_is_advised() -> None:
    rows = [Row("step", "step", at + 1, at * STEP_NS, (at + 1) * STEP_NS) for at in range(12)]
    rows += [
        Row("data_fetch", "region", at + 1, at * STEP_NS, at * STEP_NS + STEP_NS // 2)
        for at in range(12)
    ]
    spans = loaded(rows)
    assert "data-wait" in ids(spans)
    assert offers(spans, "data-wait") == set()
    assert "may run in the data loader" in undecided(spans)["data-workers"]


@pytest.mark.parametrize(
    "counters",
    [
        {**ALONE, "children_rss_bytes": 1e8},  # it has workers
        {**ALONE, "cpu_wait_ns": 0.2 * STEP_NS},  # the machine is busy
        {"cpu_wait_ns": 1.0},  # whether it has workers is unknown
    ],
)
def test_workers_are_not_advised_where_they_are_set_or_cpus_are_short(
    counters: dict[str, float],
) -> None:
    assert "data-workers" not in offers(loading(counters=counters), "data-wait")


@pytest.mark.parametrize(
    ("waits", "generates_on", "name"),
    [
        ("wait_for_samples", 1, "waits-for-samples"),
        ("data_fetch", 1, "data-wait"),
        ("wait_for_samples", 0, "data-wait"),
    ],
)
def test_who_waits_for_other_ranks_to_generate_needs_no_data_loader(
    waits: str, generates_on: int, name: str
) -> None:
    ranks: tuple[list[Row], list[Row]] = [], []
    for at in range(12):
        begin, middle, end = at * STEP_NS, at * STEP_NS + STEP_NS // 2, (at + 1) * STEP_NS
        for rows in ranks:
            rows.append(Row("step", "step", at + 1, begin, end))
        ranks[0].append(Row(waits, "stage", at + 1, begin, middle))
        ranks[0].append(Row("actor_update", "stage", at + 1, middle, end))
        rollout = (begin, end) if generates_on else (middle, middle + STEP_NS // 10)
        ranks[generates_on].append(Row("actor_generate", "stage", at + 1, *rollout))
    named = {"waits-for-samples", "data-wait", "rollout-in-loader"} & {*ids(loaded(*ranks))}
    assert named == {name}


# ---- the parts of a weight sync


@pytest.mark.parametrize(
    ("part", "name"), [("pause_generation", "weight-sync-drain"), ("load_weights", "weight-sync")]
)
def test_a_sync_that_waits_for_rollouts_is_not_a_slow_link(part: str, name: str) -> None:
    rows = []
    for at in range(12):
        start, end = at * STEP_NS, (at + 1) * STEP_NS
        cut = start + STEP_NS // 2
        rows += [Row("step", "step", at + 1, start, end)]
        rows += [Row("weight_sync", "stage", at + 1, start, cut)]
        rows += [Row(part, "region", at + 1, start + 10, cut - 10)]
        rows += [Row("actor_update", "stage", at + 1, cut, end)]
    assert {"weight-sync", "weight-sync-drain"} & {*ids(loaded(rows))} == {name}


# ---- hangs


def stopped(*notes: RankNote, status: str | None = None) -> Spans:
    rows = [Row("step", "step", at + 1, at * STEP_NS, (at + 1) * STEP_NS) for at in range(2)]
    return replace(loaded(rows), statuses={0: status}, notes=notes)


def quiet(rank: int, seconds: int = 301, **facts: str) -> RankNote:
    own = {"quiet_s": seconds, "step": 3, **facts}
    return RankNote(rank, 8, "warning", "in words", Code.NO_PROGRESS, own)


def test_a_hang_that_did_not_end_is_named_with_the_place_of_each_rank() -> None:
    own = only(stopped(quiet(1, 300, span="a, b"), quiet(0)), "hang")
    assert (own.by_name["step"].value, own.by_name["ranks"].value) == (3, 2)
    assert own.by_name["no progress of"].value == "rank 0 for 301 s, rank 1 for 300 s in a, b"


def test_a_hang_that_ended_is_no_problem() -> None:
    again = RankNote(0, 9, "info", "in words", Code.PROGRESS_AGAIN)
    assert judged(stopped(quiet(0), again), "hang") == []
    assert judged(stopped(quiet(0), status="finished"), "hang") == []
    assert judged(stopped(), "hang") == []


def test_a_note_whose_text_speaks_of_a_hang_is_none() -> None:
    text = "no progress for 300 s in a, step 3. See where: rlprof hang r"
    assert judged(stopped(RankNote(0, 7, "info", text)), "hang") == []
