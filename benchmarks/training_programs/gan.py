"""A generative adversarial network in one file: two optimizers, the discriminator's first."""

import torch
from _truth import Truth
from torch import nn
from torch.nn import functional

torch.manual_seed(1)
torch.set_num_threads(1)
generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
judge = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
judging = torch.optim.Adam(judge.parameters(), lr=2e-4)
generating = torch.optim.Adam(generator.parameters(), lr=2e-4)
real = torch.randn(4800, 64)
loader = torch.utils.data.DataLoader(real, batch_size=32, shuffle=True)
yes, no = torch.ones(32, 1), torch.zeros(32, 1)
loss = functional.binary_cross_entropy_with_logits
truth = Truth()
for batch in loader:
    fake = generator(torch.randn(32, 16))
    judging.zero_grad()
    (loss(judge(batch), yes) + loss(judge(fake.detach()), no)).backward()
    judging.step()
    generating.zero_grad()
    loss(judge(fake), yes).backward()
    generating.step()
    truth.step()
truth.tell([*generator.parameters(), *judge.parameters()])
