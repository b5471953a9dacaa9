"""Double of NeMo-RL: its timer, by labels."""

import time
from contextlib import contextmanager


class Timer:
    def __init__(self):
        self._starts, self.timers = {}, {}

    def start(self, label, should_log=False):
        if label in self._starts:
            raise ValueError(f"Timer '{label}' is already running")
        self._starts[label] = time.perf_counter()

    def stop(self, label, should_log=False):
        elapsed = time.perf_counter() - self._starts.pop(label)
        self.timers.setdefault(label, []).append(elapsed)
        return elapsed

    @contextmanager
    def time(self, label):
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)
