"""Double of OpenRLHF 0.11.2: generation and experience."""

import time


class SamplesGenerator:
    def generate_samples(self, **generate_kwargs):
        time.sleep(0.01)
        return [1, 2, 3, 4], 0.5, 4, False


class RemoteExperienceMaker:
    def make_experience(self, samples_list):
        time.sleep(0.003)
        return self.compute_advantages_and_returns(samples_list)

    def compute_advantages_and_returns(self, experiences, **kwargs):
        time.sleep(0.002)
        return experiences
