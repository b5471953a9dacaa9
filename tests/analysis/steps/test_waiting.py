"""Waiting for other ranks does not count as work, with clocks or without them."""

import random
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.analysis.steps.step_matrix import find_waits
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.runs import Row, header, loaded, write_rank

MS = 1_000_000
STEPS, RANKS = 40, 4


class Job:
    """Ranks that meet at the end of their backward pass, inside an update that is one stage.

    Attributes:
        spans: The run; with ``apart``, every rank is on a host of its own with another clock.
        waited_ns: What the ranks waited together, exactly.
    """

    def __init__(
        self,
        seed: int,
        *,
        slow: Sequence[int] = (),
        uneven: bool = False,
        phases: bool = True,
        meets: bool = True,
        apart: bool = False,
    ) -> None:
        noise = random.Random(seed)
        ranks: list[list[Row]] = [[] for _ in range(RANKS)]
        offsets = [noise.randrange(10**12) if apart else 0 for _ in range(RANKS)]
        now, self.waited_ns = [MS] * RANKS, 0
        for step in range(1, STEPS + 1):
            arrived = []
            for rank in range(RANKS):
                generated = now[rank] + noise.randint(
                    *((5 * MS, 40 * MS) if uneven else (20 * MS, 21 * MS))
                )
                forward = 10 * MS * (3 if rank in slow else 1) + noise.randint(0, MS)
                arrived.append((generated, generated + forward))
            last = max(arrival for _, arrival in arrived) + 8 * MS
            for rank, (generated, backward) in enumerate(arrived):
                end = last if meets else backward + 8 * MS
                self.waited_ns += end - backward - 8 * MS
                stepped = end + 2 * MS
                update = len(ranks[rank]) + 2  # ids count from one
                rows = [
                    Row("actor_generate", "stage", step, now[rank], generated),
                    Row("actor_update", "stage", step, generated, stepped),
                    Row("step", "step", step, now[rank], stepped),
                ]
                if phases:
                    edges = (generated, backward, end, stepped)
                    names = ("training_step", "backward", "optimizer_step")
                    rows += [
                        Row(name, "region", step, *both, parent=update)
                        for name, both in zip(names, pairwise(edges), strict=True)
                    ]
                ranks[rank] += [
                    each._replace(
                        start_ns=each.start_ns + offsets[rank], end_ns=each.end_ns + offsets[rank]
                    )
                    for each in rows
                ]
                now[rank] = stepped
        with tempfile.TemporaryDirectory() as folder:
            for rank, rows in enumerate(ranks):
                host = {"host": f"node-{rank}"} if apart else {}
                write_rank(Path(folder) / "run", header(rank, RANKS, **host), rows)
            self.spans: Spans = load(Path(folder) / "run")


def totals(table: Table, name: str) -> dict[str, int]:
    return dict(zip(table.column(name), table.column("total"), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [False, True], ids=["one clock", "no common clock"])
@pytest.mark.parametrize(
    "case", [{"slow": [2]}, {"uneven": True}, {"uneven": True, "phases": False}], ids=str
)
def test_the_wait_has_a_row_and_a_category_of_its_own(case: dict[str, bool], apart: bool) -> None:
    job = Job(1, apart=apart, **case)  # type: ignore[arg-type]
    table = stages(job.spans)
    by_stage, by_category = totals(table, "stage"), totals(ledger(job.spans), "category")
    # Without phases, work of the stage differs between ranks by its noise, too.
    about = pytest.approx(job.waited_ns, rel=1e-9 if case.get("phases", True) else 0.1)
    assert by_stage["waiting in actor_update"] == about
    assert by_category["collective wait"] == by_stage["waiting in actor_update"]
    steps = job.spans.rows(kind="step")
    assert sum(by_stage.values()) == int(job.spans.duration_ns[steps].sum())
    per_rank = stages(job.spans, per_rank=True)
    assert totals(per_rank, "stage").keys() == by_stage.keys()
    assert sum(map(int, per_rank.column("total"))) == sum(by_stage.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", [{}, {"uneven": True}, {"slow": [1], "phases": False}], ids=str)
def test_ranks_that_never_meet_do_not_wait(case: dict[str, bool], seed: int) -> None:
    job = Job(seed, meets=False, **case)  # type: ignore[arg-type]
    assert not len(find_waits(job.spans).row)
    assert "waiting in actor_update" not in stages(job.spans).column("stage")
    assert "collective wait" not in ledger(job.spans).column("category")


def test_a_slow_forward_is_seen_inside_of_a_whole_update() -> None:
    spans = Job(3, slow=[2]).spans
    table = stragglers(spans)
    assert (table.column("rank"), table.column("stages")) == ([2], ["training_step"])
    at = stages(spans)
    slowest = dict(zip(at.column("stage"), at.column("slowest rank"), strict=True))
    ratio = dict(zip(at.column("stage"), at.column("slowest / peers"), strict=True))
    assert slowest["actor_update"] == 2
    assert ratio["actor_update"] == pytest.approx(2, rel=0.05)  # 40 ms of work beside 20


def test_a_straggler_is_listed_once_and_an_uneven_load_as_waiting() -> None:
    slow = diagnose(Job(3, slow=[2]).spans)
    assert (slow.problems[0].id, slow.problems[0].by_name["rank"].value) == ("straggler", 2)
    assert slow.explained == ("collective-wait",)
    uneven = diagnose(Job(3, uneven=True).spans)
    assert uneven.problems[0].id == "collective-wait"
    assert uneven.explained == ()


def test_a_rank_waits_at_the_start_of_a_collective_and_outside_of_stages_under_its_name() -> None:
    first = [
        Row("step", "step", 1, 0, 100),
        Row("actor_update", "stage", 1, 0, 50),
        Row("all_reduce", "region", 1, 10, 40),
        Row("barrier", "region", 1, 60, 90),
    ]
    second = [
        Row("step", "step", 1, 0, 100),
        Row("actor_update", "stage", 1, 0, 50),
        Row("all_reduce", "region", 1, 30, 40),
        Row("barrier", "region", 1, 85, 90),
    ]
    spans = loaded(first, second)
    waits = find_waits(spans)
    assert np.stack([waits.start_ns, waits.end_ns]).T.tolist() == [[10, 30], [60, 85]]
    assert totals(stages(spans), "stage") == {
        "actor_update": 80,
        "waiting in barrier": 25,
        "waiting in actor_update": 20,
        "barrier": 10,
        "untraced": 65,
    }
