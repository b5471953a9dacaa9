"""Double of verl's timers, as in its versions 0.5 to 0.9."""

import time
from contextlib import contextmanager


def _timer(name, timing_raw):
    start = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0) + time.perf_counter() - start


@contextmanager
def simple_timer(name, timing_raw):
    yield from _timer(name, timing_raw)


@contextmanager
def marked_timer(name, timing_raw, color=None, domain=None, category=None):
    yield from _timer(name, timing_raw)
