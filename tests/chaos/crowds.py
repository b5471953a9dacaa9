"""Many threads, many tasks and forks that mark at once: every span is recorded once."""

import asyncio
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import annotate, count, mark, stage
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.hang_reports import STACK
from lightning_rlprof.records.run_directory import RankTrace, read_trace
from tests.chaos.outcomes import Outcome

Work = Callable[[Session], "Counter[str]"]


def threads(session: Session, number: int = 64, each: int = 200) -> "Counter[str]":
    """Mark on threads, of which some flush, while the training thread ends steps."""

    stepped = threading.Event()

    def work(own: int) -> None:
        for turn in range(each):
            if turn == each // 2:
                stepped.wait(60)  # a fast machine would have marked all before the first step ends
            with stage(f"stage {own % 8}", samples=1):
                with annotate("inside"):
                    count(tokens=own)
                mark("done")
            if turn % 50 == own % 50:
                session.flush()

    workers = [threading.Thread(target=work, args=(own,)) for own in range(number)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        _step(session)
        stepped.set()
        workers[0].join(0.001)
    stages = Counter({f"stage {own % 8}": 0 for own in range(number)})
    for own in range(number):
        stages[f"stage {own % 8}"] += each
    return stages + Counter(inside=number * each, done=number * each)


def tasks(session: Session, number: int = 1_000, each: int = 4) -> "Counter[str]":
    """Mark in tasks that take turns inside of their spans."""

    async def work(own: int) -> None:
        for _ in range(each):
            with stage("stage 0", samples=1):
                await asyncio.sleep(0)
                with annotate("inside"):
                    await asyncio.sleep(0)
                    count(tokens=own)
                mark("done")

    async def all_of_them() -> None:
        await asyncio.gather(*map(work, range(number)))

    asyncio.run(all_of_them())
    _step(session)
    return Counter({"stage 0": number * each, "inside": number * each, "done": number * each})


def forks(session: Session, number: int = 6) -> "Counter[str]":
    """Fork while other threads mark and flush; children mark, flush and close as parents do."""
    over = threading.Event()
    turns = Counter[str]()

    def work(own: int) -> None:
        while not over.is_set():
            with stage(f"stage {own}"):
                session.flush()
            turns[f"stage {own}"] += 1
            over.wait(0.001)  # the others want the interpreter, too

    workers = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for worker in workers:
        worker.start()
    codes = []
    for _ in range(number):
        _step(session)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with stage("in the child"):
                    _step(session)
                session.close()
                code = 0 if current() is None else 2
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    over.set()
    for worker in workers:
        worker.join()
    if codes != [0] * number:
        raise AssertionError(f"children ended with {codes}")
    return turns


CROWDS: dict[str, Work] = {work.__name__: work for work in (threads, tasks, forks)}


def crowded(work: Work) -> Outcome:
    """Let many mark at once, and count what has been recorded."""
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilerConfig.build(profile_save_path=folder)
        with start_session(config, name="run", recorders=()) as session:
            session.begin_step(1)
            expected = work(session)
            ended = session.next_step - 1
        trace = read_trace(Path(folder, "run", "rank-00000.jsonl"))
    # A machine that pauses makes steps long, whose stacks are sampled, and collections of garbage.
    own = [span for span in trace.spans if not span.name.startswith((STACK, "garbage_collection"))]
    found = Counter(span.name for span in own)
    steps = found.pop("step", 0)
    broken = []
    if found != expected:
        broken.append(f"spans by name: {dict(found)}, and not {dict(expected)}")
    if steps != ended:
        broken.append(f"{steps} steps of {ended}")
    if trace.lost_lines or trace.status != "finished":
        broken.append(f"{trace.lost_lines} torn lines, status {trace.status}")
    broken += _wrong_parents(trace)
    return Outcome("; ".join(broken), ended, ended - steps)


def _wrong_parents(trace: RankTrace) -> list[str]:
    """Return what is not inside of a stage of its own thread."""
    stages = {span.id: span for span in trace.spans if span.kind == "stage"}
    inner = [span for span in trace.spans if span.name in ("inside", "done")]
    wrong = 0
    for span in inner:
        around = stages.get(span.parent or 0)
        wrong += around is None or around.thread != span.thread
        wrong += around is not None and not (
            around.start_ns <= span.start_ns <= span.end_ns <= around.end_ns
        )
    if len({span.id for span in trace.spans}) < len(trace.spans):
        return ["numbers of spans are not unique"]
    return [f"{wrong} of {len(inner)} spans have another parent"] if wrong else []


def _step(session: Session) -> None:
    session.end_step()
    session.begin_step(session.next_step)
