"""Modules with every kind of method that configuration can mark, and a recording of them."""

import asyncio
import enum
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.config.stages import WrapRule
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.run_directory import read_trace
from lightning_rlprof.testing import FakeClock, make_header


class Model(enum.Enum):
    OLD = "old policy"
    REFERENCE = "reference policy"


def score(text: str, scale: int = 1) -> int:
    """Score a text."""
    return len(text) * scale


async def score_later(text: str) -> int:
    await asyncio.sleep(0)
    return len(text)


def renamed(method: Any) -> Any:
    def inner(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = method(self, x)
        return result

    return inner


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.score = score
        self.score_later = score_later
        self.shout = functools.partial(score, scale=3)
        self.short = self.layer.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    async def reward(self, fails: bool = False) -> int:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("no reward")
        return 1

    @renamed
    def decorated(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    @staticmethod
    def constant() -> int:
        return 4

    @classmethod
    def name(cls) -> str:
        return cls.__name__


class Trained(torch.nn.Module):
    """Stands in for a LightningModule, which is a module as well."""

    steps = 3

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()
        self.reward_object = Reward()

    def log_probs(self, batch: int, kind: object = Model.OLD, *rest: int, flag: int = 0) -> Any:
        return batch, kind, rest, flag

    def fails(self) -> None:
        raise KeyError("user")

    def items(self) -> Iterator[int]:
        yield 1
        yield 2

    async def stream(self) -> AsyncIterator[int]:
        yield 1


class Reward:
    threshold = 1

    def __call__(self) -> int:
        return self.threshold


class Slotted:
    __slots__ = ("method",)

    def __init__(self) -> None:
        self.method = score


def rule(target: str, how: Any = "actor_update") -> WrapRule:
    key = "stage" if isinstance(how, str) else "by_arg" if "arg" in how else "by_grad"
    return WrapRule.model_validate({"target": target, key: how})


@contextmanager
def recording(tmp_path: Path) -> Iterator[list[str]]:
    """Record a step and fill in the names of its stages, in the order in which they ended."""
    names: list[str] = []
    config = ProfilerConfig.build(profile=False)
    with Session(config, tmp_path / "run", make_header(), (), FakeClock()) as session:
        session.begin_step(1)
        yield names
        session.end_step()
    spans = read_trace(tmp_path / "run" / "rank-00000.jsonl").spans
    names.extend(span.name for span in spans if span.kind == "stage")


X = torch.ones(1, 2)
MARKABLE = (
    "constant",
    "decorated",
    "forward",
    "generate",
    "score",
    "score_later",
    "short",
    "shout",
)
