import time

from verl.utils.tracking import RLInsightLogger

for _ in range(4):
    with RLInsightLogger.trace_state("ref_compute_log_prob", state_lane_id="rank_0"):
        time.sleep(0.006)
    with RLInsightLogger.trace_state("train_batch", state_lane_id="rank_0"):
        time.sleep(0.012)
