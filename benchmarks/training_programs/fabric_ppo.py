"""PPO with Lightning Fabric, as Lightning's own example: also with torchrun."""

import os

import gymnasium
import torch
from _truth import Truth
from lightning.fabric import Fabric
from torch import nn

STEPS, ENVS, EPOCHS, ITERATIONS = 64, 4, 4, 20
fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")))
fabric.launch()
fabric.seed_everything(1 + fabric.global_rank, verbose=False)
torch.set_num_threads(1)


class Agent(nn.Module):
    """An actor and a critic, which return the log-probabilities, the entropy and the values."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x, action=None):
        """Return an action and all of the above."""
        chosen = torch.distributions.Categorical(logits=self.actor(x))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(x)[:, 0]


envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * ENVS)
agent = Agent()
agent, optimizer = fabric.setup(agent, torch.optim.Adam(agent.parameters(), lr=1e-3))
state = torch.as_tensor(envs.reset(seed=1 + fabric.global_rank)[0])
truth = Truth()
for _ in range(ITERATIONS):
    rows = []
    with truth.rollout():
        for _ in range(STEPS):
            with torch.no_grad():
                action, log_prob, _, value = agent(state)
            after, reward, ended, _, _ = envs.step(action.numpy())
            rows.append((state, action, log_prob, value, torch.as_tensor(reward).float()))
            state = torch.as_tensor(after)
    states, actions, olds, values, rewards = map(torch.stack, zip(*rows, strict=True))
    returns = rewards.flip(0).cumsum(0).flip(0)
    flat = [each.flatten(0, 1) for each in (states, actions, olds, returns - values, returns)]
    for _ in range(EPOCHS):
        for part in torch.randperm(STEPS * ENVS).chunk(4):
            x, action, old, advantage, target = (each[part] for each in flat)
            _, log_prob, entropy, value = agent(x, action)
            ratio = (log_prob - old).exp()
            gain = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = 0.5 * (value - target).square().mean() - gain - 0.01 * entropy.mean()
            optimizer.zero_grad(set_to_none=True)
            fabric.backward(loss)
            fabric.clip_gradients(agent, optimizer, max_norm=0.5)
            optimizer.step()
    truth.step()
truth.tell(agent.parameters())
