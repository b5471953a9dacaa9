import time

from sheeprl.utils.timer import timer

for _ in range(4):
    for _ in range(3):
        with timer("Time/env_interaction_time"):
            time.sleep(0.004)
    with timer("Time/train_time"):
        time.sleep(0.012)
