import time

from nemo_rl.utils.timer import Timer

timer = Timer()
for _ in range(4):
    with timer.time("total_step_time"):
        timer.start("prepare_for_generation/total")
        with timer.time("prepare_for_generation/transfer_and_update_weights"):
            time.sleep(0.003)
        timer.stop("prepare_for_generation/total")
        with timer.time("generation"):
            time.sleep(0.012)
        timer.start("policy_training")
        time.sleep(0.01)
        timer.stop("policy_training")
assert len(timer.timers["generation"]) == 4
