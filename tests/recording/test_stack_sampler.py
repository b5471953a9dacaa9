"""When the training thread's stack is sampled, on a fake clock and with fake frames."""

import sys
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording import stacks
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import Helpers, Loop, Session
from lightning_rlprof.recording.stacks import StackSampler
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.recording.watchdog import Watchdog
from lightning_rlprof.records.hang_reports import (
    FOLDER,
    STACK,
    StackAnswer,
    StackRequest,
    read_stack_answer,
    stack_request_file,
    write_stack_request,
)
from tests.builders.recording import read

STEP_NS = 500_000_000
SAMPLE_NS = 50_000_000


class Data:
    def decode(self) -> FrameType:
        return sys._getframe()


DECODE = Data().decode()


def ask(run: Path, request: StackRequest) -> None:
    """Write a request, as when the watchdog has made its folder."""
    (run / FOLDER).mkdir(exist_ok=True)
    write_stack_request(run, request)


PLACE = f"Data.decode tests/recording/test_stack_sampler.py:{DECODE.f_lineno}"
if sys.version_info < (3, 11):
    PLACE = PLACE.removeprefix("Data.")


class Sampling:
    """A session whose training thread stands in ``Data.decode``, and its sampler."""

    def __init__(self, session: Session, clock) -> None:
        self.session, self.clock, self.asked = session, clock, 0
        self.sampler = StackSampler(session, 0, self.frames)

    def frames(self) -> dict[int, FrameType]:
        self.asked += 1
        return {self.session.training_thread: DECODE}

    def steps(self, count: int, ns: int = STEP_NS) -> None:
        for _ in range(count):
            self.session.begin_step(self.session.next_step)
            self.clock.advance(ns)
            self.session.end_step()
            self.sampler.look()

    def stall(self, ns: int) -> None:
        """Let a step begin, and look 20 times a second for as long as it takes."""
        self.session.begin_step(self.session.next_step)
        self.wait(ns)

    def wait(self, ns: int) -> None:
        for _ in range(ns // SAMPLE_NS):
            self.clock.advance(SAMPLE_NS)
            self.sampler.look()

    def marks(self) -> list[tuple[int, str]]:
        self.session.flush()
        marks = [span for span in read(self.session).spans if span.kind == "mark"]
        return [(mark.step, mark.name.removeprefix(STACK)) for mark in marks]


@pytest.fixture
def sampling(start, clock, monkeypatch) -> Sampling:
    monkeypatch.chdir(__file__.partition("/tests/")[0])
    return Sampling(start(), clock)


def test_no_stack_is_looked_at_while_steps_are_usual(sampling):
    sampling.steps(50)
    sampling.stall(STEP_NS * 2)
    assert sampling.asked == 0
    assert sampling.sampler.wait_s == 0.25


def test_a_slow_step_is_sampled_while_it_runs(sampling):
    sampling.steps(20)
    sampling.stall(STEP_NS * 3 + 10 * SAMPLE_NS)
    assert sampling.sampler.wait_s == 0.05
    sampling.session.end_step()
    sampling.sampler.look()
    assert sampling.marks() == [(21, PLACE)] * 10
    assert sampling.sampler.wait_s == 0.25


def test_a_step_is_sampled_for_5_s_and_once(sampling):
    sampling.steps(20)
    sampling.stall(60_000_000_000)
    assert [step for step, _ in sampling.marks()] == [21] * 101


def test_a_step_that_is_not_longer_than_one_before_is_not_sampled(sampling):
    sampling.steps(10)
    sampling.steps(1, STEP_NS * 10)  # sampled at most once, when it has ended
    before = sampling.asked
    sampling.steps(10)
    sampling.stall(STEP_NS * 12)
    assert sampling.asked == before
    sampling.wait(STEP_NS)
    assert sampling.asked > before


def test_short_stalls_and_the_first_steps_are_not_sampled(sampling):
    sampling.stall(60_000_000_000)
    sampling.steps(20, 1_000_000)
    sampling.stall(200_000_000)
    assert sampling.asked == 0


def test_12_steps_an_hour_are_sampled(sampling, monkeypatch):
    monkeypatch.setattr(stacks, "_TIMES_LONGEST", 0.0)
    for _ in range(14):
        sampling.steps(20)
        sampling.stall(4 * STEP_NS)
    assert len({step for step, _ in sampling.marks()}) == 12
    sampling.clock.advance(3_600_000_000_000)
    sampling.steps(20)
    sampling.stall(4 * STEP_NS)
    sampling.steps(1)
    assert len({step for step, _ in sampling.marks()}) == 13


def test_an_actor_that_waits_for_its_next_call_is_not_slow(start, clock):
    sampling = Sampling(start(loop=Loop(idles=True)), clock)
    sampling.steps(20)
    sampling.wait(60_000_000_000)
    assert sampling.asked == 0


def test_a_request_is_answered_with_samples_and_open_stages(sampling):
    ask(sampling.session.run, StackRequest("a", 1.0))
    sampling.session.begin_step(1)
    with stage("data_fetch"):
        began = sampling.clock()
        sampling.wait(1_100_000_000)
        answer = read_stack_answer(sampling.session.run, 0)
        assert isinstance(answer, StackAnswer)
    assert answer.id == "a"
    assert answer.spans[-1] == ("data_fetch", began)  # other tests leave spans open
    assert [place for _, place in answer.samples] == [PLACE] * 21
    assert answer.thread == sampling.session.training_thread
    assert sampling.marks() == [(1, PLACE)] * 21
    sampling.wait(10_000_000_000)
    assert sampling.asked == 21, "once"


def test_a_request_of_other_ranks_and_one_that_was_there_before_are_left_alone(start, clock):
    session = start()
    ask(session.run, StackRequest("old", 1.0))
    sampling = Sampling(session, clock)
    sampling.wait(1_000_000_000)
    ask(session.run, StackRequest("others", 1.0, (1, 2)))
    sampling.wait(1_000_000_000)
    stack_request_file(session.run).write_text('{"id": "x", "seconds": 1e9}')
    sampling.wait(1_000_000_000)
    assert sampling.asked == 0
    ask(session.run, StackRequest("own", 1.0, (0,)))
    sampling.wait(1_000_000_000)
    assert sampling.asked > 0


def compiled(source: str, file: object):
    """Return the function ``call`` of a file."""
    names: dict[str, object] = {"sys": sys}
    exec(compile(source, str(file), "exec"), names)
    return names["call"]


def test_a_frame_of_a_library_counts_for_the_line_that_called_it(start, clock, tmp_path):
    own = compiled("def call(get):\n    return get()\n", tmp_path / "secret" / "rewards.py")
    get = compiled("def call():\n    return sys._getframe()\n", "/env/lib/python3.12/queue.py")
    frame, session = own(get), start()
    sampler = StackSampler(session, 0, lambda: {session.training_thread: frame})
    assert sampler._place() == "call rewards.py:2", "of the path the name of the file"


def test_a_thread_in_libraries_alone_has_the_line_of_these(start, clock):
    code = SimpleNamespace(co_filename="/env/lib/python3.12/queue.py", co_name="get")
    frame, session = SimpleNamespace(f_code=code, f_lineno=2, f_back=None), start()
    sampler = StackSampler(session, 0, lambda: {session.training_thread: frame})
    assert sampler._place() == "get queue.py:2"


def test_a_thread_that_has_ended_has_no_line(start, clock):
    sampler = StackSampler(start(), 0, dict)
    assert sampler._place() == ""


def test_samples_are_no_progress_of_the_training(start, clock, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.recording.watchdog.thread_stacks", lambda *_: ())
    session = start()
    watchdog = Watchdog(session, 300)
    session.begin_step(1)
    session.end_step()
    watchdog.look()
    for _ in range(3):
        clock.advance(1_000_000_000)
        ask(session.run, StackRequest(f"{clock()}", 0.5))
        watchdog._sample(watchdog._sampler)
        clock.advance(1_000_000_000)
        watchdog._sample(watchdog._sampler)
        watchdog.look()
    session.flush()
    assert _marks(session), "some were taken"
    assert watchdog._quiet_ns == 3 * 2_000_000_000


def _marks(session: Session) -> list[str]:
    return [span.name for span in read(session).spans if span.kind == "mark"]


def test_a_sampler_that_fails_leaves_the_watch_for_hangs_alone(start, clock):
    session = start()
    watchdog = Watchdog(session, 300)
    watchdog._sampler._frames = lambda: 1 / 0
    ask(session.run, StackRequest("a", 1.0))
    watchdog._sample(watchdog._sampler)
    watchdog.look()
    assert watchdog._sampler is None
    session.flush()
    (note,) = read(session).notes
    assert note.text == "stacks are no longer sampled: ZeroDivisionError: division by zero"


def test_what_was_sampled_when_the_training_ends_is_kept(start, clock):
    session = start(helpers=lambda session: Helpers(watchdog=Watchdog(session, 300)))
    watchdog = session.helpers.watchdog
    session.begin_step(1)
    ask(session.run, StackRequest("a", 60.0))
    watchdog._sample(watchdog._sampler)
    session.end_step()
    session.close()
    assert len(_marks(session)) == 1
    assert read_stack_answer(session.run, 0).id == "a"


@pytest.mark.parametrize("timeout", [300, None])
def test_one_key_turns_hang_reports_and_samples_off(timeout, tmp_path):
    config = ProfilerConfig.build(profile_save_path=str(tmp_path), hang_timeout=timeout)
    with start_session(config) as session:
        watchdog = session.helpers.watchdog
        assert (watchdog is not None and watchdog._sampler is not None) == (timeout is not None)
