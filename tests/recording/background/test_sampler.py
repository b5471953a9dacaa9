"""Samples become lines of the run; what fails is said once, and no training is harmed."""

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.background import sampler
from lightning_rlprof.recording.background.readings import HostFiles, Part, Reading, Total
from lightning_rlprof.recording.background.sampler import Background
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.notes import level_of
from lightning_rlprof.records.records import METRICS
from lightning_rlprof.records.run_directory import MetricsLine
from lightning_rlprof.testing import FakeClock, make_header

S = 1_000_000_000
Lines = list[tuple[Any, ...]]


class Source:
    """A part whose numbers a test sets, or that fails."""

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {}
        self.values: dict[str, float] = {}
        self.error: Exception | None = None

    def read(self) -> Reading:
        if self.error is not None:
            raise self.error
        return Reading(dict(self.totals), dict(self.values))


def a_session(
    add: Any, note: Any, clock: Any, flush: Callable[[], object] = bool, kind: str = "cpu"
) -> Any:
    """Return what the background needs of a session."""
    buffer, header = SimpleNamespace(flush_if_free=flush), make_header(device=kind)
    return SimpleNamespace(add=add, note=note, clock=clock, buffer=buffer, header=header)


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def make(lines: Lines, clock: FakeClock) -> Any:
    made: list[Background] = []

    def background(*parts: Part, **options: Any) -> Background:
        note = lambda code, text, **facts: lines.append(("note", level_of(code), text))  # noqa: E731
        session = a_session(lines.append, note, clock, kind=options.pop("kind", "cpu"))
        made.append(Background(session, parts, **options))
        return made[-1]

    yield background
    for one in made:
        one.stop()


def test_a_counter_that_grows_becomes_a_rate_of_the_time_that_passed(
    make: Callable[..., Background], lines: Lines, clock: FakeClock
) -> None:
    source = Source()
    source.totals = {"disk_read_bytes_per_s": Total(1_000_000)}
    background = make(Part("disk", source.read))
    background.sample()
    assert lines == []  # of the first sample no rate is known: it is not its total
    clock.advance(2 * S)
    source.totals = {"disk_read_bytes_per_s": Total(1_000_600)}
    background.sample()
    clock.advance(1 * S)
    background.sample()
    clock.advance(1 * S)
    source.totals = {"disk_read_bytes_per_s": Total(5)}  # it began anew
    background.sample()
    assert lines == [
        MetricsLine(0, 2 * S, None, {"disk_read_bytes_per_s": 300.0}, {}),
        MetricsLine(2 * S, 3 * S, None, {"disk_read_bytes_per_s": 0.0}, {}),
    ]


def test_a_share_of_another_counter_is_unknown_while_that_one_stands(
    make: Callable[..., Background], lines: Lines, clock: FakeClock
) -> None:
    source = Source()
    background = make(Part("CPU quota", source.read))
    for throttled, periods in ((0, 0), (0, 0), (500, 10)):
        source.totals = {"cpu_throttled_percent": Total(throttled, per=periods)}
        background.sample()
        clock.advance(S)
    assert lines == [MetricsLine(S, 2 * S, None, {"cpu_throttled_percent": 50.0}, {})]


def test_values_are_of_their_time_and_limits_are_written_when_they_change(
    make: Callable[..., Background], lines: Lines, clock: FakeClock
) -> None:
    source = Source()
    background = make(Part("memory", source.read, 3))
    for used, limit in ((1, 9), (1, 9), (2, 8)):
        source.values = {"container_memory_bytes": used, "container_memory_limit_bytes": limit}
        background.sample()
        clock.advance(S)
    both = {"container_memory_bytes", "container_memory_limit_bytes"}
    assert [(line.since_ns, line.clock_ns, line.device, {*line.values}) for line in lines] == [
        (0, 0, 3, both),
        (0, S, 3, {"container_memory_bytes"}),
        (S, 2 * S, 3, both),
    ]


