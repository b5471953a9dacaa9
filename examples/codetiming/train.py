"""Stages that codetiming times, as ROLL's do: `rlprof run -- python train.py`."""

import time

from codetiming import Timer

for _ in range(4):
    with Timer(name="step_total", logger=None):
        with Timer(name="step_generate", logger=None):
            time.sleep(0.012)
        with Timer(name="step_train", logger=None) as timer:
            time.sleep(0.01)
        assert timer.last > 0.009
        with Timer(logger=None):  # without a name
            pass
