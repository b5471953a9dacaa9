"""Requests in the process group's store: between ranks that don't share a directory."""

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording import capture_requests
from lightning_rlprof.recording.capture_requests import StoreRelay, store_of_the_job
from lightning_rlprof.records.capture_request import CaptureRequest, decode_request
from lightning_rlprof.testing import FakeRecorder
from tests.builders.recording import run_steps, spans
from tests.places import ROOT

REQUEST = CaptureRequest("a", 5, 7, 2, [0, 1], ["actor_update"], "a test")
KEY = "rlprof/run/capture-request"
PATIENCE_S = 120


class StoppedStore(HashStore):
    """A store whose server has stopped: no call returns before it goes on."""

    def __init__(self):
        super().__init__()
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def check(self, keys):
        self.asked.set()
        assert self.goes_on.wait(PATIENCE_S)
        return super().check(keys)


class EndedStore(HashStore):
    """A store whose server has ended."""

    def check(self, keys):
        raise ConnectionError("Broken pipe")


@pytest.fixture
def relay(monkeypatch):
    """Make relays whose threads do nothing, so that a request is where the test has put it."""
    monkeypatch.setattr(StoreRelay, "_work", lambda self: None)
    return StoreRelay


@pytest.fixture
def working_relay(monkeypatch):
    """Make relays whose threads ask at once and when they are told to, and end them."""
    monkeypatch.setattr(capture_requests, "POLL_S", PATIENCE_S)
    made = []

    def make(store):
        made.append(StoreRelay(store, "run"))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each._thread.join(PATIENCE_S)
        assert not each._thread.is_alive()


def test_a_request_arrives_whole_and_in_its_own_run_only(relay):
    store = HashStore()
    sender, receiver, stranger = (relay(store, run) for run in ("run", "run", "another"))
    sender.send(REQUEST)
    sender.exchange()
    receiver.exchange()
    stranger.exchange()
    assert receiver.received == REQUEST
    assert stranger.received is None


def test_the_newest_request_takes_the_place_of_the_last(relay):
    store = HashStore()
    sender, receiver = relay(store, "run"), relay(store, "run")
    newer = CaptureRequest("b", 6, 70, 1)
    for request in (REQUEST, newer):
        sender.send(request)
        sender.exchange()
    receiver.exchange()
    assert receiver.received == newer


@pytest.mark.parametrize("wrong", [b"", b"{", b"[]", b'{"id":"a"}', b"\xff\xfe"])
def test_what_is_no_request_is_left_alone(wrong, relay):
    store = HashStore()
    store.set(KEY, wrong)
    receiver = relay(store, "run")
    receiver.exchange()
    assert receiver.received is None


def test_a_server_that_stopped_holds_its_thread_alone(working_relay):
    store = StoppedStore()
    own = working_relay(store)
    assert store.asked.wait(PATIENCE_S)
    own.send(REQUEST)
    assert own.received is None
    own.close()
    store.goes_on.set()


def test_a_thread_passes_on_what_is_sent(working_relay):
    store = HashStore()
    working_relay(store).send(REQUEST)
    store.wait([KEY], timedelta(seconds=PATIENCE_S))
    assert decode_request(store.get(KEY)) == REQUEST


def test_a_server_that_ended_ends_the_thread(working_relay):
    own = working_relay(EndedStore())
    own._thread.join(PATIENCE_S)
    assert not own._thread.is_alive()
    own.send(REQUEST)
    assert own.received is None


def test_without_a_process_group_there_is_no_store():
    assert store_of_the_job() is None


@pytest.fixture
def built(monkeypatch):
    monkeypatch.setattr(capture_requests, "build_recorders", lambda *_, **__: [FakeRecorder()])


def test_a_rank_captures_what_another_host_asks_for_once(start, clock, monkeypatch, relay, built):
    store = HashStore()
    monkeypatch.setattr(capture_requests, "store_of_the_job", lambda: store)
    session = start()
    session._windows.requests._relays = True
    clock.advance(capture_requests.LOOK_NS)
    run_steps(session, clock, [1])
    sender = relay(store, session.run.name)
    sender.send(CaptureRequest("a", session.header.unix_ns + 1, 4, 1, why="a test"))
    sender.exchange()
    session._windows.requests._relay.exchange()
    run_steps(session, clock, range(2, 8))
    session.close()
    assert [s.step for s in spans(session, "step") if (s.counters or {}).get("capture")] == [4]


@pytest.mark.parametrize(
    ("ranks", "local", "asks"),
    [(1, None, False), (2, "2", False), (2, "1", True), (2, None, True)],
)
def test_ranks_of_one_host_have_the_run_directory(ranks, local, asks, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert capture_requests.may_span_hosts(ranks) is asks


@pytest.mark.deep
def test_two_ranks_without_a_common_directory_capture_the_same_step(tmp_path: Path) -> None:
    program = ROOT / "tests" / "builders" / "two_hosts.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("LOCAL_WORLD_SIZE", None)
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(rank), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]
    found = [load(tmp_path / f"host-{rank}" / "run") for rank in range(2)]
    steps = [
        [note.text.split()[1] for note in each.notes if note.text.startswith("captured step-")]
        for each in found
    ]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 1
