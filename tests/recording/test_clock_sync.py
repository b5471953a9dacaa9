"""Real ranks that compare clocks over torch's stores, and stores that fail."""

import multiprocessing
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.clock_fit import from_exchange, solve
from lightning_rlprof.recording import clock_sync
from lightning_rlprof.recording.clock_sync import Exchange, default_store, leaders
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.notes import Code, Fact, Level, level_of
from lightning_rlprof.records.run_directory import RankTrace, read_trace

SECOND = 10**9
PATIENCE_NS = clock_sync._PATIENCE_NS
PATIENT_NS = 60 * SECOND
"""For a rank that a busy machine keeps away."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_sync, "_PATIENCE_NS", PATIENT_NS)


class Log:
    """A session to an exchange, with a clock that is off and, where wanted, passes by hand."""

    def __init__(self, offset: int = 0) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.notes: list[tuple[str, str]] = []
        self.regions: list[tuple[int, int]] = []
        self.add = self.lines.append
        self.clock = lambda: _monotonic() + offset

    def note(self, code: Code | Level, text: str, /, **facts: Fact) -> None:
        self.notes.append((level_of(code), text))

    def record(self, marker: Any, start_ns: int, end_ns: int) -> None:
        self.regions.append((start_ns, end_ns))


def _monotonic() -> int:
    import time

    return time.perf_counter_ns()


class Broken:
    """A store of which one method fails."""

    def __init__(self, method: str) -> None:
        self.method, self.store, self.waits = method, dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        if name == self.method:
            raise RuntimeError("connection reset\nby a stack of C++")
        return getattr(self.store, name)


def meet(ranks: list[Exchange], step: int = 0) -> None:
    """Let all ranks meet at once."""
    threads = [threading.Thread(target=each.meet, args=(step,)) for each in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def exchanges(store: Any, logs: list[Log], **options: Any) -> list[Exchange]:
    peers = range(1, len(logs))
    every = options.pop("every_ns", 600 * SECOND)
    return [Exchange(store, log, rank, peers, "run", every) for rank, log in enumerate(logs)]


def test_every_peer_gets_its_offset_to_rank_0() -> None:
    logs = [Log(), Log(offset=5 * SECOND), Log(offset=-7 * SECOND)]
    ranks = exchanges(dist.HashStore(), logs)

    meet(ranks)

    assert not any(log.notes for log in logs)
    assert logs[0].lines == []
    for log, offset in zip(logs[1:], (-5 * SECOND, 7 * SECOND), strict=True):
        (line,) = log.lines
        knot = from_exchange(line.readings)
        assert line.rank == 0
        assert knot.low_ns <= offset <= knot.high_ns


def test_a_meeting_is_a_region_and_leaves_nothing_in_the_store() -> None:
    store, logs = dist.HashStore(), [Log(), Log()]
    before = store.num_keys()
    meet(exchanges(store, logs))
    assert store.num_keys() == before
    assert [len(log.regions) for log in logs] == [1, 1]


def test_all_ranks_know_alike_when_to_meet_again() -> None:
    logs = [Log(), Log(), Log()]
    ranks = exchanges(dist.HashStore(), logs)
    meet(ranks)
    met = []
    for step in range(1, 50):
        due = {each._next <= step for each in ranks}
        assert len(due) == 1
        if due == {True}:
            meet(ranks, step)
            met.append(step)
    assert met == [1, 5, 21]  # ever rarer, as steps take microseconds here
    assert [len(log.lines) for log in logs] == [0, 4, 4]


def test_once_steps_are_long_they_meet_as_often_as_was_asked_for() -> None:
    now = [0]
    log = Log()
    log.clock = lambda: now[0]
    exchange = Exchange(dist.HashStore(), log, 0, [1], "run", 600 * SECOND)
    planned = []
    step = 0
    for _ in range(8):
        following = exchange._plan(step, now[0])
        planned.append(following - step)
        now[0] += (following - step) * 20 * SECOND
        step = following
    assert planned == [1, 4, 16, 30, 30, 30, 30, 30]


@pytest.mark.parametrize("method", ["set", "wait", "get", "delete_key"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_costs_the_exchange_and_is_noted_once(method: str, rank: int) -> None:
    log, store = Log(), Broken(method)
    for ping in range(5):
        for side in ("ping", "pong"):
            store.store.set(f"rlprof/run/0/1/{ping}/{side}", "1 2 3")
    exchange = Exchange(store, log, rank, [1], "run", SECOND)
    exchange.meet()
    if rank == 0 and method == "get":  # who answers reads nothing
        assert log.notes == []
        return
    exchange.meet(1)
    assert not exchange.after(2)
    (note,) = log.notes
    assert note == (
        "warning",
        f"clock synchronization with rank {1 - rank} stopped: connection reset",
    )


def test_a_rank_that_does_not_come_costs_a_second_once_and_the_others_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock_sync, "_PATIENCE_NS", PATIENCE_NS)
    store = dist.HashStore()
    logs = [Log(), Log(), Log()]
    ranks = exchanges(store, logs)
    meet([ranks[0], ranks[2]])
    start, end = logs[0].regions[0]
    assert 0.9 * SECOND < end - start < 3 * SECOND
    meet([ranks[0], ranks[2]], 1)
    assert [text[:41] for _, text in logs[0].notes] == ["clock synchronization with rank 1 stopped"]
    assert [len(log.lines) for log in logs] == [0, 0, 2]


def test_without_peers_nothing_happens() -> None:
    log = Log()
    exchange = Exchange(Broken("set"), log, 0, [], "run", SECOND)
    exchange.meet()
    assert not exchange.after(5)
    assert (log.lines, log.notes, log.regions) == ([], [], [])


def test_there_is_no_store_without_a_process_group() -> None:
    assert default_store() is None


def test_a_leader_is_the_first_rank_of_a_host() -> None:
    assert list(leaders(8, 2)) == [4]
    assert list(leaders(2, 2)) == [1]


def _train(rank: int, folder: str, method: str) -> None:
    clock_sync._PATIENCE_NS = PATIENT_NS
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timeout)
    config = ProfilerConfig.build(None, profile_save_path=folder)
    with start_session(config, name="run", rank=rank, world_size=2, hosts=2) as session:
        for step in range(1, 11):
            session.begin_step(step)
            dist.barrier()
            session.end_step()
    dist.destroy_process_group()


def _trained(folder: Path, method: str) -> list[RankTrace]:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_train, args=(rank, str(folder), method)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0, 0]
    return [read_trace(folder / "run" / f"rank-0000{rank}.jsonl") for rank in range(2)]


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_two_gloo_ranks_meet_at_start_end_and_between_and_share_a_clock(
    tmp_path: Path, kind: str
) -> None:
    method = f"file://{tmp_path}/store" if kind == "file" else f"tcp://127.0.0.1:{_free_port()}"
    zero, one = _trained(tmp_path, method)
    assert (zero.status, one.status) == ("finished", "finished")
    assert (zero.notes, one.notes, zero.exchanges) == ([], [], [])
    assert len(one.exchanges) >= 4
    assert {rank for rank, _ in one.exchanges} == {0}
    clock = solve([from_exchange(readings) for _, readings in one.exchanges])
    assert clock is not None
    times = [span.end_ns for span in one.spans]
    # one machine, so the true offset is 0
    assert (abs(clock.offset(times)) <= clock.uncertainty(times)).all()
    regions = [span for span in one.spans if span.name == "rlprof compare clocks"]
    assert len(regions) == len(one.exchanges)
    steps = [span for span in one.spans if span.kind == "step"]
    inside = [
        span for span in regions for step in steps if step.start_ns < span.start_ns < step.end_ns
    ]
    assert inside == []


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
