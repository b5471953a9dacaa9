"""Every rule fires where it must, is silent where it must, and abstains where it cannot know."""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from lightning_rlprof.analysis.findings import rules
from lightning_rlprof.analysis.findings.finding import Rule
from lightning_rlprof.analysis.findings.rules import CATEGORY_RULES
from lightning_rlprof.analysis.ledger.accounts import Accounts
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import NO_PARENT, Counter, RankNote, Spans, Thread
from lightning_rlprof.tables.table import Table
from tests.builders.device_trace import Feed, feed, traced
from tests.builders.paced import REGIMES, Job
from tests.builders.paced import play as play_paced
from tests.builders.pairs import run_of
from tests.builders.runs import Row, header, loaded
from tests.builders.scripted import Script, play, without

# A name of each category.
NAMES = {
    Category.ROLLOUT: "actor_generate",
    Category.ROLLOUT_TAIL: "rollout_tail",
    Category.DATA_WAIT: "data_fetch",
    Category.BACKPRESSURE: "back_pressure",
    Category.COLLECTIVE_WAIT: "barrier",
    Category.COMMUNICATION: "all_reduce",
    Category.HOST_IDLE: "tokenize",
    Category.MEMCPY: "batch_transfer",
    Category.WEIGHT_SYNC: "weight_sync",
    Category.REWARD: "compute_reward",
    Category.OFFLOAD: "wake_up",
    Category.EVALUATION: "validation",
    Category.PYTHON_GC: "garbage_collection",
    Category.PROFILER: "rlprof open capture",
    Category.UNTRACED: "",
}
LENGTH = 1_000_000
STEPS = 12


def job(name: str, shares: list[float], *, fill: str = "actor_update") -> Spans:
    """Return a rank whose steps give such shares to one name, and the rest to another stage."""
    rows: list[tuple[int, str, int, int, int]] = []
    for step, share in enumerate(shares):
        begin, cut = step * LENGTH, step * LENGTH + int(share * LENGTH)
        rows += [(KINDS.index("step"), "step", step + 1, begin, begin + LENGTH)]
        if name and cut > begin:
            rows += [(KINDS.index("region"), name, step + 1, begin, cut)]
        rows += [(KINDS.index("stage"), fill, step + 1, cut, begin + LENGTH)]
    names = tuple(dict.fromkeys(row[1] for row in rows))
    kind, _, number, start, end = zip(*rows, strict=True)
    count = len(rows)
    name_of, zeros = [names.index(row[1]) for row in rows], [0] * count
    last = (zeros, range(1, count + 1), [NO_PARENT] * count)
    columns = (name_of, kind, zeros, number, start, end, *last)
    arrays = [np.array(column, dtype=np.int64) for column in columns]
    return Spans(
        Path("job"),
        names,
        (Thread(0, 1, "Main"),),
        *arrays,
        headers={0: header(0, 1)},
        statuses={0: "finished"},
    )


def cells(table: Table, title: str) -> dict[str, Any]:
    names = [column.name for column in table.columns]
    return dict(zip(names, table.rows[titles(table).index(title)], strict=True))


def not_checked(table: Table, category: Category) -> bool:
    """Return whether the note lists a category as not checked."""
    return re.search(rf"[:;] {re.escape(category.text)}(;|\.| \()", table.note) is not None


def titles(table: Table) -> list[str]:
    return [str(title) for title in table.column("finding")]


every_category = pytest.mark.parametrize("category", NAMES, ids=lambda each: each.name)


@every_category
def test_a_rule_fires_above_its_threshold_with_price_and_evidence(category: Category) -> None:
    rule = CATEGORY_RULES[category]
    share = min(rule.threshold * 1.5, 0.95)
    table = findings(job(NAMES[category], [share] * STEPS))

    assert rule.title in titles(table)
    row = cells(table, rule.title)
    assert row["cost"] == pytest.approx(share * STEPS * LENGTH, rel=1e-5)
    assert row["share"] == pytest.approx(share, rel=1e-5)
    assert row["CI low"] <= row["cost"] <= row["CI high"] + 1
    assert str(row["reproduce"]).startswith("rlprof show job ledger ")
    if NAMES[category]:
        assert str(row["evidence"]).startswith("longest spans (rank/id): 0/")
    else:
        assert row["evidence"] == "12 steps, most of it in step 1"


@every_category
def test_the_link_of_a_rule_returns_its_evidence_and_its_place_is_the_first_of_it(
    category: Category,
) -> None:
    rule = CATEGORY_RULES[category]
    spans = job(NAMES[category], [min(rule.threshold * 1.5, 0.95)] * STEPS)
    row = cells(findings(spans), rule.title)
    found = Run.of(spans).sql(str(row["query"]))
    assert set(found.column("name")) == {NAMES[category] or "step"}
    named = [f"{rank}/{one}" for rank, one in zip(*map(found.column, ("rank", "id")), strict=True)]
    assert str(row["evidence"]).endswith((", ".join(named), "most of it in step 1"))
    assert found.rows[0][:6] == (
        NAMES[category] or "step",
        "region" if NAMES[category] else "step",
        *(row["rank"], row["step"], row["from"], row["to"]),
    )


