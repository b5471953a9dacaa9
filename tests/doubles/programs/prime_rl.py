import time

from prime_rl.trainer.rl.data import DataLoader

loader = DataLoader()
for _ in range(5):
    loader.wait_for_batch()
    loader.get_batch()
    time.sleep(0.012)
