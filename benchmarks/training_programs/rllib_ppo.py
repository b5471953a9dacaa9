"""RLlib: PPO on CartPole, timed where it samples; ``python rllib_ppo.py 1`` has one env runner."""

import sys
from typing import Any

import ray
import torch
from _truth import Truth
from ray.rllib.algorithms.ppo import PPOConfig, ppo

sample = ppo.synchronous_parallel_sample
truth: Truth


def timed(*args: Any, **kwargs: Any) -> Any:
    """Sample with a clock around it."""
    with truth.rollout():
        return sample(*args, **kwargs)


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
torch.set_num_threads(1)
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=int(sys.argv[1]))
    .training(train_batch_size=512, minibatch_size=128, num_epochs=4)
    .debugging(seed=1)
)
algorithm = config.build_algo()
ppo.synchronous_parallel_sample = timed
truth = Truth()
for _ in range(10):
    algorithm.train()
    truth.step()
weights = algorithm.learner_group.get_weights()["default_policy"]
truth.tell(torch.as_tensor(weights[name]) for name in sorted(weights))
algorithm.stop()
ray.shutdown()
