"""REINFORCE in a loop of one's own on Lightning Fabric; on a CPU."""

import torch
from lightning.fabric import Fabric

VOCABULARY, LENGTH, STEPS = 64, 32, 10
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0, verbose=False)


class Policy(torch.nn.Module):
    """A recurrent policy."""

    def __init__(self):
        super().__init__()
        self.embed, self.memory = torch.nn.Embedding(VOCABULARY, 128), torch.nn.GRU(128, 256)
        self.head = torch.nn.Linear(256, VOCABULARY)

    def forward(self, tokens, state=None):
        """Return logits and the new state."""
        seen, state = self.memory(self.embed(tokens), state)
        return self.head(seen), state


module = Policy()
policy, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=3e-3))
for step in range(STEPS):
    with torch.no_grad():  # the rollout
        token, state = torch.randint(VOCABULARY, (128,)), None
        tokens = [token]
        for _ in range(LENGTH):
            logits, state = policy(token[None], state)
            token = torch.distributions.Categorical(logits=logits[0]).sample()
            tokens.append(token)
        tokens = torch.stack(tokens)
    rewards = (tokens[1:] < VOCABULARY // 8).float().mean(0)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    logits, _ = policy(tokens[:-1])
    log_probs = logits.log_softmax(-1).gather(-1, tokens[1:, :, None])[..., 0]
    optimizer.zero_grad()
    fabric.backward(-(log_probs * advantages).mean())
    optimizer.step()
    print(f"step {step}: reward {rewards.mean():.3f}")
