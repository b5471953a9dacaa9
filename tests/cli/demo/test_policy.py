"""The policy: causal, the same with and without a cache, its samples as likely as it says."""

import pytest
import torch

from lightning_rlprof.cli.demo.policy import (
    END,
    PAD,
    Policy,
    SmallPolicy,
    Task,
    answer_mask,
    generate,
    token_log_probs,
)


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(1)
    return SmallPolicy(vocabulary=12, context=16, width=16, layers=2, heads=2)


def prompts_of(rows: int) -> torch.Tensor:
    return torch.randint(2, 12, (rows, 6), generator=torch.Generator().manual_seed(3))


def test_the_default_policy_has_about_a_quarter_million_parameters(spelling: Task) -> None:
    policy = SmallPolicy(
        spelling.tokenizer.vocabulary, spelling.prompt_width + spelling.answer_width
    )
    assert sum(weights.numel() for weights in policy.parameters()) == pytest.approx(240e3, rel=0.05)


def test_a_position_sees_nothing_after_it(policy: Policy) -> None:
    tokens = prompts_of(1).repeat(2, 1)
    tokens[1, 4] = tokens[0, 4] % 10 + 2 if tokens[0, 4] < 11 else 2
    first, second = policy(tokens)
    torch.testing.assert_close(first[:4], second[:4], rtol=0, atol=0)
    assert bool(((first[4:] - second[4:]).abs().amax(1) > 1e-3).all())


@pytest.mark.parametrize("cuts", [[6], [1, 5], [2, 3, 1], [1] * 6], ids=str)
def test_a_cache_changes_no_logit(policy: Policy, cuts: list[int]) -> None:
    tokens, cache = prompts_of(4), {}
    parts = [policy(part, cache) for part in tokens.split(cuts, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), policy(tokens), rtol=1e-5, atol=1e-5)
    assert [keys.shape[2] for keys, _ in cache.values()] == [6, 6]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_cache_changes_no_sample(policy: Policy, seed: int) -> None:
    answers = []
    for kv_cache in (False, True):
        generator = torch.Generator().manual_seed(seed)
        answers.append(generate(policy, prompts_of(32), 8, generator, kv_cache))
    assert torch.equal(*answers)


def test_answers_end_once_and_are_padded_after(policy: Policy) -> None:
    answers = generate(policy, prompts_of(200), 8, torch.Generator().manual_seed(0))
    ended = 0
    for row in answers.tolist():
        length = row.index(END) + 1 if END in row else len(row)
        ended += END in row
        assert PAD not in row[:length]
        assert set(row[length:]) <= {PAD}
    assert 0 < ended < 200
    assert torch.equal(answer_mask(answers), answers != PAD)


def test_generation_stops_when_every_answer_has_ended(policy: Policy) -> None:
    with torch.no_grad():
        policy.out.weight.zero_()
        policy.out.weight[END] = 1.0
        policy.norm.weight.zero_()
        policy.norm.bias.fill_(10.0)
    seen: list[int] = []
    policy.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    answers = generate(policy, prompts_of(5), 8, torch.Generator().manual_seed(0))
    assert answers.tolist() == [[END] + [PAD] * 7] * 5
    assert seen == [6]


def test_with_a_cache_only_the_new_token_is_read(policy: Policy) -> None:
    seen: dict[bool, list[int]] = {False: [], True: []}
    for kv_cache, widths in seen.items():
        hook = policy.register_forward_pre_hook(
            lambda _, inputs, widths=widths: widths.append(inputs[0].shape[1])
        )
        generate(policy, prompts_of(64), 4, torch.Generator().manual_seed(0), kv_cache)
        hook.remove()
    assert seen == {False: [6, 7, 8, 9], True: [6, 1, 1, 1]}


def test_log_probs_are_those_that_a_loop_over_tokens_finds(policy: Policy) -> None:
    prompts = prompts_of(3)
    answers = generate(policy, prompts, 5, torch.Generator().manual_seed(2))
    found = token_log_probs(policy, prompts, answers)
    for row in range(3):
        tokens = prompts[row].tolist()
        for place, token in enumerate(answers[row].tolist()):
            if token == PAD:
                break
            logits = policy(torch.tensor([tokens]))[0, -1]
            logits[PAD] = float("-inf")
            assert found[row, place].item() == pytest.approx(
                logits.log_softmax(0)[token].item(), abs=1e-5
            )
            tokens.append(token)


def test_samples_come_as_often_as_their_probability_says(policy: Policy) -> None:
    prompts = prompts_of(1).expand(20_000, -1)
    first = generate(policy, prompts, 1, torch.Generator().manual_seed(0))[:, 0]
    seen = torch.bincount(first, minlength=12) / len(first)
    every = torch.arange(1, 12)[:, None]
    expected = token_log_probs(policy, prompts[:11], every)[:, 0].exp()
    assert expected.sum().item() == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(seen[1:], expected, rtol=0, atol=0.02)
