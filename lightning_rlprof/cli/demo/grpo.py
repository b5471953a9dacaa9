"""GRPO as a LightningModule with manual optimisation, and its mathematics as pure functions."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_rlprof.cli.demo.policy import Policy, answer_mask, generate, token_log_probs
from lightning_rlprof.cli.demo.task import Task
from lightning_rlprof.recording.annotations import count, stage


@dataclass(frozen=True)
class GrpoSettings:
    """What a GRPO run is made of; the defaults learn the demo's tasks on one CPU thread.

    Attributes:
        steps: RL steps.
        seed: Chooses prompts and samples.
        kv_cache: Whether generation keeps keys and values instead of reading everything again.
        prompts: Different prompts per step and rank.
        samples: Answers sampled per prompt, the group that they are judged in.
        minibatches: Optimizer steps per RL step, each on its share of the answers.
        clip: How far the probability ratio may move before its gradient stops.
        kl: Weight of the divergence from the reference model.
        learning_rate: Of AdamW.
        gradient_clip: Largest norm of the gradient.
        slow_rank: A rank that is made slow, to see it found; None for none.
        slow_by: How much longer it takes for each stage in which ranks do not wait for one another.
    """

    steps: int
    seed: int = 0
    kv_cache: bool = False
    prompts: int = 8
    samples: int = 8
    minibatches: int = 2
    clip: float = 0.2
    kl: float = 0.001
    learning_rate: float = 3e-4
    gradient_clip: float = 1.0
    slow_rank: int | None = None
    slow_by: float = 0.15


def group_advantages(rewards: Tensor) -> Tensor:
    """How much better than its group each answer is, in its standard deviations.

    ``(prompts, samples) -> (prompts, samples)``; every row sums to zero, and a row of equal rewards
    is all zeros. Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True, correction=0) + 1e-4)


