"""64 threads, 1,000 tasks, and forks while threads mark: every span is recorded once."""

import pytest

from tests.chaos.crowds import CROWDS, crowded
from tests.effort import DEEP


@pytest.mark.parametrize("name", CROWDS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_threads_tasks_and_forks_that_mark_at_once_are_recorded_once(name: str) -> None:
    for _ in range(5 if DEEP else 1):
        outcome = crowded(CROWDS[name])
        assert not outcome.broken
        assert outcome.ended > 0
