"""Sessions on a fake clock, and what they wrote, for tests of the recording wing."""

from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.run_directory import RankTrace, SpanLine, read_trace
from lightning_rlprof.testing import FakeClock


def read(session: Session) -> RankTrace:
    return read_trace(session.run / f"rank-{session.header.rank:05d}.jsonl")


def spans(session: Session, name: str) -> list[SpanLine]:
    return [span for span in read(session).spans if span.name == name]


def times(session: Session, name: str) -> list[tuple[int, int, int]]:
    return [(span.step, span.start_ns, span.end_ns) for span in spans(session, name)]


def run_steps(session: Session, clock: FakeClock, steps: list[int]) -> None:
    for step in steps:
        session.begin_step(step)
        clock.advance(1)
        with stage("actor_update"):
            clock.advance(5)
        clock.advance(2)
        session.end_step()
