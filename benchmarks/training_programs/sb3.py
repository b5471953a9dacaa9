"""Stable-Baselines3: ``python sb3.py PPO`` (or A2C, DQN, SAC), timed where it collects."""

import sys
from typing import Any

import gymnasium
import stable_baselines3
import torch
from _truth import Truth

NAME = sys.argv[1]
SIZES: dict[str, Any] = {
    "PPO": {"n_steps": 256, "n_epochs": 4},
    "A2C": {"n_steps": 64},
    "DQN": {"learning_starts": 100, "train_freq": 4, "target_update_interval": 200},
    "SAC": {"learning_starts": 100, "train_freq": 8, "gradient_steps": 4},
}
TIMESTEPS = {"PPO": 20 * 256, "A2C": 64 * 60, "DQN": 1300, "SAC": 740}

kind = getattr(stable_baselines3, NAME)
truth: Truth


class Timed(kind):  # type: ignore[misc, valid-type]
    """The algorithm with a clock around its rollouts."""

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        """Collect, timed."""
        with truth.rollout():
            return super().collect_rollouts(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> None:
        """Update, which ends a step."""
        super().train(*args, **kwargs)
        truth.step()


torch.set_num_threads(1)
env = gymnasium.make("Pendulum-v1" if NAME == "SAC" else "CartPole-v1")
model = Timed("MlpPolicy", env, seed=1, device="cpu", **SIZES[NAME])
truth = Truth()
model.learn(TIMESTEPS[NAME])
truth.tell(model.policy.parameters())
