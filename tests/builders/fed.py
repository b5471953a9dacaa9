"""Jobs whose roles hand one another samples and weights, event by event; not a test.

Ranks 0 to R - 1 generate, rank R scores, rank R + 1 trains and publishes; nobody meets in a
collective. Times are milliseconds.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import Kind
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, header, write_rank

MS = 10**6


@dataclass(frozen=True)
class Fed:
    """What happens.

    Attributes:
        generate: How long each rollout rank generates.
        reward: How long one sample is scored.
        train: How long the update takes.
        sync: How long publishing takes.
        latency: What passes between handing over and going on.
        lag: How many versions old the weights may be: 0, and all wait for one another.
        steps: How many steps.
        tell: Whether samples and versions are counted.
        marks: Who marks the weight sync: some of "sender" and "receiver".
        counts: Who counts versions, likewise; the receiver in what it does first with them.
    """

    generate: tuple[int, ...] = (50, 70)
    reward: int = 10
    train: int = 40
    sync: int = 8
    latency: int = 1
    lag: int = 0
    steps: int = 12
    tell: bool = True
    marks: tuple[str, ...] = ("sender",)
    counts: tuple[str, ...] = ("sender", "receiver")


Roles = Sequence[tuple[str, Sequence[Row]]]


def with_roles(roles: Roles) -> Spans:
    """Return spans with these roles and rows per rank."""
    with tempfile.TemporaryDirectory() as folder:
        return load(_written(roles, Path(folder) / "run"))


def _written(roles: Roles, run: Path) -> Path:
    for rank, (role, rows) in enumerate(roles):
        write_rank(run, header(rank, len(roles), role=role), rows)
    return run


class _Clock:
    """What each rank has done so far, and how late it is there."""

    def __init__(self, job: Fed) -> None:
        self.job, self.now = job, [0] * (len(job.generate) + 2)
        self.rows: list[list[Row]] = [[] for _ in self.now]
        self.begun = [*self.now]

    def add(self, rank: int, name: str, step: int, took: int, **told: int) -> None:
        """Let a rank do something."""
        kind: Kind = "mark" if name in ("taken", "published") else "stage"
        start, end = self.now[rank] * MS, (self.now[rank] + took) * MS
        counters = told if self.job.tell and told else None
        self.rows[rank].append(Row(name, kind, step, start, end, counters=counters))
        self.now[rank] += took

    def wait(self, rank: int, until: int) -> None:
        """Let a rank be no earlier."""
        self.now[rank] = max(self.now[rank], until)

    def end(self, step: int) -> None:
        """End everyone's step."""
        for rank, own in enumerate(self.rows):
            times = self.begun[rank] * MS, self.now[rank] * MS
            own.append(Row("step", "step", step, *times))
        self.begun = [*self.now]


def feed(job: Fed) -> Spans:
    """Let a job happen."""
    return with_roles(_played(job))


def write(job: Fed, run: Path) -> Path:
    """Let a job happen and write its run."""
    return _written(_played(job), run)


def _played(job: Fed) -> Roles:
    many, clock, published = len(job.generate), _Clock(job), {0: 0}
    for step in range(1, job.steps + 1):
        need, ready = max(step - 1 - job.lag, 0), []
        for rank, took in enumerate(job.generate):
            there = published[need] + (job.latency if need else 0)
            counted = {"version": need} if "receiver" in job.counts else {}
            if "receiver" in job.marks and need:
                clock.add(rank, "weight_sync", step, max(there - clock.now[rank], 0), **counted)
            clock.wait(rank, there)
            clock.add(rank, "actor_generate", step, took, sample=100 * step + rank, **counted)
            ready.append(clock.now[rank])
        for at in sorted(range(many), key=ready.__getitem__):
            clock.wait(many, ready[at] + job.latency)
            clock.add(many, "compute_reward", step, job.reward, sample=100 * step + at)
        late = max(clock.now[many] + job.latency - clock.now[-1], 0)
        clock.add(many + 1, "wait_for_samples", step, late)
        for at in range(many):
            clock.add(many + 1, "taken", step, 0, sample=100 * step + at)
        clock.add(many + 1, "actor_update", step, job.train)
        if "sender" in job.marks:
            told = {"version": step} if "sender" in job.counts else {}
            clock.add(many + 1, "weight_sync", step, job.sync, **told)
        else:
            clock.wait(many + 1, clock.now[-1] + job.sync)
            told = {"version": step} if "sender" in job.counts else {}
            clock.add(many + 1, "published", step, 0, **told)
        published[step] = clock.now[-1]
        clock.end(step)
    names = ["rollout"] * many + ["reward", "trainer"]
    return [*zip(names, clock.rows, strict=True)]
