"""Captures that are asked for while a session records: their steps, and what stops them."""

import os
from dataclasses import replace

import pytest

from lightning_rlprof.errors import RecorderError, RlprofError
from lightning_rlprof.recording import capture_requests
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.session import request_capture
from lightning_rlprof.records.capture_request import (
    MOST_STEPS,
    CaptureRequest,
    read_request,
    request_file,
    write_request,
)
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.system.files import owners_of
from lightning_rlprof.testing import FakeRecorder, make_header
from tests.builders.recording import read, run_steps, spans


@pytest.fixture
def built(monkeypatch):
    """Recorders that requests got, in order."""
    found = []

    def build(config, header, **_):
        found.append(FakeRecorder())
        return found[-1:]

    monkeypatch.setattr(capture_requests, "build_recorders", build)
    return found


def ask(session, first_step, steps=1, name="a", unix_ns=None, **options):
    when = session.header.unix_ns + 1 if unix_ns is None else unix_ns
    fields = {"id": name, "unix_ns": when, "why": "a test", **options}
    request = CaptureRequest(first_step=first_step, steps=steps, **fields)
    write_request(session.run, request)
    return request


def look(session, clock):
    """Let the next end of a step look for requests."""
    clock.advance(capture_requests.LOOK_NS)


def notes(session):
    return [note.text for note in read(session).notes]


def opened(recorder):
    return [call for call in recorder.calls if call.startswith("open")]


def captured(session):
    return [span.step for span in spans(session, "step") if (span.counters or {}).get("capture")]


def test_the_steps_that_were_asked_for_are_captured_and_no_others(start, clock, built):
    session = start()
    run_steps(session, clock, [1, 2])
    ask(session, 5, steps=2)
    look(session, clock)
    run_steps(session, clock, range(3, 10))
    session.close()
    (recorder,) = built
    assert recorder.calls == [
        "open step-000005",
        *["enter step", "enter actor_update", "exit actor_update", "exit step"] * 2,
        "close",
        "finish",
    ]
    assert captured(session) == [5, 6]
    assert notes(session) == [
        "capturing steps 5 to 6 (a test)",
        "captured step-000005 with FakeRecorder",
    ]


def test_a_stage_alone_is_captured(start, clock, built):
    session = start()
    ask(session, 2, stages=["actor_update"])
    look(session, clock)
    run_steps(session, clock, [1, 2, 3])
    session.close()
    assert opened(built[0]) == ["open step-000002-actor_update"]


def test_the_configured_captures_go_on_with_their_own_recorder(start, clock, built):
    own = FakeRecorder()
    session = start([own], steps=[2, 8])
    run_steps(session, clock, [1, 2])
    ask(session, 5)
    look(session, clock)
    run_steps(session, clock, range(3, 10))
    session.close()
    assert [call for call in own.calls if "open" in call] == [
        "open step-000002",
        "open step-000008",
    ]
    assert [call for call in built[0].calls if "open" in call] == ["open step-000005"]
    assert captured(session) == [2, 5, 8]


def test_a_rank_that_was_not_asked_captures_nothing_and_says_nothing(start, clock, built):
    session = start(rank=1)
    ask(session, 3, ranks=[0, 2])
    look(session, clock)
    run_steps(session, clock, range(1, 6))
    session.close()
    assert (built, notes(session)) == ([], [])


def test_each_request_is_served_once(start, clock, built):
    session = start()
    for first in (3, 7):
        ask(session, first, name=f"request {first}")
        look(session, clock)
        run_steps(session, clock, range(first - 2, first + 2))
        look(session, clock)
    session.close()
    assert (len(built), captured(session)) == (2, [3, 7])


def test_a_request_that_comes_too_late_is_noted(start, clock, built):
    session = start()
    run_steps(session, clock, [1, 2, 3])
    ask(session, 2)
    look(session, clock)
    run_steps(session, clock, [4])
    session.close()
    assert built == []
    assert notes(session) == ["capture of step 2 was requested too late, in step 4 (a test)"]


def test_a_request_after_the_file_is_full_is_refused_for_that_reason(start, clock, built):
    session = start(max_file_bytes=1_000_000)
    for step in range(1, 1_000):
        session.begin_step(step)
        with stage("x" * 1_000):
            clock.advance(MS)
        session.end_step()
    ask(session, max(span.step for span in spans(session, "step")) + 3)
    look(session, clock)
    run_steps(session, clock, [1_000])
    session.close()
    (text,) = [each for each in notes(session) if each.startswith("capture of step")]
    assert "its file is full: raise max_file_bytes" in text


