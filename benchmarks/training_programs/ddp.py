"""DistributedDataParallel, as PyTorch's examples write it: ``torchrun ddp.py``."""

import os

import torch
from _truth import Truth
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29517")
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
torch.manual_seed(1)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(1920, 64), torch.randn(1920, 1))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
truth = Truth()
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        truth.step()
truth.tell(model.parameters())
torch.distributed.destroy_process_group()
