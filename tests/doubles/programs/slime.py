import time

from slime.observability.timer import Timer, timer

for rollout in range(5):
    if rollout:
        Timer().end("train_wait")
    with timer("train"):
        with timer("ref_log_probs"):
            time.sleep(0.004)
        with timer("actor_train"):
            time.sleep(0.012)
    Timer().start("train_wait")
    with timer("update_weights"):
        time.sleep(0.003)
    time.sleep(0.008)
