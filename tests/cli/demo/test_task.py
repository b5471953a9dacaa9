"""Tasks: right prompts and answers, reasoning-gym's own verdict, nothing held out is trained."""

import importlib
import sys

import pytest
import torch

from lightning_rlprof.cli.demo.options import Recipe
from lightning_rlprof.cli.demo.policy import END, PAD, Task, make_task
from lightning_rlprof.errors import RecorderError


@pytest.fixture(params=Recipe().tasks)
def task(request: pytest.FixtureRequest, spelling: Task, sorting: Task) -> Task:
    return {one.name: one for one in (spelling, sorting)}[request.param]


def test_no_held_out_prompt_is_trained_on(task: Task) -> None:
    trained = [task.prompt(entry) for entry in task.train]
    held_out = [task.prompt(entry) for entry in task.held_out]
    assert len(held_out) == len(set(held_out)) == 256
    assert len(trained) == len(set(trained)) > 3000
    assert not set(trained) & set(held_out)


def test_the_verifier_accepts_every_right_answer(task: Task) -> None:
    entries = task.held_out
    answers = [task.answer(entry) for entry in entries]
    assert set(task.score(entries, answers)) == {1.0}
    assert set(task.rewards(entries, answers)) == {1.0}
    assert task.exact(entries, answers) == 1.0
    wrong = [answer[:-1] for answer in answers]
    assert max(task.score(entries, wrong)) < 1.0
    assert task.exact(entries, [*answers[:64], *wrong[64:]]) == 0.25


def test_right_answers_are_what_the_task_says(spelling: Task, sorting: Task) -> None:
    for entry in spelling.held_out:
        assert spelling.answer(entry) == spelling.prompt(entry)[::-1]
    for entry in sorting.held_out:
        prompt = sorting.prompt(entry)
        right = "".join(sorted(prompt[:-1], reverse=prompt[-1] == ">"))
        assert sorting.answer(entry) == right


def test_scores_are_those_of_reasoning_gym_on_a_dataset_of_its_own(spelling: Task) -> None:
    gym = importlib.import_module("reasoning_gym").create_dataset("spell_backward", seed=5, size=50)
    texts = [str(gym[place]["answer"])[:3] + "x" * (place % 5) for place in range(50)]
    expected = [gym.score_answer(text, gym[place]) for place, text in enumerate(texts)]
    assert spelling.score([gym[place] for place in range(50)], texts) == expected
    assert len(set(expected)) > 5  # graded


def test_a_wrong_answer_that_the_verifier_lets_pass_is_not_paid_in_full(
    spelling: Task, sorting: Task
) -> None:
    word = next(entry for entry in spelling.train if len(spelling.prompt(entry)) == 10)
    trailing = [spelling.answer(word) + "a"]
    assert spelling.score([word], trailing)[0] > 0.99
    assert spelling.rewards([word], trailing) == [0.8]
    numbers = next(entry for entry in sorting.train if sorting.answer(entry).startswith("1"))
    off_by_one = ["0" + sorting.answer(numbers)[1:]]
    assert sorting.score([numbers], off_by_one) == [1.0]
    assert sorting.rewards([numbers], off_by_one) == [0.0]


def test_tokens_keep_the_text(task: Task) -> None:
    entries = task.train[:40]
    prompts, answers = task.encode_prompts(entries), task.encode_answers(entries)
    assert prompts.shape == (40, task.prompt_width)
    assert answers.shape == (40, task.answer_width)
    assert task.decode(answers) == [task.answer(entry) for entry in entries]
    assert bool((prompts[:, -1] == END).all())
    letters = task.tokenizer.characters
    texts = ["".join(letters[token - 2] for token in row if token > END) for row in prompts]
    assert texts == [task.prompt(entry) for entry in entries]
    assert int(answers.max()) < task.tokenizer.vocabulary


def test_an_answer_stops_at_its_first_special_token(spelling: Task) -> None:
    a, b = 2, 3
    rows = torch.tensor([[a, b, END, a], [a, PAD, b, b], [END, a, a, a], [b, b, b, b]])
    assert spelling.decode(rows) == ["ab", "a", "", "bbbb"]


def test_the_seed_decides_the_prompts(sorting: Task) -> None:
    again, other = make_task("number_sorting"), make_task("number_sorting", seed=9)
    assert again.train == sorting.train
    assert other.train != sorting.train


def test_without_reasoning_gym_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RecorderError, match=r'pip install "lightning-rlprof\[demo\]"'):
        make_task("spell_backward")
