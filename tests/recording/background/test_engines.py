"""Pages of rollout engines become metrics of the run; a server that fails harms no training.

The engines are a double that serves pages with the names of vLLM and SGLang: no engine ran.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.background import engines
from lightning_rlprof.recording.background.readings import Total
from lightning_rlprof.recording.background.sampler import Sampler
from lightning_rlprof.recording.session import Session
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import METRICS
from lightning_rlprof.run import Run
from lightning_rlprof.testing import FakeClock
from tests.builders.diagnosed import found, judged
from tests.builders.engine_pages import Engine, EngineDouble, sglang_page, vllm_page

BUSY = Engine(running=12, waiting=3, kv=0.97, preempted=4, prompt=900, generated=5000)
VALUES = {
    "engine_running_requests": 12.0,
    "engine_waiting_requests": 3.0,
    "engine_kv_cache_percent": 97.0,
}
TOTALS = {
    "engine_preemptions_per_s": Total(4.0),
    "engine_prompt_tokens_per_s": Total(900.0),
    "engine_generated_tokens_per_s": Total(5000.0),
}
S = 1_000_000_000
START = Sampler.start


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no thread; the test takes the samples."""
    monkeypatch.setattr(Sampler, "start", lambda self: None)


@pytest.fixture
def server() -> Iterator[EngineDouble]:
    with EngineDouble(lambda: vllm_page(BUSY)).serving() as double:
        yield double


def session(tmp_path: Path, *urls: str, **options: Any) -> Session:
    config = ProfilerConfig.build(profile_save_path=str(tmp_path), engine_metrics=[*urls])
    return start_session(config, name="run", **options)


def sampler_of(*urls: str) -> tuple[Sampler, list[Any], FakeClock]:
    """Return the sampler of a session that keeps lines and notes, and its clock."""
    lines: list[Any] = []
    clock = FakeClock()
    note = lambda code, text, **facts: lines.append((code, text))  # noqa: E731
    running: Any = SimpleNamespace(add=lines.append, note=note, clock=clock)
    return engines.start(running, urls), lines, clock


# ---- the pages


@pytest.mark.parametrize("page", [vllm_page, sglang_page])
def test_a_page_of_a_double_is_read_by_the_names_of_the_engine(page: Callable[..., str]) -> None:
    read = engines.read_page(page(BUSY))
    assert (read.values, read.totals) == (VALUES, TOTALS)
    assert read.values.keys() | read.totals.keys() <= METRICS.keys()


@pytest.mark.parametrize("page", [vllm_page, sglang_page])
def test_engines_of_one_page_are_added_up_and_the_fullest_cache_counts(
    page: Callable[..., str],
) -> None:
    read = engines.read_page(page(BUSY, Engine(running=1, kv=0.2, preempted=2, prompt=100)))
    assert read.values == VALUES | {"engine_running_requests": 13.0}
    assert read.totals["engine_preemptions_per_s"] == Total(6.0)
    assert read.totals["engine_prompt_tokens_per_s"] == Total(1000.0)


def test_ranks_and_priorities_of_one_engine_are_not_added_up() -> None:
    assert engines.read_page(sglang_page(BUSY, tp=8)).values == VALUES
    lines = [
        f'sglang:num_queue_reqs{{model_name="m",priority="{each}"}} {value}'
        for each, value in (("", 5), ("1", 3), ("2", 2))
    ]
    assert engines.read_page("\n".join(lines)).values == {"engine_waiting_requests": 5.0}


