"""A double of the /metrics pages of vLLM and SGLang, served by a thread on this machine.

Names, types, help and labels are those of vLLM 0.11 (vllm/v1/metrics/loggers.py) and SGLang 0.5
(sglang/srt/observability/metrics_collector.py), as prometheus_client writes them. The pages hold
more than what is read: histograms, gauges of other things, and times at which counters began.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "Qwen/Qwen3-0.6B"

Line = tuple[str, str, str]  # Kind, name and help.
VLLM: Mapping[str, Line] = {
    "running": (
        "gauge",
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
    ),
    "waiting": (
        "gauge",
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
    ),
    "kv": ("gauge", "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."),
    "preempted": (
        "counter",
        "vllm:num_preemptions_total",
        "Cumulative number of preemption from the engine.",
    ),
    "prompt": ("counter", "vllm:prompt_tokens_total", "Number of prefill tokens processed."),
    "generated": (
        "counter",
        "vllm:generation_tokens_total",
        "Number of generation tokens processed.",
    ),
}
SGLANG: Mapping[str, Line] = {
    "running": ("gauge", "sglang:num_running_reqs", "The number of running requests."),
    "waiting": ("gauge", "sglang:num_queue_reqs", "The number of requests in the waiting queue."),
    "kv": ("gauge", "sglang:token_usage", "The token usage."),
    "preempted": (
        "counter",
        "sglang:num_retracted_requests_total",
        "Total number of retracted requests.",
    ),
    "prompt": ("counter", "sglang:prompt_tokens_total", "Number of prefill tokens processed."),
    "generated": (
        "counter",
        "sglang:generation_tokens_total",
        "Number of generation tokens processed.",
    ),
}


@dataclass
class Engine:
    """What one engine reports."""

    running: float = 0
    waiting: float = 0
    kv: float = 0
    preempted: float = 0
    prompt: float = 0
    generated: float = 0


def _metric(line: Line, labels: Sequence[str], values: Sequence[float]) -> Iterator[str]:
    kind, name, text = line
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for own, value in zip(labels, values, strict=True):
        yield f"{name}{{{own}}} {float(value)}"


def vllm_page(*engines: Engine) -> str:
    """Return the page of one server of vLLM, with an engine per data-parallel rank."""
    labels = [f'engine="{number}",model_name="{MODEL}"' for number in range(len(engines))]
    lines: list[str] = []
    for what, line in VLLM.items():
        lines += _metric(line, labels, [getattr(each, what) for each in engines])
        if line[0] == "counter":
            began = line[1].replace("_total", "_created")
            lines += _metric(("gauge", began, line[2]), labels, [1.76e9] * len(engines))
    lines += [
        "# HELP vllm:num_requests_waiting_by_reason Number of waiting requests, by reason.",
        "# TYPE vllm:num_requests_waiting_by_reason gauge",
        *(f'vllm:num_requests_waiting_by_reason{{{own},reason="capacity"}} 99.0' for own in labels),
        "# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.",
        "# TYPE vllm:time_to_first_token_seconds histogram",
        *(f'vllm:time_to_first_token_seconds_bucket{{{own},le="+Inf"}} 7.0' for own in labels),
    ]
    return "\n".join([*lines, ""])


def sglang_page(*engines: Engine, tp: int = 1) -> str:
    """Return the page of one server of SGLang; each scheduler of ``tp`` repeats its engine."""
    base = f'engine_type="unified",model_name="{MODEL}"'
    ranks = [(number, rank) for number in range(len(engines)) for rank in range(tp)]
    labels = [
        f'dp_rank="{number}",{base},moe_ep_rank="0",pp_rank="0",tp_rank="{rank}"'
        for number, rank in ranks
    ]
    lines: list[str] = []
    for what, line in SGLANG.items():
        values = [getattr(engines[number], what) for number, _ in ranks]
        if what in ("prompt", "generated"):  # The tokenizer counts them, for all schedulers.
            values = [sum(getattr(each, what) for each in engines)]
            lines += _metric(line, [base], values)
        else:
            lines += _metric(line, labels, values)
    last = ("gauge", "sglang:num_retracted_reqs", "The number of retracted requests.")
    lines += _metric(
        last, [f'{own},pid="{at}"' for at, own in enumerate(labels)], [5] * len(labels)
    )
    return "\n".join([*lines, ""])


@dataclass
class EngineDouble:
    """A server on this machine whose page a test changes; not an engine."""

    page: Callable[[], str]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_chunked: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.port}/metrics"

    @contextmanager
    def serving(self) -> Iterator["EngineDouble"]:
        """Serve the page; a second time on the same port, as after a restart."""
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                double.asked.append((self.path, self.headers.get("Authorization")))
                body = double.page().encode()
                self.send_response(double.status)
                for name, value in double.headers.items():
                    self.send_header(name, value)
                if double.is_chunked:  # As uvicorn does for prometheus_client's page.
                    self.send_header("Transfer-Encoding", "chunked")
                    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
                else:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
