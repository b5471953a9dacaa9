"""REINFORCE whose stages codetiming times, under the names that ROLL gives them; on a CPU."""

import torch
from codetiming import Timer

VOCABULARY, LENGTH, STEPS = 64, 32, 10
torch.manual_seed(0)
embed = torch.nn.Embedding(VOCABULARY, 128)
memory = torch.nn.GRU(128, 256)
head = torch.nn.Linear(256, VOCABULARY)
parameters = [*embed.parameters(), *memory.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=3e-3)


@torch.no_grad()
def generate(token):
    """Sample responses, one token at a time."""
    state, tokens = None, [token]
    for _ in range(LENGTH):
        seen, state = memory(embed(token)[None], state)
        token = torch.distributions.Categorical(logits=head(seen[0])).sample()
        tokens.append(token)
    return torch.stack(tokens)


def log_probs(tokens):
    """Return the log-probability of each token of the responses."""
    logits = head(memory(embed(tokens[:-1]))[0]).log_softmax(-1)
    return logits.gather(-1, tokens[1:, :, None])[..., 0]


for step in range(STEPS):
    with Timer(name="step_total", logger=None):
        with Timer(name="step_generate", logger=None):
            tokens = generate(torch.randint(VOCABULARY, (128,)))
        with Timer(name="cal_old_log_probs_values", logger=None), torch.no_grad():
            old = log_probs(tokens)
        with Timer(name="compute_advantage", logger=None):
            rewards = (tokens[1:] < VOCABULARY // 8).float().mean(0)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        with Timer(name="step_train", logger=None):
            ratio = (log_probs(tokens) - old).exp()
            optimizer.zero_grad()
            (-ratio * advantages).mean().backward()
            optimizer.step()
    print(f"step {step}: reward {rewards.mean():.3f}")
for name, seconds in Timer.timers.items():
    print(f"{name}: {seconds / STEPS:.4f}")