def test_what_is_missing_is_said_once_with_the_reason(
    make: Callable[..., Background], lines: Lines
) -> None:
    absent, broken, works = Source(), Source(), Source()
    absent.error, broken.error = OSError("there is no disk"), ValueError("half a line")
    works.values = {"host_available_bytes": 7}
    parts = {"disk": absent, "swap": broken, "memory": works}
    background = make(*(Part(name, source.read) for name, source in parts.items()))
    for _ in range(3):
        background.sample()
    notes = [line for line in lines if isinstance(line, tuple)]
    text = "background metrics lack: disk (there is no disk); swap (ValueError: half a line)"
    assert notes == [("note", "info", text)]
    assert len(lines) == 1 + 3


def test_a_part_that_fails_at_times_is_said_once_and_asked_again(
    make: Callable[..., Background], lines: Lines, clock: FakeClock
) -> None:
    source = Source()
    source.totals = {"network_sent_bytes_per_s": Total(0)}
    background = make(Part("network", source.read))
    background.sample()
    source.error = OSError("busy")
    for _ in range(2):
        clock.advance(S)
        background.sample()
    source.error = None
    source.totals = {"network_sent_bytes_per_s": Total(40)}
    clock.advance(2 * S)
    background.sample()
    assert lines == [
        ("note", "warning", "background metrics: no network at times (busy)"),
        MetricsLine(0, 4 * S, None, {"network_sent_bytes_per_s": 10.0}, {}),
    ]


