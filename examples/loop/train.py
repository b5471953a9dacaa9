"""A plain loop: `python train.py`, or `torchrun --nproc-per-node 2 train.py` for one run of two."""

import torch

from lightning_rlprof import stage, start_session, step

torch.manual_seed(0)
policy = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)

start_session()
for _ in range(10):
    with step():
        with stage("actor_generate", tokens=64 * 64), torch.no_grad():
            state = torch.randn(64, 512)
            for _ in range(64):
                state = torch.tanh(policy(state))
        with stage("compute_reward"):
            reward = state.sum(dim=1, keepdim=True)
        with stage("actor_update"):
            optimizer.zero_grad()
            (-(policy(state) * reward).mean()).backward()
            optimizer.step()
