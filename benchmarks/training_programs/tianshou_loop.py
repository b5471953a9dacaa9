"""Tianshou: ``python tianshou_loop.py DQN`` (or PPO), timed by its own collector."""

import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from _truth import Truth
from tianshou.algorithm import DQN, PPO
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import (
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
)
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

OFF = sys.argv[1] == "DQN"
trainer: Any = OffPolicyTrainer if OFF else OnPolicyTrainer
truth: Truth


class Timed(trainer):  # type: ignore[misc]
    """The trainer, which tells how long its collections take."""

    def _collect_training_data(self) -> Any:
        found = super()._collect_training_data()
        truth.rollouts_s[-1] = found.collect_time
        return found

    def _update_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._update_step(*args, **kwargs)
        truth.step()
        return found


np.random.seed(1)
torch.manual_seed(1)
torch.set_num_threads(1)
envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(4)])
envs.seed(1)
space = gymnasium.make("CartPole-v1")
optim = AdamOptimizerFactory(lr=1e-3)
shapes: Any = {"state_shape": (4,), "hidden_sizes": [64, 64]}
algorithm: Any
if OFF:
    policy = DiscreteQLearningPolicy(
        model=Net(**shapes, action_shape=2), action_space=space.action_space, eps_training=0.1
    )
    algorithm = DQN(policy=policy, optim=optim, target_update_freq=50)
else:
    actor = DiscreteActor(preprocess_net=Net(**shapes), action_shape=2)
    algorithm = PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=space.action_space),
        critic=DiscreteCritic(preprocess_net=Net(**shapes)),
        optim=optim,
    )
collector = Collector[Any](algorithm, envs, VectorReplayBuffer(4000, 4))
collector.reset()
shared: Any = {
    "training_collector": collector,
    "max_epochs": 3,
    "verbose": False,
    "show_progress": False,
}
params: Any = (
    OffPolicyTrainerParams(
        **shared,
        epoch_num_steps=1000,
        collection_step_num_env_steps=12,
        update_step_num_gradient_steps_per_sample=0.25,
    )
    if OFF
    else OnPolicyTrainerParams(
        **shared,
        epoch_num_steps=2560,
        collection_step_num_env_steps=256,
        update_step_num_repetitions=4,
    )
)
truth = Truth()
Timed(algorithm, params).run()
truth.tell(algorithm.parameters())
