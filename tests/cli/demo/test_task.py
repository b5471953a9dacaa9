"""Tasks: right prompts and answers, reasoning-gym's own verdict, nothing held out is trained."""

import importlib

import torch

from lightning_rlprof.cli.demo.policy import END, PAD, SpellBackward, Task


def test_no_held_out_prompt_is_trained_on(spelling: Task) -> None:
    trained = [spelling.prompt(entry) for entry in spelling.train]
    held_out = [spelling.prompt(entry) for entry in spelling.held_out]
    assert len(held_out) == len(set(held_out)) == 256
    assert len(trained) == len(set(trained)) > 3000
    assert not set(trained) & set(held_out)


def test_the_verifier_accepts_every_right_answer(spelling: Task) -> None:
    entries = spelling.held_out
    answers = [spelling.answer(entry) for entry in entries]
    assert set(spelling.score(entries, answers)) == {1.0}
    assert set(spelling.rewards(entries, answers)) == {1.0}
    assert spelling.exact(entries, answers) == 1.0
    wrong = [answer[:-1] for answer in answers]
    assert max(spelling.score(entries, wrong)) < 1.0
    assert spelling.exact(entries, [*answers[:64], *wrong[64:]]) == 0.25


def test_right_answers_are_what_the_task_says(spelling: Task) -> None:
    for entry in spelling.held_out:
        assert spelling.answer(entry) == spelling.prompt(entry)[::-1]


def test_scores_are_those_of_reasoning_gym_on_a_dataset_of_its_own(spelling: Task) -> None:
    gym = importlib.import_module("reasoning_gym").create_dataset("spell_backward", seed=5, size=50)
    texts = [str(gym[place]["answer"])[:3] + "x" * (place % 5) for place in range(50)]
    expected = [gym.score_answer(text, gym[place]) for place, text in enumerate(texts)]
    assert spelling.score([gym[place] for place in range(50)], texts) == expected
    assert len(set(expected)) > 5  # graded


def test_a_wrong_answer_that_the_verifier_lets_pass_is_not_paid_in_full(
    spelling: Task,
) -> None:
    word = next(entry for entry in spelling.train if len(spelling.prompt(entry)) == 10)
    trailing = [spelling.answer(word) + "a"]
    assert spelling.score([word], trailing)[0] > 0.99
    assert spelling.rewards([word], trailing) == [0.8]


def test_tokens_keep_the_text(spelling: Task) -> None:
    entries = spelling.train[:40]
    prompts, answers = spelling.encode_prompts(entries), spelling.encode_answers(entries)
    assert prompts.shape == (40, spelling.prompt_width)
    assert answers.shape == (40, spelling.answer_width)
    assert spelling.decode(answers) == [spelling.answer(entry) for entry in entries]
    assert bool((prompts[:, -1] == END).all())
    letters = spelling.tokenizer.characters
    texts = ["".join(letters[token - 2] for token in row if token > END) for row in prompts]
    assert texts == [spelling.prompt(entry) for entry in entries]
    assert int(answers.max()) < spelling.tokenizer.vocabulary


def test_an_answer_stops_at_its_first_special_token(spelling: Task) -> None:
    a, b = 2, 3
    rows = torch.tensor([[a, b, END, a], [a, PAD, b, b], [END, a, a, a], [b, b, b, b]])
    assert spelling.decode(rows) == ["ab", "a", "", "bbbb"]


def test_the_seed_decides_the_prompts(spelling: Task) -> None:
    again, other = SpellBackward(0, 256), SpellBackward(9, 256)
    assert again.train == spelling.train
    assert other.train != spelling.train
