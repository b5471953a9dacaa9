"""GRPO with AReaL's timers in the order of its `PPOTrainer`; on a CPU.

AReaL's own trainer needs inference servers on GPUs. Here a thread generates, one batch ahead.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from areal.utils import stats_tracker

VOCABULARY, LENGTH, GROUP, STEPS = 64, 32, 8, 10
torch.manual_seed(0)
actor = torch.nn.ModuleList(
    [torch.nn.Embedding(VOCABULARY, 128), torch.nn.GRU(128, 256), torch.nn.Linear(256, VOCABULARY)]
)
rollout, ref = copy.deepcopy(actor), copy.deepcopy(actor)
optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)


@torch.no_grad()
def generate():
    """Sample responses to new prompts, one token at a time."""
    prompts = torch.randint(VOCABULARY, (16, 4)).repeat_interleave(GROUP, 0)
    embed, memory, head = rollout
    token, state, tokens = prompts[:, -1], None, [prompts]
    for _ in range(LENGTH):
        seen, state = memory(embed(token)[None], state)
        token = torch.distributions.Categorical(logits=head(seen[0])).sample()
        tokens.append(token[:, None])
    return torch.cat(tokens, 1)


def log_probs(model, tokens):
    """Return the log-probability of each token of the responses."""
    embed, memory, head = model
    logits = head(memory(embed(tokens[:, :-1]).transpose(0, 1))[0]).transpose(0, 1)
    logits = logits[:, -LENGTH:].log_softmax(-1)
    return logits.gather(-1, tokens[:, -LENGTH:, None])[..., 0]


server = ThreadPoolExecutor(1)
batches = [server.submit(generate) for _ in range(2)]
for global_step in range(STEPS):
    with stats_tracker.record_timing("rollout"):
        tokens = batches.pop(0).result()
        batches.append(server.submit(generate))
        rewards = (tokens[:, -LENGTH:] < VOCABULARY // 8).float().mean(1).view(-1, GROUP)
    with stats_tracker.record_timing("ref_logp"), torch.no_grad():
        ref_logp = log_probs(ref, tokens)
    with stats_tracker.record_timing("recompute_logp"), torch.no_grad():
        old_logp = log_probs(actor, tokens)
    with stats_tracker.record_timing("compute_advantage"):
        spread = rewards.std(1, keepdim=True) + 1e-6
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
    with stats_tracker.record_timing("train_step"):
        logp = log_probs(actor, tokens)
        ratio, kl = (logp - old_logp).exp(), (logp - ref_logp) ** 2 / 2
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        optimizer.zero_grad()
        (0.01 * kl - gain).mean().backward()
        optimizer.step()
    with stats_tracker.record_timing("update_weights"):
        rollout.load_state_dict(actor.state_dict())
    with stats_tracker.record_timing("clear_batches"):
        del tokens
    print(f"step {global_step}: reward {rewards.mean():.3f}")
for name, seconds in stats_tracker.export().items():
    print(f"{name}: {seconds:.4f}")