def test_the_name_of_the_cache_before_vllm_0_9_is_read_and_counts_once_beside_the_new_one() -> None:
    old = 'vllm:gpu_cache_usage_perc{engine="0"} 0.4'
    assert engines.read_page(old).values == {"engine_kv_cache_percent": 40.0}
    both = f'{old}\nvllm:kv_cache_usage_perc{{engine="0"}} 0.5'
    assert engines.read_page(both).values == {"engine_kv_cache_percent": 50.0}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("vllm:num_requests_running 3", 3.0),
        ("vllm:num_requests_running 3 1760000000000\r", 3.0),
        (r'vllm:num_requests_running{model_name="a} 9 \" b"} 3.0', 3.0),
        ('vllm:num_requests_running{model_name="a"} NaN', None),
        ("vllm:num_requests_running +Inf", None),
        ("vllm:num_requests_running -1", None),
        ("vllm:num_requests_running 1e400", None),
        ("vllm:num_requests_running 1-2", None),
        ("vllm:num_requests_running{ 3", None),
        (f'vllm:num_requests_running{{a="{"x" * 5000}"}} 3', None),
        (" vllm:num_requests_running 3", None),
        ("# vllm:num_requests_running 3", None),
        ("vllm:num_requests_running_total 3", None),
    ],
)
def test_only_lines_as_prometheus_writes_them_are_read(line: str, value: float | None) -> None:
    read = engines.read_page(f"{line}\nvllm:num_requests_waiting 1\n").values
    assert read.get("engine_running_requests") == value
    assert read["engine_waiting_requests"] == 1.0


def test_a_page_of_something_else_is_refused() -> None:
    with pytest.raises(OSError, match="no metric of vLLM or SGLang; SGLang needs --enable-metrics"):
        engines.read_page("<html>sign in</html>")


# ---- the server


def test_a_double_is_read_whether_it_sends_chunks_or_a_length(server: EngineDouble) -> None:
    for server.is_chunked in (True, False):
        sampler, lines, _ = sampler_of(server.url)
        sampler.sample()
        sampler.stop()
        assert lines[0].values == VALUES


def test_a_url_without_a_path_means_the_page_and_its_user_is_sent_but_written_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, server: EngineDouble
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"http://us%40er:secret@127.0.0.1:{server.port}?key=hidden"
    with session(tmp_path, url) as running:
        running.begin_step(1)
        running.helpers.engines.sample()
        server.status = 500
        running.helpers.engines.sample()
        running.end_step()
    assert server.asked[0] == ("/metrics?key=hidden", "Basic dXNAZXI6c2VjcmV0")
    texts = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()]
    written = b"\n".join(texts) + caplog.text.encode()
    assert f"127.0.0.1:{server.port}".encode() in written
    assert not any(each in written for each in (b"secret", b"hidden", b"us%40er", b"us@er"))


def test_no_redirect_is_followed(server: EngineDouble) -> None:
    with EngineDouble(lambda: vllm_page(BUSY)).serving() as other:
        server.status, server.headers = 302, {"Location": other.url}
        sampler, lines, _ = sampler_of(server.url)
        sampler.sample()
        sampler.stop()
    assert other.asked == []
    text = f"background metrics: no answer of {server.url} at times (its status is 302, not 200)"
    assert lines == [(Code.METRICS_MISSING, text)]


