"""SIGKILL at random points: at most the last 100 ms or the current step, and one torn line."""

from pathlib import Path

import pytest

from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header
from tests.chaos.kills import killed, killed_while_it_writes
from tests.chaos.outcomes import Ends, judge
from tests.effort import DEEP


@pytest.mark.parametrize("world", [1, 2])
def test_a_training_that_is_killed_loses_100_ms_at_most(world: int) -> None:
    outcomes = {seed: killed(seed, world) for seed in range(20 if DEEP else 3)}
    assert {seed: each.broken for seed, each in outcomes.items() if each.broken} == {}
    assert sum(outcome.ended for outcome in outcomes.values()) > 0


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0] if DEEP else [0.5])
def test_a_training_that_is_killed_in_a_write_loses_what_it_wrote(part: float) -> None:
    """The kernel rarely ends a write early when its process is killed, and never where we want."""
    for call in range(5 if DEEP else 3):
        outcome = killed_while_it_writes(call, part)
        assert not outcome.broken, (call, outcome)


def span(step: int) -> tuple[object, ...]:
    return ("span", "step", "step", step, step * 10, step * 10 + 10, 7, step, None, None)


@pytest.mark.parametrize(
    ("steps", "torn", "broken"),
    [
        ([1, 2, 3, 4], b"", ""),
        ([1, 2, 3], b"", ""),
        ([1], b"", "steps of 120 ms are lost"),
        ([1, 3, 4], b"", "not all steps"),
        ([1, 2, 3], b'["span"', "1 torn lines"),
    ],
)
def test_the_judge_sees_what_breaks_the_promise(
    steps: list[int], torn: bytes, broken: str, tmp_path: Path
) -> None:
    writer = TraceWriter(tmp_path, make_header())
    writer.write([span(step) for step in steps])
    writer.close()
    with writer.path.open("ab") as file:
        file.write(torn)
    ends = [60_000_000 * step for step in range(1, 5)]
    outcome = judge(tmp_path, [Ends(ends, ends)])
    assert broken in outcome.broken
    assert bool(broken) == bool(outcome.broken)
    if not broken:
        assert (outcome.lost, outcome.lost_ms) == (4 - len(steps), 60.0 * (4 - len(steps)))
