"""Tasks for the demo's policy: reasoning-gym writes the questions and marks the answers.

A task says how a reasoning-gym entry becomes a short prompt of characters, and how the characters
that the policy writes become the text that reasoning-gym's verifier reads. Needs `reasoning-gym`,
imported only when a task is made.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_rlprof.errors import ConfigError, RecorderError

PAD = 0
"""Token before a short prompt and after the end of an answer."""

END = 1
"""Token that ends an answer; also the one that ends a prompt and asks for the answer."""

_SPECIAL = 2
_HELD_OUT = 256
_ENTRIES = 6000

Entry = dict[str, Any]


@dataclass(frozen=True)
class _Recipe:
    """How one reasoning-gym dataset is shown to a policy that reads and writes characters."""

    options: Mapping[str, Any]
    prompt: Callable[[Entry], str]
    answer: Callable[[Entry], str]
    verifier_text: Callable[[str], str]
    wrong: float  # the most that a wrong answer may earn
    warmup_steps: int  # leaves the policy right about once in five


def _digits(numbers: Sequence[str]) -> str:
    return "".join(str(int(float(number))) for number in numbers)


def _sorting_prompt(entry: Entry) -> str:
    direction = "<" if entry["metadata"]["direction"] == "ascending" else ">"
    return _digits(entry["metadata"]["original_numbers"]) + direction


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "number_sorting": _Recipe(
            options={
                "min_numbers": 3,
                "max_numbers": 4,
                "max_decimals": 0,
                "min_value": 0.0,
                "max_value": 9.0,
            },
            prompt=_sorting_prompt,
            answer=lambda entry: _digits(entry["metadata"]["sorted_numbers"]),
            verifier_text=lambda text: json.dumps(list(text)),
            wrong=0.0,
            warmup_steps=15,
        ),
        "spell_backward": _Recipe(
            options={},
            prompt=lambda entry: str(entry["metadata"]["word"]).lower(),
            answer=lambda entry: str(entry["answer"]).lower(),
            verifier_text=lambda text: text,
            wrong=0.8,
            warmup_steps=20,
        ),
    }
)

TASKS: tuple[str, ...] = tuple(sorted(_RECIPES))
"""The tasks that the demo offers, by reasoning-gym's names."""


@dataclass(frozen=True)
class Task:
    """Prompts to train on, prompts never trained on, and reasoning-gym's verifier of the answers.

    Prompts are encoded to one width: padding on the left, `END` on the right. ``train`` and
    ``held_out`` are reasoning-gym entries; no prompt of one is in the other.

    Attributes:
        name: Name of the task, one of `TASKS`.
        characters: Every character of the task, in the order of their tokens.
        prompt_width: Tokens of an encoded prompt.
        answer_width: Tokens of the longest answer, its `END` included.
        warmup_steps: Steps of supervised warm start that give GRPO something to improve.
    """

    name: str
    characters: str
    prompt_width: int
    answer_width: int
    warmup_steps: int
    train: tuple[Entry, ...] = field(repr=False)
    held_out: tuple[Entry, ...] = field(repr=False)
    dataset: Any = field(repr=False)

    @property
    def vocabulary(self) -> int:
        """Number of tokens, special ones included."""
        return _SPECIAL + len(self.characters)

    def prompt(self, entry: Entry) -> str:
        """The characters that the policy reads for this entry."""
        return _RECIPES[self.name].prompt(entry)

    def answer(self, entry: Entry) -> str:
        """The characters that a perfect policy writes for this entry."""
        return _RECIPES[self.name].answer(entry)

    def encode_prompts(self, entries: Sequence[Entry]) -> Tensor:
        """Tokens of the prompts: ``(entries, prompt_width)``."""
        rows = [[*self._tokens(self.prompt(entry)), END] for entry in entries]
        return torch.tensor([[PAD] * (self.prompt_width - len(row)) + row for row in rows])

    def encode_answers(self, entries: Sequence[Entry]) -> Tensor:
        """Tokens of the right answers, `END` then `PAD` after them: ``(entries, answer_width)``."""
        rows = [[*self._tokens(self.answer(entry)), END] for entry in entries]
        return torch.tensor([row + [PAD] * (self.answer_width - len(row)) for row in rows])

    def decode(self, tokens: Tensor) -> list[str]:
        """Text of each row of answers, up to its first special token."""
        return ["".join(self._characters(row)) for row in tokens.tolist()]

    def score(self, entries: Sequence[Entry], texts: Sequence[str]) -> list[float]:
        """Reasoning-gym's own score of each text, from 0 to 1."""
        spell = _RECIPES[self.name].verifier_text
        return [
            float(self.dataset.score_answer(spell(text), entry))
            for entry, text in zip(entries, texts, strict=True)
        ]

    def rewards(self, entries: Sequence[Entry], texts: Sequence[str]) -> list[float]:
        """What GRPO learns from: the verifier's score, with the gaps that a policy finds closed.

        The verifier of `spell_backward` means to take 0.2 off a right word with letters after it.
        But its sum of ``1 / n`` is not exactly 1.0 for words of 6, 7, 9 and 10 letters; that of
        `number_sorting` accepts sorted numbers that are off by one. Within 100 steps a policy that
        is paid for that stops being right. So a wrong answer earns at most 0.8 and 0 there.
        """
        most = _RECIPES[self.name].wrong
        return [
            score if text == self.answer(entry) else min(score, most)
            for score, entry, text in zip(self.score(entries, texts), entries, texts, strict=True)
        ]

    def exact(self, entries: Sequence[Entry], texts: Sequence[str]) -> float:
        """Share of the texts that are the right answer, character by character."""
        hits = [self.answer(entry) == text for entry, text in zip(entries, texts, strict=True)]
        return sum(hits) / len(hits)

    def _tokens(self, text: str) -> list[int]:
        return [_SPECIAL + self.characters.index(character) for character in text]

    def _characters(self, row: Sequence[int]) -> list[str]:
        ends = [place for place, token in enumerate(row) if token < _SPECIAL]
        return [self.characters[token - _SPECIAL] for token in row[: ends[0] if ends else None]]


def make_task(name: str, seed: int = 0) -> Task:
    """The task of that name, its entries drawn with that seed.

    Raises:
        ConfigError: The name is not one of `TASKS`.
        RecorderError: reasoning-gym is not installed.
    """
    if name not in _RECIPES:
        near = get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"task={name!r} is unknown; allowed: {', '.join(TASKS)}{hint}")
    recipe = _RECIPES[name]
    dataset = _reasoning_gym().create_dataset(name, seed=seed, size=_ENTRIES, **recipe.options)
    unique = list({recipe.prompt(entry): entry for entry in dataset}.values())
    texts = [recipe.prompt(entry) + recipe.answer(entry) for entry in unique]
    return Task(
        name=name,
        characters="".join(sorted(set("".join(texts)))),
        prompt_width=1 + max(len(recipe.prompt(entry)) for entry in unique),
        answer_width=1 + max(len(recipe.answer(entry)) for entry in unique),
        warmup_steps=recipe.warmup_steps,
        train=tuple(unique[_HELD_OUT:]),
        held_out=tuple(unique[:_HELD_OUT]),
        dataset=dataset,
    )


def _reasoning_gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise RecorderError(
            "the demo needs reasoning-gym, which is not installed; "
            'run: pip install "lightning-rlprof[demo]"'
        ) from error
