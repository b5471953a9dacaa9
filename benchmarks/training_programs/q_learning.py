"""Off-policy loops in one file, as CleanRL writes them: ``python q_learning.py DQN`` (or SAC)."""

import sys

import gymnasium
import numpy as np
import torch
from _truth import Truth
from torch import nn
from torch.nn import functional

SAC = sys.argv[1] == "SAC"
TOTAL, STARTS, EVERY, TARGET = (420, 100, 1, 1) if SAC else (2100, 100, 10, 50)
torch.manual_seed(1)
torch.set_num_threads(1)
random = np.random.default_rng(1)
env = gymnasium.make("Pendulum-v1" if SAC else "CartPole-v1")
size = env.observation_space.shape[0]


def net(inputs, outputs):
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


def copies(*modules):
    """Return networks of the same weights."""
    made = nn.ModuleList(net(each[0].in_features, each[2].out_features) for each in modules)
    made.load_state_dict(nn.ModuleList(modules).state_dict())
    return made


def drawn(x):
    """Return an action of the policy and its log-probability."""
    mean, log_std = actor(x).chunk(2, -1)
    chosen = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    raw = chosen.rsample()
    log_prob = (chosen.log_prob(raw) - torch.log(1 - raw.tanh().square() + 1e-6)).sum(-1)
    return 2 * raw.tanh(), log_prob


q1, q2 = (net(size + 1, 1) if SAC else net(size, 2) for _ in range(2))
targets, actor = copies(q1, q2), net(size, 2)
q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)


def update(rows):
    """Update the critics, and the actor of SAC."""
    batch = [rows[at] for at in random.integers(len(rows), size=128)]
    x, action, reward, after, done = (
        torch.as_tensor(np.stack(each), dtype=torch.float32) for each in zip(*batch, strict=True)
    )
    with torch.no_grad():
        if SAC:
            chosen, log_prob = drawn(after)
            best = torch.min(*(q(torch.cat([after, chosen], 1)) for q in targets))[:, 0]
            goal = reward + 0.99 * (1 - done) * (best - 0.2 * log_prob)
        else:
            goal = reward + 0.99 * (1 - done) * targets[0](after).amax(1)
    if SAC:
        given = torch.cat([x, action], 1)
        loss = sum(functional.mse_loss(q(given)[:, 0], goal) for q in (q1, q2))
    else:
        loss = functional.mse_loss(q1(x).gather(1, action.long()[:, None])[:, 0], goal)
    q_optimizer.zero_grad()
    loss.backward()
    q_optimizer.step()
    if SAC:
        chosen, log_prob = drawn(x)
        value = torch.min(*(q(torch.cat([x, chosen], 1)) for q in (q1, q2)))[:, 0]
        loss = (0.2 * log_prob - value).mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()


rows: list = []
state, _ = env.reset(seed=1)
env.action_space.seed(1)
truth = Truth()
for step in range(TOTAL):
    with truth.rollout():
        if step < STARTS or (not SAC and random.random() < 0.1):
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                seen = torch.as_tensor(state, dtype=torch.float32)[None]
                action = drawn(seen)[0][0].numpy() if SAC else int(q1(seen).argmax())
        after, reward, ended, cut, _ = env.step(action)
        rows.append((state, action, reward, after, float(ended)))
        state = env.reset()[0] if ended or cut else after
    if step >= STARTS and step % EVERY == 0:
        update(rows)
        if step % TARGET == 0:
            with torch.no_grad():
                for mine, theirs in zip(
                    targets.parameters(), [*q1.parameters(), *q2.parameters()], strict=True
                ):
                    mine.lerp_(theirs, 0.005 if SAC else 1.0)
        truth.step()
truth.tell([*q1.parameters(), *actor.parameters()])
