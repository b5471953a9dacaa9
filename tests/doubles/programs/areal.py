import time

from areal.utils import stats_tracker

PHASES = {
    "rollout": 8,
    "ref_logp": 3,
    "compute_advantage": 2,
    "train_step": 12,
    "update_weights": 3,
}
for _ in range(4):
    for key, milliseconds in PHASES.items():
        with stats_tracker.record_timing(key):
            time.sleep(milliseconds / 1000)
    with stats_tracker.record_timing("clear_batches"):
        pass
