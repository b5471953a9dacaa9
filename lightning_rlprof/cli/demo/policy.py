"""The demo's policies: a small character transformer in plain torch, and how all write answers."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_rlprof.cli.demo.task import END, PAD

Cache = dict[int, Any]
"""What a policy keeps of the positions that it has read; empty before the first."""


class Policy(nn.Module):
    """A causal language model that the demo trains.

    ``end`` is the token that ends an answer. `PAD` is in every vocabulary and never in an answer.
    """

    end: int

    def forward(self, tokens: Tensor, cache: Cache | None = None, last: int = 0) -> Tensor:
        """Logits of the token after each one: ``(batch, time) -> (batch, time, vocabulary)``.

        With a cache, ``tokens`` holds only the positions that the cache has not read. ``last``
        limits the logits to that many positions at the end; 0 is all.
        """
        raise NotImplementedError


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = heads, layer
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, cache: Cache | None) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), cache)
        fed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(hidden))))
        return hidden + fed

    def _attend(self, hidden: Tensor, cache: Cache | None) -> Tensor:
        batch, time, width = hidden.shape
        split = self.queries_keys_values(hidden).view(batch, time, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if self.layer in cache:
                old_keys, old_values = cache[self.layer]
                keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
            cache[self.layer] = (keys, values)
        mask = None
        if keys.shape[2] != time:  # a query sees the positions before it and itself
            mask = torch.ones(time, keys.shape[2], dtype=torch.bool, device=hidden.device)
            mask = mask.tril(keys.shape[2] - time)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None
        )
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class SmallPolicy(Policy):
    """A causal transformer over characters: pre-norm, learned positions.

    ``context`` is the longest sequence that it reads, ``width`` the size of its hidden state.
    """

    end = END

    def __init__(
        self, vocabulary: int, context: int, width: int = 96, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads, layer) for layer in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=1 / math.sqrt(width))

    def forward(self, tokens: Tensor, cache: Cache | None = None, last: int = 0) -> Tensor:
        """Keys and values of each layer are in the cache: ``(batch, heads, time, _)``."""
        start = cache[0][0].shape[2] if cache else 0
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden, cache)
        logits: Tensor = self.out(self.norm(hidden[:, -last:]))
        return logits


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Tensor,
    length: int,
    generator: torch.Generator | None = None,
    kv_cache: bool = False,
) -> Tensor:
    """Answers of the policy to the prompts: ``(batch, prompt) -> (batch, length)``.

    Each answer ends with the policy's ``end`` unless it fills ``length``; `PAD` follows. Samples at
    temperature 1 from ``generator``, or takes the likeliest token when it is None. The random
    numbers drawn do not depend on ``kv_cache``.
    """
    cache: Cache | None = {} if kv_cache else None
    answers = torch.full((len(prompts), length), PAD, device=prompts.device)
    seen, fresh = prompts, prompts
    done = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    for place in range(length):
        logits = policy(fresh if kv_cache else seen, cache, last=1)[:, -1]
        token = _pick(logits, generator).masked_fill(done, PAD)
        answers[:, place] = token
        done |= token == policy.end
        if bool(done.all()):
            break
        fresh = token[:, None]
        seen = torch.cat([seen, fresh], 1)
    return answers


def _pick(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    logits = logits[:, PAD + 1 :]  # it stands for neither text nor the end
    if generator is None:
        return logits.argmax(1) + PAD + 1
    return torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0] + PAD + 1


def answer_mask(answers: Tensor) -> Tensor:
    """True at the tokens that the policy chose: everything but the padding after the end."""
    return answers != PAD


def token_log_probs(policy: Policy, prompts: Tensor, answers: Tensor) -> Tensor:
    """Log-probability of each answer token given what precedes it: ``(batch, length)``.

    Of the distribution that `generate` samples from, so without `PAD`; at padding the value means
    nothing, see `answer_mask`.
    """
    tokens = torch.cat([prompts, answers], 1)
    logits = policy(tokens[:, :-1], last=answers.shape[1])[..., PAD + 1 :]
    picked = (answers - PAD - 1).clamp_min(0)[..., None]
    return functional.log_softmax(logits, 2).gather(2, picked)[..., 0]