@pytest.mark.parametrize("found", [True, False])
def test_a_request_past_the_end_of_training_is_said_at_the_end(start, clock, built, found):
    session = start()
    run_steps(session, clock, [1, 2])
    ask(session, 9, steps=2)
    if found:
        look(session, clock)
    run_steps(session, clock, [3])
    session.close()
    text = "nothing was captured of steps 9 to 10: the training ended after step 3 (a test)"
    assert (built, notes(session)) == ([], [text])


def test_a_request_is_not_captured_where_nothing_can_be(start, clock):
    session = start(mstx=True, profile_level="level_none", profile_with_cpu=False)
    ask(session, 3)
    look(session, clock)
    run_steps(session, clock, [1, 2, 3, 4])
    session.close()
    assert captured(session) == []
    assert notes(session) == [
        "step 3 cannot be captured: lightweight mode: cpu has no profiler markers, "
        "only spans are recorded (a test)"
    ]


def test_a_request_while_a_capture_is_open_is_noted(start, clock, built):
    own = FakeRecorder()
    session = start([own], profile_step_start=1, profile_step_end=9)
    ask(session, 3)
    look(session, clock)
    run_steps(session, clock, range(1, 6))
    session.close()
    assert "step 3 cannot be captured: another capture is open (a test)" in notes(session)
    assert opened(own) == ["open step-000001"]


def test_a_profiler_that_cannot_work_is_noted(start, clock, monkeypatch):
    def build(config, header, **_):
        raise RecorderError("nsys has the device")

    monkeypatch.setattr(capture_requests, "build_recorders", build)
    session = start()
    ask(session, 3)
    look(session, clock)
    run_steps(session, clock, range(1, 6))
    session.close()
    assert notes(session) == ["step 3 cannot be captured: nsys has the device"]


def test_a_run_serves_so_many_requests_and_then_no_more(start, clock, built, monkeypatch):
    monkeypatch.setattr(capture_requests, "_MAX_CAPTURES", 2)
    session = start()
    for number in range(1, 4):
        ask(session, 10 * number, name=str(number))
        look(session, clock)
        run_steps(session, clock, range(10 * number - 5, 10 * number + 2))
    session.close()
    assert captured(session) == [10, 20]
    assert notes(session)[-1] == "no capture: 2 were requested in this run already"


def test_a_request_that_was_there_before_the_session_is_not_its_own(start, clock, built, tmp_path):
    write_request(tmp_path, CaptureRequest("old", -1, 2, 1))
    session = start()
    look(session, clock)
    run_steps(session, clock, [1, 2, 3])
    os.utime(request_file(session.run))  # as a copy or a restart does
    look(session, clock)
    run_steps(session, clock, [4, 5])
    session.close()
    assert (built, notes(session)) == ([], [])


def test_training_that_ends_before_the_step_leaves_no_capture(start, clock, built):
    session = start()
    ask(session, 50)
    look(session, clock)
    run_steps(session, clock, [1, 2])
    session.close()
    assert (built, captured(session), read(session).status) == ([], [], "finished")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"id": 5}',
        b'{"id": "a", "unix_ns": 9, "first_step": 0, "steps": 1}',
        b'{"id": "a", "unix_ns": 9, "first_step": 2, "steps": -1}',
        b'{"id": "a", "unix_ns": 9, "first_step": 2, "steps": 1, "ranks": "all"}',
        b"[" * 200_000,
    ],
    ids=lambda content: content[:20].decode("latin-1"),
)
def test_a_file_that_is_no_request_is_refused_once(content, start, clock, built):
    session = start()
    for first in (1, 4):
        request_file(session.run).write_bytes(content)
        look(session, clock)
        run_steps(session, clock, range(first, first + 3))
    session.close()
    (note,) = notes(session)
    assert note.startswith("a request to capture was refused: ")
    assert built == []


LIMITS = {
    "steps": (MOST_STEPS + 1, 10**9, 0, -1),
    "first_step": (10**12, 0),
    "ranks": ([-1], [*range(5000)]),
    "stages": (["x" * 201], ["x"] * 101),
    "why": ("x" * 1001,),
    "id": ("x" * 65,),
}


