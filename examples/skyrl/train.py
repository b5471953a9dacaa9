"""GRPO with SkyRL's timers in the order of its fully asynchronous trainer; on a CPU.

SkyRL's own trainers need GPUs. Here a thread generates while the trainer updates.
"""

import asyncio
import copy

import torch
from loguru import logger
from skyrl.train.utils.utils import Timer

VOCABULARY, LENGTH, GROUP, STEPS = 64, 32, 8, 10
logger.remove()  # a line per timer
torch.manual_seed(0)
policy = torch.nn.ModuleList(
    [torch.nn.Embedding(VOCABULARY, 128), torch.nn.GRU(128, 256), torch.nn.Linear(256, VOCABULARY)]
)
behaviour = copy.deepcopy(policy)  # the weights that the inference engine has
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)


@torch.no_grad()
def generate(prompts):
    """Sample responses, one token at a time."""
    embed, memory, head = behaviour
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


async def run_generation(buffer):
    """Fill the buffer, at most one batch ahead."""
    while True:
        prompts = torch.randint(VOCABULARY, (16, 4)).repeat_interleave(GROUP, 0)
        await buffer.put(await asyncio.to_thread(generate, prompts))


def forward(tokens):
    """Return the log-probabilities of the weights that generated, and the rewards."""
    with torch.no_grad():
        rewards = (tokens[:, -LENGTH:] < VOCABULARY // 8).float().mean(1).view(-1, GROUP)
        return log_probs(behaviour, tokens), rewards


def train_critic_and_policy(tokens, old, advantages, timings):
    """Update the policy once, without a critic."""
    with Timer("policy_train", timings):
        ratio = (log_probs(policy, tokens) - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


async def run_training(tokens, timings):
    """Score the responses and update the policy, in threads as SkyRL does."""
    with Timer("fwd_logprobs_values_reward", timings):
        old, rewards = await asyncio.to_thread(forward, tokens)
    with Timer("compute_advantages_and_returns", timings):
        spread = rewards.std(1, keepdim=True) + 1e-6
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
    with Timer("train_critic_and_policy", timings):
        await asyncio.to_thread(train_critic_and_policy, tokens, old, advantages, timings)
    return rewards.mean().item()


async def main():
    """Train, and print what SkyRL's timers have measured."""
    buffer, timings = asyncio.Queue(maxsize=1), {}
    generation = asyncio.create_task(run_generation(buffer))
    for step in range(1, STEPS + 1):
        async with Timer("step", timings):
            async with Timer("wait_for_generation_buffer", timings):
                tokens = await buffer.get()
            with Timer("run_training", timings):
                reward = await run_training(tokens, timings)
            with Timer("sync_weights", timings):
                behaviour.load_state_dict(policy.state_dict())
        print(f"step {step}: reward {reward:.3f}")
    generation.cancel()
    for name, seconds in timings.items():
        print(f"timing/{name}: {seconds / STEPS:.4f}")


asyncio.run(main())
