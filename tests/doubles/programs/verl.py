import time

from verl.utils.profiler.performance import marked_timer

for _ in range(4):
    timing_raw = {}
    with marked_timer("step", timing_raw):
        for name, milliseconds in {"gen": 12, "reward": 2, "old_log_prob": 4, "ref": 4}.items():
            with marked_timer(name, timing_raw, color="red"):
                time.sleep(milliseconds / 1000)
        with marked_timer("update_actor", timing_raw):
            time.sleep(0.01)
    assert timing_raw.keys() == {"step", "gen", "reward", "old_log_prob", "ref", "update_actor"}