def test_a_device_is_sampled_from_when_it_is_used(
    make: Callable[..., Background], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a double of the device."""
    source, used, asked = Source(), [], []  # type: ignore[var-annotated]
    source.values = {"device_busy_percent": 50}

    def part(index: int, uuid: str | None) -> Part:
        asked.append((index, uuid))
        return Part("NVML", source.read, index)

    monkeypatch.setitem(sampler._DEVICES, "cuda", part)
    background = make(device=lambda: used[0] if used else None, kind="cuda")
    background.end_step()
    background.sample()
    assert (lines, asked) == ([], [])
    used.append((2, "8f"))
    for _ in range(2):
        background.end_step()
        background.sample()
    assert asked == [(2, "8f")]
    assert [(line.device, line.rates, line.values) for line in lines] == [
        (2, {}, {"device_busy_percent": 50})
    ] * 2


def test_a_device_that_cannot_be_asked_has_no_metrics(make: Callable[..., Background]) -> None:
    def device() -> None:
        raise RuntimeError("no driver")

    assert make(device=device, kind="cuda").end_step()[0]["gc_collections"] >= 0


def test_a_slow_sample_is_followed_by_a_longer_pause(
    make: Callable[..., Background], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it takes a thousandth of a core at most, whatever the machine."""
    times, waits = iter([0.0, 0.0004, 1.0, 1.005, 2.0, 2.04]), []  # type: ignore[var-annotated]
    monkeypatch.setitem(sampler._DEVICES, "cuda", lambda *_: Part("NVML", Reading))
    background = make(device=lambda: (0, "8f"), kind="cuda")

    class End:
        def set(self) -> None:
            pass

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            if len(waits) == 3:
                background.end_step()  # from which on the device is known
            return len(waits) == 4

    monkeypatch.setattr(sampler.time, "thread_time", times.__next__)
    monkeypatch.setattr(background, "_end", End())
    background._run()
    assert waits == [1.0, 1.0, pytest.approx(5.0), 1.0]  # importing a library costs once


def test_what_ends_the_thread_is_noted(
    make: Callable[..., Background], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = make()
    monkeypatch.setattr(background, "sample", lambda: 1 / 0)
    background._run()
    [(_, level, text)] = lines
    assert level == "warning"
    assert text.startswith("background metrics ended early (ZeroDivisionError")


# ---- of whole sessions


def session(tmp_path: Path, **options: Any) -> Any:
    config = ProfilerConfig.build(profile_save_path=str(tmp_path), **options)
    return start_session(config, name="run")


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "rlprof-background"]


def test_a_session_leaves_neither_a_thread_nor_a_callback(
    tmp_path: Path, background_metrics: None
) -> None:
    before = [*gc.callbacks]
    with session(tmp_path):
        assert threads() == ["rlprof-background"]
        assert len(gc.callbacks) == len(before) + 1
    assert threads() == []
    assert gc.callbacks == before


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample when the test says so, not on a thread."""
    monkeypatch.setattr(Background, "start", lambda self: None)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux' /proc")
def test_a_session_samples_this_machine(
    tmp_path: Path, background_metrics: None, by_hand: None
) -> None:
    with session(tmp_path) as running:
        running.begin_step(1)
        running.helpers.background.sample()
        running.helpers.background.sample()
        running.end_step()
    run = load(tmp_path / "run")
    assert "gc_pause_ns" in run.counters
    table = run.table("background_metrics")
    names = {*table.column("metric")}
    assert "process_cpu_cores" in names
    assert names <= METRICS.keys()


def test_one_key_turns_it_off(tmp_path: Path, background_metrics: None) -> None:
    with session(tmp_path, background_metrics=False) as running:
        running.begin_step(1)
        assert threads() == []
        running.end_step()
    run = load(tmp_path / "run")
    assert "background_metrics" not in run.tables
    assert "gc_pause_ns" not in run.counters


def test_a_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProfilerConfig.build().background_metrics
    monkeypatch.setenv("RLPROF__BACKGROUND_METRICS", "false")
    assert not ProfilerConfig.build().background_metrics


def test_discarding_a_session_leaves_no_thread(tmp_path: Path, background_metrics: None) -> None:
    session(tmp_path).discard()
    assert threads() == []


def test_a_process_that_may_have_no_more_threads_trains_on(
    tmp_path: Path, background_metrics: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with session(tmp_path) as running:
        running.begin_step(1)
        running.end_step()
    run = load(tmp_path / "run")
    assert "gc_pause_ns" in run.counters
    texts = [note.text for note in run.notes]
    assert "no background metrics: RuntimeError: can't start new thread" in texts


def test_a_process_without_proc_trains_on_and_says_what_is_missing_once(
    tmp_path: Path, background_metrics: None, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "HostFiles", lambda: HostFiles(tmp_path / "no such machine"))
    with session(tmp_path) as running:
        running.begin_step(1)
        for _ in range(2):
            running.helpers.background.sample()
        running.end_step()
    run = load(tmp_path / "run")
    assert run.statuses == {0: "finished"}
    assert "background_metrics" not in run.tables
    [text] = {note.text for note in run.notes if note.text.startswith("background metrics")}
    assert text.startswith("background metrics lack: process (FileNotFoundError: ")
    assert text.count("(") == 12


def test_a_driver_that_does_not_answer_is_left_behind(
    make: Callable[..., Background], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, answer = threading.Event(), threading.Event()

    def read() -> Reading:
        inside.set()
        answer.wait()
        return Reading()

    monkeypatch.setattr(sampler, "_STOP_S", 0.01)
    background = make(Part("NVML", read))
    background.start()
    inside.wait()
    thread = background._thread
    background.stop()
    text = "background metrics: a call to a driver or server does not return"
    assert lines == [("note", "warning", text)]
    answer.set()
    assert thread is not None
    thread.join()


FORK = """
import json, os, sys, gc, threading, warnings
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.session import current
from lightning_rlprof.recording.start import start_session

warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks with threads
session = start_session(ProfilerConfig.build(profile_save_path=sys.argv[1]), name="run")
session.begin_step(1)
child = os.fork()
if not child:
    gc.collect()
    session.end_step()
    print(json.dumps([threading.active_count(), len(gc.callbacks), current() is None]), flush=True)
    os._exit(0)
os.waitpid(child, 0)
session.end_step()
session.close()
print(json.dumps([threading.active_count(), len(gc.callbacks), current() is None]))
"""


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_samples_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[1, 0, True], [1, 0, True]]
    assert load(tmp_path / "run").statuses == {0: "finished"}


def test_what_waits_in_memory_is_written_while_a_step_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "PERIOD_S", 0.001)
    flushed = threading.Event()
    background = Background(a_session(print, print, int, flushed.set), [])
    background.start()
    try:
        assert flushed.wait(120)
    finally:
        background.stop()
