"""Damaged files: the loop over them counts what it finds; more of them are in tests/fuzz."""

import pytest

from tests.chaos import mutants
from tests.effort import DEEP


def test_damaged_files_are_read_or_refused() -> None:
    found = mutants.all_damaged(1_500 if DEEP else 90)
    assert {name: each.failed for name, each in found.items() if each.failed} == {}
    assert all(each.read + each.refused == each.tried > 0 for each in found.values())


def test_a_loader_that_fails_is_named_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "read", lambda path: 1 / 0)
    found = mutants.damaged("native", 2, first_seed=5)
    assert found.failed == {
        f"native, seed {seed}": "ZeroDivisionError: division by zero" for seed in (5, 6)
    }
