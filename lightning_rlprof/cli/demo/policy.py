"""What the demo trains: tasks, which reasoning-gym marks, and the policy that learns them."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

PAD = 0
"""Token before a short prompt and after the end of an answer."""

END = 1
"""Of `Characters`, the token that ends an answer, and a prompt, where it asks for the answer."""

_SPECIAL = 2
_ENTRIES = 6000

Entry = dict[str, Any]


class Tokenizer(Protocol):
    """Turns a task's texts into tokens of a policy and back."""

    def prompt(self, text: str) -> list[int]:
        """Tokens that ask for the answer to ``text``."""

    def answer(self, text: str) -> list[int]:
        """Tokens of an answer, with the one that ends it."""

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an answer, up to its first special token."""


class Characters:
    """A token for each character that occurs in some texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.characters = "".join(sorted(set("".join(texts))))
        self.vocabulary = _SPECIAL + len(self.characters)

    def prompt(self, text: str) -> list[int]:
        """The characters, then `END`."""
        return [*(_SPECIAL + self.characters.index(letter) for letter in text), END]

    answer = prompt

    def text(self, tokens: Sequence[int]) -> str:
        """The characters up to the first special token."""
        letters = takewhile(lambda token: token >= _SPECIAL, tokens)
        return "".join(self.characters[token - _SPECIAL] for token in letters)


class Task:
    """Prompts to train on, prompts never trained on, and reasoning-gym's verifier of the answers.

    ``train`` and ``held_out`` are reasoning-gym entries; no prompt of one is in the other.
    ``prompt_width`` and ``answer_width`` are the most tokens of a prompt and of a right answer.
    Without a tokenizer, tokens are the `Characters` of the texts.
    """

    name: str
    options: Mapping[str, Any] = {}
    wrong: float
    """The most that a wrong answer may earn."""
    warmup_steps: int
    """Steps of supervised warm start that leave the policy right now and then, not often."""

    def __init__(self, seed: int, held_out: int, tokenizer: Tokenizer | None = None) -> None:
        import reasoning_gym

        self.dataset: Any = reasoning_gym.create_dataset(
            self.name, seed=seed, size=_ENTRIES, **self.options
        )
        entries = list({self.prompt(entry): entry for entry in self.dataset}.values())
        self.train, self.held_out = entries[held_out:], entries[:held_out]
        prompts, answers = [*map(self.prompt, entries)], [*map(self.answer, entries)]
        self.tokenizer = tokenizer or Characters(prompts + answers)
        self.prompt_width = max(len(self.tokenizer.prompt(text)) for text in prompts)
        self.answer_width = max(len(self.tokenizer.answer(text)) for text in answers)

    def prompt(self, entry: Entry) -> str:
        """What the policy reads for this entry."""
        raise NotImplementedError

    def answer(self, entry: Entry) -> str:
        """What a perfect policy writes for this entry."""
        raise NotImplementedError

    def verifier_text(self, text: str) -> str:
        """What reasoning-gym's verifier reads when the policy has written ``text``."""
        return text

    def encode_prompts(self, entries: Sequence[Entry]) -> Tensor:
        """Tokens of the prompts, padded on the left: ``(entries, prompt_width)``."""
        rows = [self.tokenizer.prompt(self.prompt(entry)) for entry in entries]
        return torch.tensor([[PAD] * (self.prompt_width - len(row)) + row for row in rows])

    def encode_answers(self, entries: Sequence[Entry]) -> Tensor:
        """Tokens of the right answers, `PAD` after them: ``(entries, answer_width)``."""
        rows = [self.tokenizer.answer(self.answer(entry)) for entry in entries]
        return torch.tensor([row + [PAD] * (self.answer_width - len(row)) for row in rows])

    def decode(self, tokens: Tensor) -> list[str]:
        """Text of each row of answers, up to its first special token."""
        return [self.tokenizer.text(row) for row in tokens.tolist()]

    def score(self, entries: Sequence[Entry], texts: Sequence[str]) -> list[float]:
        """Reasoning-gym's own score of each text, from 0 to 1."""
        pairs = zip(map(self.verifier_text, texts), entries, strict=True)
        return [float(self.dataset.score_answer(text, entry)) for text, entry in pairs]

    def rewards(self, entries: Sequence[Entry], texts: Sequence[str]) -> list[float]:
        """What GRPO learns from: the verifier's score, with the gaps that a policy finds closed.

        The verifier of `spell_backward` means to take 0.2 off a right word with letters after it.
        But its sum of ``1 / n`` is not exactly 1.0 for words of 6, 7, 9 and 10 letters. Within 100
        steps a policy that is paid for that stops being right. So a wrong answer earns at most 0.8.
        """
        return [
            score if text == self.answer(entry) else min(score, self.wrong)
            for score, entry, text in zip(self.score(entries, texts), entries, texts, strict=True)
        ]

    def exact(self, entries: Sequence[Entry], texts: Sequence[str]) -> float:
        """Share of the texts that are the right answer, character by character."""
        hits = [self.answer(entry) == text for entry, text in zip(entries, texts, strict=True)]
        return sum(hits) / len(hits)


class SpellBackward(Task):
    """A word, to be written backward."""

    name, wrong, warmup_steps = "spell_backward", 0.8, 20

    def prompt(self, entry: Entry) -> str:
        """The word."""
        return str(entry["metadata"]["word"]).lower()

    def answer(self, entry: Entry) -> str:
        """Its letters from the last to the first."""
        return str(entry["answer"]).lower()


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
        if keys.shape[2] != time:  # A query sees itself and the positions before it.
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
    generator: torch.Generator,
    kv_cache: bool = False,
) -> Tensor:
    """Answers of the policy to the prompts: ``(batch, prompt) -> (batch, length)``.

    Each answer ends with the policy's ``end`` unless it fills ``length``; `PAD` follows. Samples at
    temperature 1 from ``generator``; the random numbers drawn do not depend on ``kv_cache``.
    """
    cache: Cache | None = {} if kv_cache else None
    answers = torch.full((len(prompts), length), PAD, device=prompts.device)
    seen, fresh = prompts, prompts
    done = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    for place in range(length):
        # `PAD` is never drawn.
        logits = policy(fresh if kv_cache else seen, cache, last=1)[:, -1, PAD + 1 :]
        drawn = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0] + PAD + 1
        token = drawn.masked_fill(done, PAD)
        answers[:, place] = token
        done |= token == policy.end
        if bool(done.all()):
            break
        fresh = token[:, None]
        seen = torch.cat([seen, fresh], 1)
    return answers


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
