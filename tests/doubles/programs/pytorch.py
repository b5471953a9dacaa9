"""A policy gradient loop as people write it, on real gymnasium; no line of it knows of rlprof."""

import time

import gymnasium
import torch
from torch import nn


class Slow(gymnasium.Env):
    """An environment that takes its time."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        time.sleep(0.002)
        return self.observation_space.sample(), 1.0, False, False, {}


gymnasium.register("Slow-v0", Slow, max_episode_steps=100)
env = gymnasium.make("Slow-v0")
policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(policy.parameters())
state, _ = env.reset(seed=0)
for _ in range(4):
    states = []
    for _ in range(5):
        with torch.no_grad():
            action = int(policy(torch.as_tensor(state)).argmax())
        states.append(torch.as_tensor(state))
        state = env.step(action)[0]
    for batch in (states[:3], states[3:]):
        loss = policy(torch.stack(batch)).square().mean()
        time.sleep(0.005)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
