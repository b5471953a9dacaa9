"""Double of prime-rl: the loader of its trainer."""

import time


class DataLoader:
    def wait_for_batch(self):
        time.sleep(0.006)

    def get_batch(self):
        return [1]
