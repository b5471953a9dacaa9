"""What rollout engines report of themselves: the Prometheus pages of vLLM and SGLang."""

import base64
import re
import socket
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from http.client import HTTPResponse
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from lightning_rlprof.recording.background.readings import Part, Reading, Total
from lightning_rlprof.recording.background.sampler import Sampler
from lightning_rlprof.records.records import ENGINE_KV_CACHE, METRICS
from lightning_rlprof.system.location import redact

if TYPE_CHECKING:
    import ssl

    from lightning_rlprof.recording.session import Session

_CONNECT_S = 0.4
_ANSWER_S = 0.9
_MAX_ANSWER_BYTES = 4 << 20
_MAX_SHARE = 0.01  # Of a core. Reading a page of 100 kB takes about 2 ms.

# The names are those of vLLM 0.6 to 0.11 (vllm/v1/metrics/loggers.py) and of SGLang 0.4 to 0.5
# (sglang/srt/observability/metrics_collector.py). The counters of prometheus_client end in _total.
# sglang:num_retracted_reqs is left out: it is a gauge of the last batch, and not a total.
_NAMES: Mapping[str, Sequence[str]] = {
    "engine_running_requests": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "engine_waiting_requests": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    ENGINE_KV_CACHE: (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",  # Its name before vLLM 0.9, which has both.
        "sglang:token_usage",
    ),
    "engine_preemptions_per_s": (
        "vllm:num_preemptions_total",
        "sglang:num_retracted_requests_total",
    ),
    "engine_prompt_tokens_per_s": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "engine_generated_tokens_per_s": (
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
    ),
}
_METRIC_OF = {name: metric for metric, names in _NAMES.items() for name in names}
_LINE = re.compile(
    rf"^({'|'.join(_METRIC_OF)})(\{{.{{0,4000}}\}})?[ \t]+([0-9.eE+-]{{1,32}})"
    r"(?:[ \t]+-?\d+)?[ \t\r]*$",
    re.MULTILINE,
)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')

# Ranks of one engine, its processes and its priorities repeat what the engine has as a whole.
_INSIDE_AN_ENGINE = {"tp_rank", "pp_rank", "moe_ep_rank", "pid", "priority"}


def start(session: "Session", urls: Sequence[str]) -> Sampler:
    """Start to read the pages of engines once a second, on a thread of their own.

    Of several engines the number, from 0, is the device of what is sampled.
    """
    many = len(urls) > 1
    parts = [
        Part(
            f"answer of {redact(url)}",
            partial(_read, urlsplit(url)),
            number if many else None,
            may_come=True,
        )
        for number, url in enumerate(urls)
    ]
    sampler = Sampler(session, parts, max_share=_MAX_SHARE)
    sampler.start()
    return sampler


def read_page(page: str) -> Reading:
    """Return what a page tells of its engines: sums, and the KV cache of the fullest engine.

    Lines of other metrics, and those that are not as Prometheus writes them, are left out.

    Raises:
        OSError: No line is of an engine.

    Example::

        >>> read_page('vllm:num_requests_running{engine="0"} 3.0').values
        {'engine_running_requests': 3.0}
    """
    by_engine: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, labels, text in _LINE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if 0 <= value < 2**63:
            own = [each for each in _LABEL.findall(labels) if each[0] not in _INSIDE_AN_ENGINE]
            key = _METRIC_OF[name], tuple(sorted(own))
            by_engine[key] = max(by_engine.get(key, 0.0), value)
    if not by_engine:
        raise OSError("it has no metric of vLLM or SGLang; SGLang needs --enable-metrics")
    found: dict[str, list[float]] = {}
    for (metric, _), value in by_engine.items():
        found.setdefault(metric, []).append(value)
    values = {
        name: round(max(own) * 100, 3) if name == ENGINE_KV_CACHE else sum(own)
        for name, own in found.items()
    }
    totals = {name: Total(values.pop(name)) for name in found if METRICS[name].is_rate}
    return Reading(totals, values)


class _Answer(BytesIO):
    """All bytes of an answer, as `HTTPResponse` reads them from a socket."""

    def makefile(self, *_: object) -> "_Answer":
        return self


def _read(url: SplitResult) -> Reading:
    """Return what the page at a URL tells; no redirect is followed.

    Raises:
        OSError: The page is missing, takes too long, is too large, or is of no engine.
    """
    is_secure, host = url.scheme == "https", url.hostname or ""
    plain = socket.create_connection((host, url.port or (443 if is_secure else 80)), _CONNECT_S)
    with plain:
        if not is_secure:
            return _reading(_answer(plain, url))
        with _tls().wrap_socket(plain, server_hostname=host) as secure:
            return _reading(_answer(secure, url))


@cache
def _tls() -> "ssl.SSLContext":
    """Return what checks certificates; to load those of the machine takes 30 ms."""
    import ssl

    return ssl.create_default_context()


def _answer(connection: socket.socket, url: SplitResult) -> bytes:
    """Return all that a server answers; it has `_ANSWER_S` for all of it, not for each byte."""
    user, _, place = url.netloc.rpartition("@")
    path = url._replace(scheme="", netloc="", path=url.path.rstrip("/") or "/metrics", fragment="")
    lines = [f"GET {path.geturl()} HTTP/1.1", f"Host: {place}", "Connection: close"]
    if user:
        secret = base64.b64encode(unquote(user).encode()).decode()
        lines.append(f"Authorization: Basic {secret}")
    until = time.monotonic() + _ANSWER_S
    connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
    answer = bytearray()
    while (left := until - time.monotonic()) > 0:
        connection.settimeout(left)
        piece = connection.recv(1 << 16)
        if not piece:
            return bytes(answer)
        answer += piece
        if len(answer) > _MAX_ANSWER_BYTES:
            raise OSError(f"it is larger than {_MAX_ANSWER_BYTES >> 20} MiB")
    raise OSError(f"it takes longer than {_ANSWER_S:g} s")


def _reading(answer: bytes) -> Reading:
    raw: Any = _Answer(answer)
    response = HTTPResponse(raw)
    response.begin()
    if response.status != 200:
        raise OSError(f"its status is {response.status}, not 200")
    return read_page(response.read().decode("utf-8", "replace"))
