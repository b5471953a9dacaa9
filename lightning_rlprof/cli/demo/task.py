"""Tasks for the demo's policies: reasoning-gym writes the questions and marks the answers."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_rlprof.errors import RecorderError

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

    Raises:
        RecorderError: reasoning-gym is not installed.
    """

    name: str
    options: Mapping[str, Any] = {}
    wrong: float
    """The most that a wrong answer may earn."""
    warmup_steps: int
    """Steps of supervised warm start that leave the policy right now and then, not often."""

    def __init__(self, seed: int, held_out: int, tokenizer: Tokenizer | None = None) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise RecorderError(
                "the demo needs reasoning-gym, which is not installed; "
                'run: pip install "lightning-rlprof[demo]"'
            ) from error
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
        But its sum of ``1 / n`` is not exactly 1.0 for words of 6, 7, 9 and 10 letters; that of
        `number_sorting` accepts sorted numbers that are off by one. Within 100 steps a policy that
        is paid for that stops being right. So a wrong answer earns at most 0.8 and 0 there.
        """
        return [
            score if text == self.answer(entry) else min(score, self.wrong)
            for score, entry, text in zip(self.score(entries, texts), entries, texts, strict=True)
        ]

    def exact(self, entries: Sequence[Entry], texts: Sequence[str]) -> float:
        """Share of the texts that are the right answer, character by character."""
        hits = [self.answer(entry) == text for entry, text in zip(entries, texts, strict=True)]
        return sum(hits) / len(hits)


class _SpellBackward(Task):
    name, wrong, warmup_steps = "spell_backward", 0.8, 20

    def prompt(self, entry: Entry) -> str:
        return str(entry["metadata"]["word"]).lower()

    def answer(self, entry: Entry) -> str:
        return str(entry["answer"]).lower()


class _NumberSorting(Task):
    name, wrong, warmup_steps = "number_sorting", 0.0, 15
    options: Mapping[str, Any] = {
        **{"min_numbers": 3, "max_numbers": 4, "max_decimals": 0},
        **{"min_value": 0.0, "max_value": 9.0},
    }

    def prompt(self, entry: Entry) -> str:
        direction = "<" if entry["metadata"]["direction"] == "ascending" else ">"
        return _digits(entry["metadata"]["original_numbers"]) + direction

    def answer(self, entry: Entry) -> str:
        return _digits(entry["metadata"]["sorted_numbers"])

    def verifier_text(self, text: str) -> str:
        return json.dumps(list(text))


def _digits(numbers: Sequence[str]) -> str:
    return "".join(str(int(float(number))) for number in numbers)


TASKS = {task.name: task for task in (_NumberSorting, _SpellBackward)}
"""The tasks that the demo offers, by reasoning-gym's names."""


def make_task(name: str, seed: int = 0, held_out: int = 256) -> Task:
    """The task of that name, its entries drawn with that seed.

    Raises:
        RecorderError: reasoning-gym is not installed.
    """
    return TASKS[name](seed, held_out)
