"""TorchRL: ``python torchrl_loop.py DQN`` (or PPO), timed by its own ``timeit``."""

import sys
from typing import Any

import torch
from _truth import Truth
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl._utils import timeit
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import EGreedyModule, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE

OFF = sys.argv[1] == "DQN"
torch.manual_seed(1)
torch.set_num_threads(1)
env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
env.set_seed(1)


def net(outputs: int) -> nn.Module:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


frames, steps = (40, 40) if OFF else (256, 12)
loss_module: Any
if OFF:
    actor: Any = QValueActor(net(2), in_keys=["observation"], spec=env.action_spec)
    policy: Any = TensorDictSequential(actor, EGreedyModule(env.action_spec))
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000), batch_size=64)
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    target = SoftUpdate(loss_module, eps=0.99)
else:
    module = TensorDictModule(net(2), in_keys=["observation"], out_keys=["logits"])
    policy = actor = ProbabilisticActor(
        module,
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    value = ValueOperator(net(1), in_keys=["observation"])
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(frames), sampler=SamplerWithoutReplacement(), batch_size=64
    )
    loss_module = ClipPPOLoss(actor, value)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value)
collector = iter(Collector(env, policy, frames_per_batch=frames, total_frames=frames * (steps + 1)))
buffer.extend(next(collector).reshape(-1))  # The networks take their shapes from it.
optimizer = torch.optim.Adam(loss_module.parameters())


def updates(data: Any) -> None:
    """Update the networks with the frames of a collection."""
    for _ in range(4):
        if not OFF:
            with torch.no_grad():
                advantage(data)
        buffer.extend(data.reshape(-1))
        for _ in range(1 if OFF else frames // 64):
            losses = loss_module(buffer.sample())
            loss = sum(each for name, each in losses.items() if name.startswith("loss"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if OFF:
            target.step()


truth = Truth()
for _ in range(steps):
    timeit.erase()
    with timeit("collecting"):
        data = next(collector)
    truth.rollouts_s[-1] = timeit.todict()["collecting"]
    with timeit("training"):
        updates(data)
    truth.step()
truth.tell(loss_module.parameters())
