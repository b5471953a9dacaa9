"""Double of OpenRLHF 0.11.2: experience."""

import time


class RemoteExperienceMaker:
    def make_experience(self, samples_list):
        time.sleep(0.003)
        return self.compute_advantages_and_returns(samples_list)

    def compute_advantages_and_returns(self, experiences, **kwargs):
        time.sleep(0.002)
        return experiences
