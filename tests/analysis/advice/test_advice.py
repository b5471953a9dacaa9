"""Each rule of advice is given, contradicted and undecided on a run that was made for it."""

import pytest

from lightning_rlprof.analysis.advice.advice import advice
from lightning_rlprof.analysis.advice.rules import RULES
from tests.analysis.advice.cases import CASES
from tests.builders.advised import Fact, advised


def row_of(fact: Fact, rule: str) -> dict[str, object]:
    table = advice(advised(fact))
    names = [column.name for column in table.columns]
    return next(
        dict(zip(names, row, strict=True))
        for row in table.rows
        if row[names.index("advice")] == rule
    )


def test_every_advice_has_its_runs() -> None:
    assert [*CASES] == [*RULES]


@pytest.mark.parametrize("rule", CASES)
def test_it_is_given(rule: str) -> None:
    row = row_of(CASES[rule].given, rule)
    assert row["verdict"] == "given", row
    assert row["evidence"]
    assert row["missing"] == ""
    assert row["settings"]


@pytest.mark.parametrize("rule", CASES)
def test_it_is_not_given_if_one_condition_is_contradicted(rule: str) -> None:
    row = row_of(CASES[rule].not_given, rule)
    assert row["verdict"] == "not given", row
    assert row["saved"] is None


@pytest.mark.parametrize("rule", CASES)
def test_it_is_undecided_without_data_and_says_what_to_record(rule: str) -> None:
    row = row_of(CASES[rule].undecided, rule)
    assert row["verdict"] == "undecided", row
    assert row["missing"]
    assert row["record"]
