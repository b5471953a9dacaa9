"""Every rule fires where it must, is silent where it must, and abstains where it cannot know."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.findings import findings
from lightning_rlprof.analysis.labels import Label
from lightning_rlprof.analysis.rules import RULES, Rule
from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import NO_PARENT, Spans, Thread
from lightning_rlprof.table import Table
from tests.analysis.scripted import Script, play, without
from tests.runs import header

# A name that means the label, and what is recorded where it does not.
NAMES = {
    Label.ROLLOUT: "actor_generate",
    Label.TAIL: "rollout_tail",
    Label.STARVATION: "data_fetch",
    Label.PRESSURE: "back_pressure",
    Label.WAITING: "barrier",
    Label.TRANSFER: "all_reduce",
    Label.HOST: "tokenize",
    Label.COPY: "batch_transfer",
    Label.SYNC: "weight_sync",
    Label.REWARD: "compute_reward",
    Label.SLEEP: "wake_up",
    Label.EVALUATION: "validation",
    Label.GARBAGE: "garbage_collection",
    Label.RLPROF: "rlprof open capture",
    Label.UNTRACED: "",
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


def cells(table: Table, claim: str) -> dict[str, Any]:
    names = [column.name for column in table.columns]
    return dict(zip(names, table.rows[claims(table).index(claim)], strict=True))


def undecided(table: Table, rule: Rule) -> bool:
    """Tell whether the note says that a rule abstained."""
    return re.search(rf"[:,] {re.escape(rule.label.text)}[,.]", table.note) is not None


def claims(table: Table) -> list[str]:
    return [str(claim) for claim in table.column("finding")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label.name)
def test_a_rule_fires_above_its_threshold_with_price_and_evidence(rule: Rule) -> None:
    share = min(rule.above * 1.5, 0.95)
    table = findings(job(NAMES[rule.label], [share] * STEPS))

    assert rule.claim in claims(table)
    row = cells(table, rule.claim)
    assert row["effect"] == pytest.approx(share * STEPS * LENGTH, rel=1e-5)
    assert row["share"] == pytest.approx(share, rel=1e-5)
    assert row["low"] <= row["effect"] <= row["high"] + 1
    assert str(row["reproduce"]).startswith("rlprof ledger RUN")
    if NAMES[rule.label]:
        assert str(row["evidence"]).startswith("longest spans (rank/id): 0/")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label.name)
def test_a_rule_is_silent_below_its_threshold(rule: Rule) -> None:
    table = findings(job(NAMES[rule.label], [rule.above * 0.5] * STEPS))
    assert rule.claim not in claims(table)
    assert not undecided(table, rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label.name)
def test_a_rule_abstains_where_steps_differ_too_much_or_are_few(rule: Rule) -> None:
    wild = [0.0, min(2 * rule.above, 1.0)] * (STEPS // 2)
    for table in (
        findings(job(NAMES[rule.label], wild)),
        findings(job(NAMES[rule.label], [min(rule.above * 1.5, 0.95)] * 4)),
    ):
        assert rule.claim not in claims(table)
        assert undecided(table, rule)


def test_what_nothing_tells_of_is_no_zero() -> None:
    note = findings(job("", [0.0] * STEPS)).note
    assert note.startswith("Not decided, as nothing tells: ")
    assert "starvation" in note


def test_every_label_but_compute_and_other_stages_has_one_rule() -> None:
    labels = [rule.label for rule in RULES]
    assert sorted(labels) == sorted(set(Label) - {Label.COMPUTE, Label.OTHER})


def test_a_slow_rank_is_a_finding_and_a_healthy_one_is_not() -> None:
    slow = findings(play(Script(slow={3: 0.2}), 5).spans)
    row = cells(slow, "rank 3 makes the others wait: slow host")
    assert row["low"] < row["effect"] < row["high"]
    assert row["reproduce"] == "rlprof stragglers RUN --json"
    assert not any("rank " in claim for claim in claims(findings(play(Script(), 5).spans)))


@pytest.mark.parametrize("seed", range(20))
def test_deleting_a_fifth_of_the_events_never_names_a_wrong_rank(seed: int) -> None:
    spans = without(play(Script(slow={1: 0.1}, uneven=0.3, steps=40), seed).spans, 0.2, seed)
    named = [claim for claim in claims(findings(spans)) if claim.startswith("rank ")]
    assert all(claim.startswith("rank 1 ") for claim in named)


def test_the_most_costly_comes_first_and_without_steps_nothing_is_told() -> None:
    table = findings(job("weight_sync", [0.3] * STEPS, fill="actor_generate"))
    effects = table.column("effect")
    assert len(effects) >= 2
    assert effects == sorted(effects, key=lambda ns: -int(ns or 0))
    empty = job("", [0.0])
    none = replace(empty, kind=np.full(len(empty), KINDS.index("stage"), dtype=np.int64))
    assert findings(none).abstained == "no step was recorded to its end"
