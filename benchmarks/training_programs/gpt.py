"""A language model in one file, as nanoGPT writes it: ``python gpt.py``, also with torchrun.

It accumulates gradients over two batches, and evaluates every ten iterations.
"""

import os
from contextlib import nullcontext

import torch
from _truth import Truth
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WORDS, LENGTH, WIDTH, ITERATIONS = 64, 32, 64, 60
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if world > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(1)
torch.set_num_threads(1)


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        """Return what the block makes of its input."""
        parts = self.attention(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + seen.transpose(1, 2).flatten(2)
        return x + self.layers(self.second(x))


class GPT(nn.Module):
    """A model of two blocks, which returns the loss."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, x, following):
        """Return the loss."""
        logits = self.blocks(self.words(x) + self.places.weight)
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


text = torch.randint(WORDS, (20_000,))
model = GPT()
raw, generator = model, torch.Generator().manual_seed(rank)
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch():
    """Return words and those that follow them."""
    at = torch.randint(len(text) - LENGTH - 1, (8,), generator=generator)
    return (torch.stack([text[i + shift : i + shift + LENGTH] for i in at]) for shift in (0, 1))


truth = Truth()
for iteration in range(ITERATIONS):
    if iteration % 10 == 0:
        model.eval()
        with torch.no_grad():
            losses = [raw(*batch()).item() for _ in range(4)]
        model.train()
    for part in range(2):
        apart = model.no_sync() if world > 1 and part == 0 else nullcontext()
        with apart:
            loss = model(*batch()) / 2
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    truth.step()
truth.tell(raw.parameters())
