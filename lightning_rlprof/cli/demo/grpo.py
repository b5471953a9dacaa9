"""GRPO as a LightningModule with manual optimisation, and its mathematics as pure functions."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rlprof.cli.demo.faults import Faults
from lightning_rlprof.cli.demo.options import DemoOptions, Recipe
from lightning_rlprof.cli.demo.policy import Policy, Task, answer_mask, generate, token_log_probs
from lightning_rlprof.recording.annotations import count, stage

MINIBATCHES = 2
"""Optimizer steps per RL step."""

CLIP, KL = 0.2, 0.001
"""How far the probability ratio may move, and the weight of the divergence from the reference."""

GRADIENT_CLIP = 1.0
"""The largest norm of the gradient."""


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
    """Share of the held-out prompts that the policy gets right, its answers sampled as in training.

    GRPO raises that share; the share by the likeliest tokens may stay, as for a model that can add.
    """
    prompts, draw = task.encode_prompts(task.held_out), torch.Generator().manual_seed(0)
    texts = task.decode(generate(policy, prompts, task.answer_width, draw, kv_cache=True))
    return task.exact(task.held_out, texts)


def warm_start(policy: Policy, task: Task, steps: int, seed: int, recipe: Recipe) -> None:
    """Teach the policy by right answers for that many steps."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.warmup_rate)
    draw = random.Random(f"warm start {seed}")
    for _ in range(steps):
        entries = draw.choices(task.train, k=recipe.warmup_batch)
        prompts, answers = task.encode_prompts(entries), task.encode_answers(entries)
        loss = masked_mean(-token_log_probs(policy, prompts, answers), answer_mask(answers))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


class Grpo(pl.LightningModule):
    """Improves a policy by GRPO, every stage of its step marked with `stage`.

    ``rewards`` holds the mean reward of each step over all ranks, NaN until then. It lies in shared
    memory, so the steps of ranks in other processes appear here, too.
    """

    def __init__(self, policy: Policy, task: Task, options: DemoOptions) -> None:
        """The policy is trained in place; the reference and rollout models are copies of it."""
        super().__init__()
        self.automatic_optimization = False
        self.task, self.options, self.recipe = task, options, options.recipe
        self.steps, self.faults = options.total_steps, Faults(options)
        self.policy = policy
        self.reference = deepcopy(policy).requires_grad_(False)
        self.rollout = deepcopy(policy).requires_grad_(False)
        self.rewards = torch.full((self.steps,), torch.nan).share_memory_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on the policy alone."""
        rate = self.recipe.learning_rate
        return torch.optim.AdamW(self.policy.parameters(), lr=rate, weight_decay=0.0)

    def train_dataloader(self) -> DataLoader[list[int]]:
        """For each step the numbers of its prompts in ``task.train``; each rank draws its own."""
        seed, pool = f"{self.options.seed}/{self.global_rank}", range(len(self.task.train))
        draws = [random.Random(f"{seed}/{step}") for step in range(self.steps)]
        batches = [draw.sample(pool, self.recipe.prompts) for draw in draws]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        """Give each rank its own stream of samples."""
        seed = self.options.seed * self.trainer.world_size + self.global_rank
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def training_step(self, batch: Sequence[int], batch_idx: int) -> None:
        """One RL step: answer the prompts, mark the answers, learn from the marks."""
        entries = [self.task.train[number] for number in batch for _ in range(self.recipe.samples)]
        prompts = self.task.encode_prompts(entries).to(self.device)
        with self._own(batch_idx, "weight_sync"):
            self.rollout.load_state_dict(self.policy.state_dict())
        with self._own(batch_idx, "actor_generate"):
            width, kv_cache = self.task.answer_width, self.options.kv_cache
            answers = generate(self.rollout, prompts, width, self.generator, kv_cache)
            lengths = answer_mask(answers).sum(dim=1)
            count(tokens=int(lengths.sum()), lengths=lengths)
        with self._own(batch_idx, "compute_reward"):
            self.faults.in_reward(batch_idx, self.global_rank)
            rewards = torch.tensor(self.task.rewards(entries, self.task.decode(answers)))
        with self._own(batch_idx, "actor_compute_log_prob"), torch.no_grad():
            old = token_log_probs(self.policy, prompts, answers)
        with self._own(batch_idx, "reference_compute_log_prob"), torch.no_grad():
            reference = token_log_probs(self.reference, prompts, answers)
        with self._own(batch_idx, "compute_advantage"):
            groups = rewards.to(self.device).view(-1, self.recipe.samples)
            advantages = group_advantages(groups).view(-1, 1)
        with stage("actor_update"):
            self.faults.in_update(batch_idx)
            self._update(prompts, answers, old, reference, advantages)
        self.rewards[batch_idx] = self.trainer.strategy.reduce(rewards.mean(), reduce_op="mean")

    @contextmanager
    def _own(self, batch: int, name: str) -> Iterator[None]:
        """Mark a stage in which no rank waits for another; the slow rank sleeps at its end."""
        with stage(name):
            start = time.perf_counter()
            yield
            self.faults.at_end_of(name, batch, time.perf_counter() - start)
            if self.global_rank == self.options.slow_rank:
                time.sleep(self.options.slow_by * (time.perf_counter() - start))

    def _update(self, *experience: Tensor) -> None:
        """Learn from the sampled answers, of which each tensor has a row."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        order = torch.randperm(len(experience[0]), generator=self.generator, device=self.device)
        for rows in order.chunk(MINIBATCHES):
            self.manual_backward(self._loss(*(each[rows] for each in experience)))
            self.clip_gradients(optimizer.optimizer, GRADIENT_CLIP, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def _loss(
        self, prompts: Tensor, answers: Tensor, old: Tensor, reference: Tensor, advantages: Tensor
    ) -> Tensor:
        new = token_log_probs(self.policy, prompts, answers)
        loss = clipped_loss(new, old, advantages, CLIP) + KL * kl_estimate(new, reference)
        return masked_mean(loss, answer_mask(answers))
