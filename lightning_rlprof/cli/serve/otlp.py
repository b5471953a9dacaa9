"""Push metrics and steps of a run to an OpenTelemetry collector: OTLP over HTTP, in protobuf.

Headers, certificates and compression are those of the environment, as OpenTelemetry names them:
``OTEL_EXPORTER_OTLP_HEADERS`` and so on. No header is printed or logged.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from lightning_rlprof.cli import console
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.report.live_view import BACKGROUND, Gauge
from lightning_rlprof.report.otlp import SCOPE, OtelSpan, otel_spans, resource_of, text
from lightning_rlprof.system.version import VERSION
from lightning_rlprof.tables.spans import Spans

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    from lightning_rlprof.cli.serve.app import LiveFeed

EVERY_S = 10.0
"""Seconds between two pushes."""

_TIMEOUT_S = 2.0
_HEADERS = "Set a user, password or key in OTEL_EXPORTER_OTLP_HEADERS"
_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1", "_per_second": "{token}/s"}


class Exporter:
    """Send metrics and spans to a collector, one request each time.

    Args:
        endpoint: Address of the collector, such as ``http://127.0.0.1:4318``.
        run: Name of the run: the collector's ``service.instance.id``.

    Raises:
        ImportError: OpenTelemetry is not installed.
        RlprofError: The endpoint is not an address, or has a user, password or query.
    """

    def __init__(self, endpoint: str, run: str) -> None:
        base = _checked(endpoint).rstrip("/")
        self.url, self.url_of_spans = f"{base}/v1/metrics", f"{base}/v1/traces"
        # OpenTelemetry would log each failure and each header that it cannot parse; `push` returns
        # the reason.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        import requests
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        # A session has the headers of its exporter.
        sessions = requests.Session(), requests.Session()
        for session in sessions:
            session.hooks["response"].append(self._remember)
        self._exporter = OTLPMetricExporter(self.url, timeout=_TIMEOUT_S, session=sessions[0])
        self._span_exporter = OTLPSpanExporter(
            self.url_of_spans, timeout=_TIMEOUT_S, session=sessions[1]
        )
        self._pushed: dict[int, int] = {}  # The last step of each rank that was pushed.
        own = Resource({"service.name": "rlprof", "service.instance.id": text(run)})
        # The environment takes precedence.
        self._resource = own.merge(OTELResourceDetector().detect())
        self._statuses: list[int] = []  # HTTP statuses of the last push.

    def push(self, gauges: Iterable[Gauge]) -> str:
        """Send metrics; return why that failed, or ``""``."""
        return self._sent(self._exporter.export, self._data(gauges))

    def push_steps(self, spans: Spans) -> str:
        """Send the steps that are complete and were not sent; return why that failed, or ``""``.

        A step is complete when a later one has ended, or its rank: iterations of a loop and
        numbers of a step may still grow.
        """
        from opentelemetry.sdk.resources import Resource

        new = np.zeros(len(spans), bool)
        last: dict[int, int] = {}
        for rank in spans.ranks:
            steps = np.unique(spans.step[spans.rows(kind="step", rank=rank)])
            steps = steps[: len(steps) - (spans.statuses.get(rank) is None)]
            steps = steps[steps > self._pushed.get(rank, 0)]
            if len(steps):
                last[rank] = int(steps[-1])
                new |= (spans.rank == rank) & np.isin(spans.step, steps)
        if not last or not spans.unix_ns:  # A damaged header has no date.
            return ""
        resources = {rank: Resource(resource_of(spans.headers[rank])) for rank in last}
        merged = {rank: each.merge(self._resource) for rank, each in resources.items()}
        new_spans = otel_spans(spans, np.flatnonzero(new))
        found = [_readable(each, merged[each.rank]) for each in new_spans]
        failure = self._sent(self._span_exporter.export, found)
        if not failure:
            self._pushed |= last
        return failure

    def _sent(self, export: Callable[[Any], Enum], data: Any) -> str:
        self._statuses.clear()
        try:
            if export(data).name == "SUCCESS":
                return ""
        except OSError:  # Older exporters raise the errors of requests.
            pass
        return f"answers {self._statuses[-1]}" if self._statuses else "gives no answer"

    def _remember(self, response: Any, *_: object, **__: object) -> None:
        self._statuses.append(response.status_code)

    def _data(self, gauges: Iterable[Gauge]) -> "MetricsData":
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        now = time.time_ns()
        scope = InstrumentationScope(SCOPE, VERSION)
        metrics = ScopeMetrics(scope, [_metric(gauge, now) for gauge in gauges], "")
        return MetricsData([ResourceMetrics(self._resource, [metrics], "")])


def _readable(own: OtelSpan, resource: "Resource") -> "ReadableSpan":
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    return ReadableSpan(
        own.name,
        SpanContext(own.trace, own.id, is_remote=False),
        None if own.parent is None else SpanContext(own.trace, own.parent, is_remote=False),
        resource,
        own.attributes,
        start_time=own.start_ns,
        end_time=own.end_ns,
        instrumentation_scope=InstrumentationScope(SCOPE, VERSION),
    )


def _metric(gauge: Gauge, now: int) -> "Metric":
    from opentelemetry.sdk.metrics import export

    name, unit = otlp_name(gauge.name)
    points = [
        export.NumberDataPoint(
            {label: text(value) for label, value in each.labels.items()}, 0, now, float(each.value)
        )
        for each in gauge.samples
    ]
    return export.Metric(name, gauge.meaning, unit, export.Gauge(points))


def otlp_name(name: str) -> tuple[str, str]:
    """Return the name and unit of a metric in OpenTelemetry, from which Prometheus makes its name.

    Background metrics keep the name that the run has.

    Example::

        >>> otlp_name("rlprof_step_duration_seconds"), otlp_name("rlprof_step")
        (('rlprof.step_duration', 's'), ('rlprof.step', ''))
    """
    if name.startswith(BACKGROUND):
        return f"rlprof.background.{name.removeprefix(BACKGROUND)}", ""
    end, unit = next((pair for pair in _UNITS.items() if name.endswith(pair[0])), ("", ""))
    return f"rlprof.{name.removeprefix('rlprof_').removesuffix(end)}", unit


async def push_always(exporter: Exporter, feed: "LiveFeed") -> None:
    """Push metrics and new steps of a run every 10 s; print the first failure, and go on."""
    has_failed = False
    while True:
        url, failure = exporter.url, await asyncio.to_thread(exporter.push, await feed.metrics())
        if not failure and (spans := await feed.spans()) is not None:
            url = exporter.url_of_spans
            failure = await asyncio.to_thread(exporter.push_steps, spans)
        if failure and not has_failed:
            has_failed = True
            console.warn(f"{url} {failure}; trying again every {EVERY_S:.0f} s")
        await asyncio.sleep(EVERY_S)


def _checked(endpoint: str) -> str:
    shown = "http://HOST:4318"
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise RlprofError("--otlp: not an address of HTTP", hint=f"Write it as {shown}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise RlprofError("--otlp: the address has a user or a query", hint=_HEADERS)
    return endpoint
