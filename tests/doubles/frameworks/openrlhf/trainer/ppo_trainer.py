"""Double of OpenRLHF 0.11.2: the plain class under its trainer."""

import time


class BasePPOTrainer:
    def train_step(self, rollout_samples, global_step):
        self.experience_maker.make_experience(rollout_samples)
        self.ppo_train(global_step)
        self.broadcast_to_vllm()
        return {}, global_step + 1

    def ppo_train(self, global_steps):
        time.sleep(0.006)

    def broadcast_to_vllm(self):
        time.sleep(0.002)
