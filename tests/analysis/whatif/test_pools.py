"""What-if of asynchronous runs: predictions beside a simulation that makes the change."""

import itertools

import numpy as np
import pytest

from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, loaded

MS = 10**6
STEPS = 60


def simulated(train: float, roll: float, servers: int, seed: int = 0) -> Spans:
    """Servers generate, a batch each; the trainer takes one per step, at most four wait."""
    noise = np.random.default_rng(seed)
    free = [0.0] * servers
    ready: list[float] = []
    rows: list[list[Row]] = [[] for _ in range(servers + 1)]
    now, taken, started = 0.0, [], 0
    for number in range(1, STEPS + 1):
        while started < number + 4:  # so far ahead
            server = int(np.argmin(free))
            begin = max(free[server], taken[started - 5] if started >= 5 else 0.0)
            end = begin + roll * noise.uniform(0.9, 1.1)
            rows[server + 1].append(
                Row("actor_generate", "stage", 1, round(begin * MS), round(end * MS))
            )
            free[server] = end
            ready.append(end)
            started += 1
        ready.sort()
        waiting_until = max(now, ready[number - 1])
        taken.append(waiting_until)
        done = waiting_until + train * noise.uniform(0.9, 1.1)
        times = [round(each * MS) for each in (now, waiting_until, done)]
        rows[0] += [
            Row("step", "step", number, times[0], times[2]),
            Row("wait_for_samples", "stage", number, times[0], times[1]),
            Row("actor_update", "stage", number, times[1], times[2]),
        ]
        now = done
    last = round(now * MS)
    for own in rows[1:]:
        own[:] = [row for row in own if row.end_ns <= last]
        own += [row for row in rows[0] if row.kind == "step"]
    return loaded(*rows)


def mean_step(spans: Spans) -> float:
    return float(spans.duration_ns[spans.rows(kind="step", rank=0)].mean())


@pytest.mark.parametrize(
    ("train", "roll", "servers"), [(20, 100, 2), (20, 100, 3), (60, 100, 2), (30, 100, 3)]
)
def test_more_servers_and_faster_stages_take_what_a_simulation_takes(
    train: float, roll: float, servers: int
) -> None:
    now = simulated(train, roll, servers)
    (row,) = whatif(now, add_replicas=1).rows
    assert row[0] == "+1 rollout replicas"
    assert row[2] == pytest.approx(mean_step(simulated(train, roll, servers + 1, 1)), rel=0.1)
    for name, other in (
        ("actor_update", simulated(train / 2, roll, servers, 1)),
        ("actor_generate", simulated(train, roll / 2, servers, 1)),
    ):
        (row,) = whatif(now, speedup={name: 2.0}).rows
        assert row[2] == pytest.approx(mean_step(other), rel=0.1)


def test_by_default_the_largest_stages_and_more_ranks_are_tried() -> None:
    table = whatif(simulated(20, 100, 2))
    assert {row[0] for row in table.rows} == {
        "actor_generate 2x faster",
        "actor_update 2x faster",
        "+1 rollout replicas",
        "+2 rollout replicas",
    }
    saved = [int(row[3] or 0) for row in table.rows]
    assert all(one >= other for one, other in itertools.pairwise(saved))
    assert "training works 20" in table.note


def test_what_cannot_be_predicted_is_said() -> None:
    spans = simulated(20, 100, 2)
    with pytest.raises(TraceError, match="unknown stage 'actor_updat'"):
        whatif(spans, speedup={"actor_updat": 2})
    with pytest.raises(TraceError, match="be stopped here"):
        whatif(spans, stop_rollout_at=0.9)