@pytest.mark.parametrize(("field", "value"), [(key, v) for key in LIMITS for v in LIMITS[key]])
def test_a_request_over_a_limit_is_neither_written_nor_believed(
    field, value, start, clock, built, monkeypatch
):
    """By whom ever it was written, such as an earlier version."""
    session = start()
    with pytest.raises(RlprofError, match="not a valid capture request"):
        ask(session, **{"first_step": 3, field: value})
    monkeypatch.setattr("lightning_rlprof.records.capture_request.decode_request", bool)
    ask(session, **{"first_step": 3, field: value})
    monkeypatch.undo()
    look(session, clock)
    run_steps(session, clock, range(1, 8))
    session.close()
    (note,) = notes(session)
    assert "a request to capture was refused" in note
    assert f"`$.{field}" in note
    assert captured(session) == []


def test_request_capture_says_what_is_too_much(start, clock, built):
    session = start()
    run_steps(session, clock, [1])
    assert request_capture(steps=MOST_STEPS + 1, why="the reward fell") == 0
    run_steps(session, clock, [2, 3])
    session.close()
    (note,) = notes(session)
    assert note.startswith("the reward fell; the capture cannot be requested: ")
    assert "<= 100 - at `$.steps`" in note


def test_a_request_of_another_user_is_refused(start, clock, built, monkeypatch):
    other = frozenset({os.geteuid() + 1})
    monkeypatch.setattr(capture_requests, "owners_of", lambda path: other)
    session = start()
    ask(session, 3)
    look(session, clock)
    run_steps(session, clock, range(1, 6))
    session.close()
    (note,) = notes(session)
    assert f"belongs to another user, {os.geteuid()}" in note
    assert captured(session) == []


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_is_no_file_in_place_of_a_request_stops_nothing(put, start, clock, built):
    session = start()
    put(request_file(session.run))
    look(session, clock)
    run_steps(session, clock, [1, 2, 3])
    session.close()
    (note,) = notes(session)
    assert note.startswith("a request to capture was refused: ")
    assert built == []


def test_why_reaches_the_log_and_the_run_escaped(start, clock, built, caplog):
    session = start()
    ask(session, 1, why="x\x1b[31m\nrlprof: hacked\u202e")
    look(session, clock)
    run_steps(session, clock, [1, 2])
    session.close()
    (note,) = notes(session)
    assert note.endswith(r"(x\x1b[31m\nrlprof: hacked\u202e)")
    assert note in caplog.messages


def test_only_the_training_may_read_a_request_beside_its_user(start):
    """One that root has written may be for the training of another user."""
    session = start()
    ask(session, 5)
    mode = request_file(session.run).stat().st_mode & 0o777
    assert mode == (0o600 if os.geteuid() else 0o644)


def steps_of(session, clock, times_ns, first=1):
    for step, ns in enumerate(times_ns, first):
        session.begin_step(step)
        clock.advance(ns)
        session.end_step()


MS = 1_000_000


def test_a_slow_step_makes_one_capture_that_comes_when_every_rank_can_know_of_it(
    start, clock, built
):
    session = start(capture_anomalies=True)
    steps_of(session, clock, [100 * MS] * 60 + [900 * MS] + [100 * MS] * 300)
    session.close()
    # 1.2 s are 12 steps, and two more.
    assert captured(session) == [75, 76]
    assert notes(session)[0] == (
        "step 61 took 9.0 times the usual 100 ms; requested a capture of steps 75 to 76"
    )


def test_a_lasting_change_makes_one_capture(start, clock, built):
    session = start(capture_anomalies=True)
    steps_of(session, clock, [100 * MS] * 60 + [140 * MS] * 500)
    session.close()
    assert captured(session) == [81, 82]
    assert notes(session)[0].startswith("the last steps took 1.4 times the usual 100 ms")


def test_captured_steps_validations_and_other_ranks_ask_for_nothing(start, clock, built):
    slow = [100 * MS] * 60 + [900 * MS] + [100 * MS] * 60
    session = start(rank=1, capture_anomalies=True)
    steps_of(session, clock, slow)
    session.close()
    assert request_file(session.run).exists() is False


