"""Options of the demo: recipes that fit its tasks, and names that it knows."""

import pytest

from lightning_rlprof.cli.demo.options import RECIPES, DemoOptions
from lightning_rlprof.cli.demo.task import TASKS
from lightning_rlprof.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"task": "xyz"}, r"task='xyz' is unknown; allowed: spell_backward, number_sorting$"),
        ({"task": "spel_backward"}, r"did you mean 'spell_backward'\?"),
        ({"model": "smollm2", "task": "spell_backward"}, "allowed: chain_sum$"),
        ({"model": "gpt"}, "model='gpt' is unknown; allowed: small, smollm2$"),
        ({"model": "smollm"}, r"did you mean 'smollm2'\?"),
    ],
)
def test_an_unknown_name_lists_those_allowed(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DemoOptions(**options)  # type: ignore[arg-type]


def test_every_task_belongs_to_a_model() -> None:
    assert {task for recipe in RECIPES.values() for task in recipe.tasks} == set(TASKS)
