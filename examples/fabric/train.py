"""A loop of one's own in Lightning Fabric: `rlprof run -- python train.py`."""

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = torch.nn.Linear(256, 256)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    for _ in range(200):
        loss = model(torch.randn(64, 256)).sum()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
