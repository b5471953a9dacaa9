"""GRPO: its mathematics against brute force, and a module that learns and marks its stages."""

import math
import random
from copy import copy

import pytest
import pytorch_lightning as pl
import torch

from lightning_rlprof.cli.demo import grpo
from lightning_rlprof.cli.demo.grpo import (
    Grpo,
    clipped_loss,
    exact_match,
    group_advantages,
    kl_estimate,
    masked_mean,
    warm_start,
)
from lightning_rlprof.cli.demo.options import DemoOptions, Recipe
from lightning_rlprof.cli.demo.policy import PAD, Policy, SmallPolicy, Task, token_log_probs
from lightning_rlprof.cli.demo.run import be_quiet


def small(task: Task, seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    context = task.prompt_width + task.answer_width
    return SmallPolicy(task.tokenizer.vocabulary, context, width=32, layers=1, heads=2)


def fit(module: Grpo, *callbacks: pl.Callback) -> None:
    be_quiet()
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module)


def test_advantages_sum_to_zero_in_each_group_and_have_its_spread() -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(rewards)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(5), rtol=0, atol=1e-5)
    torch.testing.assert_close(advantages.std(1, correction=0), torch.ones(5), rtol=2e-3, atol=0)
    assert torch.equal(advantages.argsort(1), rewards.argsort(1))


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert torch.equal(group_advantages(torch.full((2, 8), 0.5)), torch.zeros(2, 8))


def test_the_clipped_loss_is_the_one_of_the_formula() -> None:
    draw = random.Random(0)
    for _ in range(300):
        new, old, advantage = draw.gauss(-1, 1), draw.gauss(-1, 1), draw.gauss(0, 2)
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 0.8), 1.2)
        found = clipped_loss(*torch.tensor([new, old, advantage], dtype=torch.float64), clip=0.2)
        assert found.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))


@pytest.mark.parametrize(
    ("gap", "advantage", "moves"),
    [(0.0, 1, True), (0.5, 1, False), (-0.5, 1, True), (0.5, -1, True), (-0.5, -1, False)],
)
def test_the_gradient_stops_where_the_ratio_has_moved_enough(
    gap: float, advantage: float, moves: bool
) -> None:
    new = torch.tensor(gap, requires_grad=True)
    clipped_loss(new, torch.tensor(0.0), torch.tensor(float(advantage)), 0.2).backward()
    assert new.grad is not None
    assert (new.grad.item() != 0) == moves


def test_the_kl_estimate_is_never_negative_and_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    new, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(1)
    estimate = kl_estimate(new, reference)
    assert bool((estimate >= 0).all())
    exact = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close((new.exp() * estimate).sum(), exact)
    assert torch.equal(kl_estimate(new, new), torch.zeros_like(new))


def test_a_masked_mean_gives_no_gradient_to_what_is_masked() -> None:
    values = torch.tensor([1.0, float("inf"), 3.0], requires_grad=True)
    mean = masked_mean(values, torch.tensor([True, False, True]))
    mean.backward()
    assert mean.item() == 2.0
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5]
    assert masked_mean(torch.ones(2), torch.zeros(2, dtype=torch.bool)).item() == 0.0


def test_the_warm_start_lowers_the_loss_of_prompts_that_it_has_not_seen(spelling: Task) -> None:
    policy, losses = small(spelling), []
    prompts = spelling.encode_prompts(spelling.held_out)
    answers = spelling.encode_answers(spelling.held_out)
    for steps in (0, 15):
        warm_start(policy, spelling, steps, 0, Recipe())
        loss = masked_mean(-token_log_probs(policy, prompts, answers), answers != PAD)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(spelling.tokenizer.vocabulary), abs=1.0)
    assert losses[1] < losses[0] - 0.3


class Echo:
    """Pays for answers that begin with the first character of the alphabet."""

    def __init__(self, task: Task) -> None:
        self.first = task.tokenizer.characters[0]

    def score_answer(self, answer: str, entry: object) -> float:
        return 0.8 * answer.startswith(self.first)


def test_grpo_raises_a_reward_that_the_policy_had_never_been_taught(
    spelling: Task,
) -> None:
    fast = Recipe(learning_rate=3e-3)
    easy = copy(spelling)
    easy.dataset = Echo(spelling)
    module = Grpo(small(easy), easy, DemoOptions(fast, steps=25, kv_cache=True))
    fit(module)
    rewards = module.rewards / 0.8
    assert rewards[:3].mean() < 0.2
    assert rewards[-3:].mean() > 0.8


class Watch(pl.Callback):
    """Notes what holds around each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.lags: list[float] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [weights.grad for weights in pl_module.policy.parameters()]
        self.norms.append(torch.stack([one.norm() for one in gradients]).norm().item())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        self.lags.append(distance(pl_module.policy, pl_module.rollout))


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_three_steps_train_the_policy_and_only_it(
    spelling: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "GRADIENT_CLIP", 0.01)
    policy = small(spelling)
    warm_start(policy, spelling, 5, 0, Recipe())
    module, watch = Grpo(policy, spelling, DemoOptions(steps=3)), Watch()
    reference = {name: value.clone() for name, value in module.reference.state_dict().items()}
    fit(module, watch)
    assert all(torch.equal(v, reference[name]) for name, v in module.reference.state_dict().items())
    assert distance(module.policy, module.reference) > 1e-4
    assert len(watch.norms) == 6  # two mini-batches a step
    assert watch.norms == pytest.approx([0.01] * 6, rel=1e-3)  # each was larger before clipping
    # the rollout copy is one update behind: synchronised at the start of the step
    assert 0 < max(watch.lags) < distance(module.policy, module.reference)
    assert bool((module.rewards > 0).all())


def test_the_stages_of_a_step_are_marked_in_order(
    spelling: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    counted: list[dict[str, float]] = []

    class Note:
        def __init__(self, name: str) -> None:
            seen.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(grpo, "stage", Note)
    monkeypatch.setattr(grpo, "count", lambda **of: counted.append(of))
    fit(Grpo(small(spelling), spelling, DemoOptions(steps=1)))
    assert seen == [
        "weight_sync",
        "actor_generate",
        "compute_reward",
        "actor_compute_log_prob",
        "reference_compute_log_prob",
        "compute_advantage",
        "actor_update",
    ]
    assert 64 <= counted[0]["tokens"] <= 64 * spelling.answer_width


def test_exact_match_is_measured_on_what_was_held_out(
    spelling: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = spelling.encode_answers(spelling.held_out)
    monkeypatch.setattr(grpo, "generate", lambda *_, **__: right)
    assert exact_match(small(spelling), spelling) == 1.0
    monkeypatch.setattr(grpo, "generate", lambda *_, **__: right.roll(1, 0))
    assert exact_match(small(spelling), spelling) == 0.0
