"""Options of the demo: a recipe that fits its tasks, and names that it knows."""

import pytest

from lightning_rlprof.cli.demo.options import DemoOptions, Recipe
from lightning_rlprof.cli.demo.policy import TASKS
from lightning_rlprof.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"task": "xyz"}, r"task='xyz' is unknown; allowed: spell_backward, number_sorting$"),
        ({"task": "spel_backward"}, r"did you mean 'spell_backward'\?"),
    ],
)
def test_an_unknown_name_lists_those_allowed(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DemoOptions(**options)  # type: ignore[arg-type]


def test_every_task_belongs_to_the_recipe() -> None:
    assert {*Recipe().tasks} == {*TASKS}