def test_a_step_with_a_validation_or_a_capture_is_not_an_anomaly(start, clock, built):
    session = start([FakeRecorder()], capture_anomalies=True, steps=[70])
    steps_of(session, clock, [100 * MS] * 60)
    session.begin_step(61)
    with stage("validation"):
        clock.advance(900 * MS)
    session.end_step()
    steps_of(session, clock, [100 * MS] * 8 + [900 * MS] + [100 * MS] * 60, first=62)
    session.close()
    assert captured(session) == [70]
    assert request_file(session.run).exists() is False


def test_without_the_option_nothing_is_asked_for(start, clock, built):
    session = start()
    steps_of(session, clock, [100 * MS] * 60 + [900 * MS] + [100 * MS] * 60)
    session.close()
    assert request_file(session.run).exists() is False


def test_anomalies_are_captured_three_times_an_hour(start, clock, built):
    session = start(capture_anomalies=True)
    first = 1
    for number in range(5):
        steps_of(session, clock, [100 * MS] * 210 + [1000 * MS * 2**number], first)
        first += 211
    an_hour = 3600 * 1000 * MS
    steps_of(session, clock, [100 * MS] * 210 + [an_hour] + [100 * MS] * 30, first)
    session.close()
    assert len(captured(session)) == 2 * 4
    assert sum("not captured" in note for note in notes(session)) == 2


def test_a_condition_of_the_users_asks_from_any_rank(start, clock, built):
    session = start(rank=3)
    steps_of(session, clock, [500 * MS] * 20)
    assert (
        request_capture(2, why="reward is 0") == 26
    )  # 1.2 s are 3 steps, and 2 more: step 21 has begun
    steps_of(session, clock, [500 * MS] * 10, first=21)
    session.close()
    assert captured(session) == [26, 27]
    assert notes(session)[0] == "reward is 0; requested a capture of steps 26 to 27"


def test_a_run_directory_that_cannot_be_written_costs_the_request_alone(
    start, clock, built, monkeypatch
):
    def refuse(run, request):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(capture_requests, "write_request", refuse)
    session = start()
    run_steps(session, clock, [1])
    request_capture()
    run_steps(session, clock, [2])
    session.close()
    assert notes(session) == [
        "request_capture(); the capture cannot be requested: [Errno 30] Read-only file system"
    ]


def test_longer_responses_are_not_an_anomaly_and_slower_ones_are(start, clock, built):
    session = start(capture_anomalies=True)
    for step in range(1, 301):
        session.begin_step(step)
        tokens = 1000 if step < 100 else 3000
        with stage("actor_generate", tokens=tokens):
            clock.advance(tokens * MS // 10 * (2 if step >= 200 else 1))
        session.end_step()
    session.close()
    assert captured(session) == [213, 214]
    assert notes(session)[0].startswith(
        "the last steps took 2.0 times the usual 300 ms for as many tokens; requested"
    )


def test_of_many_ranks_those_are_captured_that_show_the_cause(start, clock, built):
    session = start(capture_anomalies=True)
    session.header = replace(session.header, world_size=8)
    others = [TraceWriter(session.run, make_header(rank, world_size=8)) for rank in range(1, 8)]
    for step in range(1, 101):
        begin = clock()
        slow = 900 * MS if step == 60 else 0
        session.begin_step(step)
        with stage("compute_reward"):
            clock.advance(50 * MS)
        with stage("actor_update"):
            clock.advance(50 * MS + slow)
        session.end_step()
        for rank, writer in enumerate(others, 1):  # each writes its step when rank 0 goes on
            middle = begin + 50 * MS + slow * (rank == 3)
            times = [("compute_reward", "stage", begin, middle)]
            times += [("actor_update", "stage", middle, clock()), ("step", "step", begin, clock())]
            writer.write(
                [
                    ["span", name, kind, step, low, high, 7, 3 * step + at, None, None]
                    for at, (name, kind, low, high) in enumerate(times)
                ]
            )
    for writer in others:
        writer.close()
    session.close()
    (text,) = [note for note in notes(session) if "; requested a capture" in note]
    assert text == (
        "step 60 took 10.0 times the usual 100 ms; rank 3 arrives last, by 90% of the step; "
        "requested a capture of steps 79 to 80 on ranks 0, 3"
    )
    assert captured(session) == [79, 80]
    assert read_request(session.run, owners_of(session.run)).ranks == [0, 3]
