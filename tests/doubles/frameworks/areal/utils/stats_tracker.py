"""Double of AReaL 1.0.4: `record_timing`, by the module's attribute."""

import time
from contextlib import contextmanager

timings = {}


@contextmanager
def record_timing(key):
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[key] = timings.get(key, 0.0) + time.perf_counter() - start
