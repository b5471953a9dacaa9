"""Double of OpenRLHF 0.11.2: generation."""

import time


class SamplesGenerator:
    def generate_samples(self, **generate_kwargs):
        time.sleep(0.01)
        return [1, 2, 3, 4], 0.5, 4, False