@pytest.mark.parametrize(
    ("waits", "generates_on", "title"),
    [
        ("wait_for_samples", 1, "Trainer waits for samples"),
        ("data_fetch", 1, "Trainer waits for data"),
        ("wait_for_samples", 0, "Trainer waits for data"),
    ],
)
def test_who_waits_for_other_ranks_to_generate_needs_no_data_loader(
    waits: str, generates_on: int, title: str
) -> None:
    ranks: tuple[list[Row], list[Row]] = [], []
    for at in range(STEPS):
        begin, middle, end = at * LENGTH, at * LENGTH + LENGTH // 2, (at + 1) * LENGTH
        for rows in ranks:
            rows.append(Row("step", "step", at + 1, begin, end))
        ranks[0].append(Row(waits, "stage", at + 1, begin, middle))
        ranks[0].append(Row("actor_update", "stage", at + 1, middle, end))
        rollout = (begin, end) if generates_on else (begin, begin + LENGTH // 10)
        ranks[generates_on].append(Row("actor_generate", "stage", at + 1, *rollout))
    table = findings(loaded(*ranks))
    named = [each for each in titles(table) if each.startswith("Trainer waits")]
    assert named == [title]
    assert ("DataLoader" in str(cells(table, title)["try"])) == (title == "Trainer waits for data")


@every_category
def test_a_rule_is_silent_below_its_threshold(category: Category) -> None:
    rule = CATEGORY_RULES[category]
    table = findings(job(NAMES[category], [rule.threshold * 0.5] * STEPS))
    assert rule.title not in titles(table)
    assert not not_checked(table, category)


@every_category
def test_a_rule_abstains_where_steps_differ_too_much_or_are_few(category: Category) -> None:
    rule = CATEGORY_RULES[category]
    wild = [0.0, min(2 * rule.threshold, 1.0)] * (STEPS // 2)
    for table in (
        findings(job(NAMES[category], wild)),
        findings(job(NAMES[category], [min(rule.threshold * 1.5, 0.95)] * 4)),
    ):
        assert rule.title not in titles(table)
        assert not_checked(table, category)


def test_a_category_without_data_is_not_checked() -> None:
    note = findings(job("", [0.0] * STEPS)).note
    assert "Not checked (no data): " in note
    assert "data wait" in note
    assert "finding changes needs 24" in note


def test_every_category_has_one_rule_but_what_is_no_problem() -> None:
    none = {Category.COMPUTE, Category.CUSTOM, Category.WARM_UP}
    assert sorted(CATEGORY_RULES) == sorted(set(Category) - none)
    of_kernels = {Category.LAUNCH_LATENCY, Category.UNATTRIBUTED_IDLE}
    assert sorted(NAMES) == sorted({*CATEGORY_RULES} - of_kernels)


def test_warm_up_counts_for_no_finding() -> None:
    """The first step takes as long as thirty, and only loads data."""
    rows = [Row("step", "step", 0, 0, 30 * LENGTH), Row("data_fetch", "region", 0, 0, 30 * LENGTH)]
    for step in range(1, STEPS):
        begin = (29 + step) * LENGTH
        rows += [Row("step", "step", step, begin, begin + LENGTH)]
        rows += [Row("actor_update", "stage", step, begin, begin + LENGTH)]
    table = findings(loaded(rows))
    assert CATEGORY_RULES[Category.DATA_WAIT].title not in titles(table)
    assert not not_checked(table, Category.DATA_WAIT)


def test_a_slow_rank_is_a_finding_and_a_healthy_one_is_not() -> None:
    spans = play(Script(slow={3: 0.2}), 5).spans
    row = cells(findings(spans), "Rank 3 is a straggler (slow host)")
    assert row["CI low"] < row["cost"] < row["CI high"]
    assert row["reproduce"] == f"rlprof stragglers {spans.path} --json"
    found = Run.of(spans).sql(str(row["query"]))
    assert set(found.column("rank")) == {3} == {row["rank"]}
    assert (found.column("start_ns")[0], found.column("step")[0]) == (row["from"], row["step"])
    healthy = findings(play(Script(), 5).spans)
    assert not any("rank " in title.lower() for title in titles(healthy))


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_events_never_names_a_wrong_rank(seed: int) -> None:
    spans = without(play(Script(slow={1: 0.1}, uneven=0.3, steps=40), seed).spans, 0.2, seed)
    named = [title for title in titles(findings(spans)) if title.startswith("Rank ")]
    assert all(title.startswith("Rank 1 ") for title in named)


def test_problems_come_first_then_ideas_and_without_steps_there_is_no_data() -> None:
    """Rollout is most of the step and costs more, but it is work and no loss."""
    table = findings(job("weight_sync", [0.3] * STEPS, fill="actor_generate"))
    assert titles(table) == ["Weight sync is slow", "Rollout takes most of the time"]
    costs = table.column("cost")
    assert int(str(costs[0])) < int(str(costs[1]))
    empty = job("", [0.0])
    none = replace(empty, kind=np.full(len(empty), KINDS.index("stage"), dtype=np.int64))
    assert findings(none).abstained == "no complete step was recorded"


def test_device_kernels_replace_the_rule_on_the_host_category_and_need_no_five_steps() -> None:
    kernels, calls = feed(Feed())
    table = findings(traced(kernels, calls))
    assert titles(table) == ["Device idle between short kernels"]
    row = cells(table, titles(table)[0])
    assert row["share"] == pytest.approx(row["cost"] / (kernels[-1]["start"] + 6_000), rel=0.01)
    assert not not_checked(table, Category.HOST_IDLE)
    assert "device idle between launches" in findings(traced(kernels[:199])).note


def test_a_rank_out_of_memory_comes_first() -> None:
    spans = job("weight_sync", [0.3] * 24)
    table = findings(replace(spans, statuses={0: "interrupted by OutOfMemoryError"}))
    assert len(titles(table)) > 1
    assert titles(table)[0].startswith("Rank 0 ran out of memory in step 24")


def test_a_hang_that_did_not_end_comes_first() -> None:
    facts = {"quiet_s": 300.0, "span": "reward", "step": 25}
    note = RankNote(0, 1, "warning", "", Code.NO_PROGRESS, facts)
    spans = replace(job("weight_sync", [0.3] * 24), notes=(note,))
    table = findings(replace(spans, statuses={0: None}))
    assert len(titles(table)) > 1
    assert titles(table)[0] == "The run hung in step 25"


def test_findings_without_a_cost_in_time_are_at_the_end() -> None:
    spans = job("weight_sync", [0.3] * 24)
    steps = spans.rows(kind="step")
    held = Counter(steps, np.arange(24) * 2**28 + 2**32)
    table = findings(replace(spans, counters={"device_allocated_bytes": held}))
    assert titles(table)[-1] == "Memory grows every step: torch on rank 0"
    assert table.column("cost")[-1] is None
    assert table.column("cost")[-2] is not None


def test_a_report_computes_the_accounts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = job("weight_sync", [0.3] * STEPS)
    alone = ledger(job("weight_sync", [0.3] * STEPS))
    asked: list[Spans] = []
    module = importlib.import_module("lightning_rlprof.analysis.ledger.ledger")
    whole = module.compute_accounts

    def compute_accounts(spans: Spans) -> Accounts:
        asked.append(spans)
        return whole(spans)  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "compute_accounts", compute_accounts)
    findings(spans)
    again = ledger(spans)
    assert len(asked) == 1
    assert again == alone


def test_steps_that_became_slower_are_a_finding_with_step_stage_size_and_price() -> None:
    table = findings(play_paced(Job(slower={"actor_generate": 2.0}, since=30), 4))
    title = next(each for each in titles(table) if each.startswith("Steps take"))
    assert re.fullmatch(r"Steps take 1\.\d\dx as long since step 3[01] \(actor_generate\)", title)
    row = cells(table, title)
    assert row["CI low"] < row["cost"] < row["CI high"]
    assert row["step"] in (30, 31)
    assert row["reproduce"] == "rlprof show paced changes"


def test_an_outlier_step_is_a_finding_only_if_it_costs_enough() -> None:
    times = 1e8 * np.exp(np.random.default_rng(1).normal(0, 0.02, 60))
    times[40] *= 5
    assert "Step 41 took 4.9x as long as its neighbors (a)" in titles(
        findings(run_of({"a": times}))
    )
    long = np.tile(times, 10)
    long[100:] = 1e8
    assert not any(title.startswith("Step 41") for title in titles(findings(run_of({"a": long}))))


@pytest.mark.parametrize("regime", ["iid 2%", "common AR(.9) 3%", "GC 10% x 200 ms"])
def test_a_healthy_run_is_accused_of_no_change(regime: str) -> None:
    found = titles(findings(play_paced(Job(regime=REGIMES[regime]), 3)))
    assert not [title for title in found if title.startswith("Step")]


def test_every_rule_can_be_explained() -> None:
    every = {each for each in vars(rules).values() if isinstance(each, Rule)}
    known = [each for own in rules.rules_by_id().values() for each in own]
    assert every | {*CATEGORY_RULES.values()} == {*known}
    assert len(known) == len({*known})
