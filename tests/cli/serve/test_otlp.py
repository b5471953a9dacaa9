"""Metrics by OTLP: a collector on this machine receives them, and they are those of /metrics."""

import asyncio
import http.server
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rlprof.cli.serve import otlp
from lightning_rlprof.report.live_view import Gauge, Sample, exposition, gauges
from tests.cli.serve.test_app import begin
from tests.cli.serve.test_command import get, serving
from tests.report.test_live_view import Job
from tests.report.test_live_view_metrics import WEIRD, full, parsed

service = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
    reason="pip install 'lightning-rlprof[otlp]'",
)

UNITS = {"": "", "s": "_seconds", "By": "_bytes", "1": "_ratio", "{token}/s": "_per_second"}
"""What Prometheus makes of the unit of a gauge: the end of its name."""

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Collector(http.server.ThreadingHTTPServer):
    """Keep what is pushed; answer each request with a status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.requests: list[SimpleNamespace] = []
        self.status = 200
        self.came, self.spans_came = threading.Event(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        found = SimpleNamespace(path=self.path, headers=headers, body=body)
        self.server.requests.append(found)
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()
        self.server.came.set()
        if self.path.endswith("/v1/traces"):
            self.server.spans_came.set()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        serving = threading.Thread(target=made.serve_forever, args=(0.01,))
        serving.start()
        yield made
        made.shutdown()
        serving.join()


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HEADERS", "METRICS_HEADERS", "COMPRESSION", "METRICS_COMPRESSION"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 60)
    log = logging.getLogger("opentelemetry")
    level = log.level
    yield
    log.setLevel(level)


def received(body: bytes) -> tuple[dict[str, str], Values]:
    """Return the resource of a request, and its values under the names that Prometheus gives."""
    (of_run,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    (scope,) = of_run.scope_metrics
    assert scope.scope.name == "lightning_rlprof"
    found: Values = {}
    for metric in scope.metrics:
        assert metric.description
        assert metric.WhichOneof("data") == "gauge"
        name = metric.name.replace(".", "_") + UNITS[metric.unit]
        for point in metric.gauge.data_points:
            labels = {each.key: each.value.string_value for each in point.attributes}
            key = name, frozenset(labels.items())
            assert key not in found
            assert point.time_unix_nano > 1.7e18
            found[key] = point.as_double
    resource = {each.key: each.value.string_value for each in of_run.resource.attributes}
    return resource, found


def test_every_number_of_metrics_arrives(collector, tmp_path):
    job = full(tmp_path / "run-7")
    view = job.view
    found = gauges(job.live, view)
    exporter = otlp.Exporter(collector.address, "run-7")
    assert exporter.push(found) == ""
    (request,) = collector.requests
    assert request.path == "/v1/metrics"
    assert request.headers["content-type"] == "application/x-protobuf"
    resource, values = received(request.body)
    assert (resource["service.name"], resource["service.instance.id"]) == ("rlprof", "run-7")
    assert values == parsed(exposition(found))
    assert len(values) > 25


def steps_in(request: SimpleNamespace) -> list[tuple[int, int]]:
    """Return rank and number of the steps in a request, which are `rl.loop`."""
    traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    assert request.path == "/v1/traces"
    found = []
    for of_rank in traces.ExportTraceServiceRequest.FromString(request.body).resource_spans:
        told = {each.key: each.value for each in of_rank.resource.attributes}
        for span in of_rank.scope_spans[0].spans:
            number = {each.key: each.value.int_value for each in span.attributes}["rl.step"]
            found += [(told["nv.dl.rank"].int_value, number)] if span.name == "rl.loop" else []
            assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
    return sorted(found)


def test_each_step_is_pushed_once_when_it_is_complete(collector, tmp_path):
    job = Job(tmp_path / "run", 2, unix_ns=10**18)
    exporter = otlp.Exporter(collector.address, "run")

    def push() -> str:
        job.live.refresh()
        return exporter.push_steps(job.live.spans)

    job.step(1)
    assert (push(), collector.requests) == ("", [])  # its numbers may still come
    job.step(2)
    job.step(3)
    collector.status = 404
    assert push() == "answers 404"
    collector.status = 200
    assert (push(), push()) == ("", "")
    job.writers[0].write([("end", 9 * 10**9, "finished")])
    assert push() == ""
    assert [*map(steps_in, collector.requests)] == [
        [(0, 1), (0, 2), (1, 1), (1, 2)],
        [(0, 1), (0, 2), (1, 1), (1, 2)],
        [(0, 3)],
    ]


def test_the_environment_names_the_service_and_its_headers(collector, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=rl,service.name=grpo")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cret")
    assert otlp.Exporter(f"{collector.address}/otlp/", "run-7").push([]) == ""
    (request,) = collector.requests
    assert request.path == "/otlp/v1/metrics"
    assert request.headers["api-key"] == "s3cret"
    resource, _ = received(request.body)
    assert (resource["service.name"], resource["team"]) == ("grpo", "rl")


def test_labels_and_numbers_of_any_kind_arrive(collector):
    sample = Sample("rlprof_step", {"stage": WEIRD}, 2**70)
    exporter = otlp.Exporter(collector.address, "\ud800")
    assert exporter.push([Gauge("rlprof_step", "Step", [sample])]) == ""
    resource, values = received(collector.requests[0].body)
    key = "rlprof_step", frozenset({("stage", WEIRD.replace("\ud800", "?"))})
    assert values == {key: float(2**70)}
    assert resource["service.instance.id"] == "?"


def test_a_collector_that_refuses_is_one_line_without_the_header(
    collector, monkeypatch, capsys, caplog, tmp_path
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret,s3cret broken")
    collector.status = 401
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    class Feed:
        async def metrics(self) -> list[Gauge]:
            return []

        async def spans(self) -> None:
            """Return none: the collector refuses everything."""

    monkeypatch.setattr(otlp.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(otlp.push_always(otlp.Exporter(collector.address, "run"), Feed()))
    assert pauses == [10.0] * 3
    assert [each.headers["authorization"] for each in collector.requests] == ["Bearer s3cret"] * 3
    out, err = capsys.readouterr()
    line = f"warning: {collector.address}/v1/metrics answers 401; trying again every 10 s"
    assert (out, err) == (f"{line}\n", "")
    assert "s3cret" not in caplog.text


def test_without_a_collector_it_says_so(monkeypatch):
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    exporter = otlp.Exporter(f"http://127.0.0.1:{port}", "run")
    assert exporter.push([]) == "gives no answer"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("collector:4318", "--otlp: not an address of HTTP"),
        ("grpc://collector:4317", "--otlp: not an address of HTTP"),
        ("http://", "--otlp: not an address of HTTP"),
        ("http://host:99999", "--otlp: not an address of HTTP"),
        ("https://me:s3cret@host", "--otlp: the address has a user or a query"),
        ("https://host/?key=s3cret", "--otlp: the address has a user or a query"),
    ],
)
def test_what_is_not_an_address_is_refused_and_not_repeated(url, said, rlprof, tmp_path):
    begin(tmp_path)
    code, out, err = rlprof("serve", tmp_path, "--port", 0, "--otlp", url)
    assert (code, out) == (2, "")
    assert said in err
    assert "s3cret" not in err


def test_without_its_packages_it_says_how_to_get_them(rlprof, tmp_path, monkeypatch):
    begin(tmp_path)
    name = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    code, _, err = rlprof("serve", tmp_path, "--port", 0, "--otlp", "http://127.0.0.1:4318")
    assert code == 2
    assert f"--otlp needs {name}" in err.replace("\n", " ")
    assert 'hint: pip install "lightning-rlprof[otlp]"' in err


@pytest.mark.deep
def test_serve_pushes_what_it_answers_to_prometheus(collector, tmp_path: Path):
    run = tmp_path / "run"
    begin(run)  # it has ended: no number changes
    with serving(run, "--otlp", collector.address) as served:
        assert collector.spans_came.wait(120)
        _, text = get(f"{served.address}metrics", served.token)
        served.process.send_signal(signal.SIGINT)
        _, err = served.process.communicate(timeout=60)
    resource, values = received(collector.requests[0].body)
    assert resource["service.instance.id"] == run.name
    assert values == parsed(text)
    assert [each.path for each in collector.requests[:2]] == ["/v1/metrics", "/v1/traces"]
    assert (served.process.returncode, err) == (0, "")
