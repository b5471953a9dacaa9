"""REINFORCE on a language model in one file, with `generate` of transformers and a reference."""

import copy

import torch
from _truth import Truth
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(1)
torch.set_num_threads(1)
config = GPT2Config(
    vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=99
)
model = GPT2LMHeadModel(config)
reference = copy.deepcopy(model).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def log_probs(network, words):
    """Return the log-probabilities of generated words."""
    logits = network(words).logits[:, 7:-1].log_softmax(-1)
    return logits.gather(-1, words[:, 8:, None])[..., 0]


truth = Truth()
for _ in range(15):
    prompts = torch.randint(1, 99, (8, 8))
    with truth.rollout():
        words = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=24,
            min_new_tokens=24, pad_token_id=0,
        )  # fmt: skip
        rewards = (words[:, 8:] % 2 == 0).float().mean(1)
        with torch.no_grad():
            known = log_probs(reference, words)
    for part in range(2):
        rows = slice(4 * part, 4 * part + 4)
        ours = log_probs(model, words[rows])
        gain = (rewards[rows] - rewards.mean())[:, None]
        loss = (0.1 * (ours - known[rows]) - gain * ours).mean() / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    truth.step()
truth.tell(model.parameters())