def clipped_loss(new: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic loss of each token: ``-min(r A, clamp(r, 1 - clip, 1 + clip) A)``.

    ``new`` and ``old`` are log-probabilities, ``r`` is the ratio of the probabilities. Schulman et
    al. 2017, arXiv:1707.06347, equation 7.
    """
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def kl_estimate(new: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(new, reference) at each token sampled from ``new``.

    ``q/p - log(q/p) - 1``, Schulman's k3, as in arXiv:2402.03300, equation 4.
    """
    gap = reference - new
    return gap.exp() - gap - 1


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask is true; what lies elsewhere has no part, nor gradient."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp_min(1)


def exact_match(policy: Policy, task: Task) -> float:
    """Share of the held-out prompts that the policy, always picking the likeliest, gets right."""
    prompts = task.encode_prompts(task.held_out)
    texts = task.decode(generate(policy, prompts, task.answer_width, kv_cache=True))
    return task.exact(task.held_out, texts)


def warm_start(
    policy: Policy, task: Task, steps: int, seed: int, learning_rate: float = 2e-3
) -> list[float]:
    """Teach the policy by right answers for that many steps of 64; returns the loss of each."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    draw = random.Random(f"warm start {seed}")
    losses = []
    for _ in range(steps):
        entries = draw.choices(task.train, k=64)
        prompts, answers = task.encode_prompts(entries), task.encode_answers(entries)
        loss = masked_mean(-token_log_probs(policy, prompts, answers), answer_mask(answers))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True)
class _Experience:
    """What one step learns from; each row is one sampled answer."""

    prompts: Tensor
    answers: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor

    def rows(self, rows: Tensor) -> "_Experience":
        return _Experience(
            self.prompts[rows],
            self.answers[rows],
            self.old[rows],
            self.reference[rows],
            self.advantages[rows],
        )


class _PromptBatches(Dataset[list[int]]):
    """One batch of prompt numbers per step; each rank draws its own."""

    def __init__(self, settings: GrpoSettings, pool: int, rank: int) -> None:
        self.settings, self.pool, self.rank = settings, pool, rank

    def __len__(self) -> int:
        return self.settings.steps

    def __getitem__(self, step: int) -> list[int]:
        draw = random.Random(f"{self.settings.seed}/{self.rank}/{step}")
        return draw.sample(range(self.pool), self.settings.prompts)


class Grpo(pl.LightningModule):
    """Improves a policy by GRPO, every stage of its step marked with `stage`.

    ``rewards`` holds the mean reward of each step, over all ranks. It is a buffer, so it comes back
    with the weights from ranks that ran in other processes.
    """

    rewards: Tensor

    def __init__(self, policy: Policy, task: Task, settings: GrpoSettings) -> None:
        """The policy is trained in place; the reference and rollout models are copies of it."""
        super().__init__()
        self.automatic_optimization = False
        self.task, self.settings = task, settings
        self.policy = policy
        self.reference = deepcopy(policy).requires_grad_(False)
        self.rollout = deepcopy(policy).requires_grad_(False)
        self.register_buffer("rewards", torch.zeros(settings.steps))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on the policy alone."""
        return torch.optim.AdamW(
            self.policy.parameters(), lr=self.settings.learning_rate, weight_decay=0.0
        )

    def train_dataloader(self) -> DataLoader[list[int]]:
        """One item per step: the numbers of its prompts in ``task.train``."""
        batches = _PromptBatches(self.settings, len(self.task.train), self.global_rank)
        return DataLoader(batches, batch_size=None)

    def on_train_start(self) -> None:
        """Give each rank its own stream of samples."""
        seed = self.settings.seed * self.trainer.world_size + self.global_rank
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def training_step(self, batch: Sequence[int], batch_idx: int) -> None:
        """One RL step: answer the prompts, mark the answers, learn from the marks."""
        samples = range(self.settings.samples)
        entries = [self.task.train[number] for number in batch for _ in samples]
        prompts = self.task.encode_prompts(entries).to(self.device)
        with self._own("weight_sync"):
            self.rollout.load_state_dict(self.policy.state_dict())
        with self._own("actor_generate"):
            answers = self._generate(prompts)
            count(tokens=int(answer_mask(answers).sum()))
        with self._own("compute_reward"):
            rewards = torch.tensor(self.task.rewards(entries, self.task.decode(answers)))
        with self._own("actor_compute_log_prob"), torch.no_grad():
            old = token_log_probs(self.policy, prompts, answers)
        with self._own("reference_compute_log_prob"), torch.no_grad():
            reference = token_log_probs(self.reference, prompts, answers)
        with self._own("compute_advantage"):
            groups = rewards.to(self.device).view(-1, len(samples))
            advantages = group_advantages(groups).view(-1, 1)
        with stage("actor_update"):
            self._update(_Experience(prompts, answers, old, reference, advantages))
        self.rewards[batch_idx] = self.trainer.strategy.reduce(rewards.mean(), reduce_op="mean")

    @contextmanager
    def _own(self, name: str) -> Iterator[None]:
        """Mark a stage in which no rank waits for another; the slow rank sleeps at its end."""
        with stage(name):
            start = time.perf_counter()
            yield
            if self.global_rank == self.settings.slow_rank:
                time.sleep(self.settings.slow_by * (time.perf_counter() - start))

    def _generate(self, prompts: Tensor) -> Tensor:
        return generate(
            self.rollout, prompts, self.task.answer_width, self.generator, self.settings.kv_cache
        )

    def _update(self, experience: _Experience) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        order = torch.randperm(
            len(experience.answers), generator=self.generator, device=self.device
        )
        for rows in order.chunk(self.settings.minibatches):
            self.manual_backward(self._loss(experience.rows(rows)))
            self.clip_gradients(optimizer.optimizer, self.settings.gradient_clip, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def _loss(self, batch: _Experience) -> Tensor:
        new = token_log_probs(self.policy, batch.prompts, batch.answers)
        loss = clipped_loss(new, batch.old, batch.advantages, self.settings.clip)
        loss = loss + self.settings.kl * kl_estimate(new, batch.reference)
        return masked_mean(loss, answer_mask(batch.answers))
