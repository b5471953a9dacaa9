"""A tool server or a judge, without torch: `python server.py tools`. It prints its port."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lightning_rlprof import Sample, start_session

STAGES = {"tools": "env_step", "judge": "compute_reward"}
ROLE = sys.argv[1]


class Handler(BaseHTTPRequestHandler):
    """Answer each request after the seconds that it asks for."""

    def do_POST(self):
        """Do the work for the sample that the header names."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Sample.extract(self.headers).phase(STAGES[ROLE]):
            time.sleep(asked["seconds"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        """Leave the terminal to the training."""


class Server(ThreadingHTTPServer):
    """All samples of a rollout may call at the same time."""

    request_queue_size = 64


start_session(role=ROLE)
server = Server(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()  # Until the training has ended.
