"""PPO in one file, as CleanRL writes it: ``python ppo.py``, also with torchrun.

``kl`` as an argument ends an update's epochs early, by the divergence of a minibatch.
"""

import os
import sys

import gymnasium
import numpy as np
import torch
from _truth import Truth
from torch import nn

ENVS, STEPS, EPOCHS, BATCHES, ITERATIONS = 4, 128, 4, 4, 20
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    torch.distributed.init_process_group("gloo")
seed = 1 + int(os.environ.get("RANK", "0"))
torch.manual_seed(1)
torch.set_num_threads(1)
np.random.seed(seed)


def make() -> gymnasium.Env:
    """Return one environment."""
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def act(self, x, action=None):
        """Return actions, their log-probabilities, the entropy and the values."""
        chosen = torch.distributions.Categorical(logits=self.actor(x))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(x)[:, 0]


envs = gymnasium.vector.SyncVectorEnv([make] * ENVS)
agent = Agent()
torch.manual_seed(seed)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4)
state, _ = envs.reset(seed=seed)
state, done = torch.as_tensor(state), torch.zeros(ENVS)
truth = Truth()
for _ in range(ITERATIONS):
    rows = []
    with truth.rollout():
        for _ in range(STEPS):
            with torch.no_grad():
                action, log_prob, _, value = agent.act(state)
            after, reward, ended, cut, _ = envs.step(action.numpy())
            rows.append((state, action, log_prob, value, torch.as_tensor(reward), done))
            state = torch.as_tensor(after)
            done = torch.as_tensor(np.logical_or(ended, cut)).float()
    states, actions, log_probs, values, rewards, dones = map(torch.stack, zip(*rows, strict=True))
    with torch.no_grad():
        last, advantages = agent.critic(state)[:, 0], torch.zeros(STEPS, ENVS)
        for t in reversed(range(STEPS)):
            going = 1 - (done if t == STEPS - 1 else dones[t + 1])
            following = last if t == STEPS - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * following * going - values[t]
            advantages[t] = delta + (
                0.99 * 0.95 * going * (advantages[t + 1] if t < STEPS - 1 else 0)
            )
        returns = advantages + values
    flat = [each.flatten(0, 1) for each in (states, actions, log_probs, advantages, returns)]
    for _ in range(EPOCHS):
        for part in torch.randperm(STEPS * ENVS).chunk(BATCHES):
            x, action, old, advantage, target = (each[part] for each in flat)
            _, log_prob, entropy, value = agent.act(x, action)
            ratio = (log_prob - old).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = clipped - 0.01 * entropy.mean() + 0.5 * (value - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if world > 1:  # As in CleanRL's ppo_atari_multigpu.py.
                grads = torch.cat([each.grad.view(-1) for each in agent.parameters()])
                torch.distributed.all_reduce(grads)
                torch.nn.utils.vector_to_parameters(grads / world, [
                    each.grad for each in agent.parameters()])  # fmt: skip
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        if "kl" in sys.argv and (old - log_prob).mean().abs() > 1e-3:
            break
    truth.step()
truth.tell(agent.parameters())