def test_a_page_that_is_too_large_is_left(
    server: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MAX_ANSWER_BYTES", 1 << 20)
    server.page = lambda: "x" * (2 << 20)
    sampler, lines, _ = sampler_of(server.url)
    sampler.sample()
    sampler.stop()
    assert "(it is larger than 1 MiB)" in lines[0][1]


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_does_not_end_its_answer_is_left(
    drips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit for each byte would never be reached by one that sends a byte at times."""
    monkeypatch.setattr(engines, "_ANSWER_S", 0.05)
    is_over = threading.Event()

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not is_over.wait(0.001):
                if drips:
                    connection.send(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        sampler, lines, _ = sampler_of(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        sampler.sample()
        sampler.stop()
        is_over.set()
        thread.join()
    assert [code for code, _ in lines] == [Code.METRICS_MISSING]


def test_the_time_for_a_byte_is_what_is_left_of_the_time_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts: list[float] = []
    double: Any = SimpleNamespace(
        sendall=len, settimeout=timeouts.append, recv=lambda size: b"x" * size
    )
    times = iter([5.0, 5.0, 5.3, 5.8, 5.95])
    monkeypatch.setattr(engines, "time", SimpleNamespace(monotonic=times.__next__))
    with pytest.raises(OSError, match=r"longer than 0\.9 s"):
        engines._answer(double, urlsplit("http://host/metrics"))
    assert timeouts == pytest.approx([0.9, 0.6, 0.1])


def test_a_server_that_is_not_there_is_noted_once_and_read_when_it_comes_and_comes_back() -> None:
    engine = Engine(preempted=10, prompt=100)
    double = EngineDouble(lambda: vllm_page(engine))
    with double.serving():
        pass
    sampler, lines, clock = sampler_of(double.url)

    def sample() -> None:
        clock.advance(S)
        sampler.sample()

    sample()
    sample()
    with double.serving():
        sample()
        engine.prompt += 50
        sample()
    sample()
    engine.preempted, engine.prompt = 0, 20  # It was restarted, and counts again from 0.
    with double.serving():
        sample()
        engine.preempted += 6
        sample()
    sampler.stop()
    assert [each[0] for each in lines if isinstance(each, tuple)] == [Code.METRICS_MISSING]
    assert [
        (each.clock_ns // S, each.rates.get("engine_prompt_tokens_per_s")) for each in lines[1:]
    ] == [(3, None), (4, 50.0), (6, None), (7, 0.0)]
    assert lines[-1].rates["engine_preemptions_per_s"] == 6.0


def test_each_of_several_engines_has_its_number(server: EngineDouble) -> None:
    with EngineDouble(lambda: sglang_page(Engine(running=1))).serving() as other:
        sampler, lines, _ = sampler_of(server.url, other.url)
        sampler.sample()
        sampler.stop()
    assert [(each.device, each.values["engine_running_requests"]) for each in lines] == [
        (0, 12.0),
        (1, 1.0),
    ]


# ---- the run


def test_steps_beside_a_full_double_have_its_series_and_the_finding(
    tmp_path: Path, server: EngineDouble
) -> None:
    full = Engine(running=40, waiting=20, kv=0.99)
    server.page = lambda: vllm_page(full)
    with session(tmp_path, server.url) as running:
        for number in range(1, 71):
            running.begin_step(number)
            running.helpers.engines.sample()
            full.preempted += 2
            full.generated += 100
            running.end_step()
        running.helpers.engines.sample()
    spans = load(tmp_path / "run")
    table = spans.table("background_metrics")
    assert {*table.column("metric")} == VALUES.keys() | TOTALS.keys()
    assert min(table.column("value")) >= 0
    [own] = found(spans, "preemptions")
    assert own.facts[0].value == pytest.approx(2, rel=0.2)
    assert [each.value for each in own.facts[1:]] == pytest.approx([1.0, 0.99])
    assert [each.id for each in own.problem.remedies] == ["kv-preemptions"]
    assert len(Run.of(spans).sql(own.query).rows) > 60


def test_steps_beside_an_idle_double_have_no_finding_and_are_decided(
    tmp_path: Path, server: EngineDouble
) -> None:
    server.page = lambda: sglang_page(Engine())
    with session(tmp_path, server.url) as running:
        for number in range(1, 21):
            running.begin_step(number)
            running.helpers.engines.sample()
            running.end_step()
    assert judged(load(tmp_path / "run"), "preemptions") == []


def test_a_thread_samples_without_background_metrics_and_ends_with_the_session(
    tmp_path: Path, server: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "start", START)
    read = threading.Event()

    def page() -> str:
        read.set()
        return vllm_page(BUSY)

    server.page = page
    with session(tmp_path, server.url) as running:
        running.begin_step(1)
        assert running.helpers.background is None
        assert read.wait(60)
        thread = running.helpers.engines._thread
        running.end_step()
    assert not thread.is_alive()
    assert {*load(tmp_path / "run").table("background_metrics").column("metric")} == VALUES.keys()


def test_only_the_first_rank_reads_an_engine_and_none_without_the_key(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/metrics"
    with session(tmp_path / "a", url, rank=1, world_size=2) as running:
        assert running.helpers.engines is None
    with session(tmp_path / "b") as running:
        assert running.helpers.engines is None
    with session(tmp_path / "c", url, world_size=2) as running:
        assert running.helpers.engines is not None


@pytest.mark.parametrize("leaves", [True, False])
def test_a_forked_child_and_a_discarded_session_read_no_engine(
    leaves: bool, tmp_path: Path, server: EngineDouble
) -> None:
    running = session(tmp_path, server.url)
    reader, watchdog = running.helpers.engines, running.helpers.watchdog
    assert not reader._end.is_set()
    if leaves:
        running.leave()
        watchdog.stop()  # A forked child has no such thread.
    running.discard()
    assert reader._end.is_set()
    assert server.asked == []
