"""A plain loop whose steps take 30 ms, with the fault of the first argument: `plain.py reward`."""

import gc
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from lightning_rlprof import annotate, stage, start_session, step

fault = sys.argv[1] if len(sys.argv) > 1 else ""
kept, burners, pool = [], [], ThreadPoolExecutor(4)


def update():
    """Take 15 ms: idle, so that other programs of the machine disturb it less, or computing."""
    end = time.process_time() + 0.015
    while fault == "cpu-contention" and time.process_time() < end:
        pass
    if fault != "cpu-contention":
        time.sleep(0.015)


def burn():
    """Keep a CPU busy."""
    while True:
        pass


def answer(milliseconds):
    """Answer one request."""
    with annotate("generate"):
        time.sleep(milliseconds / 1e3)


def generate():
    """Answer four requests at a time, of which the last one may take long."""
    with stage("actor_generate"):
        list(pool.map(answer, [8, 8, 8, 60 if fault == "rollout-tail" else 9]))


if fault == "cpu-contention":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(2)]
    for burner in burners:
        burner.start()
if fault == "garbage-collection":
    kept = [[at] for at in range(50_000)]

start_session(summary=False)
for number in range(60):
    with step():
        generate()
        with stage("compute_reward"):
            time.sleep(0.030 if fault == "reward" else 0.001)
        if fault == "untraced":
            time.sleep(0.030)
        with stage("actor_update"):
            update()
            if fault == "garbage-collection":
                gc.collect()
            if fault == "slower-over-time":
                time.sleep(number * 0.001)
        if fault == "weight-sync":
            with stage("weight_sync"):
                time.sleep(0.020)
for burner in burners:
    burner.terminate()
