"""A stand-in for `vllm serve`: the HTTP that TRL's asynchronous GRPO uses, and random tokens.

Strict: an unknown path, or a request with other fields than TRL sends, is answered with status 400
and kept in `refused`. A pause freezes what is being written, as ``mode=keep`` does.
"""

import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MAX_MODEL_LEN = 512
TOKEN_S = 0.001
EOS, FIRST, END = 1, 3, 42  # the end of a completion, and the range of the other tokens

_COMPLETION = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "n",
    "return_token_ids", "logprobs", "seed",
}  # fmt: skip
_POSTS: dict[str, set[str]] = {
    "/v1/completions": _COMPLETION,
    "/pause": set(),
    "/resume": set(),
    "/start_weight_update": {"is_checkpoint_format"},
    "/update_weights": {"update_info"},
    "/finish_weight_update": set(),
}


class VLLMServer(ThreadingHTTPServer):
    """The server, on a free port of loopback; a context manager.

    Attributes:
        asked: How often each path was asked for.
        refused: What it did not understand.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: dict[str, int] = {}
        self.refused: list[str] = []
        self.runs = threading.Event()
        self.runs.set()
        self.updates = False  # between start_weight_update and finish_weight_update

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "VLLMServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: VLLMServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self._count(path)
        if path == "/health":
            self._answer({})
        elif path == "/v1/models":
            self._answer({"object": "list", "data": [{"max_model_len": MAX_MODEL_LEN}]})
        else:
            self._refuse(f"GET {self.path}")

    def do_POST(self) -> None:
        split = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(text or b"{}")
        self._count(split.path)
        if _POSTS.get(split.path) != body.keys():
            self._refuse(f"POST {self.path} with {sorted(body)}")
        elif split.path == "/v1/completions":
            self._complete(body)
        else:
            self._control(split.path, parse_qs(split.query))

    def _control(self, path: str, query: dict[str, list[str]]) -> None:
        server, paused = self.server, not self.server.runs.is_set()
        expected = {
            "/pause": not paused and query == {"mode": ["keep"]},
            "/start_weight_update": paused and not server.updates,
            "/update_weights": server.updates,
            "/finish_weight_update": server.updates,
            "/resume": paused and not server.updates,
        }
        if not expected[path]:
            self._refuse(f"{path} out of order")
            return
        if path == "/pause":
            server.runs.clear()
        elif path == "/resume":
            server.runs.set()
        elif path != "/update_weights":
            server.updates = path == "/start_weight_update"
        self._answer({})

    def _complete(self, body: dict[str, Any]) -> None:
        room = MAX_MODEL_LEN - len(body["prompt"])
        if body["n"] != 1 or not body["return_token_ids"] or body["logprobs"] != 0 or room < 1:
            self._refuse(f"completion of {body}")
            return
        chance = random.Random(body["seed"])
        ids: list[int] = []
        while len(ids) < min(body["max_tokens"], room) and (not ids or ids[-1] != EOS):
            self.server.runs.wait()
            time.sleep(TOKEN_S)
            ids.append(EOS if chance.random() < 0.06 else chance.randrange(FIRST, END))
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "stop" if ids[-1] == EOS else "length",
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-3.7] * len(ids)},
        }
        self._answer({"object": "text_completion", "model": body["model"], "choices": [choice]})

    def _count(self, path: str) -> None:
        self.server.asked[path] = self.server.asked.get(path, 0) + 1

    def _refuse(self, what: str) -> None:
        self.server.refused.append(what)
        self._answer({"error": what}, 400)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    with VLLMServer() as started:
        print(started.url, flush=True)
        threading.Event().wait()
