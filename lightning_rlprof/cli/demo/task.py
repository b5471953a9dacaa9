"""Tasks for the demo's policy: reasoning-gym writes the questions and marks the answers."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from lightning_rlprof.cli.console import did_you_mean
from lightning_rlprof.errors import ConfigError, RecorderError

PAD = 0
"""Token before a short prompt and after the end of an answer."""

END = 1
"""Token that ends an answer; also the one that ends a prompt and asks for the answer."""

_SPECIAL = 2
_HELD_OUT = 256
_ENTRIES = 6000

Entry = dict[str, Any]


class Task:
    """Prompts to train on, prompts never trained on, and reasoning-gym's verifier of the answers.

    ``train`` and ``held_out`` are reasoning-gym entries; no prompt of one is in the other. A token
    stands for a character of ``characters``. ``prompt_width`` and ``answer_width`` are the most
    tokens of a prompt and of an answer, `END` included.

    Raises:
        RecorderError: reasoning-gym is not installed.
    """

    name: str
    options: Mapping[str, Any] = {}
    wrong: float
    """The most that a wrong answer may earn."""
    warmup_steps: int
    """Steps of supervised warm start that leave the policy right about once in five."""

    def __init__(self, seed: int = 0) -> None:
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
        self.train, self.held_out = entries[_HELD_OUT:], entries[:_HELD_OUT]
        prompts, answers = [*map(self.prompt, entries)], [*map(self.answer, entries)]
        self.prompt_width = 1 + max(map(len, prompts))
        self.answer_width = 1 + max(map(len, answers))
        self.characters = "".join(sorted(set("".join(prompts + answers))))
        self.vocabulary = _SPECIAL + len(self.characters)

    def prompt(self, entry: Entry) -> str:
        """The characters that the policy reads for this entry."""
        raise NotImplementedError

    def answer(self, entry: Entry) -> str:
        """The characters that a perfect policy writes for this entry."""
        raise NotImplementedError

    def verifier_text(self, text: str) -> str:
        """What reasoning-gym's verifier reads when the policy has written ``text``."""
        return text

    def encode_prompts(self, entries: Sequence[Entry]) -> Tensor:
        """Tokens of the prompts, padded on the left: ``(entries, prompt_width)``."""
        rows = [self._tokens(self.prompt(entry)) for entry in entries]
        return torch.tensor([[PAD] * (self.prompt_width - len(row)) + row for row in rows])

    def encode_answers(self, entries: Sequence[Entry]) -> Tensor:
        """Tokens of the right answers, `END` then `PAD` after them: ``(entries, answer_width)``."""
        rows = [self._tokens(self.answer(entry)) for entry in entries]
        return torch.tensor([row + [PAD] * (self.answer_width - len(row)) for row in rows])

    def _tokens(self, text: str) -> list[int]:
        return [*(_SPECIAL + self.characters.index(letter) for letter in text), END]

    def decode(self, tokens: Tensor) -> list[str]:
        """Text of each row of answers, up to its first special token."""
        rows = [takewhile(lambda token: token >= _SPECIAL, row) for row in tokens.tolist()]
        return ["".join(self.characters[token - _SPECIAL] for token in row) for row in rows]

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


def make_task(name: str, seed: int = 0) -> Task:
    """The task of that name, its entries drawn with that seed.

    Raises:
        ConfigError: The name is not one of `TASKS`.
        RecorderError: reasoning-gym is not installed.
    """
    if name not in TASKS:
        near = did_you_mean(name, TASKS)
        hint = f"; {near}" if near else ""
        raise ConfigError(f"task={name!r} is unknown; allowed: {', '.join(TASKS)}{hint}")
    return TASKS[name](seed)
